"""How a step is written for a kind of device. The forms compute the same, in other operations.

CPUs and GPUs run loops whose length is known only at run time, and want one array per weight.
Neuron compiles nothing of unknown length, wants few buffers, and sums integers over ranks not at
all; what it compiles is listed in ``neuron/README.md``.
"""

from dataclasses import dataclass
from typing import Literal

LayerForm = Literal["unrolled", "loop"]


@dataclass(frozen=True)
class StepForm:
    """The choices that depend on the device.

    Attributes:
        static_reads: pages are read in a number of trips known at compile time, that of the step's
            page table; else as many as a sequence needs.
        read_tokens: prior tokens of a rank read at a time; None: what suits a CPU's caches.
        stacked_weights: the weights of all layers are one array; else one each.
        layers: with stacked weights, a program for each layer or one in a loop.
        scattered_sums: a sum over ranks is a reduce-scatter and an all-gather; else an all-reduce.
        native_pools: 16- and 8-bit values are stored as what they are; else as unsigned integers,
            without which XLA:CPU copies the pool in every step.
        samples_on_host: what is not greedy is sampled by the host's CPU.
        several_contexts: steps are compiled for several lengths of page tables; with reads of
            dynamic length one, the longest, costs nothing.
    """

    static_reads: bool = False
    read_tokens: int | None = None
    stacked_weights: bool = False
    layers: LayerForm = "unrolled"
    scattered_sums: bool = False
    native_pools: bool = False
    samples_on_host: bool = False
    several_contexts: bool = False


DYNAMIC = StepForm()
"""For CPUs and GPUs."""

STATIC = StepForm(
    static_reads=True,
    read_tokens=2048,
    stacked_weights=True,
    layers="loop",
    scattered_sums=True,
    native_pools=True,
    samples_on_host=True,
    several_contexts=True,
)
"""For Neuron: one program for all ranks, everything in it of a length known at compile time."""
