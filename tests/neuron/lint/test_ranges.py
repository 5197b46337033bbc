"""Intervals hold what XLA computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from neuron.hlo import entry, root
from neuron.lint.graph import Graph
from neuron.lint.interval import Interval
from neuron.lint.ranges import find_ranges
from neuron.program import IndexRange, Program, TensorSpec
from tests.neuron.lint.programs import program

LENGTH = 5
INT_TYPES = (np.int32, np.uint32, np.int8, np.uint8)


def result_intervals(small: Program) -> list[Interval | None]:
    """Of the outputs, in their order."""
    graph = Graph(small.module)
    ranges = find_ranges(small, graph)
    return [ranges.of(i) for i in graph.operands(root(entry(small.module)))]


def bounds(function: Callable[..., Any], *inputs: TensorSpec) -> tuple[int, int]:
    """Of the only output's elements together."""
    (interval,) = result_intervals(program(function, *inputs))
    assert interval is not None
    return interval.bounds


def sampled(specification: TensorSpec, seed: int) -> np.ndarray:
    """Random values within the declared ranges, their ends more often than others."""
    random = np.random.default_rng(seed)
    limits = np.iinfo(specification.dtype)
    low = np.full(specification.size, limits.min, np.int64)
    high = np.full(specification.size, limits.max, np.int64)
    for part in specification.ranges:
        low[part.start : part.stop], high[part.start : part.stop] = part.low, part.high
    choice = random.integers(0, 3, specification.size)
    values = np.where(choice == 0, low, np.where(choice == 1, high, random.integers(low, high + 1)))
    return values.astype(specification.dtype).reshape(specification.shape)


def check_holds(function: Callable[..., Any], *inputs: TensorSpec, tries: int = 3) -> None:
    """All results lie in the intervals, for random inputs."""
    found = result_intervals(program(function, *inputs))
    for seed in range(tries):
        results = jax.tree.leaves(function(*(jnp.asarray(sampled(x, seed)) for x in inputs)))
        for interval, result in zip(found, results, strict=True):
            if interval is not None:
                values = np.asarray(result).astype(np.int64)
                assert np.all(interval.low <= values), (interval.low, values)
                assert np.all(values <= interval.high), (interval.high, values)


# Random programs: each step makes a new array of LENGTH elements from earlier ones.
UNARY: list[Callable[..., Any]] = [
    lambda x: -x,
    lambda x: ~x,
    jnp.abs,
    lambda x: lax.sort(x),
    lambda x: x[::-1],
    lambda x: jnp.broadcast_to(jnp.max(x), (LENGTH,)),
    lambda x: jnp.broadcast_to(jnp.sum(x, dtype=x.dtype), (LENGTH,)),
    lambda x: jnp.broadcast_to(jnp.min(x), (LENGTH,)),
    lambda x: jnp.concatenate([x[1:], x[:1]]),
    lambda x: jnp.pad(x[2:], (1, 1)),
    lambda x: lax.pad(x[:3], x[0], ((0, 0, 1),)),
    lambda x: lax.dynamic_slice(jnp.concatenate([x, x]), (x[0],), (LENGTH,)),
    lambda x: lax.dynamic_update_slice(x, x[:2], (x[1],)),
    lambda x: x[jnp.clip(x.astype(jnp.int32), 0, LENGTH - 1)],
    lambda x: x.at[jnp.clip(x.astype(jnp.int32), 0, LENGTH - 1)].set(x[::-1]),
    lambda x: x.reshape(LENGTH, 1).T.reshape(LENGTH),
    lambda x: jnp.max(x[:, None] + x[None, :], axis=0),
    lambda x: lax.fori_loop(0, 3, lambda i, y: y + i.astype(y.dtype), x),
    lambda x: lax.fori_loop(0, 4, lambda i, y: jnp.where(y > y[i], y[i], y), x),
    lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, _other(x.dtype)), x.dtype),
    lambda x: jnp.sign(x),
    lambda x: x % x.dtype.type(7),
    lambda x: x // x.dtype.type(3),
    lambda x: jnp.broadcast_to(jnp.argmax(x), (LENGTH,)).astype(x.dtype),
    lambda x: jnp.where(x < x.dtype.type(4), x, x - x.dtype.type(4)),
]
BINARY: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    jnp.minimum,
    jnp.maximum,
    lambda x, y: x & y,
    lambda x, y: x | y,
    lambda x, y: x ^ y,
    lambda x, y: jnp.where(x < y, x, y),
    lambda x, y: jnp.where((x >= y) & (x != x.dtype.type(0)), y, x),
    lambda x, y: jnp.where(~((x <= y) | (y == x.dtype.type(1))), x - y, y),
    lambda x, y: lax.rem(x, jnp.where(y == y.dtype.type(0), y.dtype.type(1), y)),
    lambda x, y: lax.div(x, jnp.maximum(y, y.dtype.type(1))),
    lambda x, y: lax.shift_right_logical(x, y & y.dtype.type(7)),
    lambda x, y: lax.shift_right_arithmetic(x, y & y.dtype.type(7)),
    lambda x, y: x << (y & y.dtype.type(7)),
    lambda x, y: lax.clamp(jnp.minimum(x, y), x, jnp.maximum(x, y)),
    lambda x, y: jnp.stack([x, y], axis=1)[:, 1],
    lambda x, y: x.astype(jnp.int8).astype(y.dtype) + y,
]
NARROW = {1: jnp.int8, 4: jnp.int32}


def _other(dtype: Any) -> Any:
    """The type of the same size with the other sign."""
    dtype = np.dtype(dtype)
    return np.dtype(("i" if dtype.kind == "u" else "u") + str(dtype.itemsize))


Step = tuple[int, int, int]


def run(steps: list[Step], *inputs: Any) -> Any:
    """The program that a list of steps says: (operation, first operand, second operand)."""
    known = list(inputs)
    for operation, first, second in steps:
        x, y = known[first % len(known)], known[second % len(known)]
        if operation < len(UNARY):
            known.append(UNARY[operation](x))
        else:
            known.append(BINARY[operation - len(UNARY)](x, y))
    return known[len(inputs) :]


@st.composite
def ranges_of(draw: Any, dtype: Any) -> tuple[IndexRange, ...]:
    limits = np.iinfo(dtype)
    near = st.integers(max(limits.min, -9), 9)
    ends = st.one_of(near, st.integers(int(limits.min), int(limits.max)))
    cut = draw(st.integers(0, LENGTH))
    parts = []
    for start, stop in ((0, cut), (cut, LENGTH)):
        low, high = sorted((draw(ends), draw(ends)))
        parts.append(IndexRange(start, stop, low, high))
    return tuple(parts)


@settings(max_examples=25)
@given(data=st.data(), dtype=st.sampled_from(INT_TYPES))
def test_random_programs_stay_in_their_intervals(data: Any, dtype: Any):
    operation = st.integers(0, len(UNARY) + len(BINARY) - 1)
    step = st.tuples(operation, st.integers(0, 7), st.integers(0, 7))
    steps = data.draw(st.lists(step, min_size=1, max_size=8))
    inputs = [
        TensorSpec(name, (LENGTH,), np.dtype(dtype).name, data.draw(ranges_of(dtype)))
        for name in "ab"
    ]
    check_holds(lambda *x: run(steps, *x), *inputs)
