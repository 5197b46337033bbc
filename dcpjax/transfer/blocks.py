"""What moves, in bytes: blocks of memory at some offsets of some pages.

The tokens of a path that lie at the same offsets of their pages are one :class:`StridedBlocks`:
some offsets × some pages. A block grows over heads and layers as far as the memory of both sides is
without gaps, so a whole page of the layers that two ranks have in common is one block.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcpjax.layout import KVShare
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.plan import TransferPath, TransferPlan
from dcpjax.transfer.runs import StridedRuns

Array = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class StridedBlocks:
    """``R × n`` blocks of ``num_bytes`` bytes on the way between two ranks.

    Block (j, i) starts at address + ``offsets[j]`` + ``pages[i]`` * page_stride, on either side.

    Attributes:
        source_offsets, target_offsets: [R] bytes from the beginning of a page, ascending.
        source_pages, target_pages: [n] page ids; those of the source ascend.
    """

    num_bytes: int
    source_offsets: Offsets
    target_offsets: Offsets
    source_pages: Pages
    target_pages: Pages

    @property
    def num_blocks(self) -> int:
        return len(self.source_offsets) * len(self.source_pages)


@dataclass(frozen=True, eq=False)
class BoundPath:
    """All blocks from one source rank to one target rank."""

    source_rank: int
    target_rank: int
    blocks: tuple[StridedBlocks, ...]

    @property
    def num_bytes(self) -> int:
        return sum(blocks.num_bytes * blocks.num_blocks for blocks in self.blocks)

    @property
    def num_blocks(self) -> int:
        return sum(blocks.num_blocks for blocks in self.blocks)


@dataclass(frozen=True, eq=False)
class Landing:
    """What one target rank copies from staging pages into its own when all bytes are there.

    Row k, for all layers and heads of the rank: the token at ``staging_offsets[k]`` of page
    ``staging_pages[k]`` goes to ``target_offsets[k]`` of page ``target_pages[k]``. One row for each
    token of the transfer that the rank holds, in the order of positions.
    """

    target_rank: int
    staging_pages: Pages
    staging_offsets: Pages
    target_pages: Pages
    target_offsets: Pages


@dataclass(frozen=True, eq=False)
class BoundTransfer:
    """A plan with addresses: what a backend moves.

    Attributes:
        source_ranks: the memory regions of the source engine, by rank.
        target_ranks: those of the target engine; its staging regions if there are landings.
        paths: in the order of the plan.
        landings: what is left to do afterwards, by target rank; empty if the bytes move directly to
            their places.
    """

    source_ranks: tuple[RankMemory, ...]
    target_ranks: tuple[RankMemory, ...]
    paths: tuple[BoundPath, ...]
    landings: tuple[Landing, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return sum(path.num_bytes for path in self.paths)

    @property
    def num_blocks(self) -> int:
        """Blocks that move, before contiguous ones are merged."""
        return sum(path.num_blocks for path in self.paths)

    def addresses(self, path: BoundPath) -> tuple[Offsets, Offsets, Offsets]:
        """Source address, target address and bytes of what moves on ``path``, by source address.

        Blocks that follow each other without a gap in the memory of both sides are one.
        """
        source_rank = self.source_ranks[path.source_rank]
        target_rank = self.target_ranks[path.target_rank]
        source = _concatenate(
            _starts(source_rank, blocks.source_offsets, blocks.source_pages)
            for blocks in path.blocks
        )
        target = _concatenate(
            _starts(target_rank, blocks.target_offsets, blocks.target_pages)
            for blocks in path.blocks
        )
        num_bytes = _concatenate(
            np.full(blocks.num_blocks, blocks.num_bytes) for blocks in path.blocks
        )
        return _merged(source, target, num_bytes)


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Runs of ``num_tokens`` tokens at the same two offsets (in tokens) of their pages."""

    source_offset: int
    target_offset: int
    num_tokens: int
    source_pages: Pages
    target_pages: Pages


def page_groups(
    runs: StridedRuns, source_page_ids: Array, target_page_ids: Array
) -> Iterator[PageGroup]:
    """The runs by their offsets and lengths, each group in the order of source page ids."""
    source_size, target_size = runs.source.page_size, runs.target.page_size
    alike: dict[tuple[int, int, int], list[int]] = {}
    for run, place in enumerate(
        zip(
            (runs.source_start % source_size).tolist(),
            (runs.target_start % target_size).tolist(),
            runs.length.tolist(),
            strict=True,
        )
    ):
        alike.setdefault(place, []).append(run)
    for place, members in sorted(alike.items()):
        source_start, target_start = runs.repeated(members)
        source_ids = source_page_ids[source_start // source_size]
        order = np.argsort(source_ids)
        target_ids = target_page_ids[target_start // target_size]
        yield PageGroup(
            *place, source_ids[order].astype(np.int32), target_ids[order].astype(np.int32)
        )


def path_blocks(
    plan: TransferPlan,
    path: TransferPath,
    group: PageGroup,
    source_ranks: Sequence[RankMemory],
    target_ranks: Sequence[RankMemory],
) -> StridedBlocks:
    """The blocks of one group of a path: tokens, then heads, then layers, up to the first gap."""
    source, target = source_ranks[path.source_rank], target_ranks[path.target_rank]
    num_bytes = group.num_tokens * source.token_bytes
    at_source = _first_offset(
        path, plan.source.shares[path.source_rank], source, group.source_offset
    )
    at_target = _first_offset(
        path, plan.target.shares[path.target_rank], target, group.target_offset
    )
    for count, source_stride, target_stride in (
        (path.num_heads, source.head_stride, target.head_stride),
        (path.num_layers, source.layer_stride, target.layer_stride),
    ):
        if count == 1:
            continue
        # Never so for layers if it was not for heads: a layer is longer than one of several heads.
        if source_stride == target_stride == num_bytes:
            num_bytes *= count
            continue
        steps = np.arange(count)[:, None]
        at_source = (steps * source_stride + at_source).ravel()
        at_target = (steps * target_stride + at_target).ravel()
    return StridedBlocks(num_bytes, at_source, at_target, group.source_pages, group.target_pages)


def _first_offset(path: TransferPath, share: KVShare, rank: RankMemory, token: int) -> Offsets:
    """Where the first head of the first layer of a path begins in a page, [1]."""
    layer = (path.layer_start - share.layer_start) * rank.layer_stride
    head = (path.head_start - share.head_start) * rank.head_stride
    return np.array([layer + head + rank.first + token * rank.token_bytes])


def _concatenate(parts: Iterable[Offsets]) -> Offsets:
    return np.concatenate(list(parts))


def _starts(rank: RankMemory, offsets: Offsets, pages: Pages) -> Offsets:
    """Addresses of blocks, offset by offset."""
    page = rank.address + pages.astype(np.int64) * rank.page_stride
    return (offsets[:, None] + page).ravel()


def _merged(
    source: Offsets, target: Offsets, num_bytes: Offsets
) -> tuple[Offsets, Offsets, Offsets]:
    order = np.argsort(source, kind="stable")
    source, target, num_bytes = source[order], target[order], num_bytes[order]
    follows = (source[1:] == source[:-1] + num_bytes[:-1]) & (
        target[1:] == target[:-1] + num_bytes[:-1]
    )
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return source[starts], target[starts], np.add.reduceat(num_bytes, starts)
