"""Current tokens in tiles of queries: nothing that counts is left out, whatever the window."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention import attention_reference, current, merge_partials, segment_attention
from dcpjax.attention.current import own_bounds
from dcpjax.layout import owner, window_rows

SPLITS = [(1, 16), (2, 1), (2, 4), (3, 4), (4, 2)]
NUM_TOKENS, HEADS, KV_HEADS, WIDTH, PAGE = 48, 4, 2, 8, 16
SCALE = 0.3


def starts(ranks: int, interleave: int) -> range:
    """Every way in which a window can lie over the ranks."""
    return range(ranks * interleave)


@pytest.mark.parametrize("ranks, interleave", SPLITS)
def test_bounds_hold_for_every_window_and_rank_and_are_tight(ranks, interleave):
    """Brute force: least and most tokens of a rank among the first n of a window."""
    for stop in range(1, NUM_TOKENS + 1):
        counts = [
            sum(owner(start + i, ranks=ranks, interleave=interleave) == rank for i in range(stop))
            for start in starts(ranks, interleave)
            for rank in range(ranks)
        ]
        seen, reached = own_bounds(
            NUM_TOKENS, NUM_TOKENS // ranks, stop, stop, ranks=ranks, interleave=interleave
        )
        assert (seen, reached) == (min(counts), min(max(counts), NUM_TOKENS // ranks))


def test_keys_of_other_ranks_leave_nothing_certain():
    assert own_bounds(NUM_TOKENS, NUM_TOKENS, 8, 16, ranks=2, interleave=4) == (0, NUM_TOKENS)


def compile_ranks(ranks: int, interleave: int) -> Callable[[int], tuple[jax.Array, jax.Array]]:
    """A chunk after ``start`` tokens whose keys and values are zeros, merged over the ranks."""
    q, k, v = chunk()
    split = {"ranks": ranks, "interleave": interleave}

    def attend(start, rank):
        own = window_rows(start, NUM_TOKENS, rank, **split)
        pages = jnp.zeros((1, KV_HEADS, PAGE, 2 * WIDTH))
        table = jnp.zeros(8, jnp.int32)
        positions = start + own
        return segment_attention(
            q, pages, table, start, k[own], v[own], positions, rank, **split, scale=SCALE
        )

    on_ranks = jax.jit(jax.vmap(attend, in_axes=(None, 0)))
    return lambda start: merge_partials(*on_ranks(jnp.uint32(start), jnp.arange(ranks, dtype="u4")))


def chunk() -> tuple[jax.Array, ...]:
    random = np.random.default_rng(3)
    shapes = [(NUM_TOKENS, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)


@pytest.mark.parametrize("split, tile", [((1, 16), 7), ((2, 4), 16), ((3, 4), 7), ((3, 4), 47)])
def test_tiles_give_dense_attention(monkeypatch, split, tile):
    monkeypatch.setattr(current, "QUERY_TILE", tile)
    q, k, v = chunk()
    attend = compile_ranks(*split)
    for start in {0, 1, 5, split[0] * split[1] - 1}:
        before = jnp.zeros((start, KV_HEADS, WIDTH))
        positions = jnp.arange(start + NUM_TOKENS)
        expected = attention_reference(
            q,
            jnp.concatenate([before, k]),
            jnp.concatenate([before, v]),
            positions[start:],
            positions,
            scale=SCALE,
        )
        for got, want in zip(attend(start), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_bounds_that_are_too_narrow_are_noticed(monkeypatch):
    monkeypatch.setattr(current, "QUERY_TILE", 16)
    right = np.asarray(compile_ranks(2, 4)(0)[0])
    monkeypatch.setattr(
        "dcpjax.attention.current.own_bounds",
        lambda num_tokens, num_keys, start, stop, **_: (start // 2, stop // 2 - 1),
    )
    assert np.abs(np.asarray(compile_ranks(2, 4)(0)[0]) - right).max() > 1e-3
