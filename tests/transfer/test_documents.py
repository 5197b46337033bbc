"""The examples and numbers of the documents that describe these transfers, reproduced by the plan.

They name one rank of several replicas; the plan may spread the work over all of them.
"""

import numpy as np
import pytest

from dcpjax.layout import KVPlacement, filter_pages, layer_range
from dcpjax.transfer import RankMemory, SequenceMemory, bind, neuron_remote_ranks, plan_transfer

NEURON = {"layers": 2, "kv_heads": 8, "page_size": 16}
PAGES = {**NEURON, "interleave": 16}


def paths_by_target(plan):
    paths = {}
    for path in plan.paths:
        paths.setdefault(path.target_rank, []).append(path)
    return paths


def shares_of(placement, ranks):
    return {placement.shares[rank] for rank in ranks}


def pages_of(plan, source_rank, target_rank):
    """Global pages of one path, by the tokens of its pieces."""
    return {
        token // 16
        for piece in plan.pieces()
        if (piece.source_rank, piece.target_rank) == (source_rank, target_rank)
        for token in range(piece.token_start, piece.token_stop)
    }


@pytest.mark.parametrize(
    "prefill, decode, documented",
    [
        # DCP prefill to standard decode: all token groups of the rank's heads.
        ((4, 2), (2, 1), {0: [0, 2], 1: [1, 3]}),
        # The same DCP degree: one prefill rank for each decode rank.
        ((32, 2), (16, 2), {0: [0], 1: [16]}),
        # P_DCP > D_DCP: prefill token ranks r, r + D_DCP, ...
        ((32, 4), (16, 2), {0: [0, 16], 1: [8, 24]}),
    ],
)
def test_dcp_prefill_to_decode(prefill, decode, documented):
    source, target = (
        KVPlacement.prefill_dcp(*prefill, **PAGES),
        KVPlacement.decode(*decode, **PAGES),
    )
    plan = plan_transfer(source, target, num_tokens=16 * 64)
    for rank, named in documented.items():
        used = [path.source_rank for path in paths_by_target(plan)[rank]]
        assert set(named) <= set(used)
        assert shares_of(source, used) == shares_of(source, named), "replicas of the named ranks"
        assert named == neuron_remote_ranks(
            rank,
            prefill_tp=prefill[0],
            prefill_dcp=prefill[1],
            decode_tp=decode[0],
            decode_dcp=decode[1],
            num_kv_heads=8,
        )


def test_blocks_of_token_groups_are_interleaved():
    source, target = KVPlacement.prefill_dcp(4, 2, **PAGES), KVPlacement.decode(2, 1, **PAGES)
    plan = plan_transfer(source, target, num_tokens=16 * 8)
    assert pages_of(plan, 0, 0) == pages_of(plan, 1, 1) == {0, 2, 4, 6}
    assert pages_of(plan, 2, 0) == pages_of(plan, 3, 1) == {1, 3, 5, 7}


def test_standard_prefill_to_dcp_decode_keeps_every_second_block():
    source = KVPlacement.tensor_parallel(16, **NEURON)
    target = KVPlacement.decode(16, 2, **PAGES)
    plan = plan_transfer(source, target, num_tokens=16 * 8)
    for rank, paths in paths_by_target(plan).items():
        kept = set().union(*(pages_of(plan, path.source_rank, rank) for path in paths))
        assert kept == set(range(rank % 2, 8, 2))
        assert {path.source_rank // 2 for path in paths} == {rank // 2}, "ranks of the same head"


def heads(path):
    return path.head_start, path.head_stop


def test_matching_heads():
    source, target = KVPlacement.prefill_dcp(8, 2, **PAGES), KVPlacement.decode(4, 1, **PAGES)
    plan = plan_transfer(source, target, num_tokens=64)
    for rank, paths in paths_by_target(plan).items():
        assert [heads(path) for path in paths] == [(2 * rank, 2 * rank + 2)] * 2


def test_splitting_heads():
    """A decode rank takes a part of a prefill rank's heads: a head offset in the source."""
    source, target = KVPlacement.prefill_dcp(4, 2, **PAGES), KVPlacement.decode(4, 1, **PAGES)
    plan = plan_transfer(source, target, num_tokens=64)
    for rank, paths in paths_by_target(plan).items():
        assert [heads(path) for path in paths] == [(2 * rank, 2 * rank + 2)] * 2
        assert [path.source_rank % 2 for path in paths] == [rank // 2] * 2


def test_merging_heads():
    """A decode rank puts the heads of several prefill ranks together."""
    source, target = KVPlacement.prefill_dcp(8, 2, **PAGES), KVPlacement.decode(2, 1, **PAGES)
    plan = plan_transfer(source, target, num_tokens=64)
    for rank, paths in paths_by_target(plan).items():
        first = 4 * rank
        assert [heads(p) for p in paths] == [(first, first + 2), (first + 2, first + 4)] * 2


# GLM-5.2 at 576 B per token and layer: 8 layer-split prefill ranks, 4 DCP ranks with pages of 64.
GLM = {"layers": 78, "kv_heads": 1, "page_size": 64}
SPLIT = KVPlacement.layer_split(8, **GLM)
DCP_4 = KVPlacement.decode(4, 4, interleave=64, **GLM)
NUM_LAYERS = [10, 10, 10, 10, 10, 10, 9, 9]


def test_the_matrix_of_eight_by_four_paths():
    table = plan_transfer(SPLIT, DCP_4, num_tokens=32768).bytes_by_path(576)
    assert table.shape == (8, 4) and np.count_nonzero(table) == 32
    np.testing.assert_array_equal(table, np.outer(NUM_LAYERS, [32768 // 4 * 576] * 4))


def test_every_path_has_the_layers_of_its_source_and_a_quarter_of_the_pages():
    plan = plan_transfer(SPLIT, DCP_4, num_tokens=32768)
    sides = [
        SequenceMemory(
            placement,
            tuple(
                RankMemory.dense(
                    1 << 30,
                    num_pages=num_pages,
                    num_layers=share.num_layers,
                    num_heads=1,
                    page_size=64,
                    token_bytes=576,
                )
                for share in placement.shares
            ),
            np.arange(num_pages),
        )
        for placement, num_pages in ((SPLIT, 512), (DCP_4, 128))
    ]
    for path, bound in zip(plan.paths, bind(plan, *sides).paths, strict=True):
        layers = layer_range(78, 8, path.source_rank)
        assert (path.layer_start, path.layer_stop) == layers
        (blocks,) = bound.blocks
        assert blocks.num_blocks == 128 and blocks.num_bytes == path.num_layers * 64 * 576
        # The page filter of the document: source pages of the rank, and their ids on it.
        assert blocks.source_pages.tolist() == list(range(path.target_rank, 512, 4))
        ids = filter_pages(np.arange(512), path.target_rank, ranks=4)
        assert blocks.target_pages.tolist() == ids.tolist()


def test_bytes_of_a_request():
    """1.47 GB in all, 368 MB to each rank, a quarter of what sending all to every rank takes."""
    sharded = plan_transfer(SPLIT, DCP_4, num_tokens=32768).bytes_by_path(576)
    everywhere = KVPlacement.pcp(4, **GLM)
    naive = plan_transfer(SPLIT, everywhere, num_tokens=32768).bytes_by_path(576)
    assert sharded.sum() == 78 * 576 * 32768
    assert round(sharded.sum() / 1e9, 2) == 1.47
    assert [round(n / 1e6) for n in sharded.sum(axis=0).tolist()] == [368] * 4
    assert naive.sum() == 4 * sharded.sum()
    assert round((naive.sum() - sharded.sum()) / naive.sum(), 2) == 0.75
