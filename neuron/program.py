"""A lowered program: what one rank runs, as the compiler reads it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from neuron.hlo import Module

ProgramKind = Literal["decode", "segment", "prefill", "draft", "page_gather", "page_scatter"]


@dataclass(frozen=True)
class IndexRange:
    """Elements [start, stop) of a flattened integer input lie in [low, high]."""

    start: int
    stop: int
    low: int
    high: int


@dataclass(frozen=True)
class TensorSpec:
    """An input or output as one device has it; ``ranges`` bound an integer input's elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[IndexRange, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Program:
    """One program for all ranks.

    Attributes:
        name: also of its files.
        module: normalised HloModuleProto; instructions still know the source lines they come from.
        inputs, outputs: in the order of the parameters and of the root's elements.
    """

    name: str
    kind: ProgramKind
    num_ranks: int
    module: Any
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_bytes(self) -> bytes:
        """The file that neuronx-cc reads."""
        return to_bytes(self.module)


def to_bytes(module: Any) -> bytes:
    """A module without its source lines: the same bytes for the same program, wherever it was made
    and from where it was called."""
    bare = Module()
    bare.CopyFrom(module)
    bare.ClearField("stack_frame_index")
    for computation in bare.computations:
        for instruction in computation.instructions:
            instruction.ClearField("metadata")
    return bare.SerializeToString(deterministic=True)
