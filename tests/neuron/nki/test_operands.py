"""What the kernels are given, against a plain account of who holds which token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from neuron.nki.operands import flatten_pool, segment_operands, segment_result
from tests.attention.sequences import deal

PAGES, LAYERS, KV_HEADS, PAGE, WIDTH = 6, 2, 3, 4, 5
TOKENS, GROUP, ENTRIES = 3, 2, 4


def pool_pages(has_layers: bool) -> np.ndarray:
    """Pages in which every value is different."""
    shape = (PAGES, LAYERS, KV_HEADS, PAGE, 2 * WIDTH)
    pages = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return pages if has_layers else pages[:, 1].copy()


def segment(prior: int, kind: str):
    """q, table, prior length, k, v and positions of a segment behind ``prior`` tokens."""
    random = np.random.default_rng(3)
    q = random.standard_normal((TOKENS, KV_HEADS * GROUP, WIDTH)).astype(np.float32)
    k, v = random.standard_normal((2, TOKENS, KV_HEADS, WIDTH)).astype(np.float32)
    table = np.array([5, 0, 3, 2], np.int32)
    positions = np.arange(prior, prior + TOKENS).astype(kind)
    return q, table, np.asarray(prior, kind), k, v, positions


def traced_operands(pages, layer, rank, arrays, **split):
    """Compiled, with all that a step knows only when it runs traced: lengths, rank and layer."""
    make = jax.jit(
        lambda pages, layer, rank, *arrays: segment_operands(
            flatten_pool(pages), layer, rank, *arrays, **split
        )
    )
    return make(pages, layer, rank, *arrays)


@pytest.mark.parametrize("kind", ["int32", "uint32"])
@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 4), (3, 2)])
@pytest.mark.parametrize("prior", [0, 1, 3, 4, 5, 9])
def test_a_key_is_seen_by_whom_it_should_be(prior, ranks, interleave, kind):
    """Prior tokens that the rank holds by all queries, current ones that it owns by later ones."""
    hands = deal(prior + TOKENS, ranks, interleave)
    for rank in range(ranks):
        operands = traced_operands(
            pool_pages(True),
            np.asarray(1, kind),
            np.asarray(rank, kind),
            segment(prior, kind),
            ranks=ranks,
            interleave=interleave,
        )
        held = int(np.sum(hands[rank] < prior))
        sees_prior = np.asarray(operands.prior_from) <= np.asarray(operands.positions)
        index = np.arange(ENTRIES * PAGE)
        expected = np.broadcast_to(index < held, (GROUP * TOKENS, ENTRIES * PAGE))
        np.testing.assert_array_equal(sees_prior, expected)
        sees_current = np.asarray(operands.current_from) <= np.asarray(operands.positions)
        token = np.arange(TOKENS)
        own = np.isin(prior + token, hands[rank])
        causal = token[None, :] <= np.tile(token, GROUP)[:, None]
        np.testing.assert_array_equal(sees_current, own[None, :] & causal)


@pytest.mark.parametrize("has_layers", [False, True])
def test_rows_are_the_tokens_of_the_pages_in_the_table(has_layers):
    pages, arrays = pool_pages(has_layers), segment(5, "int32")
    layer = 1 if has_layers else 0
    operands = traced_operands(pages, layer, 0, arrays, ranks=2, interleave=4)
    rows = np.asarray(operands.rows)
    assert rows.dtype == np.int32 and rows.shape == (KV_HEADS, ENTRIES * PAGE, 1)
    of_layer = pages[:, layer] if has_layers else pages
    expected = of_layer[arrays[1]].transpose(1, 0, 2, 3).reshape(KV_HEADS, ENTRIES * PAGE, -1)
    np.testing.assert_array_equal(pages.reshape(-1, 2 * WIDTH)[rows[..., 0]], expected)


def test_query_rows_come_back_to_their_tokens_and_heads():
    """Queries laid out as rows, taken for results, are the queries again."""
    arrays = segment(5, "int32")
    operands = traced_operands(pool_pages(False), 0, 0, arrays, ranks=1, interleave=1)
    rows = jnp.swapaxes(operands.queries, 1, 2)
    back, lse = jax.jit(partial(segment_result, tokens=TOKENS))(rows, rows[..., :1])
    np.testing.assert_array_equal(back, arrays[0])
    np.testing.assert_array_equal(lse, arrays[0][..., 0])
    np.testing.assert_array_equal(
        np.asarray(operands.positions)[:, 0], np.tile(5.0 + np.arange(TOKENS), GROUP)
    )
