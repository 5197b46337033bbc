"""An emulation, in NumPy, of the few NKI calls that our kernels use. It is not AWS's simulator.

It follows the published documentation of NKI 0.6: float32 arithmetic, results cast to the target,
uninitialised memory that cannot be taken for data, and the documented limits as errors. What it
does not know: engines, time, the size of memories, the compiler's subset of Python, approximations
of the scalar engine. A kernel that runs here is right in shapes, masks and arithmetic, no more.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.neuron.nki.emulated_isa import ISA
from tests.neuron.nki.emulated_memory import Launch, Tensor


class Kernel:
    """A decorated kernel: ``kernel(...)`` on one core, ``kernel[n](...)`` on n."""

    def __init__(self, launch: Launch, body: Callable[..., Any], cores: int = 1) -> None:
        self.launch, self.body, self.cores = launch, body, cores

    def __getitem__(self, cores: int) -> "Kernel":
        return Kernel(self.launch, self.body, cores)

    def __call__(self, *arguments: Any) -> Any:
        tensors = [
            Tensor(np.asarray(value), "hbm") if hasattr(value, "shape") else value
            for value in arguments
        ]
        self.launch.reset()
        with np.errstate(over="ignore", invalid="ignore"):
            for program in range(self.cores):
                self.launch.start(program)
                results = self.body(*tensors)
        return tuple(result.array for result in results)


LANGUAGE = {
    "sbuf": "sbuf",
    "psum": "psum",
    "shared_hbm": "shared_hbm",
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
    **{name: getattr(np, name) for name in ("add", "subtract", "multiply", "maximum", "minimum")},
    **{name: getattr(np, name) for name in ("exp", "log", "greater", "less")},
}


def _modules(launch: Launch) -> dict[str, ModuleType]:
    nki, language, isa = (ModuleType(name) for name in ("nki", "nki.language", "nki.isa"))
    vars(language).update(LANGUAGE, ndarray=launch.ndarray, program_id=launch.program_id)
    vars(isa).update({name: launch.counted(call) for name, call in ISA.items()})
    vars(isa).update(
        engine=SimpleNamespace(tensor="tensor"),
        reduce_cmd=SimpleNamespace(reset_reduce="reset_reduce"),
    )
    vars(nki).update(jit=partial(Kernel, launch), language=language, isa=isa)
    return {"nki": nki, "nki.language": language, "nki.isa": isa}


@contextmanager
def installed() -> Iterator[Launch]:
    """While open, ``import nki`` gives the emulation; kernels imported then are forgotten after."""
    launch = Launch()
    modules = _modules(launch)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield launch
    finally:
        for name in [name for name in sys.modules if name.startswith("neuron.nki.kernels")]:
            del sys.modules[name]
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
