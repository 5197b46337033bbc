"""The numbers that the layout takes: Python ints, NumPy arrays and JAX arrays, traced or not.

All are treated by the same operators; the few functions without an operator come from the array's
own namespace, so that JAX is never imported here. All numbers are non-negative. Python ints are
checked when they arrive; the values of arrays are not, because traced arrays have none.
"""

import operator
from typing import Any, TypeAlias

import numpy as np

from dcpjax.errors import LayoutError

Integers: TypeAlias = Any
"""A Python int, a NumPy integer or array, or a JAX array of integers."""

Booleans: TypeAlias = Any
"""What a comparison of :data:`Integers` gives."""


def namespace(*values: Integers) -> Any:
    """The array module of ``values``: that of a JAX array if there is one, else NumPy."""
    modules = [value.__array_namespace__() for value in values if is_array(value)]
    return next((module for module in modules if module is not np), np)


def is_array(value: Integers) -> bool:
    """Whether ``value`` has a dtype of its own, which NumPy's scalars do and lists do not."""
    return not (value is None or isinstance(value, int | list | tuple))


def as_array(value: Integers, module: Any) -> Integers:
    """``value`` as an array of ``module``, int32 where it has no dtype of its own."""
    return module.asarray(value) if is_array(value) else module.asarray(value, dtype=np.int32)


def minimum(a: Integers, b: Integers) -> Integers:
    """Elementwise minimum; an int of two ints."""
    return namespace(a, b).minimum(a, b) if is_array(a) or is_array(b) else min(a, b)


def maximum(a: Integers, b: Integers) -> Integers:
    """Elementwise maximum; an int of two ints."""
    return namespace(a, b).maximum(a, b) if is_array(a) or is_array(b) else max(a, b)


def arange(stop: int, like: Integers) -> Integers:
    """``[0, 1, ..., stop)`` in the namespace and integer type of ``like``; int32 for an int."""
    dtype = like.dtype if is_array(like) else np.int32
    return namespace(like).arange(stop, dtype=dtype)


def in_type_of(reference: Integers, value: Integers) -> Integers:
    """``value`` in the integer type of ``reference``, so that a mixed pair does not widen.

    NumPy would make int64 of uint32 and int32; JAX with strict promotion would refuse them.
    """
    if not is_array(reference) or not is_array(value) or value.dtype == reference.dtype:
        return value
    return value.astype(reference.dtype)


def static_count(name: str, value: Any, minimum: int = 1) -> int:
    """``value`` as a Python int of at least ``minimum``; NumPy's would widen what they divide.

    Raises:
        LayoutError: it is smaller, no integer, or traced.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise LayoutError(f"{name} is a static integer", **{name: value}) from error
    if number < minimum:
        raise LayoutError(f"{name} is at least {minimum}", **{name: number})
    return number


def check_below(name: str, value: Integers, stop_name: str, stop: int) -> None:
    """Refuse a Python or NumPy int outside ``[0, stop)``.

    Raises:
        LayoutError: with the value and the limit.
    """
    if _is_scalar(value) and not 0 <= value < stop:
        raise LayoutError(
            f"{name} is in [0, {stop_name})", **{name: int(value), stop_name: int(stop)}
        )


def check_not_negative(name: str, value: Integers) -> None:
    """Refuse a negative Python or NumPy int.

    Raises:
        LayoutError: with the value.
    """
    if _is_scalar(value) and value < 0:
        raise LayoutError(f"{name} is not negative", **{name: int(value)})


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Refuse a ``part`` that does not divide ``whole``.

    Raises:
        LayoutError: with both values.
    """
    if whole % part:
        raise LayoutError(
            f"{whole_name} is a multiple of {part_name}", **{whole_name: whole, part_name: part}
        )


def _is_scalar(value: Integers) -> bool:
    return isinstance(value, int | np.integer)
