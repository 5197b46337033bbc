"""The named formulas: their documents' examples, and that what they name holds what is wanted."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from dcpjax.errors import LayoutError, PlanError
from dcpjax.layout import KVPlacement, filter_pages, head_group, num_head_groups
from dcpjax.transfer import (
    HeadAction,
    RankMemory,
    SequenceMemory,
    bind,
    neuron_head_action,
    neuron_remote_ranks,
    pair_dcp_pages,
    plan_transfer,
    should_filter_cp_indices,
    transfer_page_size,
    vllm_dcp_source_ranks,
    vllm_tp_mapping,
)

FOLDER = Path(__file__).parents[1] / "vectors"


def cases_of(name):
    cases = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    return pytest.mark.parametrize(
        "inputs, expected", [(case["inputs"], case["expected"]) for case in cases]
    )


def rows_moved(source, target, source_ids, target_ids, first, num_tokens):
    """What a bound plan moves: per target rank (source row, target row) of every token.

    A row is page id · page size + offset; pages are dense and a token is one byte.
    """
    sides = []
    for placement, ids in ((source, source_ids), (target, target_ids)):
        region = RankMemory.dense(
            1,
            num_pages=max(ids) + 1,
            num_layers=1,
            num_heads=1,
            page_size=placement.page_size,
            token_bytes=1,
        )
        sides.append(SequenceMemory(placement, (region,) * placement.num_ranks, ids))
    bound = bind(plan_transfer(source, target, num_tokens=num_tokens, first_token=first), *sides)
    rows = {}
    for path in bound.paths:
        starts = zip(*bound.addresses(path), strict=True)
        pairs = [(s + k - 1, t + k - 1) for s, t, size in starts for k in range(size)]
        rows.setdefault(path.target_rank, []).extend(pairs)
    return {rank: sorted(pairs) for rank, pairs in rows.items()}


def sequences(inputs):
    """The vector's page lists as page ids of whole sequences, from their first token on."""
    size, ranks = inputs["page_size"], inputs["ranks"]
    before = inputs["prefix_tokens"] // size + inputs["source_page_offset"]
    spare = itertools.count(100)
    source_ids = [next(spare) for _ in range(before)] + inputs["source_pages"]
    prefix = inputs["prefix_tokens"] // (size * ranks)
    target_ids = [next(spare) for _ in range(prefix)] + inputs["target_pages"]
    first = before * size
    return source_ids, target_ids, first, first + inputs["num_tokens"]


def placement_of_tokens(inputs, interleave):
    cache = {"layers": 1, "kv_heads": 1}
    size, ranks = inputs["page_size"], inputs["ranks"]
    return (
        KVPlacement.tensor_parallel(1, page_size=size, **cache),
        KVPlacement.decode(ranks, ranks, page_size=size, interleave=interleave, **cache),
        KVPlacement.tensor_parallel(1, page_size=size * ranks, **cache),
    )


def page_pairs(rows, page_size):
    """Whole pages as pairs of page ids."""
    starts = [(s, t) for s, t in rows if s % page_size == 0]
    assert all((s + k, t + k) in rows for s, t in starts for k in range(page_size))
    return sorted((s // page_size, t // page_size) for s, t in starts)


@cases_of("page_plan")
def test_sglang_page_plan(inputs, expected):
    size = inputs["page_size"]
    source, sharded, replicated = placement_of_tokens(inputs, size)
    rows = rows_moved(source, sharded, *sequences(inputs))
    for share in expected["sharded"]:
        pairs = sorted(zip(share["source"], share["target"], strict=True))
        assert page_pairs(rows[share["rank"]], size) == pairs
    rows = rows_moved(source, replicated, *sequences(inputs))
    pairs = sorted(zip(*expected["replicated"].values(), strict=True))
    assert page_pairs(rows[0], size) == pairs


@cases_of("token_plan")
def test_sglang_token_plan(inputs, expected):
    source, sharded, replicated = placement_of_tokens(inputs, 1)
    rows = rows_moved(source, sharded, *sequences(inputs))
    for share in expected["sharded"]:
        assert rows[share["rank"]] == sorted(zip(share["source"], share["target"], strict=True))
    rows = rows_moved(source, replicated, *sequences(inputs))
    assert rows[0] == sorted(zip(*expected["replicated"].values(), strict=True))


def test_a_wrong_vector_is_noticed():
    case = json.loads((FOLDER / "page_plan.json").read_text())["cases"][0]
    shifted = {**case["inputs"], "source_pages": case["inputs"]["source_pages"][::-1]}
    with pytest.raises(AssertionError):
        test_sglang_page_plan(shifted, case["expected"])


@cases_of("nixl_tp_mapping")
def test_vllm_tp_mapping(inputs, expected):
    for case in expected["ranks"]:
        ranks, offset = vllm_tp_mapping(
            case["decode_rank"],
            prefill_tp=inputs["prefill_tp"],
            decode_tp=inputs["decode_tp"],
            num_kv_heads=inputs["num_kv_heads"],
            is_mla=inputs["mla"],
        )
        assert (ranks, offset) == (case["source_ranks"], case["head_offset"])


def check_named_ranks(source, target, target_rank, named):
    """The named ranks hold all that the target rank wants, and nothing is named twice."""
    share = target.shares[target_rank]
    tokens = np.arange(4 * max(s.ranks * s.interleave for s in (*source.shares, share)))
    grid = np.ix_(range(source.layers), range(source.kv_heads), tokens)
    held = sum(np.asarray(source.holds(rank, *grid), int) for rank in named)
    is_wanted = np.asarray(target.holds(target_rank, *grid))
    assert len(set(named)) == len(named)
    assert (held[is_wanted] == 1).all(), "each wanted item is held by exactly one of them"
    assert all(np.any(source.holds(rank, *grid) & is_wanted) for rank in named), "none is idle"


TP_SIZES = [1, 2, 4, 8, 16]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_ranks_of_vllm_hold_the_heads(num_kv_heads):
    cache = {"layers": 1, "kv_heads": num_kv_heads, "page_size": 4}
    for prefill_tp, decode_tp in itertools.product(TP_SIZES, TP_SIZES):
        source = KVPlacement.tensor_parallel(prefill_tp, **cache)
        target = KVPlacement.tensor_parallel(decode_tp, **cache)
        for rank in range(decode_tp):
            named, offset = vllm_tp_mapping(
                rank,
                prefill_tp=prefill_tp,
                decode_tp=decode_tp,
                num_kv_heads=num_kv_heads,
                is_mla=num_kv_heads == 1,
            )
            check_named_ranks(source, target, rank, named)
            share = target.shares[rank]
            begin = source.shares[named[0]].head_start + offset * share.num_heads
            assert begin == share.head_start


@pytest.mark.parametrize(
    "target_dcp, expected",
    [
        (1, [[0, 1, 2, 3]] * 4),
        (2, [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (4, [[0], [1], [2], [3]]),
    ],
)
def test_vllm_dcp_source_ranks(target_dcp, expected):
    named = [
        vllm_dcp_source_ranks(rank, source_tp=4, source_dcp=4, target_dcp=target_dcp)
        for rank in range(4)
    ]
    assert named == expected


@pytest.mark.parametrize("source_dcp", [2, 4, 8])
@pytest.mark.parametrize("target_dcp", [1, 2, 4, 8])
def test_dcp_ranks_of_vllm_hold_the_pages(source_dcp, target_dcp):
    cache = {"layers": 1, "kv_heads": 1, "page_size": 4, "interleave": 4}
    source = KVPlacement.decode(source_dcp, source_dcp, **cache)
    target = KVPlacement.decode(target_dcp, target_dcp, **cache)
    for rank in range(target_dcp):
        named = vllm_dcp_source_ranks(
            rank, source_tp=source_dcp, source_dcp=source_dcp, target_dcp=target_dcp
        )
        check_named_ranks(source, target, rank, named)


def test_pages_are_paired_by_their_place_in_the_sequence():
    """DCP 4 to rank 0 of DCP 2; vLLM's own example."""
    pages = [10, 11, 12]
    target = {"target_ranks": 2, "target_rank": 0}
    first = pair_dcp_pages([20, 21], pages, source_ranks=4, source_rank=0, **target)
    other = pair_dcp_pages([220, 221], pages, source_ranks=4, source_rank=2, **target)
    assert [ids.tolist() for ids in first] == [[20, 21], [10, 12]]
    assert [ids.tolist() for ids in other] == [[220], [11]]


def test_thirteen_pages_of_four_ranks_are_not_paired_from_the_end():
    """DCP 4 to one rank, 13 pages: 4, 3, 3 and 3, and no list is shorter for a prefix hit."""
    lists = [list(range(100 * r, 100 * r + len(range(r, 13, 4)))) for r in range(4)]
    for rank, pages in enumerate(lists):
        source, target = pair_dcp_pages(
            pages, range(13), source_ranks=4, source_rank=rank, target_ranks=1, target_rank=0
        )
        assert source.tolist() == pages and target.tolist() == list(range(rank, 13, 4))


@pytest.mark.parametrize("source_ranks, target_ranks", [(4, 2), (2, 4), (3, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("num_pages, num_computed", [(13, 0), (13, 1), (12, 2), (0, 0), (1, 0)])
def test_paired_pages_are_those_of_the_plan(source_ranks, target_ranks, num_pages, num_computed):
    cache = {"layers": 1, "kv_heads": 1, "page_size": 2, "interleave": 2}
    source = KVPlacement.decode(source_ranks, source_ranks, **cache)
    target = KVPlacement.decode(target_ranks, target_ranks, **cache)
    ids = [np.arange(10, 30), np.arange(40, 60)]
    first = num_computed * target_ranks * 2
    rows = rows_moved(source, target, *ids, min(first, num_pages * 2), num_pages * 2)
    for rank in range(target_ranks):
        pairs = []
        for source_rank in range(source_ranks):
            held = len(range(source_rank, num_pages, source_ranks))
            wanted = len(range(rank, num_pages, target_ranks))
            paired = pair_dcp_pages(
                ids[0][:held],
                ids[1][num_computed:wanted],
                source_ranks=source_ranks,
                source_rank=source_rank,
                target_ranks=target_ranks,
                target_rank=rank,
                num_computed_pages=num_computed,
            )
            pairs += zip(*(side.tolist() for side in paired), strict=True)
        starts = [(s, t) for s, t in rows.get(rank, []) if s % 2 == 0]
        assert sorted(pairs) == sorted((s // 2, t // 2) for s, t in starts)


def test_filter_pages():
    """Page mod N names the owner, page div N is its id there."""
    assert [filter_pages(np.arange(6), rank, ranks=4).tolist() for rank in range(4)] == [
        [0, 1],
        [0, 1],
        [0],
        [0],
    ]


@pytest.mark.parametrize(
    "is_cp_layersplit, attn_cp_size, enabled, expected",
    [
        (True, 8, True, False),
        (True, 1, True, False),
        (False, 8, True, False),
        (False, 1, True, True),
        (False, 1, False, False),
        (True, 8, False, False),
    ],
)
def test_should_filter_cp_indices(is_cp_layersplit, attn_cp_size, enabled, expected):
    got = should_filter_cp_indices(
        is_cp_layersplit=is_cp_layersplit,
        attn_cp_size=attn_cp_size,
        enable_all_cp_ranks_for_transfer=enabled,
    )
    assert got is expected


def test_transfer_page_size():
    assert transfer_page_size(page_size=64, dcp_size=4, is_sharded=True) == 64
    assert transfer_page_size(page_size=64, dcp_size=4, is_sharded=False) == 256
    assert transfer_page_size(page_size=64, dcp_size=1, is_sharded=False) == 64


def neuron_shapes():
    """(prefill tp, dcp, decode tp, dcp, heads) of which each pair of numbers divides."""
    for prefill_tp, decode_tp in itertools.product([1, 2, 4, 8, 32], [1, 2, 4, 8, 16]):
        for prefill_dcp, decode_dcp in itertools.product([1, 2, 4], [1, 2, 4]):
            if prefill_tp % prefill_dcp == 0 and decode_tp % decode_dcp == 0:
                for heads in (1, 2, 8):
                    yield prefill_tp, prefill_dcp, decode_tp, decode_dcp, heads


@pytest.mark.parametrize("is_dcp_slowest", [True, False])
def test_ranks_of_neuron_hold_heads_and_tokens(is_dcp_slowest):
    build = KVPlacement.prefill_dcp if is_dcp_slowest else KVPlacement.decode
    for prefill_tp, prefill_dcp, decode_tp, decode_dcp, heads in neuron_shapes():
        cache = {"layers": 1, "kv_heads": heads, "page_size": 2, "interleave": 2}
        source = build(prefill_tp, prefill_dcp, **cache)
        target = KVPlacement.decode(decode_tp, decode_dcp, **cache)
        for rank in range(decode_tp):
            named = neuron_remote_ranks(
                rank,
                prefill_tp=prefill_tp,
                prefill_dcp=prefill_dcp,
                decode_tp=decode_tp,
                decode_dcp=decode_dcp,
                num_kv_heads=heads,
                is_dcp_slowest=is_dcp_slowest,
            )
            check_named_ranks(source, target, rank, named)


def test_a_wrong_rank_is_noticed():
    """The twin: the other order of ranks does not hold what is wanted."""
    cache = {"layers": 1, "kv_heads": 2, "page_size": 2, "interleave": 2}
    source = KVPlacement.prefill_dcp(4, 2, **cache)
    target = KVPlacement.decode(2, 1, **cache)
    shape = {"prefill_tp": 4, "prefill_dcp": 2, "decode_tp": 2, "decode_dcp": 1}
    check_named_ranks(source, target, 1, neuron_remote_ranks(1, num_kv_heads=2, **shape))
    named = neuron_remote_ranks(1, num_kv_heads=2, is_dcp_slowest=False, **shape)
    with pytest.raises(AssertionError):
        check_named_ranks(source, target, 1, named)


def printed_formula(prefill_tp, prefill_dcp, decode_tp, decode_dcp, num_kv_heads, rank):
    """Remote ranks as Neuron's documentation prints them, from an older connector."""
    heads = [
        np.subtract(*head_group(num_head_groups(tp, dcp), 1, num_kv_heads, 0)[::-1])
        for tp, dcp in ((prefill_tp, prefill_dcp), (decode_tp, decode_dcp))
    ]
    num_ranks = prefill_tp // decode_tp * max(1, heads[0] // heads[1])
    inverse = heads[1] // heads[0]
    if inverse > 1:
        p_dcp = num_ranks // inverse
        ranks = [
            rank * inverse + head + cp * (prefill_tp // p_dcp)
            for head in range(inverse)
            for cp in range(p_dcp)
        ]
    else:
        stride = prefill_tp // num_ranks
        ranks = [rank * stride // decode_tp + place * stride for place in range(num_ranks)]
    if decode_dcp > 1:
        ranks = [r for place, r in enumerate(ranks) if place % decode_dcp == rank % decode_dcp]
    return ranks


@pytest.mark.parametrize(
    "shape, rank, documented, printed",
    [
        ((4, 2, 2, 1, 8), 0, [0, 2], [0, 2]),
        ((4, 2, 2, 1, 8), 1, [1, 3], [1, 3]),
        ((32, 2, 16, 2, 8), 0, [0], [0]),
        ((32, 2, 16, 2, 8), 1, [16], [17]),
        ((32, 4, 16, 2, 8), 0, [0, 16], [0]),
        ((32, 4, 16, 2, 8), 1, [8, 24], [17]),
        # Of standard prefill only the kept blocks are documented; they come from a replica.
        ((16, 1, 16, 2, 8), 0, [0], [0]),
        ((16, 1, 16, 2, 8), 1, [0], []),
    ],
)
def test_the_printed_formula_contradicts_its_examples(shape, rank, documented, printed):
    names = ("prefill_tp", "prefill_dcp", "decode_tp", "decode_dcp", "num_kv_heads")
    assert neuron_remote_ranks(rank, **dict(zip(names, shape, strict=True))) == documented
    assert printed_formula(*shape, rank) == printed


@pytest.mark.parametrize(
    "decode_tp, action, sources",
    [
        (4, HeadAction.MATCH, [[0], [1], [2], [3]]),
        (8, HeadAction.SPLIT, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (2, HeadAction.MERGE, [[0, 1], [2, 3]]),
    ],
)
def test_head_actions(decode_tp, action, sources):
    shape = {"prefill_tp": 4, "prefill_dcp": 1, "decode_tp": decode_tp, "decode_dcp": 1}
    assert neuron_head_action(num_kv_heads=8, **shape) == action
    ranks = range(decode_tp)
    assert [neuron_remote_ranks(rank, num_kv_heads=8, **shape) for rank in ranks] == sources


@pytest.mark.parametrize(
    "changes, error, match",
    [
        ({"decode_dcp": 3, "decode_tp": 6}, PlanError, "prefill_dcp=4, decode_dcp=3"),
        ({"num_kv_heads": 3}, LayoutError, "kv_heads=3"),
        ({"prefill_dcp": 3}, LayoutError, "tp=8, dcp=3"),
        ({"rank": -1}, LayoutError, "rank=-1"),
        ({"rank": 8}, LayoutError, "group=4, groups=4"),
    ],
)
def test_shapes_that_do_not_divide_are_refused(changes, error, match):
    shape = {"prefill_tp": 8, "prefill_dcp": 4, "decode_tp": 8, "decode_dcp": 2}
    arguments = {"rank": 0, "num_kv_heads": 4, **shape, **changes}
    with pytest.raises(error, match=match):
        neuron_remote_ranks(**arguments)


def test_tensor_parallel_sizes_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="prefill_tp=3, decode_tp=2"):
        vllm_tp_mapping(0, prefill_tp=3, decode_tp=2, num_kv_heads=6, is_mla=False)
