"""Intervals of elementwise operations. Operands are intervals of equally many axes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from neuron.lint.interval import LIMITS, Interval, constant, corners, make, whole, wrap

_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_INVERTED = {"LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT", "EQ": "NE", "NE": "EQ"}


def add(shape: Any, a: Interval, b: Interval) -> Interval:
    return wrap(shape, a.low + b.low, a.high + b.high)


def subtract(shape: Any, a: Interval, b: Interval) -> Interval:
    return wrap(shape, a.low - b.high, a.high - b.low)


def multiply(shape: Any, a: Interval, b: Interval) -> Interval:
    # Products of two 32-bit integers leave int64; as floats they are exact wherever they count.
    return wrap(shape, *corners(lambda x, y: x.astype(np.float64) * y, a, b))


def divide(shape: Any, a: Interval, b: Interval) -> Interval:
    """Towards zero. What a division by zero gives is not relied on."""
    may_fail = (b.low <= 0) & (b.high >= 0)
    low, high = corners(_quotient, a, _without(b, may_fail))
    return _unless(may_fail, wrap(shape, low, high), whole(shape))


def remainder(shape: Any, a: Interval, b: Interval) -> Interval:
    """With the sign of the dividend."""
    may_fail = (b.low <= 0) & (b.high >= 0)
    b = _without(b, may_fail)
    most = np.maximum(abs(b.low), abs(b.high)) - 1
    low = np.where(a.low < 0, np.maximum(a.low, -most), 0)
    high = np.where(a.high > 0, np.minimum(a.high, most), 0)
    found = make(low, high)
    is_one_period = (b.low == b.high) & (_quotient(a.low, b.low) == _quotient(a.high, b.low))
    is_one_period &= (a.low >= 0) | (a.high <= 0)
    period = make(a.low - _quotient(a.low, b.low) * b.low, a.high - _quotient(a.low, b.low) * b.low)
    return _unless(may_fail, _unless(is_one_period, found, period), whole(shape))


def minimum(shape: Any, a: Interval, b: Interval) -> Interval:
    return make(np.minimum(a.low, b.low), np.minimum(a.high, b.high))


def maximum(shape: Any, a: Interval, b: Interval) -> Interval:
    return make(np.maximum(a.low, b.low), np.maximum(a.high, b.high))


def clamp(shape: Any, low: Interval, x: Interval, high: Interval) -> Interval:
    return minimum(shape, maximum(shape, x, low), high)


def negate(shape: Any, x: Interval) -> Interval:
    if LIMITS[shape.element_type][0] == 0:  # 0 - x modulo the type's size
        return subtract(shape, constant(0, 0, x.ndim), x)
    return wrap(shape, -x.high, -x.low)


def absolute(shape: Any, x: Interval) -> Interval:
    low = np.where((x.low <= 0) & (x.high >= 0), 0, np.minimum(abs(x.low), abs(x.high)))
    return wrap(shape, low, np.maximum(abs(x.low), abs(x.high)))


def sign(shape: Any, x: Interval) -> Interval:
    return Interval(np.sign(x.low), np.sign(x.high))


def logical_not(shape: Any, x: Interval) -> Interval:
    smallest, largest = LIMITS[shape.element_type]
    return Interval(smallest + largest - x.high, smallest + largest - x.low)


def logical_and(shape: Any, a: Interval, b: Interval) -> Interval:
    """No bit is new: of non-negative values it is at most the smaller one."""
    is_known = (a.low == a.high) & (b.low == b.high)
    bounded = make(np.zeros_like(a.low), np.minimum(a.high, b.high))
    found = _unless((a.low < 0) | (b.low < 0), bounded, whole(shape))
    return _unless(is_known, found, make(a.low & b.low, a.low & b.low))


def logical_or(shape: Any, a: Interval, b: Interval) -> Interval:
    """Of non-negative values at least the larger one, and no longer than the longer one."""
    is_known = (a.low == a.high) & (b.low == b.high)
    bounded = make(np.maximum(a.low, b.low), _all_ones(np.maximum(a.high, b.high)))
    found = _unless((a.low < 0) | (b.low < 0), bounded, whole(shape))
    return _unless(is_known, found, make(a.low | b.low, a.low | b.low))


def logical_xor(shape: Any, a: Interval, b: Interval) -> Interval:
    is_known = (a.low == a.high) & (b.low == b.high)
    bounded = make(np.zeros_like(a.low), _all_ones(np.maximum(a.high, b.high)))
    found = _unless((a.low < 0) | (b.low < 0), bounded, whole(shape))
    return _unless(is_known, found, make(a.low ^ b.low, a.low ^ b.low))


def shift_left(shape: Any, a: Interval, b: Interval) -> Interval:
    may_leave = (b.low < 0) | (b.high > 31)
    amount = _without(b, may_leave)
    scaled = multiply(shape, a, Interval(1 << amount.low, 1 << amount.high))
    return _unless(may_leave, scaled, whole(shape))


def shift_right_logical(shape: Any, a: Interval, b: Interval) -> Interval:
    may_leave = (b.low < 0) | (b.high > 31) | (a.low < 0)
    amount = _without(b, may_leave)
    shifted = make(a.low >> amount.high, a.high >> amount.low)
    return _unless(may_leave, shifted, whole(shape))


def shift_right_arithmetic(shape: Any, a: Interval, b: Interval) -> Interval:
    """Copies of the highest bit come from the left, also into unsigned values."""
    smallest, largest = LIMITS[shape.element_type]
    has_highest = a.high > (largest >> 1) if smallest == 0 else np.zeros_like(a.high, bool)
    may_leave = (b.low < 0) | (b.high > 31) | has_highest
    low, high = corners(lambda x, amount: x >> amount, a, _without(b, may_leave))
    return _unless(may_leave, make(low, high), whole(shape))


def convert(shape: Any, x: Interval) -> Interval:
    """Between integers; to predicates it asks for non-zero."""
    if LIMITS[shape.element_type] == (0, 1):
        is_zero = (x.low == 0) & (x.high == 0)
        may_be_zero = (x.low <= 0) & (x.high >= 0)
        return Interval((~may_be_zero).astype(np.int64), (~is_zero).astype(np.int64))
    return wrap(shape, x.low, x.high)


def reinterpret(shape: Any, x: Interval) -> Interval:
    """The same bits as signed or unsigned: values in both types stay, others move as one."""
    smallest, largest = LIMITS[shape.element_type]
    period = largest - smallest + 1
    moved = np.where(x.high < smallest, period, np.where(x.low > largest, -period, 0))
    return wrap(shape, x.low + moved, x.high + moved)


def select(shape: Any, predicate: Interval, if_true: Interval, if_false: Interval) -> Interval:
    """Element by element the branch that the predicate's interval leaves, or both."""
    can_be_true, can_be_false = predicate.high > 0, predicate.low < 1
    low, high = np.minimum(if_true.low, if_false.low), np.maximum(if_true.high, if_false.high)
    both = make(low, high)
    one = _unless(can_be_true, if_false, if_true)
    return _unless(can_be_true & can_be_false, one, both)


def compare(direction: str, a: Interval, b: Interval) -> Interval:
    """A predicate: certain where the intervals decide it."""
    if direction in ("GT", "GE"):
        return compare(_FLIPPED[direction], b, a)
    if direction == "NE":
        return logical_not_of(compare("EQ", a, b))
    if direction == "LT":
        always, maybe = a.high < b.low, a.low < b.high
    elif direction == "LE":
        always, maybe = a.high <= b.low, a.low <= b.high
    else:
        always = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
        maybe = (a.low <= b.high) & (b.low <= a.high)
    return make(always.astype(np.int64), maybe.astype(np.int64))


def logical_not_of(predicate: Interval) -> Interval:
    return Interval(1 - predicate.high, 1 - predicate.low)


def narrow(x: Interval, direction: str, other: Interval) -> Interval:
    """The interval of x where ``x direction other`` holds; as it was where that is impossible."""
    low, high = x.low, x.high
    if direction in ("LT", "LE", "EQ"):
        high = np.minimum(high, other.high - (direction == "LT"))
    if direction in ("GT", "GE", "EQ"):
        low = np.maximum(low, other.low + (direction == "GT"))
    narrowed = make(low, high)
    return _unless(narrowed.low > narrowed.high, narrowed, x)


def flipped(direction: str) -> str:
    """The comparison with its sides exchanged."""
    return _FLIPPED[direction]


def inverted(direction: str) -> str:
    """The comparison that holds where this one does not."""
    return _INVERTED[direction]


ELEMENTWISE: dict[str, Callable[..., Interval]] = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
    "remainder": remainder,
    "minimum": minimum,
    "maximum": maximum,
    "clamp": clamp,
    "negate": negate,
    "abs": absolute,
    "sign": sign,
    "not": logical_not,
    "and": logical_and,
    "or": logical_or,
    "xor": logical_xor,
    "shift-left": shift_left,
    "shift-right-logical": shift_right_logical,
    "shift-right-arithmetic": shift_right_arithmetic,
    "convert": convert,
    "bitcast-convert": reinterpret,
    "select": select,
}
"""Result's shape and operands' intervals to the result's interval, by opcode."""


def _quotient(a: Any, b: Any) -> Any:
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))


def _without(x: Interval, where: np.ndarray) -> Interval:
    """Ones where the values cannot be used."""
    return make(np.where(where, 1, x.low), np.where(where, 1, x.high))


def _unless(condition: np.ndarray, usual: Interval, otherwise: Interval) -> Interval:
    low = np.where(condition, otherwise.low, usual.low)
    return make(low, np.where(condition, otherwise.high, usual.high))


def _all_ones(largest: np.ndarray) -> np.ndarray:
    """The largest integer with as many bits; of 0 it is 0."""
    bits = np.zeros_like(largest)
    for shift in range(32):
        bits += largest >= (1 << shift)
    return (1 << bits) - 1
