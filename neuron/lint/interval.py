"""Bounds of the elements of integer arrays, and arithmetic on them.

An :class:`Interval` has, along each axis of an array, one bound per element or one for all of
them. So a scalar bound, bounds per column and bounds per element are one thing, and NumPy's
broadcasting is the arithmetic between them. All integers of up to 32 bits fit; those of 64 bits,
which programs must not have, have no intervals.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neuron.hlo import ElementType

MAX_BOUNDS = 1 << 14
"""Bounds that a result may have if no operand has more; beyond it elements share theirs."""

LIMITS = {
    ElementType.PRED: (0, 1),
    ElementType.S8: (-(2**7), 2**7 - 1),
    ElementType.S16: (-(2**15), 2**15 - 1),
    ElementType.S32: (-(2**31), 2**31 - 1),
    ElementType.U8: (0, 2**8 - 1),
    ElementType.U16: (0, 2**16 - 1),
    ElementType.U32: (0, 2**32 - 1),
}


@dataclass(frozen=True)
class Interval:
    """Element e lies in [low[e], high[e]]; an axis of length one stands for all along it."""

    low: np.ndarray
    high: np.ndarray

    @property
    def ndim(self) -> int:
        return self.low.ndim

    @property
    def bounds(self) -> tuple[int, int]:
        """Of all elements together."""
        return int(self.low.min()), int(self.high.max())


def has_interval(shape: Any) -> bool:
    """Whether arrays of this shape are followed."""
    return shape.element_type in LIMITS


def whole(shape: Any) -> Interval:
    """All values that the type has."""
    low, high = LIMITS[shape.element_type]
    return constant(low, high, len(shape.dimensions))


def constant(low: int, high: int, ndim: int) -> Interval:
    """The same bounds for all elements."""
    ones = (1,) * ndim
    return Interval(np.full(ones, low, np.int64), np.full(ones, high, np.int64))


def exact(values: np.ndarray) -> Interval:
    """Known values."""
    values = np.asarray(values, np.int64)
    return Interval(values, values)


def make(low: np.ndarray, high: np.ndarray) -> Interval:
    """An interval from bounds of possibly different lengths of axes."""
    low, high = np.broadcast_arrays(low, high)
    return Interval(low, high)


def fit(*operands: Interval) -> tuple[Interval, ...]:
    """Operands whose broadcast has few bounds: not many more than the largest has."""
    allowed = max(MAX_BOUNDS, *(x.low.size for x in operands))
    while True:
        shape = np.broadcast_shapes(*(x.low.shape for x in operands))
        if math.prod(shape) <= allowed:
            return operands
        axis = int(np.argmax(shape))
        operands = tuple(collapse(x, [axis]) if x.low.shape[axis] > 1 else x for x in operands)


def simplify(x: Interval) -> Interval:
    """The same interval, with one bound where all are equal."""
    low, high = x.low.flat[0], x.high.flat[0]
    if x.low.size > 1 and (x.low == low).all() and (x.high == high).all():
        return constant(int(low), int(high), x.ndim)
    return x


def collapse(x: Interval, axes: Sequence[int]) -> Interval:
    """One bound for all elements along these axes."""
    axes = tuple(axes)
    if not axes:
        return x
    return Interval(x.low.min(axes, keepdims=True), x.high.max(axes, keepdims=True))


def join(*parts: Interval) -> Interval:
    """What holds for an element that comes from any of these."""
    low, high = parts[0].low, parts[0].high
    for part in parts[1:]:
        low, high = np.minimum(low, part.low), np.maximum(high, part.high)
    return make(low, high)


def expand(x: Interval, axis: int, length: int) -> Interval:
    """A bound for each element along an axis."""
    shape = [*x.low.shape]
    shape[axis] = length
    return Interval(np.broadcast_to(x.low, shape), np.broadcast_to(x.high, shape))


def wrap(shape: Any, low: np.ndarray, high: np.ndarray) -> Interval:
    """Bounds of a result; an element that may leave the type wraps, so it may be anything."""
    smallest, largest = LIMITS[shape.element_type]
    low, high = np.broadcast_arrays(low, high)
    leaves = (low < smallest) | (high > largest)
    return Interval(
        np.where(leaves, smallest, low).astype(np.int64),
        np.where(leaves, largest, high).astype(np.int64),
    )


def corners(operation: Callable[[Any, Any], Any], a: Interval, b: Interval) -> tuple[Any, Any]:
    """Smallest and largest result of an operation that is monotone in each argument."""
    results = [operation(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return np.minimum.reduce(results), np.maximum.reduce(results)
