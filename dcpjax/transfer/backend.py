"""Who moves the bytes: the protocol of transfer backends, and the one for a single process.

A backend knows addresses and peers, no placements, requests or pages. One agent serves all ranks
of a process; a peer is one process of another engine, see :mod:`dcpjax.transfer.agents`. Its
methods are called from one thread at a time; ``submit`` may block as long as the copy takes.

A backend keeps no deadline. A peer that is gone ends its transfers within a bounded time, but one
that merely stands still may go on at any time and then still read or write: only a final state says
that nothing moves any more. Who gives up earlier must keep the pages until then.
"""

import ctypes
import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.bind import BoundTransfer
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.sides import OwnMemory, Peers, used_ranks

LONGEST_PAUSE = 0.01  # seconds between two polls


class TransferState(enum.Enum):
    """Of a submitted transfer. DONE and FAILED are final: the bytes do not move any more."""

    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class TransferHandle(Protocol):
    """A submitted transfer."""

    def poll(self) -> TransferState:
        """Never raises for a failed transfer: that is a state. Does not wait."""
        ...

    def release(self) -> None:
        """Give back what the library holds for it. Idempotent; a final state stays.

        Raises:
            TransferError: it is still moving. No library used here can recall bytes that are on
                the way: it ends by the peer, or by :meth:`TransferBackend.close`.
        """
        ...


class TransferBackend(Protocol):
    """Moves bound transfers between registered memory of this process and of peers."""

    @property
    def name(self) -> str: ...

    @property
    def pulls(self) -> bool:
        """Whether the target's side starts transfers (reads); else the source's side (writes)."""
        ...

    def register(self, regions: Sequence[RankMemory]) -> None:
        """Make the memory of this process's ranks reachable. Once, before :attr:`agent`.

        Raises:
            TransferError: a second time, after :meth:`close`, or the library refuses the memory.
        """
        ...

    @property
    def agent(self) -> bytes:
        """What a peer needs to connect; travels in the handshake.

        Raises:
            TransferError: nothing is registered.
        """
        ...

    def connect(self, peer: str, agent: bytes) -> None:
        """Learn of a peer by a name of its own. Again with the same bytes: no effect.

        Raises:
            PeerError: the bytes are not understood, belong to another process than the ones this
                name was connected with, or the peer cannot be reached.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Idempotent.

        Raises:
            TransferError: a transfer with it is still moving.
        """
        ...

    def submit(self, bound: BoundTransfer, peer: str) -> TransferHandle:
        """Start moving the bytes; a read where the backend pulls, else a write.

        Raises:
            PeerError: the peer is not connected.
            TransferError: it could not be started; nothing moves.
        """
        ...

    def close(self) -> None:
        """Unregister everything. Idempotent; what was still moving stops and has failed."""
        ...


@dataclass(frozen=True)
class FinalTransfer:
    """A handle of a transfer that was over when it was submitted."""

    state: TransferState

    def poll(self) -> TransferState:
        return self.state

    def release(self) -> None:
        """Nothing is held."""


def wait(handle: TransferHandle, timeout: float) -> TransferState:
    """The state of a transfer once it is final, or after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    pause = LONGEST_PAUSE / 256
    while (state := handle.poll()) is TransferState.MOVING and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return state


class InProcessFabric:
    """The memory of the engines of one process, by engine id. Shared by their backends."""

    def __init__(self) -> None:
        self.members: dict[str, OwnMemory] = {}
        self.lock = threading.Lock()  # held while bytes move: no member leaves meanwhile


class InProcessBackend:
    """Copies between two engines of one process.

    Args:
        fabric: the same for both.
        engine_id: of this engine; also its agent bytes.
        pulls: which side starts a transfer. The copy is the same.
    """

    name = "in-process"

    def __init__(self, fabric: InProcessFabric, engine_id: str, *, pulls: bool = True) -> None:
        self.pulls = pulls
        self._fabric = fabric
        self._engine_id = engine_id
        self._memory = OwnMemory()
        self._peers: Peers[str] = Peers()

    def register(self, regions: Sequence[RankMemory]) -> None:
        if self._fabric.members.get(self._engine_id) not in (None, self._memory):
            raise TransferError("an engine id belongs to one engine", engine_id=self._engine_id)
        self._memory.register(regions)
        self._fabric.members[self._engine_id] = self._memory

    @property
    def agent(self) -> bytes:
        _ = self._memory.regions  # registered and not closed
        return self._engine_id.encode()

    def connect(self, peer: str, agent: bytes) -> None:
        if self._peers.is_known(peer, agent):
            return
        engine_id = agent.decode(errors="replace")
        if engine_id not in self._fabric.members:
            raise PeerError("the peer is not in this process", peer=peer, agent=agent)
        self._peers.add(peer, agent, engine_id)

    def disconnect(self, peer: str) -> None:
        self._peers.remove(peer)

    def submit(self, bound: BoundTransfer, peer: str) -> FinalTransfer:
        with self._fabric.lock:
            return self._copy(bound, peer)

    def _copy(self, bound: BoundTransfer, peer: str) -> FinalTransfer:
        own, other = self._memory, self._fabric.members.get(self._peers.connection(peer))
        source, target = used_ranks(bound)
        own.check_holds(target if self.pulls else source)
        if other is None:  # closed since
            return FinalTransfer(TransferState.FAILED)
        other.check_holds(source if self.pulls else target)
        copy(bound)
        return FinalTransfer(TransferState.DONE)

    def close(self) -> None:
        with self._fabric.lock:
            if self._fabric.members.get(self._engine_id) is self._memory:
                del self._fabric.members[self._engine_id]
            self._memory.close()


def copy(bound: BoundTransfer) -> None:
    """Move the bytes of a transfer whose both sides lie in this process."""
    for path in bound.paths:
        columns = (column.tolist() for column in bound.addresses(path))
        for source, target, num_bytes in zip(*columns, strict=True):
            ctypes.memmove(target, source, num_bytes)
