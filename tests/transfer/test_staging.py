"""Staged transfers: few pieces, the same bytes after landing, chosen only where they are faster."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.errors import PlanError, TransferError
from dcpjax.layout import KVPlacement, KVShare
from dcpjax.transfer.bind import bind
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import plan_transfer
from dcpjax.transfer.staging import (
    PIECE_COST_BYTES,
    StagingMemory,
    is_staging_faster,
    num_staging_pages,
    stage,
)
from tests.transfer.simulated import (
    SimulatedEngine,
    SimulatedStaging,
    move,
    move_blocks,
    placement_pairs,
    token_ranges,
)


def staged(source, target, tokens, seed=0, mover=move, spoil=None, **options):
    """The bytes of the target after a staged transfer, and what they should be."""
    rng = np.random.default_rng(seed)
    engines = [SimulatedEngine.build(p, tokens.stop, rng, **options) for p in (source, target)]
    engines[0].fill(tokens.stop)
    plan = plan_transfer(source, target, num_tokens=tokens.stop, first_token=tokens.start)
    staging = SimulatedStaging.build(plan, rng, **options)
    expected, _ = engines[1].expected(tokens)
    bound = stage(plan, engines[0].memory, engines[1].memory, staging.memory)
    mover(bound, engines[0], staging)
    staging.land(spoil(bound) if spoil else bound, engines[1])
    return engines[1].data, expected


def check_random_staging(data):
    source, target = data.draw(placement_pairs())
    got, expected = staged(
        source,
        target,
        data.draw(token_ranges(source, target)),
        seed=data.draw(st.integers(0, 2**16)),
        mover=data.draw(st.sampled_from([move, move_blocks])),
        with_gaps=data.draw(st.booleans()),
        items_per_token=data.draw(st.integers(1, 2)),
    )
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=150)
@given(st.data())
def test_any_source_to_any_target(data):
    check_random_staging(data)


@pytest.mark.matrix
@settings(max_examples=3000)
@given(st.data())
def test_any_source_to_any_target_thousands(data):
    check_random_staging(data)


def split(dcp, interleave, page_size=4):
    return KVPlacement.decode(
        dcp, dcp, layers=2, kv_heads=1, page_size=page_size, interleave=interleave
    )


@pytest.mark.parametrize("column", ["staging_pages", "staging_offsets", "target_pages"])
def test_a_wrong_row_is_noticed(column):
    """The twin of the tests above."""

    def spoil(bound):
        first, *others = bound.landings
        rows = dataclasses.replace(first, **{column: np.roll(getattr(first, column), 1)})
        return dataclasses.replace(bound, landings=(rows, *others))

    for chosen, is_right in ((None, True), (spoil, False)):
        got, expected = staged(split(2, 1), split(1, 4), range(30), spoil=chosen)
        assert np.array_equal(got, expected) == is_right


def glm(dcp, interleave):
    return KVPlacement.decode(dcp, dcp, layers=78, kv_heads=1, page_size=64, interleave=interleave)


def dense_memory(placement, num_pages, page_size=None, token_bytes=576):
    """A dense region per rank; the addresses are never read."""
    return tuple(
        RankMemory.dense(
            1 << 40,
            num_pages=num_pages,
            num_layers=share.num_layers,
            num_heads=share.num_heads,
            page_size=page_size or placement.page_size,
            token_bytes=token_bytes,
        )
        for share in placement.shares
    )


def sequence(placement, num_tokens, **options):
    num_pages = -(-num_tokens // (placement.shares[0].ranks * placement.page_size))
    return SequenceMemory(
        placement, dense_memory(placement, num_pages, **options), range(num_pages)
    )


def staging_memory(plan, num_pages=None):
    num_pages = num_staging_pages(plan) if num_pages is None else num_pages
    ranks = dense_memory(plan.target, num_pages, plan.source.page_size)
    return StagingMemory(ranks, range(num_pages))


def test_a_million_tokens_are_thousands_of_pieces():
    num_tokens = 1 << 20
    source, target = glm(8, 1), glm(1, 64)
    plan = plan_transfer(source, target, num_tokens=num_tokens)
    sides = sequence(source, num_tokens), sequence(target, num_tokens)
    bound = bind(plan, *sides, staging=staging_memory(plan))
    assert bound.num_blocks == num_tokens // 64
    assert bound.num_bytes == plan.bytes_by_path(576).sum(), "each page is wanted whole"
    assert len(bound.landings[0].target_pages) == num_tokens
    assert bind(plan, *sides).num_blocks == num_tokens * 78, "what it would be without staging"


@pytest.mark.parametrize(
    "source, target, is_staged",
    [
        (glm(8, 1), glm(1, 64), True),
        (glm(8, 1), glm(8, 64), True),  # each page to eight ranks: 36,864 · 8 bytes of 64 pieces
        (glm(1, 64), glm(8, 1), True),
        (glm(8, 16), glm(1, 64), True),
        (glm(8, 64), glm(8, 16), False),  # each page to four ranks, in pieces of 9,216 bytes
        (glm(8, 1), glm(8, 1), False),  # whole pages, whatever the interleave
        (glm(8, 64), glm(4, 64), False),
        (KVPlacement.layer_split(8, layers=78, kv_heads=1, page_size=64), glm(8, 64), False),
    ],
)
def test_what_is_staged(source, target, is_staged):
    num_tokens = 5000
    plan = plan_transfer(source, target, num_tokens=num_tokens)
    assert is_staging_faster(plan, token_bytes=576) == is_staged
    sides = sequence(source, num_tokens), sequence(target, num_tokens)
    bound = bind(plan, *sides, staging=staging_memory(plan))
    assert bool(bound.landings) == is_staged
    assert not bind(plan, *sides).landings, "never without staging memory"
    assert not bind(plan, *sides, staging=staging_memory(plan), piece_cost_bytes=0).landings


def test_the_choice_turns_where_bytes_and_pieces_cost_the_same():
    """DCP 2 to one rank: a source page of 4 tokens takes the place of 4 pieces."""
    plan = plan_transfer(split(2, 1), split(1, 4), num_tokens=24)
    assert is_staging_faster(plan, token_bytes=100, piece_cost_bytes=101)
    assert not is_staging_faster(plan, token_bytes=100, piece_cost_bytes=100)


def test_a_short_prompt_is_no_reason_to_stage():
    plan = plan_transfer(glm(2, 64), glm(2, 64), num_tokens=3)
    assert not is_staging_faster(plan, token_bytes=1, piece_cost_bytes=PIECE_COST_BYTES)


def test_ranks_of_other_layers_fill_the_same_staging_pages():
    """A layer split by two under two token ranks, as no constructor has it."""
    shares = tuple(
        KVShare(layer, layer + 1, 0, 1, 2, residue, 1) for layer in (0, 1) for residue in (0, 1)
    )
    got, expected = staged(KVPlacement(2, 1, 4, shares), split(1, 4), range(3, 30))
    np.testing.assert_array_equal(got, expected)


def test_tokens_dealt_in_two_ways_cannot_be_staged():
    shares = (KVShare(0, 1, 0, 1, 1, 0, 4), *(KVShare(1, 2, 0, 1, 2, r, 2) for r in (0, 1)))
    plan = plan_transfer(KVPlacement(2, 1, 4, shares), split(1, 4), num_tokens=9)
    with pytest.raises(PlanError, match="deals its tokens in one way"):
        num_staging_pages(plan)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda s: dataclasses.replace(s, page_ids=s.page_ids[1:]), "page_ids=7, needed=8"),
        (lambda s: dataclasses.replace(s, page_ids=[*s.page_ids[1:], 8]), "page_id=8, num_pages=8"),
        (lambda s: dataclasses.replace(s, page_ids=[0, *s.page_ids[:-1]]), "distinct"),
        (lambda s: dataclasses.replace(s, ranks=()), "regions=0, ranks=1"),
        (
            lambda s: dataclasses.replace(
                s, ranks=tuple(dataclasses.replace(r, head_stride=15 * 100) for r in s.ranks)
            ),
            "head_stride=1500, least=",
        ),
    ],
)
def test_staging_memory_that_cannot_be_right_is_refused(change, match):
    source, target = split(2, 1), split(1, 4)
    plan = plan_transfer(source, target, num_tokens=32)
    sides = sequence(source, 32), sequence(target, 32)
    staging = staging_memory(plan)
    assert bind(plan, *sides, staging=staging).landings
    with pytest.raises(TransferError, match=match):
        bind(plan, *sides, staging=change(staging))
