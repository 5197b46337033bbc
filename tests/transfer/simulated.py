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

BASE = 4096
UNTOUCHED = 0xA5
ITEM = np.dtype("<u4")


@dataclass
class SimulatedEngine:
    """The bytes of all ranks of one engine and the pages of one sequence in them."""

    memory: SequenceMemory
    data: np.ndarray

    @classmethod
    def build(cls, placement, num_tokens, rng, *, with_gaps=False, items_per_token=1):
        """Regions one after the other, random page ids, a few pages more than are used."""
        token_bytes = items_per_token * ITEM.itemsize
        num_ids = max(
            -(-num_tokens // (share.ranks * placement.page_size)) for share in placement.shares
        )
        num_pages = num_ids + int(rng.integers(1, 4))
        ranks, address = [], BASE
        for share in placement.shares:
            gap = (lambda: int(rng.integers(0, 3)) * 4) if with_gaps else (lambda: 0)
            head = placement.page_size * token_bytes + gap()
            layer = share.num_heads * head + gap()
            page = share.num_layers * layer + gap()
            ranks.append(RankMemory(address, num_pages, page, layer, head, token_bytes))
            address += num_pages * page + gap()
        page_ids = rng.permutation(num_pages)[:num_ids]
        data = np.full(address - BASE, UNTOUCHED, np.uint8)
        return cls(SequenceMemory(placement, tuple(ranks), page_ids), data)

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
        self.data, _ = self.expected(range(num_tokens))


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
    """Any constructor, up to 12 ranks."""
    cache = {"layers": layers, "kv_heads": kv_heads, "page_size": page_size}
    interleave = draw(st.sampled_from(divisors(page_size)))
    dcp = draw(st.integers(1, 4))
    groups = draw(st.sampled_from(sorted({*divisors(kv_heads), kv_heads, 2 * kv_heads})))
    kind = draw(st.sampled_from(["tp", "decode", "prefill_dcp", "layer_split", "pcp", "pcp_dcp"]))
    if kind == "tp":
        return KVPlacement.tensor_parallel(groups, **cache)
    if kind == "decode":
        return KVPlacement.decode(groups * dcp, dcp, interleave=interleave, **cache)
    if kind == "prefill_dcp":
        return KVPlacement.prefill_dcp(groups * dcp, dcp, interleave=interleave, **cache)
    if kind == "layer_split":
        return KVPlacement.layer_split(draw(st.integers(1, layers + 2)), **cache)
    return KVPlacement.pcp(dcp, interleave=None if kind == "pcp" else interleave, **cache)


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
    """Any part of a short sequence; lengths around pages and virtual pages more often than others."""
    edges = {0, 1}
    for placement in (source, target):
        size = placement.page_size
        edges |= {size - 1, size, size + 1, size * placement.shares[0].ranks}
    length = draw(st.sampled_from(sorted(edges)) | st.integers(0, 60))
    return range(draw(st.sampled_from([0]) | st.integers(0, length)), length)
