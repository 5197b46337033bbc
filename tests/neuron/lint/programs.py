"""Small programs to look at, lowered from JAX functions over ranks that do not exist."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from neuron.hlo import DTYPES, ElementType, entry, root
from neuron.lowering import abstract_mesh, lower
from neuron.program import IndexRange, Program, TensorSpec

NUM_RANKS = 4
AXIS = "ranks"


def spec(shape: Sequence[int], dtype: Any, *bounds: int, name: str = "x") -> TensorSpec:
    """An input; two bounds are those of all its elements."""
    shape = tuple(shape)
    size = int(np.prod(shape))
    ranges = (IndexRange(0, size, *bounds),) if bounds else ()
    return TensorSpec(name, shape, np.dtype(dtype).name, ranges)


def program(
    function: Callable[..., Any],
    *inputs: TensorSpec,
    aliases: dict[int, int] | None = None,
    num_ranks: int = NUM_RANKS,
) -> Program:
    """A function that every rank runs on the whole inputs."""
    mesh = abstract_mesh({AXIS: num_ranks})
    whole = PartitionSpec()
    arguments = [
        jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype), sharding=NamedSharding(mesh, whole))
        for x in inputs
    ]
    mapped = jax.shard_map(
        lambda *x: jax.tree.leaves(function(*x)),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    module = lower(mapped, arguments, name="small", aliases=aliases or {})
    result = root(entry(module)).shape
    results = result.tuple_shapes or [result]
    outputs = tuple(
        TensorSpec(f"out{n}", tuple(s.dimensions), DTYPES.get(ElementType(s.element_type), "?"))
        for n, s in enumerate(results)
    )
    return Program("small", "decode", num_ranks, module, inputs, outputs)
