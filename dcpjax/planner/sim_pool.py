"""The cache of a simulated engine: pages that sequences hold, and pages kept for their prefix.

Pages are virtual pages: what one page id holds on all ranks. A full page of a prompt is known by
its block id and may be shared; the others belong to one sequence.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Holding:
    """Pages of one sequence: shared ones by id, and how many of its own."""

    blocks: list[int] = field(default_factory=list[int])
    num_own: int = 0


@dataclass(frozen=True)
class Reservation:
    """What a sequence got.

    Attributes:
        device_pages: leading pages of the prompt that are in the pool.
        host_pages: those after them that the host keeps: to be copied.
    """

    holding: Holding
    device_pages: int
    host_pages: int


class PagePool:
    """``num_pages`` pages on the devices, and ``host_pages`` for what is evicted from them.

    The least recently used prefix pages are evicted when a sequence needs pages.
    """

    def __init__(self, num_pages: int, host_pages: int = 0) -> None:
        self.num_pages, self.host_pages = num_pages, host_pages
        self.num_own = 0
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Pages that sequences hold."""
        return self.num_own + len(self._holders)

    @property
    def num_used(self) -> int:
        """Those, and pages that are only kept for their prefix."""
        return self.num_held + len(self._idle)

    def count_hits(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are on the devices."""
        hits = 0
        for block in blocks:
            if block not in self._holders and block not in self._idle:
                break
            hits += 1
        return hits

    def reserve(self, blocks: Sequence[int], num_pages: int) -> Reservation | None:
        """Take ``num_pages`` pages for a sequence whose prompt begins with ``blocks``.

        None where the pages that nobody holds are too few; then nothing has changed.
        """
        hits = self.count_hits(blocks)
        woken = sum(1 for block in blocks[:hits] if block in self._idle)
        needed = num_pages - hits
        if self.num_held + woken + needed > self.num_pages:
            return None
        for block in blocks[:hits]:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1
        host = self._count_host(blocks[hits:])
        self._evict(needed)
        self.num_own += needed
        return Reservation(Holding(list(blocks[:hits]), needed), hits, host)

    def publish(self, holding: Holding, blocks: Sequence[int]) -> None:
        """The prompt is computed: its full pages may be shared from now on."""
        for block in blocks[len(holding.blocks) :]:
            if block in self._holders or block in self._idle:
                break  # another sequence has computed the same: this one keeps its copy
            self._holders[block] = 1
            holding.blocks.append(block)
            holding.num_own -= 1
            self.num_own -= 1

    def release(self, holding: Holding) -> None:
        """Give the pages back; shared ones are kept while there is room, the first the longest."""
        for block in reversed(holding.blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._idle[block] = None
        self.num_own -= holding.num_own
        holding.blocks, holding.num_own = [], 0

    def _count_host(self, blocks: Sequence[int]) -> int:
        hits = 0
        for block in blocks:
            if block not in self._host:
                break
            self._host.move_to_end(block)
            hits += 1
        return hits

    def _evict(self, needed: int) -> None:
        while self.num_used + needed > self.num_pages:
            block, _ = self._idle.popitem(last=False)
            if self.host_pages:
                self._host[block] = None
                self._host.move_to_end(block)
                if len(self._host) > self.host_pages:
                    self._host.popitem(last=False)
