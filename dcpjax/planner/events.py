"""Time in a simulation: actions at moments, in order, ties in the order in which they were set."""

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """What happens when. ``now`` is the time of the action that runs, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._order = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run ``action`` at ``time``, or now if that is past."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run(self, on_event: Callable[[], None] | None = None) -> None:
        """Until nothing is left; ``on_event`` is called after each action."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self.num_done += 1
            if on_event is not None:
                on_event()
