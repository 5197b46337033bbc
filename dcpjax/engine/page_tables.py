"""Page tables as arrays, kept between steps so that a step costs what it adds to them."""

import numpy as np

from dcpjax.engine.request import Request


class PageTables:
    """One row per slot: the page ids of the request that holds the slot, then the scratch page."""

    def __init__(self, num_slots: int, width: int, scratch_page: int) -> None:
        self._rows = np.full((num_slots, width), scratch_page, np.int32)
        self._scratch_page = scratch_page
        self._filled = [0] * num_slots

    def start(self, request: Request) -> None:
        """Begin anew: the request got its slot, for the first time or after a preemption."""
        slot = _slot(request)
        self._rows[slot] = self._scratch_page
        self._filled[slot] = 0

    def of(self, request: Request) -> np.ndarray:
        """The table of a running request [width]; valid until the next call."""
        slot, pages = _slot(request), request.page_ids
        filled = self._filled[slot]
        if len(pages) > filled:
            self._rows[slot, filled : len(pages)] = pages[filled:]
            self._filled[slot] = len(pages)
        return self._rows[slot]


def _slot(request: Request) -> int:
    assert request.slot is not None, "only running requests have a page table"
    return request.slot
