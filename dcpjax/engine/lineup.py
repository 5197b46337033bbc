"""The unfinished requests: who waits, and who has a slot and pages. Host only.

Knows the order of arrival, not why somebody starts or has to go.
"""

import dataclasses
import heapq
from collections import OrderedDict
from collections.abc import Sequence

from dcpjax.engine.request import FinishReason, Request, Status, TokenOutput
from dcpjax.engine.residency import Admission, Residency


class Lineup:
    """Requests by id, in ``waiting`` in the order of arrival, in ``running`` in that of starting.

    ``running`` are all that hold a slot, those whose KV is on the way included; ``landed`` those of
    them whose KV has come and which are in no plan yet.
    """

    def __init__(self, residency: Residency, max_num_seqs: int) -> None:
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.landed: list[Request] = []
        self._residency = residency
        self._free_slots = list(range(max_num_seqs))  # a heap: low rows first
        self._ended: list[TokenOutput] = []  # outside a commit: aborted or failed
        self._num_accepted = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.running or request_id in self.waiting

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`take_ended` has something to tell."""
        return bool(self._ended)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of an id."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def append(self, request: Request) -> None:
        """Queue a new request behind all others."""
        request.place = self._num_accepted
        self._num_accepted += 1
        self.waiting[request.request_id] = request

    def start(self, admissions: Sequence[Admission]) -> None:
        """Give slots and pages to waiting requests, whose summed cost is available."""
        self._residency.admit(admissions)
        for admission in admissions:
            request = admission.request
            request.slot = heapq.heappop(self._free_slots)
            request.status = Status.RUNNING
            self.running[request.request_id] = self.waiting.pop(request.request_id)

    def requeue(self, request: Request) -> None:
        """Back to its place in the queue, without pages."""
        self._release(request)
        request.status = Status.WAITING
        self.waiting[request.request_id] = request
        in_order = sorted(self.waiting.values(), key=lambda waiting: waiting.place)
        self.waiting = OrderedDict((waiting.request_id, waiting) for waiting in in_order)

    def finish(self, request: Request) -> None:
        """It has all its tokens; its slot and pages are free."""
        if request.status is Status.WAITING:
            del self.waiting[request.request_id]
        else:
            self._release(request)
        request.status = Status.FINISHED

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Finish it outside a commit; what it says of that waits in :meth:`take_ended`."""
        self._ended.append(dataclasses.replace(request.output((), reason), error=error))
        self.finish(request)

    def take_ended(self) -> list[TokenOutput]:
        """The outputs of requests that were ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def check_integrity(self) -> None:
        """Assert that every running request has a slot of its own, and no waiting one pages."""
        slots = [request.slot for request in self.running.values()]
        assert not {None, *self._free_slots}.intersection(slots), "a running request has no slot"
        assert len(set(slots)) == len(slots), "two requests have the same slot"
        assert not any(r.page_ids for r in self.waiting.values()), "a waiting request has pages"

    def _release(self, request: Request) -> None:
        del self.running[request.request_id]
        assert request.slot is not None, "a running request has no slot"
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
        self.landed = [other for other in self.landed if other is not request]
        self._residency.release(request)
