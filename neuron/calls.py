"""A function of the engine, and with what it is called, on its way to be a program of one rank."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dcpjax.cache.parts import KV
from neuron.hlo import dtype_name
from neuron.lowering import lower
from neuron.program import IndexRange, Program, ProgramKind, TensorSpec

POOL = "pool"
"""Of a model whose cache has one part; those of the others begin with it."""


@dataclass(frozen=True)
class Call:
    """A function of the engine and what it is called with, before it is lowered.

    Attributes:
        arguments: pytrees of jax.ShapeDtypeStruct over the deployment's mesh.
        input_names, output_names: of the flat inputs and outputs. An output has the memory of the
            input of the same name.
        ranges: bounds of integer inputs, by name.
    """

    name: str
    kind: ProgramKind
    num_ranks: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    ranges: Mapping[str, tuple[IndexRange, ...]]

    @property
    def aliases(self) -> dict[int, int]:
        """{output: input} that share memory."""
        return {
            output: self.input_names.index(name)
            for output, name in enumerate(self.output_names)
            if name in self.input_names
        }

    def lower(self) -> Program:
        """The program of one rank."""
        module = lower(self.function, self.arguments, name=self.name, aliases=self.aliases)
        shapes = module.host_program_shape
        inputs = zip(self.input_names, shapes.parameters, strict=True)
        results = shapes.result.tuple_shapes or [shapes.result]
        outputs = zip(self.output_names, results, strict=True)
        return Program(
            self.name,
            self.kind,
            self.num_ranks,
            module,
            tuple(_spec(name, shape, self.ranges.get(name, ())) for name, shape in inputs),
            tuple(_spec(name, shape) for name, shape in outputs),
        )


def _spec(name: str, shape: Any, ranges: tuple[IndexRange, ...] = ()) -> TensorSpec:
    return TensorSpec(name, tuple(shape.dimensions), dtype_name(shape), ranges)


def pool_names(parts: Iterable[str]) -> list[str]:
    """What the pools of a cache's parts are called among a program's inputs and outputs, in the
    order in which JAX has the values of a dict: that of its keys."""
    return [pool_name(part) for part in sorted(parts)]


def pool_name(part: str) -> str:
    return POOL if part == KV else f"{POOL}_{part}"
