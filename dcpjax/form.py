"""How a step is written for a kind of device. The forms compute the same, in other operations.

CPUs and GPUs run loops whose length is known only at run time, and want one array per weight.
Neuron compiles nothing of unknown length, wants few buffers, and sums integers over ranks not at
all; what it compiles is listed in ``neuron/README.md``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import lax


@dataclass(frozen=True)
class StepForm:
    """The choices that depend on the device.

    Attributes:
        is_static: pages are read in a number of trips known at compile time, that of the step's
            page table; else as many as a sequence needs.
        read_tokens: prior tokens of a rank read at a time; None: what suits a CPU's caches.
        stacked_weights: the weights of all layers are one array; else one each.
        unrolled: layers, and reads of static length, stand one after the other in the program; else
            they are loops.
        scattered_sums: a sum over ranks is a reduce-scatter and an all-gather; else an all-reduce.
        native_pools: 16- and 8-bit values are stored as what they are; else as unsigned integers,
            without which XLA:CPU copies the pool in every step.
        samples_on_host: what is not greedy is sampled by the host's CPU.
        is_audited: the compiled program is examined for copies of the pool. Neuron's cannot be:
            there the aliasing in what is compiled is the proof, see ``neuron.check``.
        several_contexts: steps are compiled for several lengths of page tables; with reads of
            dynamic length one, the longest, costs nothing.
    """

    is_static: bool = False
    read_tokens: int | None = None
    stacked_weights: bool = False
    unrolled: bool = True
    scattered_sums: bool = False
    native_pools: bool = False
    samples_on_host: bool = False
    several_contexts: bool = False
    is_audited: bool = True


DYNAMIC = StepForm()
"""For CPUs and GPUs."""

STATIC = StepForm(
    is_static=True,
    read_tokens=2048,
    stacked_weights=True,
    unrolled=False,
    scattered_sums=True,
    native_pools=True,
    samples_on_host=True,
    several_contexts=True,
    is_audited=False,
)
"""For Neuron: one program for all ranks, everything in it of a length known at compile time."""

FORMS = {"dynamic": DYNAMIC, "static": STATIC, "unrolled": replace(STATIC, unrolled=True)}


def form_for(name: str, platform: str) -> StepForm:
    """The form of this name; "auto": what devices of the platform want."""
    if name == "auto":
        name = "static" if platform == "neuron" else "dynamic"
    return FORMS[name]


def repeat(form: StepForm, times: int, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """``body(index, value)`` so many times: a loop, or in a row where the form is unrolled."""
    if not form.unrolled:
        return lax.fori_loop(0, times, body, start)
    for index in range(times):
        start = body(index, start)
    return start
