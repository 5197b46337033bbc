"""Slots, writes and pages against pools that are filled token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import LayoutError
from dcpjax.layout import (
    filter_pages,
    global_page,
    local_page,
    page_owner,
    slot_mapping,
    write_slots,
)

SHAPES = [(1, 1, 4), (2, 1, 4), (2, 4, 4), (3, 2, 4), (8, 1, 1), (4, 16, 16)]  # N, I, P
NUM_VIRTUAL_PAGES = 3
POOL_PAGES = 11  # the last one is the scratch page
shapes = st.sampled_from(SHAPES)
tables = st.permutations(range(POOL_PAGES - 1)).map(lambda ids: ids[:NUM_VIRTUAL_PAGES])


def by_name(shape):
    return dict(zip(("ranks", "interleave", "page_size"), shape, strict=True))


def filled_pool(deal, table, rank, shape):
    """[pages * P]: the position whose KV lies in each slot of ``rank``, or -1."""
    ranks, interleave, page_size = shape
    pool = np.full(POOL_PAGES * page_size, -1)
    places = deal(NUM_VIRTUAL_PAGES * ranks * page_size, ranks, interleave)
    mine = np.flatnonzero(places[:, 0] == rank)
    for index, position in enumerate(mine.tolist()):
        pool[table[index // page_size] * page_size + index % page_size] = position
    return pool


def all_positions(shape):
    return np.arange(NUM_VIRTUAL_PAGES * shape[0] * shape[2])


def slots_of(dtype, jitted, table, positions, rank, **sizes):
    function = functools.partial(slot_mapping, **sizes)
    arguments = np.asarray(table, np.int32), positions.astype(dtype), np.asarray(rank, dtype)
    return (compiled_slots(**sizes) if jitted else function)(*arguments)


@functools.cache
def compiled_slots(**sizes):
    return jax.jit(functools.partial(slot_mapping, **sizes))


@pytest.mark.parametrize("jitted", [False, True], ids=["numpy", "jit"])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@given(shape=shapes, table=tables, data=st.data())
def test_a_slot_holds_its_token(deal, dtype, jitted, shape, table, data):
    rank = data.draw(st.integers(0, shape[0] - 1))
    slots = slots_of(dtype, jitted, table, all_positions(shape), rank, **by_name(shape))
    assert slots.dtype == np.int32
    pool, slots = filled_pool(deal, table, rank, shape), np.asarray(slots)
    owned = np.flatnonzero(slots >= 0)
    np.testing.assert_array_equal(pool[slots[owned]], owned)
    assert len(owned) == np.sum(pool >= 0), "every filled slot is named, so none is named twice"
    assert set(slots[slots < 0].tolist()) <= {-1}


@given(shape=shapes, table=tables)
def test_every_token_has_one_slot_on_one_rank(shape, table):
    positions = all_positions(shape)
    slots = np.stack(
        [slot_mapping(table, positions, rank, **by_name(shape)) for rank in range(shape[0])]
    )
    assert (np.sum(slots >= 0, axis=0) == 1).all()


@given(shape=shapes, first=tables, second=tables)
def test_a_table_of_several_sequences(shape, first, second):
    positions = all_positions(shape)
    rows = positions % 2
    slots = slot_mapping(np.array([first, second]), positions, 0, rows=rows, **by_name(shape))
    alone = [slot_mapping(table, positions, 0, **by_name(shape)) for table in (first, second)]
    np.testing.assert_array_equal(slots, np.where(rows == 0, *alone))


def test_lists_and_ints_count_as_arrays():
    sizes = {"ranks": 2, "interleave": 1, "page_size": 4}
    slots = slot_mapping([7, 3], [0, 1, 8], 0, **sizes)
    assert slots.dtype == np.int32 and slots.tolist() == [28, -1, 12]
    assert slot_mapping([7, 3], 8, 0, **sizes) == 12
    assert slot_mapping([7, 3], [], 0, **sizes).shape == (0,)


@pytest.mark.parametrize("table_module, position_module", [(np, jnp), (jnp, np), (jnp, jnp)])
def test_one_jax_array_makes_the_result_one(table_module, position_module):
    table, positions = table_module.asarray([7, 3]), position_module.asarray([0, 1, 8])
    slots = slot_mapping(table, positions, 0, ranks=2, interleave=1, page_size=4)
    assert isinstance(slots, jax.Array) and slots.tolist() == [28, -1, 12]


@pytest.mark.parametrize("table, rows", [([[1, 2]], None), ([1, 2], [0])])
def test_rows_belong_to_a_table_of_several_sequences(table, rows):
    with pytest.raises(LayoutError, match="a page table is 1-D, or 2-D"):
        slot_mapping(table, [0], 0, ranks=1, interleave=1, page_size=4, rows=rows)


@functools.cache
def compiled_writes(**sizes):
    return jax.jit(functools.partial(write_slots, **sizes))


@pytest.mark.parametrize("jitted", [False, True], ids=["numpy", "jit"])
@given(shape=shapes, table=tables, num_valid=st.integers(0, 400), data=st.data())
def test_writes_go_to_slots_or_to_the_scratch_page(jitted, shape, table, num_valid, data):
    rank = data.draw(st.integers(0, shape[0] - 1))
    sizes, page_size, scratch = by_name(shape), shape[2], POOL_PAGES - 1
    inside = all_positions(shape)
    positions = np.arange(2 * len(inside), dtype=np.uint32)  # padding past the end of the table
    valid = positions < min(num_valid, len(inside))
    function = functools.partial(write_slots, **sizes, scratch_page=scratch)
    if jitted:
        function = compiled_writes(**sizes, scratch_page=scratch)
    pages, offsets = function(np.array(table, np.int32), positions, valid, np.uint32(rank))
    assert pages.dtype == offsets.dtype == np.int32
    slots = np.full(len(positions), -1)
    slots[: len(inside)] = slot_mapping(table, inside, rank, **sizes)
    scratch_slots = scratch * page_size + positions % page_size
    expected = np.where(valid & (slots >= 0), slots, scratch_slots)
    np.testing.assert_array_equal(np.asarray(pages) * page_size + np.asarray(offsets), expected)


def test_writes_of_several_sequences():
    pages, offsets = write_slots(
        np.array([[5, 6], [7, 8]]),
        np.array([0, 8, 0, 9]),
        np.array([True, True, True, True]),
        0,
        ranks=2,
        interleave=1,
        page_size=4,
        scratch_page=10,
        rows=np.array([0, 0, 1, 1]),
    )
    assert pages.tolist() == [5, 6, 7, 10] and offsets.tolist() == [0, 0, 0, 1]


@given(ranks=st.integers(1, 9), pages=st.lists(st.integers(0, 10**6), max_size=30))
def test_a_page_filter_and_its_inverse_are_the_identity(ranks, pages):
    back = [
        page
        for rank in range(ranks)
        for page in global_page(filter_pages(pages, rank, ranks=ranks), rank, ranks=ranks).tolist()
    ]
    assert sorted(back) == sorted(pages)


def test_pages_are_dealt_one_by_one(kind, deal):
    holders, indices = deal(64, 3, 1).T
    np.testing.assert_array_equal(kind.call(page_owner, np.arange(64), ranks=3), holders)
    np.testing.assert_array_equal(kind.call(local_page, np.arange(64), ranks=3), indices)
    np.testing.assert_array_equal(kind.call(global_page, indices, holders, ranks=3), np.arange(64))


def test_a_page_filter_keeps_order_and_kind():
    assert filter_pages([9, 4, 1, 6], 1, ranks=4).tolist() == [2, 0]
    assert filter_pages([], 1, ranks=4).tolist() == []
    assert filter_pages(np.array([2], np.int64), 1, ranks=4).dtype == np.int64
    assert isinstance(filter_pages(jnp.array([5]), 1, ranks=4), jax.Array)
