"""Owners, local indices and lengths against a deal of tokens like cards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.layout import (
    active_mask,
    global_position,
    local_filled,
    local_index,
    max_local_filled,
    owner,
)

SPLITS = [(1, 1), (1, 4), (2, 1), (3, 1), (8, 1), (4, 16), (3, 5), (5, 2), (2, 64)]
WIDTH = 64  # one shape, so that a split compiles once
splits = st.sampled_from(SPLITS)
near_starts = st.integers(0, 600)
far_starts = st.integers(0, 2**31 - 1 - WIDTH)


def by_name(split):
    return {"ranks": split[0], "interleave": split[1]}


@given(split=splits, start=near_starts, data=st.data())
def test_tokens_are_dealt_like_cards(kind, deal, split, start, data):
    positions = start + np.arange(WIDTH)
    holders, indices = deal(start + WIDTH, *split)[start:].T
    np.testing.assert_array_equal(kind.call(owner, positions, **by_name(split)), holders)
    np.testing.assert_array_equal(kind.call(local_index, positions, **by_name(split)), indices)
    rank = data.draw(st.integers(0, split[0] - 1))
    mask = kind.call(active_mask, positions, rank, **by_name(split))
    np.testing.assert_array_equal(mask, holders == rank)


@given(split=splits, start=far_starts)
def test_owner_and_index_are_a_bijection(kind, split, start):
    positions = start + np.arange(WIDTH)
    holders = kind.call(owner, positions, **by_name(split))
    indices = kind.call(local_index, positions, **by_name(split))
    back = kind.call(global_position, indices, holders, **by_name(split))
    np.testing.assert_array_equal(back, positions)


@given(split=splits, start=st.integers(0, 10**6), data=st.data())
def test_position_of_an_index_has_that_index(kind, split, start, data):
    rank = data.draw(st.integers(0, split[0] - 1))
    indices = start + np.arange(WIDTH)
    positions = kind.call(global_position, indices, rank, **by_name(split))
    np.testing.assert_array_equal(kind.call(owner, positions, **by_name(split)), rank)
    np.testing.assert_array_equal(kind.call(local_index, positions, **by_name(split)), indices)


@given(split=splits, start=near_starts)
def test_local_lengths_count_the_deal(kind, deal, split, start):
    lengths = start + np.arange(WIDTH)
    holders = deal(start + WIDTH, *split)[:, 0]
    for rank in range(split[0]):
        before = np.concatenate([[0], np.cumsum(holders == rank)])
        local = kind.call(local_filled, lengths, rank, **by_name(split))
        np.testing.assert_array_equal(local, before[lengths])


@given(split=splits, start=far_starts)
def test_local_lengths_sum_to_the_length(kind, split, start):
    lengths = start + np.arange(WIDTH)
    local = [kind.call(local_filled, lengths, r, **by_name(split)) for r in range(split[0])]
    np.testing.assert_array_equal(np.sum(local, axis=0, dtype=np.int64), lengths)
    most = kind.call(max_local_filled, lengths, **by_name(split))
    np.testing.assert_array_equal(np.max(local, axis=0), most)


@pytest.mark.parametrize("split", SPLITS)
def test_edge_lengths(kind, deal, split):
    cycle = split[0] * split[1]
    lengths = np.array([0, 1, split[1] - 1, split[1], split[1] + 1, cycle - 1, cycle, cycle + 1])
    for rank in range(split[0]):
        expected = [np.sum(deal(length, *split)[:, 0] == rank) for length in lengths.tolist()]
        local = kind.call(local_filled, lengths, rank, **by_name(split))
        np.testing.assert_array_equal(local, expected)


def test_fewer_tokens_than_ranks_leave_ranks_empty(kind):
    ranks = np.arange(8)
    local = kind.call(local_filled, 3, ranks, ranks=8, interleave=1)
    np.testing.assert_array_equal(local, [1, 1, 1, 0, 0, 0, 0, 0])


@given(split=splits, prior=near_starts)
def test_expand_then_localise(kind, deal, split, prior):
    """What each token of a segment may see, itself included, is counted per token."""
    seen = kind.call(local_filled, prior + 1 + np.arange(WIDTH), 0, **by_name(split))
    mine = deal(prior + WIDTH, *split)[:, 0] == 0
    expected = [np.sum(mine[: prior + 1 + token]) for token in range(WIDTH)]
    np.testing.assert_array_equal(seen, expected)


def test_localise_then_expand_is_wrong():
    localised_first = local_filled(7, 0, ranks=4, interleave=1) + 1 + np.arange(4)
    localised_last = local_filled(7 + 1 + np.arange(4), 0, ranks=4, interleave=1)
    assert not np.array_equal(localised_first, localised_last)


def test_the_deal_tells_wrong_formulas_apart(deal):
    positions = np.arange(48)
    holders, indices = deal(48, 4, 3).T
    assert not np.array_equal(positions % 4, holders), "round robin ignores the interleave"
    assert not np.array_equal(positions // 12 % 4, holders), "contiguous shares are no deal"
    assert not np.array_equal(positions // 4, indices), "an index of another interleave"


def test_an_unsigned_length_does_not_wrap_below_the_share_of_a_rank():
    lengths = np.arange(40, dtype=np.uint32)
    local = local_filled(lengths, np.uint32(3), ranks=4, interleave=4)
    assert local.max() == 8
    wrapped = lengths // 16 * 4 + np.clip(lengths % 16 - np.uint32(12), 0, 4)
    assert wrapped[0] == 4 and local[0] == 0, "the formula without care is wrong for length 0"
