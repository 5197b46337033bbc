"""Rank orders as views over one device list, and the heads of each group."""

import numpy as np
import pytest

from dcpjax.errors import LayoutError
from dcpjax.layout import (
    decode_dcp_rank,
    decode_groups,
    decode_head_group,
    head_group,
    heads_per_rank,
    num_head_groups,
    prefill_cp_rank,
    prefill_groups,
    prefill_head_group,
)

SHAPES = [(1, 1), (2, 1), (2, 2), (8, 4), (8, 8), (12, 3), (16, 2)]  # tp, dcp


@pytest.mark.parametrize("tp, dcp", SHAPES)
def test_decode_ranks_are_coordinates_of_the_decode_mesh(tp, dcp):
    mesh = np.arange(tp).reshape(tp // dcp, dcp)  # axes ("tp", "dcp")
    assert decode_groups(tp, dcp) == mesh.tolist()
    for (group, token_rank), rank in np.ndenumerate(mesh):
        assert decode_head_group(int(rank), dcp) == group
        assert decode_dcp_rank(int(rank), dcp) == token_rank


@pytest.mark.parametrize("tp, dcp", SHAPES)
def test_prefill_ranks_are_coordinates_of_the_prefill_mesh(tp, dcp):
    mesh = np.arange(tp).reshape(dcp, tp // dcp)  # axes ("dcp", "tp")
    dcp_tp, cp_kv = prefill_groups(tp, dcp)
    assert dcp_tp == mesh.tolist() and cp_kv == mesh.T.tolist()
    for (token_rank, group), rank in np.ndenumerate(mesh):
        assert prefill_cp_rank(int(rank), tp, dcp) == token_rank
        assert prefill_head_group(int(rank), tp, dcp) == group


@pytest.mark.parametrize("tp, dcp", [(8, 4), (16, 2)])
def test_the_two_orders_put_tokens_on_different_ranks(tp, dcp):
    ranks = np.arange(tp)
    assert (decode_dcp_rank(ranks, dcp) != prefill_cp_rank(ranks, tp, dcp)).any()


def test_a_dcp_group_runs_over_pcp_ranks_first():
    assert decode_groups(2, 4, 2) == [[0, 2, 1, 3]]
    assert decode_groups(2, 2, 2) == [[0, 2], [1, 3]]
    assert decode_groups(2, 1, 2) == [[0], [1], [2], [3]]


def test_rank_functions_take_arrays(kind):
    ranks = np.arange(8)
    np.testing.assert_array_equal(kind.call(decode_dcp_rank, ranks, dcp=4), ranks % 4)
    np.testing.assert_array_equal(kind.call(decode_head_group, ranks, dcp=4), ranks // 4)
    np.testing.assert_array_equal(kind.call(prefill_cp_rank, ranks, tp=8, dcp=4), ranks // 2)
    np.testing.assert_array_equal(kind.call(prefill_head_group, ranks, tp=8, dcp=4), ranks % 2)


@pytest.mark.parametrize("tp, dcp", [(4, 3), (2, 4), (0, 1), (4, 0)])
def test_dcp_divides_tp(tp, dcp):
    for function in (decode_groups, prefill_groups, num_head_groups):
        with pytest.raises(LayoutError, match=f"{dcp}"):
            function(tp, dcp)


@pytest.mark.parametrize(
    "tp, dcp, kv_heads, groups",
    [
        (1, 1, 3, [(0, 3)]),
        (4, 1, 8, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (4, 2, 8, [(0, 4), (4, 8)]),
        (4, 1, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (8, 2, 2, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 1, 1, [(0, 1)] * 4),  # MLA: one head on all
        (3, 3, 5, [(0, 5)]),
    ],
)
def test_heads_of_each_group(tp, dcp, kv_heads, groups):
    assert [head_group(tp, dcp, kv_heads, g) for g in range(num_head_groups(tp, dcp))] == groups
    assert heads_per_rank(tp, dcp, kv_heads) == groups[0][1] - groups[0][0]


def test_head_groups_take_arrays(array_kind):
    def start_of(group):
        return head_group(8, 1, 2, group)[0]

    result = array_kind.call(start_of, np.arange(8))
    np.testing.assert_array_equal(result, [0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("tp, dcp, kv_heads", [(3, 1, 2), (4, 2, 3), (6, 1, 4)])
def test_heads_and_groups_divide(tp, dcp, kv_heads):
    with pytest.raises(LayoutError, match=f"tp={tp}, dcp={dcp}, kv_heads={kv_heads}"):
        heads_per_rank(tp, dcp, kv_heads)


@pytest.mark.parametrize("group", [-1, 2])
def test_a_head_group_exists(group):
    with pytest.raises(LayoutError, match=f"group={group}, groups=2"):
        head_group(4, 2, 8, group)
