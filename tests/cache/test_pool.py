"""Pools: where their pages lie, how many bytes they take, and that a write touches nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.cache import formats
from dcpjax.cache.pool import POOL_SPEC, PoolShape, allocate_pool, write_tokens
from dcpjax.mesh import decode_mesh, prefill_mesh

SHAPE = PoolShape(
    num_pages=5, num_layers=3, num_heads=4, page_size=4, width=6, dtype=jnp.dtype(jnp.float32)
)
NARROW = PoolShape(5, 3, 4, 4, 6, jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize("shape", [SHAPE, NARROW], ids=lambda shape: shape.dtype.name)
@pytest.mark.parametrize("make_mesh", [decode_mesh, prefill_mesh])
@pytest.mark.parametrize("ranks, dcp", [(1, 1), (2, 2), (3, 3), (8, 2), (4, 1)])
def test_a_rank_holds_its_pages_of_its_heads_and_no_more(shape, make_mesh, ranks, dcp):
    pool = allocate_pool(shape, make_mesh(jax.devices()[:ranks], dcp))
    groups = ranks // dcp
    assert pool.shape == shape.array_shape(dcp) and pool.sharding.spec == POOL_SPEC
    assert pool.dtype == formats.storage_dtype(shape.dtype) and not np.asarray(pool).any()
    shares = [shard.data for shard in pool.addressable_shards]
    assert len(shares) == ranks
    for share in shares:
        assert share.shape == (6, 3, 4 // groups, 4, 6), "one page more: the scratch page"
        assert share.nbytes == shape.rank_bytes(groups)


def test_ranks_that_share_tokens_divide_the_bytes():
    """The same number of tokens, on 1 rank and on 4; scratch pages apart."""
    alone, shared = PoolShape(8, 3, 4, 4, 6, SHAPE.dtype), PoolShape(2, 3, 4, 4, 6, SHAPE.dtype)
    page = alone.page_bytes(1)
    assert alone.rank_bytes(1) - page == 4 * (shared.rank_bytes(1) - page)
    assert alone.page_bytes(4) * 4 == alone.page_bytes(1), "and so do head groups"
    assert NARROW.page_bytes(1) * 2 == page


def test_the_scratch_page_is_the_last_of_a_rank():
    assert SHAPE.scratch_page == SHAPE.array_shape(1)[0] - 1


def rows_of(random, tokens):
    return (
        random.standard_normal((tokens, 4, width)).astype(np.float32) for width in (4, 2)
    )  # keys, values


@pytest.mark.parametrize("shape", [SHAPE, NARROW], ids=lambda shape: shape.dtype.name)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_write_changes_its_slots_and_nothing_else(shape, layer, tokens):
    random = np.random.default_rng(tokens)
    keys, values = rows_of(random, tokens)
    slots = random.permutation(5 * 4)[:tokens]
    before = random.standard_normal(shape.array_shape(1)).astype(np.float32)
    stored = formats.encode(jnp.asarray(before), formats.storage_dtype(shape.dtype))
    write = jax.jit(write_tokens, static_argnums=1)
    pages, offsets = (x.astype(np.int32) for x in np.divmod(slots, 4))
    after = formats.decode(write(stored, layer, pages, offsets, keys, values), jnp.float32)
    expected = before.copy()
    for token in range(tokens):
        row = np.concatenate([keys[token], values[token]], axis=-1)
        expected[pages[token], layer, :, offsets[token]] = row
    expected = jnp.asarray(expected).astype(shape.dtype).astype(jnp.float32)
    np.testing.assert_array_equal(after, expected)


def test_many_tokens_may_go_to_the_scratch_page():
    """Which of them stays does not matter; the others' pages do."""
    keys, values = rows_of(np.random.default_rng(0), 6)
    pages = np.array([SHAPE.scratch_page] * 5 + [2], np.int32)
    offsets = np.array([0, 0, 0, 1, 1, 3], np.int32)
    pool = jnp.zeros(SHAPE.array_shape(1))
    after = np.array(write_tokens(pool, 1, *map(jnp.asarray, (pages, offsets, keys, values))))
    np.testing.assert_array_equal(after[2, 1, :, 3, :4], keys[5])
    after[2, 1, :, 3] = 0
    assert not after[: SHAPE.scratch_page].any()


def test_a_donated_pool_is_written_in_place():
    write = jax.jit(write_tokens, static_argnums=1, donate_argnums=0)
    pool = allocate_pool(SHAPE, decode_mesh(jax.devices()[:1], 1))
    address = pool.addressable_shards[0].data.unsafe_buffer_pointer()
    keys, values = rows_of(np.random.default_rng(0), 2)
    places = np.array([0, 1], np.int32)
    after = write(pool, 0, places, places, keys, values)
    assert pool.is_deleted()
    assert after.addressable_shards[0].data.unsafe_buffer_pointer() == address
