"""Intervals hold what XLA computes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from neuron.hlo import entry, root
from neuron.lint import lint
from neuron.lint.graph import Graph
from neuron.lint.interval import MAX_BOUNDS, Interval
from neuron.lint.ranges import find_ranges
from neuron.program import IndexRange, Program, TensorSpec
from neuron.targets import find_target
from tests.neuron.lint.programs import AXIS, program, spec

LENGTH = 5
INT_TYPES = (np.int32, np.uint32, np.int8, np.uint8)


def result_intervals(small: Program) -> list[Interval | None]:
    """Of the outputs, in their order."""
    graph = Graph(small.module)
    ranges = find_ranges(small, graph)
    result = root(entry(small.module))
    returned = graph.operands(result) if result.opcode == "tuple" else [result]
    return [ranges.of(i) for i in returned]


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


ANYTHING = (-(2**31), 2**31 - 1)
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


@pytest.mark.parametrize("dtype", INT_TYPES)
@pytest.mark.parametrize("operation", range(len(UNARY) + len(BINARY)))
def test_one_operation_stays_in_its_interval(operation: int, dtype: Any):
    """Small values and those at the type's ends, of both signs where it has them."""
    limits = np.iinfo(dtype)
    low = max(limits.min, -3)
    ranges = (IndexRange(0, 3, low, 5), IndexRange(3, LENGTH, limits.max - 2, limits.max))
    inputs = [
        TensorSpec("a", (LENGTH,), np.dtype(dtype).name, ranges),
        TensorSpec("b", (LENGTH,), np.dtype(dtype).name, (IndexRange(0, LENGTH, low, 9),)),
    ]
    check_holds(lambda *x: run([(operation, 0, 1), (operation, 1, 0)], *x), *inputs, tries=5)


def index(*limits: int) -> TensorSpec:
    return spec((), np.int32, *limits)


def table(*limits: int) -> TensorSpec:
    return spec((6,), np.int32, *limits)


@pytest.mark.parametrize(
    "function, inputs, expected",
    [
        # What is not declared may be anything of its type.
        (lambda x: x, [spec((), np.uint8)], (0, 255)),
        (lambda x: x + np.int32(1), [index(0, 7)], (1, 8)),
        (lambda x: x * np.int32(-2), [index(-3, 7)], (-14, 6)),
        (lambda x: lax.div(x, np.int32(16)), [index(-33, 40)], (-2, 2)),
        (lambda x: lax.rem(x, np.int32(16)), [index(0, 40)], (0, 15)),
        (lambda x: lax.rem(x, np.int32(16)), [index(33, 40)], (1, 8)),
        (lambda x: lax.rem(x, np.int32(16)), [index(-40, 3)], (-15, 3)),
        # A division by what may be zero is not relied on.
        (lambda x, y: lax.div(x, y), [index(0, 1), index(0, 3)], (-(2**31), 2**31 - 1)),
        (lambda x: jnp.clip(x, 2, 5), [index()], (2, 5)),
        (lambda x: x & np.int32(7), [index(0, 100)], (0, 7)),
        (lambda x: x | np.int32(4), [index(0, 8)], (4, 15)),
        (lambda x: lax.shift_right_logical(x, np.int32(2)), [index(4, 100)], (1, 25)),
        (lambda x: lax.shift_right_logical(x, np.uint8(4)), [spec((), np.uint8)], (0, 15)),
        (lambda x: x >> np.int32(2), [index(-9, 100)], (-3, 25)),
        (lambda x: lax.shift_right_arithmetic(x, np.uint8(1)), [spec((), np.uint8)], (0, 255)),
        (lambda x: x << np.int32(3), [index(1, 3)], (8, 24)),
        # One step over the end of a type, and everything is possible.
        (lambda x: x + np.uint32(1), [spec((), np.uint32, 0, 2**32 - 2)], (1, 2**32 - 1)),
        (lambda x: x + np.uint32(1), [spec((), np.uint32, 0, 2**32 - 1)], (0, 2**32 - 1)),
        (lambda x: x - np.uint32(1), [spec((), np.uint32, 0, 5)], (0, 2**32 - 1)),
        (lambda x: x * x, [spec((), np.uint32, 0, 2**16)], (0, 2**32 - 1)),
        (lambda x: x * x, [spec((), np.uint32, 0, 2**16 - 1)], (0, (2**16 - 1) ** 2)),
        (lambda x: x.astype(jnp.int8), [index(0, 127)], (0, 127)),
        (lambda x: x.astype(jnp.int8), [index(0, 128)], (-128, 127)),
        # A comparison that the intervals decide, and one that narrows its branches.
        (lambda x: jnp.where(x < 8, x, 100), [index(0, 7)], (0, 7)),
        (lambda x: jnp.where(x < 8, x, 100), [index(0, 9)], (0, 100)),
        (lambda x: jnp.where(x < 0, x + 8, x), [index(-8, 7)], (0, 7)),
        (lambda x: jnp.where((x >= 2) & (x < 6), x, 2), [index()], (2, 5)),
        (lambda x: jnp.where(~((x < 2) | (x > 5)), x, 3), [index()], (2, 5)),
        (lambda x: jnp.where(x != 3, 3, x), [index()], (3, 3)),
        # Elements, from whatever place.
        (lambda x, i: x[i], [table(3, 9), index(0, 5)], (3, 9)),
        (lambda x, i: x.at[i].set(4), [table(3, 9), index(0, 5)], (3, 9)),
        (lambda x: jnp.sum(x, dtype=x.dtype), [table(-1, 3)], (-6, 18)),
        (lambda x: jnp.max(x), [table(-1, 3)], (-1, 3)),
        (lambda x: jnp.argmax(x), [table()], (0, 5)),
        (lambda x: lax.all_gather(x, AXIS), [table(3, 9)], (3, 9)),
        (lambda x: lax.optimization_barrier(x), [table(3, 9)], (3, 9)),
        (lambda x: jnp.sum(x < 3, dtype=jnp.int32), [table()], (0, 6)),
        # Loops: a counter, what stays as it is, and what grows without a bound.
        (lambda x: lax.fori_loop(0, 6, lambda i, y: i, x), [index(0, 9)], (0, 9)),
        (lambda x: lax.fori_loop(0, 6, lambda i, y: y + 2, x), [index(0, 9)], (12, 21)),
        (
            lambda x: lax.fori_loop(0, 6, lambda i, y: y + x, x),
            [index(0, 9)],
            (-(2**31), 2**31 - 1),
        ),
        (lambda x: lax.fori_loop(0, 6, lambda i, y: (y + x) % 4, x), [index(0, 3)], (0, 3)),
    ],
)
def test_intervals_are_as_narrow_as_needed(function: Any, inputs: Any, expected: Any):
    assert bounds(function, *inputs) == expected


def test_parts_of_a_packed_input_have_their_own_bounds():
    parts = (IndexRange(0, 2, 0, 3), IndexRange(2, 6, 5, 9))
    packed = TensorSpec("packed", (6,), "int32", parts)
    small = program(lambda x: (x[:2], x[2:].reshape(2, 2), x[1:3]), packed)
    assert [x.bounds for x in result_intervals(small) if x is not None] == [(0, 3), (5, 9), (0, 9)]


def test_columns_of_a_matrix_of_indices_have_their_own_bounds():
    small = program(
        lambda x, y: jnp.stack([x, y, jnp.zeros_like(x)], axis=1), table(3, 9), table(-2, 0)
    )
    (found,) = result_intervals(small)
    assert found is not None
    assert found.low.tolist()[0] == [3, -2, 0] and found.high.tolist()[0] == [9, 0, 0]


def test_a_counter_is_bounded_by_the_runs_of_its_loop():
    """The slice at 4 + 1 is the last one; one more run would be out of range."""

    def run_times(count: int) -> Program:
        def body(i: Any, total: Any) -> Any:
            row = lax.dynamic_slice(rows_of[0], (i + 1, jnp.int32(0)), (1, 3))
            return total + row[0]

        rows_of: list[Any] = []

        def loop(rows: Any, start: Any) -> Any:
            rows_of[:] = [rows]
            return lax.fori_loop(0, count, body, start)

        return program(loop, spec((6, 3), np.float32), spec((3,), np.float32))

    names = [[f.rule.name for f in lint(run_times(n), find_target("trn2"))] for n in (5, 6)]
    assert names == [[], ["slice-index"]]


def test_inputs_that_are_not_the_parameters_bound_nothing():
    small = program(lambda x: x, table(3, 9))
    wrong = dataclasses.replace(small, inputs=(spec((7,), np.int32, 3, 9),))
    (found,) = result_intervals(wrong)
    assert found is not None and found.bounds == (-(2**31), 2**31 - 1)


def test_bounds_of_a_wide_product_are_shared():
    """A matrix of masks costs no bound per element."""
    wide = spec((4096,), np.int32, 0, 9)
    small = program(lambda x, y: x[:, None] + y[None, :] + jnp.arange(4096)[:, None], wide, wide)
    (found,) = result_intervals(small)
    assert found is not None
    assert found.bounds == (0, 9 + 9 + 4095)
    assert found.low.size <= MAX_BOUNDS
