"""min_p, top_k and top_p against an oracle that sorts."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dcpjax.sampling.filters import MASS_BITS, filter_distances
from dcpjax.sampling.sampler import _distances

ROWS, SIZE = 3, 41
EPS = float(np.finfo(np.float32).eps)

distances_of = jax.jit(_distances)
filtered = jax.jit(filter_distances)


@pytest.fixture(autouse=True, scope="module")
def _strict_arrays() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def keep_by_sorting(distances: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens of one row are kept: sorted, cut three times, ties with the last one added."""
    order = np.argsort(distances, kind="stable")
    ascending = distances[order].astype(np.float64)
    last = min(top_k, len(order)) - 1 if top_k > 0 else len(order) - 1
    weights = np.exp(-ascending)
    is_left = (ascending <= ascending[last]) & (weights >= min_p)
    mass = np.cumsum(np.where(is_left, weights, 0.0))
    if top_p < 1:
        is_left &= ascending <= ascending[np.searchsorted(mass, top_p * mass[-1])]
    kept = np.zeros(len(order), bool)
    kept[order] = is_left
    return kept & np.isfinite(distances)


def assert_between(kept: np.ndarray, fewer: np.ndarray, more: np.ndarray) -> None:
    """``fewer`` and ``more`` are what the oracle keeps for shares moved by the rounding error."""
    assert not (fewer & ~kept).any(), np.flatnonzero(fewer & ~kept)
    assert not (kept & ~more).any(), np.flatnonzero(kept & ~more)


def check_row(row: np.ndarray, result: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    kept = np.isfinite(result)
    np.testing.assert_array_equal(result[kept], row[kept])
    # A weight is off by half a unit and by exp's few ulp, in the sum and in the total alike; then a
    # product and a comparison of float32. min_p is compared as a logarithm of at most 104.
    share = row.size * 2.0**-MASS_BITS + 16 * EPS
    factor = np.exp(4 * 104 * EPS)
    less_p, more_p = max(top_p * (1 - share) - share, 0.0), min(top_p * (1 + share) + share, 1.0)
    fewer = keep_by_sorting(row, top_k, less_p, min(min_p * factor, 1.0))
    assert_between(kept, fewer, keep_by_sorting(row, top_k, more_p, min_p / factor))


NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=32),
    st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 2.0, 2.5, 3e38, -3e38, 1e-45]),
)


@settings(deadline=None, max_examples=150)
@given(
    logits=hnp.arrays(np.float32, (ROWS, SIZE), elements=NUMBERS, fill=NUMBERS),
    temperature=st.floats(0.0078125, 64, width=32),
    top_k=st.integers(-1, SIZE + 2),
    top_p=st.floats(2.0**-20, 1, width=32),
    min_p=st.floats(0, 1, width=32),
)
@example(np.zeros((ROWS, SIZE), np.float32), 1.0, 1, 0.5, 1.0)
@example(np.full((ROWS, SIZE), -np.inf, np.float32), 1.0, 3, 0.5, 0.5)
def test_filters_keep_what_sorting_keeps(logits, temperature, top_k, top_p, min_p) -> None:
    distances = distances_of(jnp.asarray(logits), jnp.full(ROWS, temperature, jnp.float32))
    # One filter per row, and all of them in the last one.
    top_ks, top_ps, min_ps = [top_k, 0, top_k], [1.0, top_p, top_p], [0.0, min_p, min_p]
    result = filtered(
        distances,
        jnp.array(top_ks, jnp.int32),
        jnp.array(top_ps, jnp.float32),
        jnp.array(min_ps, jnp.float32),
    )
    rows = zip(np.asarray(distances), np.asarray(result), top_ks, top_ps, min_ps, strict=True)
    for row in rows:
        check_row(*row)


@pytest.mark.parametrize("size", [1, 2, 131, 65_535, 65_536, 140_000])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_thresholds_are_exact_for_every_size(size: int, scale: float) -> None:
    """Sizes on both sides of those where the mass needs another part; flat and peaked rows."""
    logits = scale * np.random.default_rng(size).normal(size=(4, size))
    distances = distances_of(jnp.asarray(logits, jnp.float32), jnp.ones(4))
    top_ks, top_ps = [50, 0, 0, 1000], [1.0, 0.9, 0.999, 0.5]
    result = filtered(
        distances, jnp.array(top_ks, jnp.int32), jnp.array(top_ps, jnp.float32), jnp.zeros(4)
    )
    rows = zip(np.asarray(distances), np.asarray(result), top_ks, top_ps, strict=True)
    for row, kept, top_k, top_p in rows:
        check_row(row, kept, top_k, top_p, 0.0)
    assert np.isfinite(result[0]).sum() == min(50, size)  # no ties here, so exactly k


@pytest.mark.parametrize(
    "used, other",
    [((10, 1.0), (9, 1.0)), ((10, 1.0), (11, 1.0)), ((10, 0.5), (10, 0.3)), ((10, 0.5), (10, 0.6))],
)
def test_the_oracle_tells_neighbouring_parameters_apart(
    used: tuple[int, float], other: tuple[int, float]
) -> None:
    row = np.log(np.arange(1, 21, dtype=np.float32))  # weights 1, 1/2, 1/3, ...
    top_k, top_p = jnp.array([used[0]], jnp.int32), jnp.array([used[1]], jnp.float32)
    result = np.asarray(filtered(jnp.asarray(row)[None], top_k, top_p, jnp.zeros(1)))[0]
    check_row(row, result, *used, 0.0)
    with pytest.raises(AssertionError):
        check_row(row, result, *other, 0.0)
