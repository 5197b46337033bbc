"""Where whole source pages land when runs are too short to be moved one by one.

Two engines that deal their tokens differently (an interleave below the page) have only short runs
in common. Then the planner moves whole pages into this memory, and a copy puts their tokens in
order. The pool is written in place, as a transfer that lands directly does, so this is only for
pools in main memory.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from dcpjax.layout import KVPlacement
from dcpjax.transfer.bind import BoundTransfer, Landing
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.part_info import PartInfo
from dcpjax.transfer.plan import TransferPlan, plan_transfer
from dcpjax.transfer.staging import StagingMemory, is_staging_faster, num_staging_pages

STAGING_BYTES = 64 * 2**20
"""Of each rank. Longer transfers take several rounds."""


class StagingArea:
    """Staging pages of all ranks of an engine, cut to the page size of each source.

    Args:
        ranks: of the engine.
    """

    def __init__(self, ranks: int) -> None:
        self._num_bytes = STAGING_BYTES
        self._buffers = [np.empty(self._num_bytes, np.uint8) for _ in range(ranks)]

    @property
    def regions(self) -> tuple[RankMemory, ...]:
        """To be registered: each rank's buffer as one page."""
        size = self._num_bytes
        return tuple(
            RankMemory(buffer.ctypes.data, 1, size, size, size, 1) for buffer in self._buffers
        )

    def cut(self, target: PartInfo, page_size: int) -> StagingMemory:
        """Pages with the tokens of a source page, and the layers and heads of each target rank.

        Args:
            target: the cache part that is staged; one after the other has all of the memory.
        """
        ranks = tuple(
            _region(buffer, share.num_layers, share.num_heads, page_size, target.token_bytes)
            for buffer, share in zip(self._buffers, target.placement.shares, strict=True)
        )
        return StagingMemory(ranks, np.arange(min(rank.num_pages for rank in ranks)))


def transfers(
    source: KVPlacement, target: KVPlacement, span: range, *, token_bytes: int, num_pages: int
) -> Iterator[tuple[TransferPlan, bool]]:
    """The plans that together bring the tokens ``span``, and whether each is to be staged.

    Args:
        num_pages: staging pages of a rank; 0: nothing is staged.
    """
    plan = plan_transfer(source, target, num_tokens=span.stop, first_token=span.start)
    if not num_pages or not is_staging_faster(plan, token_bytes=token_bytes):
        yield plan, False
    elif num_staging_pages(plan) <= num_pages or len(span) == 1:
        yield plan, num_staging_pages(plan) <= num_pages
    else:
        middle = (span.start + span.stop) // 2
        for half in (range(span.start, middle), range(middle, span.stop)):
            yield from transfers(source, target, half, token_bytes=token_bytes, num_pages=num_pages)


def put_in_order(bound: BoundTransfer, target: PartInfo, page_size: int) -> None:
    """Copy what has landed in staging pages to the places of its tokens.

    Args:
        page_size: of the staging pages.
    """
    for landing in bound.landings:
        staged = _view(bound.target_ranks[landing.target_rank], landing, target, page_size)
        pages = _view(
            target.regions[landing.target_rank], landing, target, target.placement.page_size
        )
        rows = staged[landing.staging_pages, :, :, landing.staging_offsets]
        pages[landing.target_pages, :, :, landing.target_offsets] = rows


def _region(
    buffer: np.ndarray, num_layers: int, num_heads: int, page_size: int, token_bytes: int
) -> RankMemory:
    page_bytes = num_layers * num_heads * page_size * token_bytes
    return RankMemory.dense(
        buffer.ctypes.data,
        num_pages=len(buffer) // page_bytes,
        num_layers=num_layers,
        num_heads=num_heads,
        page_size=page_size,
        token_bytes=token_bytes,
    )


def _view(region: RankMemory, landing: Landing, target: PartInfo, page_size: int) -> np.ndarray:
    """A rank's pages without gaps as bytes [pages, layers, heads, page_size, token_bytes]."""
    share = target.placement.shares[landing.target_rank]
    shape = (region.num_pages, share.num_layers, share.num_heads, page_size, region.token_bytes)
    memory: Any = (ctypes.c_uint8 * region.num_bytes).from_address(region.address)
    return np.frombuffer(memory, np.uint8).reshape(shape)
