"""Bound plans move the right bytes, all of them, once, and nothing else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.errors import PlanError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.bind import bind
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import plan_transfer
from tests.transfer.simulated import (
    SimulatedEngine,
    move,
    move_blocks,
    placement_pairs,
    token_ranges,
)


def make_engines(source, target, tokens, rng, **options):
    engines = [
        SimulatedEngine.build(placement, tokens.stop, rng, **options)
        for placement in (source, target)
    ]
    engines[0].fill(tokens.stop)
    return engines


def transferred(source, target, tokens, seed=0, mover=move, spoil=None, **options):
    """The bytes of the target after a transfer, what they should be, and the bound transfer."""
    engines = make_engines(source, target, tokens, np.random.default_rng(seed), **options)
    plan = plan_transfer(source, target, num_tokens=tokens.stop, first_token=tokens.start)
    bound = bind(plan, engines[0].memory, engines[1].memory)
    expected, num_bytes = engines[1].expected(tokens)
    # All that is wanted arrives, and not more bytes than that move: each item moves once.
    assert bound.num_bytes == num_bytes == plan.bytes_by_path(bound_item(engines)).sum()
    mover(spoil(bound) if spoil else bound, *engines)
    return engines[1].data, expected, bound


def bound_item(engines):
    return engines[0].memory.ranks[0].token_bytes


def check_random_transfer(data):
    source, target = data.draw(placement_pairs())
    tokens = data.draw(token_ranges(source, target))
    got, expected, _ = transferred(
        source,
        target,
        tokens,
        seed=data.draw(st.integers(0, 2**16)),
        mover=data.draw(st.sampled_from([move, move_blocks])),
        with_gaps=data.draw(st.booleans()),
        items_per_token=data.draw(st.integers(1, 2)),
    )
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=300)
@given(st.data())
def test_any_source_to_any_target(data):
    check_random_transfer(data)


@pytest.mark.matrix
@settings(max_examples=6000)
@given(st.data())
def test_any_source_to_any_target_thousands(data):
    check_random_transfer(data)


TP_1 = KVPlacement.tensor_parallel(1, layers=3, kv_heads=2, page_size=4)
TP_2 = KVPlacement.tensor_parallel(2, layers=3, kv_heads=2, page_size=4)
DCP_2 = KVPlacement.decode(2, 2, layers=3, kv_heads=2, page_size=4, interleave=4)
LAYERS_3 = KVPlacement.layer_split(3, layers=3, kv_heads=2, page_size=4)


def spoiled_path(bound, **changes):
    """The transfer with other values in the first blocks of its first path."""
    path, *others = bound.paths
    blocks, *rest = path.blocks
    path = dataclasses.replace(path, blocks=(dataclasses.replace(blocks, **changes), *rest))
    return dataclasses.replace(bound, paths=(path, *others))


def first_blocks(bound):
    return bound.paths[0].blocks[0]


SPOILS = {
    "a path is missing": lambda b: dataclasses.replace(b, paths=b.paths[1:]),
    "paths are swapped": lambda b: dataclasses.replace(
        b, paths=(dataclasses.replace(b.paths[0], target_rank=b.paths[1].target_rank), b.paths[1])
    ),
    "the wrong page": lambda b: spoiled_path(b, target_pages=first_blocks(b).target_pages[::-1]),
    "the wrong offset": lambda b: spoiled_path(
        b, target_offsets=first_blocks(b).target_offsets + 4
    ),
    "too few bytes": lambda b: spoiled_path(b, num_bytes=first_blocks(b).num_bytes - 1),
    "too many bytes": lambda b: spoiled_path(b, num_bytes=first_blocks(b).num_bytes + 1),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
@pytest.mark.parametrize("mover", [move, move_blocks])
def test_a_wrong_address_is_noticed(spoil, mover):
    """The twin of the tests above: each fault is seen, and without it there is none to see."""
    for chosen, is_right in ((None, True), (spoil, False)):
        got, expected, _ = transferred(
            TP_1, DCP_2, range(30), mover=mover, spoil=chosen, with_gaps=True
        )
        assert np.array_equal(got, expected) == is_right


def bound_of(source, target, num_tokens, first_token=0, page_ids=None, **options):
    engines = make_engines(
        source, target, range(first_token, num_tokens), np.random.default_rng(0), **options
    )
    if page_ids is not None:
        for engine, ids in zip(engines, page_ids, strict=True):
            engine.memory = dataclasses.replace(engine.memory, page_ids=ids)
    plan = plan_transfer(source, target, num_tokens=num_tokens, first_token=first_token)
    return bind(plan, engines[0].memory, engines[1].memory)


def block_sizes(bound):
    return {b.num_bytes for path in bound.paths for b in path.blocks}


def test_equal_pages_are_one_block_each():
    bound = bound_of(TP_1, TP_1, 40)
    assert bound.num_blocks == 10
    assert block_sizes(bound) == {3 * 2 * 4 * 4}


def test_a_layer_split_meets_a_page_of_all_layers_in_one_block():
    bound = bound_of(LAYERS_3, TP_1, 40)
    assert [path.num_blocks for path in bound.paths] == [10, 10, 10]
    assert block_sizes(bound) == {2 * 4 * 4}


def test_a_share_of_heads_is_a_block_per_page_and_layer():
    bound = bound_of(TP_1, TP_2, 40)
    assert [path.num_blocks for path in bound.paths] == [10 * 3, 10 * 3]
    assert block_sizes(bound) == {4 * 4}


def test_a_part_of_a_page_is_a_block_per_layer_and_head():
    bound = bound_of(TP_1, TP_1, 7, first_token=5)
    assert bound.num_blocks == 3 * 2
    assert block_sizes(bound) == {2 * 4}


def test_gaps_end_a_block():
    bound = bound_of(TP_1, TP_1, 40, with_gaps=True)
    assert bound.num_blocks == 10 * 3 * 2


def test_blocks_of_a_group_ascend_by_source_page():
    bound = bound_of(TP_1, DCP_2, 40)
    for path in bound.paths:
        assert (np.diff(path.blocks[0].source_pages) > 0).all()
        assert path.blocks[0].source_pages.dtype == path.blocks[0].target_pages.dtype == np.int32


@pytest.mark.parametrize(
    "source_ids, target_ids, num_merged",
    [
        ([0, 1, 2, 3], [5, 6, 7, 8], 1),
        ([0, 1, 2, 3], [8, 7, 6, 5], 4),
        ([3, 2, 1, 0], [8, 7, 6, 5], 1),
        ([0, 1, 3, 4], [5, 6, 7, 8], 2),
        ([0, 2, 4, 6], [0, 2, 4, 6], 4),
    ],
)
def test_runs_of_pages_merge_where_both_sides_ascend(source_ids, target_ids, num_merged):
    source = KVPlacement.tensor_parallel(1, layers=1, kv_heads=1, page_size=4)
    memory = [
        SequenceMemory(source, (dense_region(source, num_pages=9),), ids)
        for ids in (source_ids, target_ids)
    ]
    bound = bind(plan_transfer(source, source, num_tokens=16), *memory)
    at_source, at_target, num_bytes = bound.addresses(bound.paths[0])
    assert len(at_source) == len(at_target) == num_merged
    assert num_bytes.sum() == bound.num_bytes == 16 * 4
    assert (np.diff(at_source) > 0).all()


def dense_region(placement, num_pages=9, address=4096, token_bytes=4):
    return RankMemory.dense(
        address,
        num_pages=num_pages,
        num_layers=placement.layers,
        num_heads=placement.kv_heads,
        page_size=placement.page_size,
        token_bytes=token_bytes,
    )


def sequence(placement=TP_1, page_ids=(4, 2, 0), **changes):
    region = dataclasses.replace(dense_region(placement), **changes)
    return SequenceMemory(placement, (region,) * placement.num_ranks, page_ids)


def test_nothing_to_move_needs_neither_pages_nor_memory():
    empty = sequence(page_ids=(), address=0)
    bound = bind(plan_transfer(TP_1, TP_1, num_tokens=9, first_token=9), empty, empty)
    assert (bound.paths, bound.num_bytes, bound.num_blocks) == ((), 0, 0)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    "change, match",
    [
        ({"page_ids": (4, 2)}, "page_ids=2, needed=3"),
        ({"page_ids": (4, 2, 9)}, "page_id=9, num_pages=9"),
        ({"page_ids": (4, 2, -1)}, "page_id=-1, num_pages=9"),
        ({"page_ids": (4, 2, 2**40)}, f"page_id={2**40}, num_pages=9"),
        ({"page_ids": (4, 2, 4)}, "distinct.*page_id=4"),
        ({"page_ids": (4, 2, 0.0)}, "integers.*float64"),
        ({"page_ids": ((4, 2, 0),)}, r"one row.*\(1, 3\)"),
        ({"address": 0}, "has memory.*address=0"),
        ({"token_bytes": 0}, "token_bytes=0, least=1"),
        ({"head_stride": 15}, "head_stride=15, least=16"),
        ({"layer_stride": 31}, "layer_stride=31, least=32"),
        ({"page_stride": 95}, "page_stride=95, least=96"),
        ({"token_bytes": 2}, "same bytes.*(source=2, target=4|source=4, target=2)"),
    ],
)
def test_memory_that_cannot_be_right_is_refused(side, change, match):
    sides = {"source": sequence(), "target": sequence(), side: sequence(**change)}
    plan = plan_transfer(TP_1, TP_1, num_tokens=9)
    bind(plan, sequence(), sequence())
    with pytest.raises(TransferError, match=match) as refused:
        bind(plan, sides["source"], sides["target"])
    assert side in str(refused.value)


@pytest.mark.parametrize("side", ["source", "target"])
def test_memory_of_another_placement_is_refused(side):
    sides = {"source": sequence(TP_1), "target": sequence(TP_1), side: sequence(TP_2)}
    with pytest.raises(PlanError, match=f"{side} memory has the placement"):
        bind(plan_transfer(TP_1, TP_1, num_tokens=9), sides["source"], sides["target"])


def test_a_rank_without_anything_to_send_needs_no_memory():
    """More ranks than layers, and a sequence too short for the second DCP rank."""
    split = KVPlacement.layer_split(5, layers=3, kv_heads=2, page_size=4)
    source = sequence(split)
    ranks = (*source.ranks[:3], *(dataclasses.replace(r, address=0) for r in source.ranks[3:]))
    target = sequence(DCP_2, page_ids=(7,))
    absent = (target.ranks[0], dataclasses.replace(target.ranks[1], address=0, num_pages=0))
    bound = bind(
        plan_transfer(split, DCP_2, num_tokens=4),
        dataclasses.replace(source, ranks=ranks),
        dataclasses.replace(target, ranks=absent),
    )
    assert {(p.source_rank, p.target_rank) for p in bound.paths} == {(0, 0), (1, 0), (2, 0)}
