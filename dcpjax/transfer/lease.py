"""How long a producer holds the pages of a request for its consumer. Host only, no pages.

A lease ends exactly once, and who is told so frees the pages: :meth:`LeaseTable.land` answers
RELEASED, :meth:`LeaseTable.close` or :meth:`LeaseTable.unpin` answers True, or
:meth:`LeaseTable.expire` lists it. Until then the pages are held, also after the time is over: a
confirmation that comes late, and still before :meth:`LeaseTable.expire`, is a good one.

Expiry is a time of this process's clock and is told to nobody: the clocks of two machines have
nothing to do with each other, so only durations travel.
"""

import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dcpjax.errors import TransferError


class Landing(enum.Enum):
    """What a confirmation did. PENDING: others are missing; UNKNOWN: the pages are not held."""

    PENDING = "pending"
    RELEASED = "released"
    UNKNOWN = "unknown"


@dataclass
class _Lease:
    """``is_closed``: wanted by nobody any more, and held only by its pins."""

    expiry: float
    num_target_ranks: int | None
    landed: set[int] = field(default_factory=set[int])
    num_pins: int = 0
    is_closed: bool = False


class LeaseTable:
    """The leases of one producer. Every method may be called from any thread.

    Args:
        duration: seconds that a lease lasts from :meth:`open`.
        extension: seconds that it lasts at least from a heartbeat on.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        duration: float = 30.0,
        extension: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.duration = duration
        self.extension = extension
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def open(self, request_id: str, num_target_ranks: int | None = None) -> None:
        """Start to hold the pages of a request.

        Args:
            num_target_ranks: ranks that will confirm; None: the first confirmation says it.

        Raises:
            TransferError: the request is held already, or less than one rank would confirm.
        """
        _check_count(num_target_ranks)
        with self._lock:
            if request_id in self._leases:
                raise TransferError("a request is held once at a time", request_id=request_id)
            self._leases[request_id] = _Lease(self._clock() + self.duration, num_target_ranks)

    def heartbeat(self, request_ids: Iterable[str]) -> list[str]:
        """Extend leases, never shorten them; the ids of those that are held, as they were given."""
        with self._lock:
            extended = self._clock() + self.extension
            known = [id for id in request_ids if self._wanted(id) is not None]
            for request_id in known:
                lease = self._leases[request_id]
                lease.expiry = max(lease.expiry, extended)
            return known

    def land(self, request_id: str, ranks: Iterable[int], num_target_ranks: int) -> Landing:
        """Note that these target ranks need the pages no more.

        All ranks of the target confirm, those without a share too; one that does so twice counts
        once. While the lease is pinned the last confirmation is PENDING, and the last
        :meth:`unpin` ends the lease.

        Raises:
            TransferError: a rank outside the target, or a target of another size than before.
        """
        _check_count(num_target_ranks)
        ranks = set(ranks)
        for rank in ranks:
            if not 0 <= rank < num_target_ranks:
                raise TransferError(
                    "a rank is below the number of target ranks",
                    rank=rank,
                    num_target_ranks=num_target_ranks,
                )
        with self._lock:
            lease = self._wanted(request_id)
            if lease is None:
                return Landing.UNKNOWN
            _set_count(lease, num_target_ranks)
            lease.landed |= ranks
            if len(lease.landed) < num_target_ranks:
                return Landing.PENDING
            return Landing.RELEASED if self._close(request_id, lease) else Landing.PENDING

    def close(self, request_id: str) -> bool:
        """Give a request up, known or not; from now on it is unknown to everyone but its pins.

        Returns:
            whether this has ended the lease. False: it was not held, or the last :meth:`unpin`
            will end it.
        """
        with self._lock:
            lease = self._wanted(request_id)
            return lease is not None and self._close(request_id, lease)

    def pin(self, request_id: str) -> bool:
        """Keep a lease from ending while something reads from the pages. False: it is not held."""
        with self._lock:
            lease = self._wanted(request_id)
            if lease is None:
                return False
            lease.num_pins += 1
            return True

    def unpin(self, request_id: str) -> bool:
        """Take one pin back. Returns whether this has ended the lease, which was closed meanwhile.

        Raises:
            TransferError: there is no pin.
        """
        with self._lock:
            lease = self._leases.get(request_id)
            if lease is None or lease.num_pins == 0:
                raise TransferError("only what is pinned is unpinned", request_id=request_id)
            lease.num_pins -= 1
            return lease.is_closed and self._close(request_id, lease)

    def expire(self) -> list[str]:
        """End the leases whose time is over and which are not pinned; their ids, oldest first."""
        with self._lock:
            now = self._clock()
            # All of them: a heartbeat extends a lease where it stands, so there is no order.
            over = [
                request_id
                for request_id, lease in self._leases.items()
                if lease.expiry <= now and lease.num_pins == 0
            ]
            for request_id in over:
                del self._leases[request_id]
            return over

    def _wanted(self, request_id: str) -> _Lease | None:
        lease = self._leases.get(request_id)
        return None if lease is None or lease.is_closed else lease

    def _close(self, request_id: str, lease: _Lease) -> bool:
        """End a lease if no pin holds it, else let the last pin end it."""
        lease.is_closed = True
        if lease.num_pins == 0:
            del self._leases[request_id]
        return lease.num_pins == 0


def _check_count(num_target_ranks: int | None) -> None:
    if num_target_ranks is not None and num_target_ranks < 1:
        raise TransferError("a target has at least one rank", num_target_ranks=num_target_ranks)


def _set_count(lease: _Lease, num_target_ranks: int) -> None:
    if lease.num_target_ranks is None:
        lease.num_target_ranks = num_target_ranks
    if lease.num_target_ranks != num_target_ranks:
        raise TransferError(
            "all messages about a request count the same target ranks",
            before=lease.num_target_ranks,
            now=num_target_ranks,
        )
