"""Several cache parts of one sequence: each in its own placement, bound as one transfer."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.errors import PlanError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.bind import bind
from dcpjax.transfer.parts import PlacedPart, by_field, cuts_pages, join, plan_parts
from tests.transfer.simulated import FOREIGN, UNTOUCHED, SimulatedEngine, move

LAYERS, PAGE = 6, 4
INDEXED = (0, 2, 5)
LATENT, INDEXER, DRAFT = "latent", "indexer", "draft_latent"


def decode_parts(tp: int, dcp: int, interleave: int, *, has_whole_index: bool):
    """An engine with DCP: the draft layer, and perhaps the index, whole on every rank."""
    shape = {"kv_heads": 1, "page_size": PAGE, "interleave": interleave}
    whole = {"kv_heads": 1, "page_size": dcp * PAGE}
    latent = KVPlacement.decode(tp, dcp, layers=LAYERS, **shape)
    index = latent.select_layers(INDEXED)
    if has_whole_index:
        index = KVPlacement.tensor_parallel(tp, layers=len(INDEXED), **whole)
    draft = KVPlacement.tensor_parallel(tp, layers=1, **whole)
    return named(latent, index, draft)


def layer_split_parts(ranks: int):
    """Every rank has its own layers, all of them the draft layer."""
    model = KVPlacement.layer_split(ranks, layers=LAYERS, kv_heads=1, page_size=PAGE)
    draft = KVPlacement.pcp(ranks, layers=1, kv_heads=1, page_size=PAGE)
    return named(model, model.select_layers(INDEXED), draft)


def named(latent, index, draft):
    return [
        PlacedPart(LATENT, tuple(range(LAYERS)), latent),
        PlacedPart(INDEXER, INDEXED, index),
        PlacedPart(DRAFT, (LAYERS,), draft),
    ]


SIDES = {
    "one rank": layer_split_parts(1),
    "layer split": layer_split_parts(4),
    "more ranks than layers": layer_split_parts(8),
    "sharded": decode_parts(4, 2, 2, has_whole_index=False),
    "whole index": decode_parts(4, 4, PAGE, has_whole_index=True),
    "prefix of pages": decode_parts(2, 2, 1, has_whole_index=True),
}


def transferred(source, target, tokens, spoil=list):
    """Move all parts by one joined transfer.

    Returns the bytes of all target parts, what they should be, and the plans.
    """
    plans = plan_parts(source, target, num_tokens=tokens.stop, first_token=tokens.start)
    sources, targets = (engines_of(side, tokens.stop) for side in (source, target))
    for engine in sources.values():
        engine.fill(tokens.stop)
    expected = np.concatenate([engine.expected(tokens)[0] for engine in targets.values()])
    data = [side_by_side(engines.values()) for engines in (sources, targets)]
    bounds = [
        bind(plan, sources[name].memory, targets[name].memory) for name, plan in plans.items()
    ]
    move(join(spoil(bounds)), *data)
    return data[1].data, expected, plans


def engines_of(parts, num_tokens):
    rng = np.random.default_rng(num_tokens)
    return {part.name: SimulatedEngine.build(part.placement, num_tokens, rng) for part in parts}


def side_by_side(engines):
    """One memory with that of all parts, one behind the other; their regions move there."""
    engines, start = list(engines), 0
    for engine in engines:
        ranks = tuple(
            dataclasses.replace(rank, address=rank.address + start) for rank in engine.memory.ranks
        )
        engine.memory = dataclasses.replace(engine.memory, ranks=ranks)
        start += len(engine.data)
    return SimulatedEngine(engines[0].memory, np.concatenate([e.data for e in engines]))


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SIDES)),
    st.sampled_from(sorted(SIDES)),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_all_parts_arrive_and_nothing_else(source, target, first, length):
    tokens = range(min(first, length), length)
    got, expected, plans = transferred(SIDES[source], SIDES[target], tokens)
    np.testing.assert_array_equal(got, expected)
    assert list(plans) == [LATENT, INDEXER, DRAFT]


def test_a_missing_part_is_noticed():
    sides = SIDES["layer split"], SIDES["whole index"]
    got, expected, _ = transferred(*sides, range(9), spoil=lambda bounds: bounds[:-1])
    assert (got != expected).any()


def test_ranks_that_hold_everything_share_the_work():
    """Of the draft layer, and of a whole index, each source rank sends as much as the others."""
    _, _, plans = transferred(SIDES["whole index"], SIDES["sharded"], range(64))
    for name, layers in ((INDEXER, len(INDEXED)), (DRAFT, 1)):
        sent = plans[name].bytes_by_path(1).sum(axis=1)
        copies = 2 if name == INDEXER else 4  # ranks of the target that want a token
        assert sent.tolist() == [copies * layers * 64 // 4] * 4


def test_a_staged_transfer_is_not_joined():
    plan = plan_parts(SIDES["one rank"], SIDES["one rank"], num_tokens=4)[LATENT]
    engines = [engines_of(SIDES["one rank"], 4)[LATENT] for _ in range(2)]
    bound = bind(plan, engines[0].memory, engines[1].memory)
    with pytest.raises(PlanError, match="staged transfers stay alone .landings=1"):
        join([dataclasses.replace(bound, landings=(None,))])


# Pages whose tokens do not lie together


FIELDS = (8, 4)
"""Bytes of values and scales of a token; a page has the scales of all its tokens at its end."""


def whole_pages(dcp: int, interleave: int, page_size: int = PAGE, *, is_replicated=False):
    shape = {"layers": len(INDEXED), "kv_heads": 1}
    if is_replicated:
        placement = KVPlacement.tensor_parallel(dcp, **shape, page_size=dcp * page_size)
    else:
        shape["interleave"] = interleave
        placement = KVPlacement.decode(dcp, dcp, **shape, page_size=page_size)
    return PlacedPart(INDEXER, INDEXED, placement, FIELDS)


FITTING = [
    (whole_pages(1, PAGE), whole_pages(4, PAGE)),
    (whole_pages(2, PAGE), whole_pages(3, PAGE)),
    (whole_pages(2, 1), whole_pages(2, 1)),
    (whole_pages(4, 1, is_replicated=True), whole_pages(1, 1, 4 * PAGE)),
    (whole_pages(4, 1, is_replicated=True), whole_pages(2, 1, 2 * PAGE, is_replicated=True)),
]


@pytest.mark.parametrize(("source", "target"), FITTING)
@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE + 1, 50])
def test_whole_pages_move_as_they_are(source, target, length):
    """All bytes of every page that has a token; the pages that the tokens have are enough."""
    plan = plan_parts([source], [target], num_tokens=length)[INDEXER]
    engines = [engines_of([side], length)[INDEXER] for side in (source, target)]
    bound = bind(plan, engines[0].memory, engines[1].memory)
    page = source.placement.page_size
    page_bytes = page * engines[0].memory.ranks[0].token_bytes
    for path in bound.paths:
        for blocks in path.blocks:
            assert blocks.num_bytes % page_bytes == 0
            assert not (blocks.source_offsets % page_bytes).any()
            assert not (blocks.target_offsets % page_bytes).any()
    engines[0].fill(plan.num_tokens)
    move(bound, *engines)
    expected, _ = engines[1].expected(range(plan.num_tokens))
    np.testing.assert_array_equal(engines[1].data, expected)
    assert length <= plan.num_tokens < length + page * source.placement.shares[0].ranks


def test_whole_pages_behind_a_prefix():
    source, target = whole_pages(1, PAGE), whole_pages(4, PAGE)
    plan = plan_parts([source], [target], num_tokens=17, first_token=16)[INDEXER]
    assert (plan.first_token, plan.num_tokens) == (16, 20)
    with pytest.raises(PlanError, match="begins with a page .part='indexer', first_token=17"):
        plan_parts([source], [target], num_tokens=18, first_token=17)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (whole_pages(1, PAGE), whole_pages(1, 1, 2 * PAGE)),
        (whole_pages(2, 2), whole_pages(1, PAGE)),
        (whole_pages(2, 1), whole_pages(4, 1)),
        (whole_pages(2, PAGE), whole_pages(2, 1, is_replicated=True)),
    ],
)
@pytest.mark.parametrize(
    "tokens", [range(0), range(1), range(3, 8), range(2 * PAGE + 1), range(50)]
)
def test_what_would_cut_a_page_moves_field_by_field(source, target, tokens):
    for one, other in ((source, target), (target, source)):
        assert cuts_pages(one.placement, other.placement)
        plan = plan_parts([one], [other], num_tokens=tokens.stop, first_token=tokens.start)[INDEXER]
        assert (plan.first_token, plan.num_tokens) == (tokens.start, tokens.stop)
        rng = np.random.default_rng(tokens.stop)
        sides = [
            SimulatedEngine.build(part.placement, tokens.stop, rng, items_per_token=3)
            for part in (one, other)
        ]
        pairs = list(by_field(FIELDS, *(side.memory for side in sides)))
        sides[0].data.fill(FOREIGN)
        expected = sides[1].data
        for from_memory, to_memory in pairs:
            sides[0].data, _ = SimulatedEngine(from_memory, sides[0].data).expected(
                range(tokens.stop)
            )
            expected, _ = SimulatedEngine(to_memory, expected).expected(tokens)
        move(join([bind(plan, *memories) for memories in pairs]), *sides)
        np.testing.assert_array_equal(sides[1].data, expected)
        assert len(pairs) == 2 and (not tokens or (expected != UNTOUCHED).any())


def test_the_fields_of_a_part_are_the_same_on_both_sides():
    rows = dataclasses.replace(whole_pages(1, PAGE), field_bytes=())
    with pytest.raises(PlanError, match=r"same field_bytes.*source=\(8, 4\), target=\(\)"):
        plan_parts([whole_pages(1, PAGE)], [rows], num_tokens=8)
