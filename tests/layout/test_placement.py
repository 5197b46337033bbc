"""Placements: what they hold against the rank orders and the deal, and how often."""

import numpy as np
import pytest

from dcpjax.errors import LayoutError
from dcpjax.layout import KVPlacement, KVShare, decode_groups, layer_range, prefill_groups

CACHE = {"layers": 5, "kv_heads": 4, "page_size": 4}
SHARDED = {**CACHE, "interleave": 2}
NUM_TOKENS = 37

# Placement and the copies that it keeps of each (layer, head, token).
PLACEMENTS = [
    (KVPlacement.tensor_parallel(1, **CACHE), 1),
    (KVPlacement.tensor_parallel(2, **CACHE), 1),
    (KVPlacement.tensor_parallel(8, **CACHE), 2),
    (KVPlacement.decode(4, 1, **SHARDED), 1),
    (KVPlacement.decode(4, 2, **SHARDED), 1),
    (KVPlacement.decode(3, 3, **SHARDED), 1),
    (KVPlacement.decode(16, 2, **SHARDED), 2),
    (KVPlacement.decode(64, 8, **SHARDED), 2),
    (KVPlacement.prefill_dcp(8, 4, **SHARDED), 1),
    (KVPlacement.prefill_dcp(16, 2, **SHARDED), 2),
    (KVPlacement.layer_split(2, **CACHE), 1),
    (KVPlacement.layer_split(8, **CACHE), 1),
    (KVPlacement.pcp(3, **CACHE), 3),
    (KVPlacement.pcp(3, **SHARDED), 1),
    (KVPlacement.pcp_dcp(2, 3, 1, **SHARDED), 3),
    (KVPlacement.pcp_dcp(8, 2, 2, **SHARDED), 2),
    (KVPlacement.pcp_dcp(2, 3, 6, **SHARDED), 1),
]


def everything():
    """[layers, heads, tokens] grids of indices."""
    return np.ix_(np.arange(CACHE["layers"]), np.arange(CACHE["kv_heads"]), np.arange(NUM_TOKENS))


@pytest.mark.parametrize("placement, copies", PLACEMENTS)
def test_everything_is_held_equally_often(placement, copies):
    held = sum(placement.holds(r, *everything()).astype(int) for r in range(placement.num_ranks))
    np.testing.assert_array_equal(held, copies)


@pytest.mark.parametrize("placement, copies", PLACEMENTS)
def test_shares_count_what_they_hold(placement, copies):
    for rank, share in enumerate(placement.shares):
        held = placement.holds(rank, *everything())
        assert share.num_layers * share.num_heads * share.num_tokens(NUM_TOKENS) == held.sum()
        assert share.is_empty == (not held.any())


@pytest.mark.parametrize("tp, dcp", [(4, 2), (8, 4), (8, 8), (16, 2)])
def test_decode_groups_share_heads_and_deal_tokens(deal, tp, dcp):
    placement = KVPlacement.decode(tp, dcp, **SHARDED)
    holders = deal(NUM_TOKENS, dcp, 2)[:, 0]
    for group in decode_groups(tp, dcp):
        assert (
            len({(placement.shares[r].head_start, placement.shares[r].head_stop) for r in group})
            == 1
        )
        for token_rank, rank in enumerate(group):
            held = placement.holds(rank, *everything()).any(axis=(0, 1))
            np.testing.assert_array_equal(held, holders == token_rank)


@pytest.mark.parametrize("tp, dcp", [(4, 2), (8, 4), (8, 8), (16, 2)])
def test_prefill_groups_share_tokens_or_heads(deal, tp, dcp):
    placement = KVPlacement.prefill_dcp(tp, dcp, **SHARDED)
    holders = deal(NUM_TOKENS, dcp, 2)[:, 0]
    same_tokens, same_heads = prefill_groups(tp, dcp)
    for token_rank, group in enumerate(same_tokens):
        for rank in group:
            held = placement.holds(rank, *everything()).any(axis=(0, 1))
            np.testing.assert_array_equal(held, holders == token_rank)
    for group in same_heads:
        assert (
            len({(placement.shares[r].head_start, placement.shares[r].head_stop) for r in group})
            == 1
        )


def test_decode_and_prefill_differ_in_the_order_of_ranks_only():
    decode, prefill = KVPlacement.decode(8, 4, **SHARDED), KVPlacement.prefill_dcp(8, 4, **SHARDED)
    assert decode != prefill
    by_share = [sorted(p.shares, key=repr) for p in (decode, prefill)]
    assert by_share[0] == by_share[1]


def test_a_layer_split_gives_each_rank_its_layers():
    placement = KVPlacement.layer_split(8, layers=78, kv_heads=1, page_size=64)
    for rank, share in enumerate(placement.shares):
        assert (share.layer_start, share.layer_stop) == layer_range(78, 8, rank)
    assert placement.holds(7, 77, 0, 10**6) and not placement.holds(7, 68, 0, 0)


def test_more_ranks_than_layers_leave_shares_empty():
    placement = KVPlacement.layer_split(8, layers=3, kv_heads=1, page_size=4)
    assert [share.is_empty for share in placement.shares] == [False] * 3 + [True] * 5


def test_short_sequences_leave_ranks_without_tokens():
    placement = KVPlacement.decode(8, 8, layers=2, kv_heads=1, page_size=4, interleave=4)
    assert [share.num_tokens(5) for share in placement.shares] == [4, 1, 0, 0, 0, 0, 0, 0]


def test_equal_placements_are_equal():
    one_rank_each = KVPlacement.decode(4, 1, **SHARDED)
    assert one_rank_each == KVPlacement.tensor_parallel(4, **CACHE)
    assert hash(one_rank_each) == hash(KVPlacement.prefill_dcp(4, 1, **SHARDED))
    assert KVPlacement.pcp(1, **SHARDED) == KVPlacement.pcp(1, **CACHE)


def test_holds_takes_ints_and_arrays():
    placement = KVPlacement.decode(4, 2, **SHARDED)
    assert placement.holds(0, 0, 0, 0) is True
    assert placement.holds(0, 5, 0, 0) is False, "there is no layer 5"
    assert placement.holds(0, 0, 4, 0) is False, "there is no head 4"
    assert placement.holds(1, 0, 0, np.arange(6)).tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_exists(rank):
    with pytest.raises(LayoutError, match=f"rank={rank}, ranks=4"):
        KVPlacement.decode(4, 2, **SHARDED).holds(rank, 0, 0, 0)


@pytest.mark.parametrize(
    "build, match",
    [
        (lambda: KVPlacement.decode(4, 3, **SHARDED), "tp=4, dcp=3"),
        (lambda: KVPlacement.prefill_dcp(4, 3, **SHARDED), "tp=4, dcp=3"),
        (lambda: KVPlacement.tensor_parallel(3, **CACHE), "tp=3, dcp=1, kv_heads=4"),
        (lambda: KVPlacement.tensor_parallel(0, **CACHE), "tp=0"),
        (lambda: KVPlacement.layer_split(0, **CACHE), "ranks=0"),
        (lambda: KVPlacement.pcp(0, **CACHE), "ranks=0"),
        (lambda: KVPlacement.pcp(2, **CACHE, interleave=0), "interleave=0"),
        (lambda: KVPlacement.decode(4, 2, **CACHE, interleave=3), "page_size=4, interleave=3"),
        (lambda: KVPlacement.decode(4, 1, **CACHE, interleave=8), "page_size=4, interleave=8"),
        (lambda: KVPlacement.pcp(2, layers=0, kv_heads=1, page_size=4), "layers=0"),
        (lambda: KVPlacement(1, 1, 4, ()), "ranks=0"),
        (lambda: KVPlacement(1, 1, 4, (KVShare(0, 2, 0, 1, 1, 0, 4),)), "inside the cache"),
        (lambda: KVShare(2, 1, 0, 1, 1, 0, 4), "start=2, stop=1"),
        (lambda: KVShare(0, 1, 0, 1, 2, 2, 4), "residue=2, ranks=2"),
    ],
)
def test_what_does_not_fit_is_refused(build, match):
    with pytest.raises(LayoutError, match=match):
        build()


@pytest.mark.parametrize("tp, pcp, dcp", [(1, 3, 3), (2, 3, 3), (2, 3, 6), (4, 2, 8), (8, 2, 2)])
def test_pcp_ranks_of_a_dcp_group_deal_tokens(deal, tp, pcp, dcp):
    placement = KVPlacement.pcp_dcp(tp, pcp, dcp, **SHARDED)
    holders = deal(NUM_TOKENS, dcp, 2)[:, 0]
    for group in decode_groups(tp, dcp, pcp):
        shares = [placement.shares[rank] for rank in group]
        assert len({(share.head_start, share.head_stop) for share in shares}) == 1
        for token_rank, rank in enumerate(group):
            held = placement.holds(rank, *everything()).any(axis=(0, 1))
            np.testing.assert_array_equal(held, holders == token_rank)


def test_pcp_ranks_without_dcp_are_replicas():
    placement = KVPlacement.pcp_dcp(2, 3, 1, **SHARDED)
    assert placement.shares == KVPlacement.tensor_parallel(2, **CACHE).shares * 3


def test_pcp_dcp_contains_the_others():
    assert KVPlacement.pcp_dcp(8, 1, 4, **SHARDED) == KVPlacement.decode(8, 4, **SHARDED)
    assert KVPlacement.pcp_dcp(1, 3, 1, **SHARDED) == KVPlacement.pcp(3, **CACHE)
    assert KVPlacement.pcp_dcp(1, 3, 3, **SHARDED) == KVPlacement.pcp(3, **SHARDED)


@pytest.mark.parametrize("tp, pcp, dcp, match", [(4, 4, 2, "dcp=2, pcp=4"), (4, 2, 3, "dcp=3")])
def test_dcp_groups_hold_all_pcp_ranks(tp, pcp, dcp, match):
    with pytest.raises(LayoutError, match=match):
        KVPlacement.pcp_dcp(tp, pcp, dcp, **SHARDED)


@pytest.mark.parametrize("layers", [(0, 2, 3), (4,), (0, 1, 2, 3, 4)])
def test_selected_layers_stay_on_their_ranks(layers):
    placement = KVPlacement.layer_split(3, **CACHE)
    part = placement.select_layers(layers)
    assert (part.layers, part.num_ranks) == (len(layers), 3)
    for rank in range(3):
        held = [placement.holds(rank, layer, 0, 0) for layer in layers]
        assert [part.holds(rank, place, 0, 0) for place in range(len(layers))] == held


@pytest.mark.parametrize(
    "layers, match",
    [
        ((), "layers=0"),
        ((5,), "layer=5, before=-1, layers=5"),
        ((-1,), "layer=-1"),
        ((2, 2), "layer=2, before=2"),
        ((3, 1), "layer=1, before=3"),
    ],
)
def test_selected_layers_ascend_and_exist(layers, match):
    with pytest.raises(LayoutError, match=match):
        KVPlacement.layer_split(3, **CACHE).select_layers(layers)
