"""The kinds of numbers that one implementation serves, and the deal: the layout by definition."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("layout", settings.get_profile("untimed"), max_examples=16)
settings.load_profile("layout")


@dataclass(frozen=True)
class Kind:
    """Calls a layout function with one kind of numbers; ``dtype`` None means Python ints."""

    name: str
    call: Callable[..., np.ndarray]
    dtype: Any = None


def call_with_ints(function: Callable[..., Any], *args: Any, **static: int) -> np.ndarray:
    columns = [a.ravel().tolist() for a in np.broadcast_arrays(*args)]
    results = [function(*row, **static) for row in zip(*columns, strict=True)]
    assert all(type(result) in (int, bool) for result in results)
    return np.array(results)


def call_with_numpy(
    dtype: Any, function: Callable[..., Any], *args: Any, **static: int
) -> np.ndarray:
    result = function(*(np.asarray(a, dtype) for a in args), **static)
    assert isinstance(result, np.ndarray | np.generic) and result.dtype in (dtype, np.bool_)
    return np.asarray(result)


def call_in_jit(dtype: Any, function: Callable[..., Any], *args: Any, **static: int) -> np.ndarray:
    result = compiled(function, **static)(*(np.asarray(a, dtype) for a in args))
    assert result.dtype in (dtype, np.bool_)
    return np.asarray(result)


@functools.cache
def compiled(function: Callable[..., Any], **static: int) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, **static))


KINDS = [Kind("int", call_with_ints)] + [
    Kind(f"{how}-{dtype.__name__}", functools.partial(call, dtype), dtype)
    for how, call in (("numpy", call_with_numpy), ("jit", call_in_jit))
    for dtype in (np.int32, np.uint32)
]


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="session", params=KINDS[1:], ids=lambda kind: kind.name)
def array_kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@functools.cache
def dealt(num_tokens: int, ranks: int, interleave: int) -> np.ndarray:
    hands = [0] * ranks
    places: list[tuple[int, int]] = []
    rank = 0
    while len(places) < num_tokens:
        for _ in range(interleave):
            places.append((rank, hands[rank]))
            hands[rank] += 1
        rank = (rank + 1) % ranks
    return np.array(places[:num_tokens]).reshape(num_tokens, 2)


@pytest.fixture(scope="session")
def deal() -> Callable[[int, int, int], np.ndarray]:
    """``deal(num_tokens, ranks, interleave)`` → [num_tokens, 2]: rank and place in its hand.

    Tokens are dealt like cards, ``interleave`` at a time to one rank after the other, without any
    of the formulas that it judges.
    """
    return dealt
