"""Engines of bytes: what a transfer moves, and what it should have moved by the definitions alone.

An engine's memory is one NumPy array, an address is an index into it plus :data:`BASE`, so that a
wrong address is an error or a difference and never a crash. The oracle asks ``placement.holds`` and
counts: the k-th token that a rank holds is at place k of its pages.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from dcpjax.layout import KVPlacement
from dcpjax.transfer.bind import BoundTransfer
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.staging import StagingMemory, num_staging_pages

BASE = 4096
UNTOUCHED, FOREIGN = 0xA5, 0x5A
ITEM = np.dtype("<u4")


@dataclass
class SimulatedEngine:
    """The bytes of all ranks of one engine and the pages of one sequence in them."""

    memory: SequenceMemory
    data: np.ndarray

    @classmethod
    def build(cls, placement, num_tokens, rng, *, with_gaps=False, items_per_token=1):
        """Regions one after the other, random page ids, a few pages more than are used."""
        num_ids = max(
            -(-num_tokens // (share.ranks * placement.page_size)) for share in placement.shares
        )
        num_pages = num_ids + int(rng.integers(1, 4))
        sizes = [(share.num_layers, share.num_heads) for share in placement.shares]
        ranks, data = make_regions(
            sizes, num_pages, placement.page_size, items_per_token, rng if with_gaps else None
        )
        page_ids = rng.permutation(num_pages)[:num_ids]
        return cls(SequenceMemory(placement, ranks, page_ids), data)

    def places(self, rank, tokens):
        """Index into ``data`` of every (layer, head, token) of ``tokens`` that ``rank`` holds.

        Returns the places, flat, and for each its layer, head and token.
        """
        placement, region = self.memory.placement, self.memory.ranks[rank]
        grid = np.ix_(range(placement.layers), range(placement.kv_heads), range(tokens.stop))
        held = np.asarray(placement.holds(rank, *grid))
        layer, head, token = np.nonzero(held)
        if not len(layer):
            return layer, layer, head, token
        order = np.cumsum(held[layer[0], head[0]]) - 1
        page, offset = np.divmod(order[token], placement.page_size)
        place = (
            region.address
            - BASE
            + np.asarray(self.memory.page_ids)[page] * region.page_stride
            + (layer - layer[0]) * region.layer_stride
            + (head - head.min()) * region.head_stride
            + region.first
            + offset * region.token_bytes
        )
        kept = token >= tokens.start
        return place[kept], layer[kept], head[kept], token[kept]

    def expected(self, tokens):
        """This memory after everything that its ranks hold of ``tokens`` was put into it, and
        the number of bytes that this takes."""
        data, num_bytes = self.data.copy(), 0
        items_per_token = self.memory.ranks[0].token_bytes // ITEM.itemsize
        for rank in range(self.memory.placement.num_ranks):
            place, *what = self.places(rank, tokens)
            for item in range(items_per_token):
                at = (place + item * ITEM.itemsize)[:, None] + np.arange(ITEM.itemsize)
                values = value_of(*what, item).astype(ITEM)
                data[at] = values.view(np.uint8).reshape(-1, ITEM.itemsize)
                num_bytes += at.size
        return data, num_bytes

    def fill(self, num_tokens):
        """Make this a source: what is not of the sequence differs from what it is in a target."""
        self.data.fill(FOREIGN)
        self.data, _ = self.expected(range(num_tokens))


def make_regions(sizes, num_pages, page_size, items_per_token, gap_rng=None):
    """A region per rank, of its (layers, heads), one after the other, and their bytes.

    With ``gap_rng`` there are gaps after heads, layers, pages and regions, else none.
    """
    ranks, address = [], BASE
    for num_layers, num_heads in sizes:
        gaps = [0] * 4 if gap_rng is None else (gap_rng.integers(0, 3, 4) * 4).tolist()
        token_bytes = items_per_token * ITEM.itemsize
        head = page_size * token_bytes + gaps[0]
        layer = num_heads * head + gaps[1]
        page = num_layers * layer + gaps[2]
        ranks.append(RankMemory(address, num_pages, page, layer, head, token_bytes))
        address += num_pages * page + gaps[3]
    return tuple(ranks), np.full(address - BASE, UNTOUCHED, np.uint8)


@dataclass
class SimulatedStaging:
    """The staging pages of a target engine, as many as a plan takes."""

    memory: StagingMemory
    data: np.ndarray

    @classmethod
    def build(cls, plan, rng, *, with_gaps=False, items_per_token=1):
        num_ids = num_staging_pages(plan)
        num_pages = num_ids + int(rng.integers(1, 4))
        sizes = [(share.num_layers, share.num_heads) for share in plan.target.shares]
        ranks, data = make_regions(
            sizes, num_pages, plan.source.page_size, items_per_token, rng if with_gaps else None
        )
        return cls(StagingMemory(ranks, rng.permutation(num_pages)[:num_ids]), data)

    def land(self, bound: BoundTransfer, target: SimulatedEngine) -> None:
        """What the scatter of each target rank does."""
        for landing in bound.landings:
            share = target.memory.placement.shares[landing.target_rank]
            staged = self.memory.ranks[landing.target_rank]
            region = target.memory.ranks[landing.target_rank]
            rows = zip(
                landing.staging_pages,
                landing.staging_offsets,
                landing.target_pages,
                landing.target_offsets,
                strict=True,
            )
            for staging_page, staging_offset, target_page, target_offset in rows:
                for layer in range(share.num_layers):
                    for head in range(share.num_heads):
                        copy(
                            self.data,
                            item_address(staged, staging_page, layer, head, staging_offset),
                            target.data,
                            item_address(region, target_page, layer, head, target_offset),
                            region.token_bytes,
                        )


def item_address(rank: RankMemory, page, layer, head, offset) -> int:
    return (
        rank.address
        + int(page) * rank.page_stride
        + layer * rank.layer_stride
        + head * rank.head_stride
        + int(offset) * rank.token_bytes
    )


def value_of(layer, head, token, item):
    """A number for every item of a cache; none looks like memory that nothing was written to."""
    return ((layer * 16 + head) * 4096 + token) * 4 + item


def move(bound: BoundTransfer, source: SimulatedEngine, target: SimulatedEngine) -> None:
    """What a backend does, with the merged addresses."""
    for path in bound.paths:
        for start, to, size in zip(*bound.addresses(path), strict=True):
            copy(source.data, int(start), target.data, int(to), int(size))


def move_blocks(bound: BoundTransfer, source: SimulatedEngine, target: SimulatedEngine) -> None:
    """What a backend does, block by block as the contract of ``StridedBlocks`` says."""
    for path in bound.paths:
        from_rank = bound.source_ranks[path.source_rank]
        to_rank = bound.target_ranks[path.target_rank]
        for blocks in path.blocks:
            for j in range(len(blocks.source_offsets)):
                for i in range(len(blocks.source_pages)):
                    copy(
                        source.data,
                        block_address(from_rank, blocks.source_offsets[j], blocks.source_pages[i]),
                        target.data,
                        block_address(to_rank, blocks.target_offsets[j], blocks.target_pages[i]),
                        blocks.num_bytes,
                    )


def block_address(rank: RankMemory, offset, page) -> int:
    return rank.address + int(offset) + int(page) * rank.page_stride


def copy(source: np.ndarray, start: int, target: np.ndarray, to: int, size: int) -> None:
    assert min(start, to) >= BASE and start - BASE + size <= len(source)
    target[to - BASE : to - BASE + size] = source[start - BASE : start - BASE + size]


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


@st.composite
def placements(draw, layers: int, kv_heads: int, page_size: int) -> KVPlacement:
    """Any constructor, up to 32 ranks."""
    cache = {"layers": layers, "kv_heads": kv_heads, "page_size": page_size}
    interleave = draw(st.sampled_from(divisors(page_size)))
    split = {**cache, "interleave": interleave}
    ranks = draw(st.integers(1, 4))
    groups = draw(st.sampled_from(sorted({*divisors(kv_heads), 2 * kv_heads})))
    builders = {
        "tp": lambda: KVPlacement.tensor_parallel(groups, **cache),
        "decode": lambda: KVPlacement.decode(groups * ranks, ranks, **split),
        "prefill_dcp": lambda: KVPlacement.prefill_dcp(groups * ranks, ranks, **split),
        "layer_split": lambda: KVPlacement.layer_split(draw(st.integers(1, layers + 2)), **cache),
        "pcp": lambda: KVPlacement.pcp(ranks, **cache),
        "pcp_sharded": lambda: KVPlacement.pcp(ranks, **split),
        "pcp_dcp": lambda: KVPlacement.pcp_dcp(
            groups, ranks, draw(st.sampled_from([1, ranks, groups * ranks])), **split
        ),
    }
    return builders[draw(st.sampled_from(sorted(builders)))]()


@st.composite
def placement_pairs(draw) -> tuple[KVPlacement, KVPlacement]:
    """Two placements of one cache; the page size of one divides that of the other."""
    layers = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    small = draw(st.sampled_from([1, 2, 3, 4]))
    large = small * draw(st.sampled_from([1, 1, 2, 3]))
    sizes = draw(st.permutations([small, large]))
    source = draw(placements(layers, kv_heads, sizes[0]))
    return source, draw(placements(layers, kv_heads, sizes[1]))


@st.composite
def token_ranges(draw, source: KVPlacement, target: KVPlacement) -> range:
    """Any part of a short sequence, often with a length near a page or a virtual page."""
    edges = {0, 1}
    for placement in (source, target):
        size = placement.page_size
        edges |= {size - 1, size, size + 1, size * placement.shares[0].ranks}
    length = draw(st.sampled_from(sorted(edges)) | st.integers(0, 60))
    return range(draw(st.sampled_from([0]) | st.integers(0, length)), length)
