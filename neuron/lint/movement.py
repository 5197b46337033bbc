"""Intervals of operations that move elements: each result element comes from some operand element.

An axis of length one in an interval stands for an axis of any length in the array, so most
operations need the arrays' shapes beside the intervals.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from neuron.lint.graph import Instruction, dimensions
from neuron.lint.interval import MAX_BOUNDS, Interval, collapse, constant, expand, join


def iota(instruction: Instruction) -> Interval:
    shape, axis = dimensions(instruction.shape), instruction.dimensions[0]
    lengths = [length if a == axis else 1 for a, length in enumerate(shape)]
    counted = np.arange(shape[axis], dtype=np.int64).reshape(lengths)
    return Interval(counted, counted)


def broadcast(instruction: Instruction, x: Interval) -> Interval:
    lengths = [1] * len(instruction.shape.dimensions)
    for axis, length in zip(instruction.dimensions, x.low.shape, strict=True):
        lengths[axis] = length
    # The operand's axes may come in another order.
    order = np.argsort(instruction.dimensions, kind="stable")
    return _each(x, lambda bounds: bounds.transpose(order).reshape(lengths))


def reshape(source: Sequence[int], target: Sequence[int], x: Interval) -> Interval:
    """Axes that are cut or merged together get a bound per element if one of them has more than
    one; the others keep what they have."""
    lengths: list[int] = []
    full: list[int] = []
    for old, new in _groups(source, target):
        if math.prod(source[axis] for axis in old) > max(MAX_BOUNDS, x.low.size):
            x = collapse(x, old)
        if all(x.low.shape[axis] == 1 for axis in old):
            full += [1] * len(old)
            lengths += [1] * len(new)
        else:
            full += [source[axis] for axis in old]
            lengths += [target[axis] for axis in new]
    return _each(x, lambda bounds: np.broadcast_to(bounds, full).reshape(lengths))


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[range, range]]:
    """Runs of axes of both shapes that hold the same elements, as short as possible."""
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        begin, end = (i, j), (i, j)
        left = right = 1
        while begin == end or left != right:
            if (left <= right and i < len(source)) or j == len(target):
                left, i = left * source[i], i + 1
            else:
                right, j = right * target[j], j + 1
            end = (i, j)
        groups.append((range(begin[0], i), range(begin[1], j)))
    return groups


def transpose(instruction: Instruction, x: Interval) -> Interval:
    return _each(x, lambda bounds: bounds.transpose(list(instruction.dimensions)))


def reverse(instruction: Instruction, x: Interval) -> Interval:
    return _each(x, lambda bounds: np.flip(bounds, tuple(instruction.dimensions)))


def slice_(instruction: Instruction, x: Interval) -> Interval:
    parts = tuple(
        slice(None) if length == 1 else slice(part.start, part.limit, part.stride)
        for length, part in zip(x.low.shape, instruction.slice_dimensions, strict=True)
    )
    return _each(x, lambda bounds: bounds[parts])


def concatenate(axis: int, shapes: Sequence[Sequence[int]], parts: Sequence[Interval]) -> Interval:
    """Parts without elements count for nothing."""
    filled = [(s[axis], x) for s, x in zip(shapes, parts, strict=True) if 0 not in s]
    apart = [expand(x, axis, length) for length, x in filled]
    others = np.broadcast_shapes(*(x.low[_along(x.ndim, axis, slice(1))].shape for x in apart))
    wide = [(*others[:axis], length, *others[axis + 1 :]) for length, _ in filled]
    pairs = list(zip(apart, wide, strict=True))
    low = [np.broadcast_to(x.low, shape) for x, shape in pairs]
    high = [np.broadcast_to(x.high, shape) for x, shape in pairs]
    return Interval(np.concatenate(low, axis), np.concatenate(high, axis))


def pad(instruction: Instruction, source: Sequence[int], x: Interval, filler: Interval) -> Interval:
    """Bounds per element along padded axes, unless elements are taken away."""
    low, high = filler.bounds
    for axis, config in enumerate(instruction.padding_config.dimensions):
        edges = (config.edge_padding_low, config.edge_padding_high)
        if config.interior_padding or min(edges) < 0:
            x = join(collapse(x, [axis]), constant(low, high, x.ndim))
        elif any(edges):
            widths = [edges if a == axis else (0, 0) for a in range(x.ndim)]
            x = expand(x, axis, source[axis])
            x = Interval(
                np.pad(x.low, widths, constant_values=low),
                np.pad(x.high, widths, constant_values=high),
            )
    return x


def dynamic_slice(
    instruction: Instruction, source: Sequence[int], x: Interval, starts: Sequence[Interval]
) -> Interval:
    """Along an axis with a known start the slice itself, else all that it may reach.

    XLA moves a start that is out of range to the nearest one in range.
    """
    for axis, (size, start) in enumerate(zip(instruction.dynamic_slice_sizes, starts, strict=True)):
        if x.low.shape[axis] == 1:
            continue
        low, high = np.clip(start.bounds, 0, source[axis] - size)
        x = _each(x, lambda b, a=axis, s=slice(low, high + size): b[_along(b.ndim, a, s)])
        if low != high:
            x = collapse(x, [axis])
    return x


def dynamic_update_slice(
    source: Sequence[int], sizes: Sequence[int], x: Interval, update: Interval
) -> Interval:
    """Either's elements anywhere along the axes on which the update is shorter."""
    shorter = [axis for axis, n in enumerate(source) if sizes[axis] != n]
    if 0 in sizes:
        return x
    return join(x, collapse(update, shorter)) if shorter else update


def gather(instruction: Instruction, source: Sequence[int], x: Interval) -> Interval:
    """Whole axes of the operand keep their bounds, of others any element may come."""
    numbers = instruction.gather_dimension_numbers
    sizes = instruction.gather_slice_sizes
    x = collapse(x, [axis for axis, n in enumerate(source) if sizes[axis] != n])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [length for axis, length in enumerate(x.low.shape) if axis not in gone]
    lengths = [1] * len(instruction.shape.dimensions)
    for axis, length in zip(numbers.offset_dims, kept, strict=True):
        lengths[axis] = length
    return _each(x, lambda bounds: bounds.reshape(lengths))


def scatter(x: Interval, updates: Interval) -> Interval:
    """Any element may be the old one or any update."""
    return join(x, constant(*updates.bounds, x.ndim))


def all_gather(axis: int, source: int, target: int, x: Interval) -> Interval:
    """Every rank's part has the same bounds, as all ranks run one program on bounded inputs."""
    if x.low.shape[axis] == 1:
        return x
    times = [target // source if a == axis else 1 for a in range(x.ndim)]
    return _each(x, lambda bounds: np.tile(bounds, times))


def _each(x: Interval, change: Callable[[np.ndarray], np.ndarray]) -> Interval:
    return Interval(change(x.low), change(x.high))


def _along(ndim: int, axis: int, part: slice) -> tuple[slice, ...]:
    return tuple(part if a == axis else slice(None) for a in range(ndim))
