"""The examples and formulas in the Neuron SDK's documentation of decode context parallelism."""

import numpy as np
import pytest

from dcpjax.layout import (
    active_mask,
    decode_dcp_rank,
    decode_groups,
    global_position,
    local_filled,
    owner,
    prefill_cp_rank,
    prefill_groups,
    slot_mapping,
)

SHAPES = [(1, 1, 1), (2, 1, 16), (4, 16, 16), (2, 8, 16), (8, 4, 32), (3, 2, 4)]  # N, I, block


def test_prefill_groups_of_tp8_dcp4():
    dcp_tp, cp_kv = prefill_groups(8, 4)
    assert dcp_tp == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cp_kv == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [prefill_cp_rank(rank, 8, 4) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_prefill_ranks_own_blocks_in_turn():
    for cp_rank in range(4):
        blocks = [b for b in range(12) if active_mask(16 * b, cp_rank, ranks=4, interleave=16)]
        assert blocks == [cp_rank, cp_rank + 4, cp_rank + 8]


def test_decode_groups_of_tp16_dcp2():
    assert decode_groups(16, 2) == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert [decode_dcp_rank(rank, 2) for rank in range(16)] == [0, 1] * 8


def test_blocks_of_interleave_16_over_4_ranks():
    owners = owner(np.arange(80), ranks=4, interleave=16)
    np.testing.assert_array_equal(owners, np.repeat([0, 1, 2, 3, 0], 16))
    slots = slot_mapping([7, 9], np.arange(80), 1, ranks=4, interleave=16, page_size=16)
    np.testing.assert_array_equal(slots[16:32], 7 * 16 + np.arange(16))
    assert (slots[:16] == -1).all() and (slots[32:] == -1).all()


def documented_local_filled(length, rank, ranks, interleave, block_size):
    vblock, stride = block_size * ranks, interleave * ranks
    filled = length // vblock * block_size
    remaining = length - length // vblock * vblock
    filled += remaining // stride * interleave
    leftover = remaining - remaining // stride * stride
    return filled + np.minimum(np.maximum(leftover - rank * interleave, 0), interleave)


def documented_active_mask(length, rank, ranks, interleave, block_size):
    vblock = block_size * ranks
    return (length - length // vblock * vblock) // interleave % ranks == rank


@pytest.mark.parametrize("shape", SHAPES)
def test_documented_masks_agree(shape):
    split = {"ranks": shape[0], "interleave": shape[1]}
    lengths = np.arange(5 * shape[0] * shape[2])
    for rank in range(shape[0]):
        filled, active = local_filled(lengths, rank, **split), active_mask(lengths, rank, **split)
        np.testing.assert_array_equal(filled, documented_local_filled(lengths, rank, *shape))
        np.testing.assert_array_equal(active, documented_active_mask(lengths, rank, *shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_active_token_counts_once_and_then_is_prior(shape):
    split = {"ranks": shape[0], "interleave": shape[1]}
    lengths, ranks = np.arange(3 * shape[0] * shape[2]), range(shape[0])
    active = np.stack([active_mask(lengths, rank, **split) for rank in ranks])
    np.testing.assert_array_equal(active.sum(axis=0), 1)
    before = np.stack([local_filled(lengths, rank, **split) for rank in ranks])
    after = np.stack([local_filled(lengths + 1, rank, **split) for rank in ranks])
    np.testing.assert_array_equal(after - before, active)


@pytest.mark.parametrize("shape", SHAPES)
def test_global_positions_of_prior_slots(shape):
    ranks, interleave, _ = shape
    slots = np.arange(100)
    for rank in range(ranks):
        documented = slots // interleave * (ranks * interleave) + rank * interleave
        np.testing.assert_array_equal(
            global_position(slots, rank, ranks=ranks, interleave=interleave),
            documented + slots % interleave,
        )


@pytest.mark.parametrize("shape", [(4, 16, 16), (2, 8, 16), (3, 2, 4)])
def test_owned_slots_of_an_aligned_chunk_are_a_strided_view(shape):
    ranks, interleave, page_size = shape
    width = 2 * ranks * page_size
    sizes = {"ranks": ranks, "interleave": interleave, "page_size": page_size}
    for rank in range(ranks):
        slots = slot_mapping([5, 3], np.arange(width), rank, **sizes)
        viewed = slots.reshape(-1, ranks, interleave)[:, rank, :].reshape(-1)
        np.testing.assert_array_equal(viewed, slots[slots >= 0])
        assert len(viewed) == width // ranks
