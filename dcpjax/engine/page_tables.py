"""Page tables as arrays, kept between steps so that a step costs what it adds to them."""

import numpy as np

from dcpjax.engine.request import Request


class PageTables:
    """One row per slot: the page ids of the request that holds the slot, then the scratch page."""

    def __init__(self, num_slots: int, width: int, scratch_page: int) -> None:
        self._rows = np.full((num_slots, width), scratch_page, np.int32)
        self._scratch_page = scratch_page
        self._holders: list[tuple[str, int] | None] = [None] * num_slots
        self._filled = [0] * num_slots

    def of(self, request: Request) -> np.ndarray:
        """The table of a running request [width]; valid until the next call."""
        slot = request.slot
        assert slot is not None, "only running requests have a page table"
        holder = (request.request_id, request.num_preemptions)
        if self._holders[slot] != holder:
            self._rows[slot] = self._scratch_page
            self._holders[slot], self._filled[slot] = holder, 0
        filled, pages = self._filled[slot], request.page_ids
        if len(pages) > filled:
            self._rows[slot, filled : len(pages)] = pages[filled:]
            self._filled[slot] = len(pages)
        return self._rows[slot]
