"""What every backend keeps of the two sides of a transfer: its own memory, and its peers."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.bind import BoundTransfer
from dcpjax.transfer.memory import RankMemory

Connection = TypeVar("Connection")


class OwnMemory:
    """The regions that this process made reachable: not yet, some, or not any more.

    Regions without a byte (a rank that holds nothing) are left out.
    """

    def __init__(self) -> None:
        self._regions: tuple[RankMemory, ...] | None = None
        self._is_closed = False

    def register(self, regions: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
        """Note the regions; those of them that hold something.

        Raises:
            TransferError: a second time, or after :meth:`close`.
        """
        if self._is_closed:
            raise TransferError("a closed backend registers no memory", regions=len(regions))
        if self._regions is not None:
            raise TransferError(
                "memory is registered once", known=len(self._regions), more=len(regions)
            )
        self._regions = tuple(region for region in regions if region.num_bytes > 0)
        return self._regions

    @property
    def regions(self) -> tuple[RankMemory, ...]:
        """What is registered.

        Raises:
            TransferError: nothing was registered, or the backend is closed.
        """
        if self._is_closed:
            raise TransferError("the backend is closed")
        if self._regions is None:
            raise TransferError("memory is registered before anything is moved")
        return self._regions

    def check_holds(self, ranks: Iterable[RankMemory]) -> None:
        """Raise a TransferError, with both sides named, unless all of ``ranks`` is registered."""
        for rank in ranks:
            if rank.num_bytes > 0 and not any(_contains(own, rank) for own in self.regions):
                raise TransferError(
                    "only registered memory moves",
                    wanted=_shown(rank),
                    registered=[_shown(own) for own in self.regions],
                )

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        self._regions = None


class Peers(Generic[Connection]):
    """The connections to other engines, by engine id."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Connection]] = {}

    def is_known(self, peer: str, agent: bytes) -> bool:
        """Whether this very peer is connected.

        Raises:
            PeerError: it is, with another agent. An engine that restarts takes a new id; under the
                old one its memory would be read at the addresses of a process that is gone.
        """
        if peer not in self._known:
            return False
        if self._known[peer][0] != agent:
            raise PeerError("an engine id belongs to one process", peer=peer)
        return True

    def add(self, peer: str, agent: bytes, connection: Connection) -> None:
        self._known[peer] = (agent, connection)

    def connection(self, peer: str) -> Connection:
        """Of a connected peer.

        Raises:
            PeerError: it is not connected.
        """
        if peer not in self._known:
            raise PeerError("a peer is connected first", peer=peer, connected=sorted(self._known))
        return self._known[peer][1]

    def get(self, peer: str) -> Connection | None:
        """The connection, or None."""
        return self._known[peer][1] if peer in self._known else None

    def connections(self) -> list[Connection]:
        return [connection for _, connection in self._known.values()]

    def remove(self, peer: str) -> None:
        """Idempotent."""
        self._known.pop(peer, None)


def used_ranks(bound: BoundTransfer) -> tuple[list[RankMemory], list[RankMemory]]:
    """The source ranks and the target ranks between which something moves."""
    source = sorted({path.source_rank for path in bound.paths})
    target = sorted({path.target_rank for path in bound.paths})
    return (
        [bound.source_ranks[rank] for rank in source],
        [bound.target_ranks[rank] for rank in target],
    )


def _contains(region: RankMemory, part: RankMemory) -> bool:
    return (
        region.device_id == part.device_id
        and region.address <= part.address
        and part.address + part.num_bytes <= region.address + region.num_bytes
    )


def _shown(region: RankMemory) -> str:
    end = region.address + region.num_bytes
    return f"device {region.device_id} [{region.address:#x}, {end:#x})"
