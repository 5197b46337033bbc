"""Plans cover what is wanted exactly once, in balance and in order, and do not grow with tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.errors import LayoutError, PlanError
from dcpjax.layout import KVPlacement, KVShare
from dcpjax.transfer.parts import PlacedPart, plan_parts
from dcpjax.transfer.plan import plan_transfer
from tests.transfer.simulated import placement_pairs, token_ranges

CACHE = {"layers": 4, "kv_heads": 2, "page_size": 4}
TP_1 = KVPlacement.tensor_parallel(1, **CACHE)
MLA = {"layers": 4, "kv_heads": 1, "page_size": 4}


def planned(source, target, tokens):
    return plan_transfer(source, target, num_tokens=tokens.stop, first_token=tokens.start)


def counts(plan, pieces):
    """[target ranks, layers, heads, tokens]: how often each is on its way.

    Every piece is held by its source; two pieces of a path never touch.
    """
    table = np.zeros(
        (plan.target.num_ranks, plan.source.layers, plan.source.kv_heads, plan.num_tokens), int
    )
    for piece in pieces:
        heads = np.arange(piece.head_start, piece.head_stop)[:, None]
        tokens = np.arange(piece.token_start, piece.token_stop)
        assert plan.source.holds(piece.source_rank, piece.layer, heads, tokens).all()
        table[piece.target_rank, piece.layer, heads, tokens] += 1
    return table


def wanted(target, tokens):
    grid = np.ix_(range(target.layers), range(target.kv_heads), range(tokens.stop))
    held = np.stack([target.holds(rank, *grid) for rank in range(target.num_ranks)]).astype(int)
    held[..., : tokens.start] = 0
    return held


@settings(max_examples=150)
@given(st.data())
def test_pieces_cover_what_is_wanted_once(data):
    source, target = data.draw(placement_pairs())
    tokens = data.draw(token_ranges(source, target))
    plan = planned(source, target, tokens)
    pieces = list(plan.pieces())
    np.testing.assert_array_equal(counts(plan, pieces), wanted(target, tokens))
    by_path = np.zeros((source.num_ranks, target.num_ranks), int)
    for piece in pieces:
        size = (piece.head_stop - piece.head_start) * (piece.token_stop - piece.token_start)
        by_path[piece.source_rank, piece.target_rank] += 3 * size
    np.testing.assert_array_equal(plan.bytes_by_path(3), by_path)


def test_a_missing_piece_is_noticed():
    """The twin of the test above."""
    plan = planned(TP_1, KVPlacement.decode(4, 2, interleave=2, **CACHE), range(3, 30))
    pieces = list(plan.pieces())
    np.testing.assert_array_equal(counts(plan, pieces), wanted(plan.target, range(3, 30)))
    for fault in (pieces[1:], [*pieces, pieces[0]]):
        assert (counts(plan, fault) != wanted(plan.target, range(3, 30))).any()


@settings(max_examples=50)
@given(st.data())
def test_intervals_are_as_long_as_possible_and_in_order(data):
    source, target = data.draw(placement_pairs())
    pieces = list(planned(source, target, data.draw(token_ranges(source, target))).pieces())
    keys = [(p.source_rank, p.target_rank, p.layer, p.token_start) for p in pieces]
    assert keys == sorted(keys)
    for before, after in zip(pieces, pieces[1:], strict=False):
        if (before.target_rank, before.layer) == (after.target_rank, after.layer):
            assert before.token_stop < after.token_start or before.source_rank < after.source_rank


@settings(max_examples=50)
@given(st.data())
def test_chunks_of_a_sequence_are_the_sequence(data):
    """A send that is pipelined by tokens moves the bytes of one that is not, piece for piece."""
    source, target = data.draw(placement_pairs())
    tokens = data.draw(token_ranges(source, target))
    cut = data.draw(st.integers(tokens.start, tokens.stop))
    parts = [planned(source, target, range(tokens.start, cut))]
    parts += [planned(source, target, range(cut, tokens.stop))]
    total = sum(plan.bytes_by_path(1).sum(axis=0) for plan in parts)
    np.testing.assert_array_equal(total, planned(source, target, tokens).bytes_by_path(1).sum(0))


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_equal_shares_are_runs_of_whole_pages(interleave):
    """Local indices run on where positions do not."""
    placement = KVPlacement.decode(3, 3, interleave=interleave, **CACHE)
    plan = planned(placement, placement, range(12 * 1000))
    assert plan.num_runs == 3
    assert all(path.runs.length.tolist() == [4] for path in plan.paths)


def test_the_size_of_a_plan_does_not_depend_on_the_tokens():
    source = KVPlacement.decode(3, 3, interleave=1, **MLA)
    target = KVPlacement.decode(2, 2, interleave=4, **MLA)
    sizes = [planned(source, target, range(5, n)).num_runs for n in (10**3, 10**6, 10**9)]
    assert sizes[0] == sizes[1] == sizes[2], "the same place in a period of 24 tokens"
    any_end = [planned(source, target, range(5, 10**6 + n)).num_runs for n in range(24)]
    assert max(any_end) <= 3 * 24


def by_path(source, target, num_tokens):
    return plan_transfer(source, target, num_tokens=num_tokens).bytes_by_path(1).tolist()


def test_replicas_serve_one_target_each():
    """8 ranks hold 2 heads in 4 copies each, on both sides: rank i serves rank i."""
    placement = KVPlacement.tensor_parallel(8, **CACHE)
    assert by_path(placement, placement, 100) == (np.eye(8, dtype=int) * 4 * 100).tolist()


def test_replicas_share_the_tokens_of_one_target():
    replicas, one = KVPlacement.pcp(3, **MLA), KVPlacement.tensor_parallel(1, **MLA)
    plan = plan_transfer(replicas, one, num_tokens=34)
    # Cuts at 11.3 and 22.7 tokens, moved back to the boundaries of pages.
    intervals = [(p.token_start, p.token_stop) for p in plan.pieces() if p.layer == 0]
    assert intervals == [(0, 8), (8, 20), (20, 34)]


def test_replicas_are_cut_between_virtual_pages_where_tokens_go_round_robin():
    replicas = KVPlacement.pcp(2, **MLA)
    target = KVPlacement.decode(3, 3, interleave=1, **MLA)
    plan = plan_transfer(replicas, target, num_tokens=60)
    pieces = [p for p in plan.pieces() if p.layer == 0 and p.target_rank == 1]
    assert {p.token_start // 24 for p in pieces if p.source_rank == 0} == {0}
    assert {p.token_start // 24 for p in pieces if p.source_rank == 1} == {1, 2}


@pytest.mark.parametrize("num_replicas, num_targets", [(2, 3), (3, 2), (4, 4), (5, 3), (1, 4)])
def test_replicas_are_in_balance(num_replicas, num_targets):
    """Within two pages per cut, of a target's tokens."""
    source = KVPlacement.pcp(num_replicas, **MLA)
    target = KVPlacement.pcp(num_targets, **MLA)
    sent = np.sum(by_path(source, target, 1000), axis=1)
    assert sent.sum() == num_targets * 4 * 1000
    assert np.ptp(sent) <= 2 * 2 * 4 * MLA["layers"]


def test_order_is_by_source_then_target():
    plan = plan_transfer(
        KVPlacement.layer_split(3, **MLA),
        KVPlacement.decode(4, 4, interleave=4, **MLA),
        num_tokens=100,
    )
    ranks = [(path.source_rank, path.target_rank) for path in plan.paths]
    assert ranks == [(s, t) for s in range(3) for t in range(4)]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5])
def test_short_sequences_leave_paths_out(num_tokens):
    target = KVPlacement.decode(4, 4, interleave=4, **MLA)
    plan = plan_transfer(KVPlacement.tensor_parallel(1, **MLA), target, num_tokens=num_tokens)
    reached = [path.target_rank for path in plan.paths]
    assert reached == [r for r in range(4) if target.shares[r].num_tokens(num_tokens)]


@settings(max_examples=50)
@given(st.data())
def test_layers_one_after_the_other_are_the_sequence(data):
    source, target = data.draw(placement_pairs())
    plan = planned(source, target, data.draw(token_ranges(source, target)))
    cut = data.draw(st.integers(0, source.layers))
    chunks = [plan.of_layers(0, cut), plan.of_layers(cut, source.layers)]
    pieces = [set(chunk.pieces()) for chunk in chunks]
    assert pieces[0] | pieces[1] == set(plan.pieces())
    assert all(piece.layer < cut for piece in pieces[0])
    assert all(piece.layer >= cut for piece in pieces[1])


@pytest.mark.parametrize("start, stop", [(-1, 2), (3, 2), (0, 5)])
def test_a_layer_range_is_one(start, stop):
    with pytest.raises(PlanError, match=f"start={start}, stop={stop}, layers=4"):
        plan_transfer(TP_1, TP_1, num_tokens=1).of_layers(start, stop)


@pytest.mark.parametrize("first, stop", [(-1, 4), (5, 4), (0, -1), (0, 2**31), (0, 10**30)])
def test_a_token_range_is_one(first, stop):
    with pytest.raises(PlanError, match=f"first_token={first}, num_tokens={stop}"):
        plan_transfer(TP_1, TP_1, num_tokens=stop, first_token=first)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"layers": 5}, "same layers .source=4, target=5"),
        ({"kv_heads": 1}, "same kv_heads .source=2, target=1"),
        ({"page_size": 6}, "page sizes.*source=4, target=6"),
    ],
)
def test_placements_of_different_caches_are_refused(changes, match):
    other = KVPlacement.tensor_parallel(1, **{**CACHE, **changes})
    with pytest.raises(PlanError, match=match):
        plan_transfer(TP_1, other, num_tokens=1)


@pytest.mark.parametrize(
    "shares, match",
    [
        # (layers, heads, token ranks, residue, interleave)
        ([KVShare(0, 4, 0, 1, 1, 0, 4)], "layer=0, head=1, token=0"),
        ([KVShare(0, 3, 0, 2, 1, 0, 4)], "layer=3, head=0, token=0"),
        ([KVShare(0, 4, 0, 2, 2, 0, 4)], "layer=0, head=0, token=4"),
        ([KVShare(0, 4, 0, 2, 3, r, 2) for r in (0, 2)], "layer=0, head=0, token=2"),
    ],
)
def test_what_no_source_holds_is_named(shares, match):
    with pytest.raises(PlanError, match=f"target_rank=0, {match}"):
        plan_transfer(KVPlacement(4, 2, 4, tuple(shares)), TP_1, num_tokens=100)


@pytest.mark.parametrize(
    "second",
    [
        KVShare(3, 4, 0, 2, 1, 0, 4),
        KVShare(0, 4, 1, 2, 1, 0, 4),
        KVShare(0, 4, 0, 2, 5, 3, 2),
    ],
)
def test_what_is_held_in_two_ways_is_refused(second):
    source = KVPlacement(4, 2, 4, (KVShare(0, 4, 0, 2, 1, 0, 4), second))
    with pytest.raises(PlanError, match="equal shares or disjoint ones"):
        plan_transfer(source, TP_1, num_tokens=0)


def test_a_target_may_want_less_than_there_is():
    """A rank that takes one head of two layers from a source that holds all."""
    target = KVPlacement(4, 2, 4, (KVShare(1, 3, 1, 2, 1, 0, 4),))
    assert by_path(TP_1, target, 9) == [[2 * 1 * 9]]


LAYERS = KVPlacement.layer_split(3, layers=8, kv_heads=1, page_size=4)  # [0, 3) [3, 6) [6, 8)
DECODE = KVPlacement.decode(2, 2, layers=8, kv_heads=1, page_size=4, interleave=4)


def parts_of(placement, draft):
    return [
        PlacedPart("latent", tuple(range(8)), placement),
        PlacedPart.of_layers("index", (0, 2, 7), placement),
        PlacedPart("draft", (8,), draft),
    ]


DRAFTS = [KVPlacement.pcp(n, layers=1, kv_heads=1, page_size=4) for n in (3, 2)]


def test_each_part_moves_the_layers_that_have_it():
    plans = plan_parts(
        parts_of(LAYERS, DRAFTS[0]), parts_of(DECODE, DRAFTS[1]), num_tokens=8, first_token=0
    )
    assert {name: plan.bytes_by_path(1).tolist() for name, plan in plans.items()} == {
        "latent": [[12, 12], [12, 12], [8, 8]],
        "index": [[8, 8], [0, 0], [4, 4]],
        "draft": [[4, 0], [4, 0], [0, 8]],
    }
    assert list(plans) == ["latent", "index", "draft"]


def test_parts_that_the_target_lacks_stay():
    plans = plan_parts(
        parts_of(LAYERS, DRAFTS[0]), parts_of(DECODE, DRAFTS[1])[1::-1], num_tokens=8
    )
    assert list(plans) == ["index", "latent"]


@pytest.mark.parametrize(
    "source, target, match",
    [
        (
            slice(2),
            slice(3),
            r"source=\['index', 'latent'\], target=\['draft', 'index', 'latent'\]",
        ),
        (slice(0), slice(1), r"source=\[\], target=\['latent'\]"),
    ],
)
def test_parts_that_the_source_lacks_are_refused(source, target, match):
    sides = parts_of(LAYERS, DRAFTS[0])[source], parts_of(DECODE, DRAFTS[1])[target]
    with pytest.raises(PlanError, match=match):
        plan_parts(*sides, num_tokens=8)


def test_parts_of_different_layers_are_refused():
    source = [PlacedPart.of_layers("index", (0, 2, 7), LAYERS)]
    target = [PlacedPart.of_layers("index", (0, 3, 7), DECODE)]
    with pytest.raises(PlanError, match=r"source=\(0, 2, 7\), target=\(0, 3, 7\)"):
        plan_parts(source, target, num_tokens=8)


def test_a_part_has_one_name_and_a_layer_for_each_of_its_placement():
    part = PlacedPart("latent", tuple(range(8)), LAYERS)
    with pytest.raises(PlanError, match="distinct names"):
        plan_parts([part, part], [part], num_tokens=8)
    with pytest.raises(PlanError, match="layers=3, placement=8"):
        PlacedPart("latent", (0, 1, 2), LAYERS)
    with pytest.raises(LayoutError, match="layer=8"):
        PlacedPart.of_layers("index", (0, 8), LAYERS)


@pytest.mark.parametrize("wrong", [{"num_tokens": 1.5}, {"num_tokens": 9, "first_token": "1"}])
def test_tokens_are_counted(wrong):
    placement = KVPlacement.tensor_parallel(1, layers=1, kv_heads=1, page_size=4)
    with pytest.raises(PlanError, match="tokens are counted"):
        plan_transfer(placement, placement, **wrong)
