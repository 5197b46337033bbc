"""Who moves the bytes: the protocol of transfer backends, and the one for a single process.

A backend knows addresses and peers, no placements, requests or pages. One agent serves all ranks
of a process. Its methods are called from one thread at a time; ``submit`` may block as long as the
copy takes.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from dcpjax.transfer.bind import BoundTransfer
from dcpjax.transfer.memory import RankMemory


class TransferState(enum.Enum):
    """Of a submitted transfer. DONE and FAILED are final: the bytes do not move any more."""

    MOVING = "moving"
    DONE = "done"
    FAILED = "failed"


class TransferHandle(Protocol):
    """A submitted transfer."""

    def poll(self) -> TransferState:
        """Never raises for a failed transfer: that is a state."""
        ...

    def release(self) -> None:
        """Give back what the library holds for it. Idempotent; waits for what still moves."""
        ...


class TransferBackend(Protocol):
    """Moves bound transfers between registered memory of this process and of peers."""

    @property
    def name(self) -> str: ...

    @property
    def pulls(self) -> bool:
        """Whether the target's side starts the transfer (reads); else the source's side (writes)."""
        ...

    def register(self, regions: Sequence[RankMemory]) -> None:
        """Make the memory of this process's ranks reachable. Once, before :attr:`agent`."""
        ...

    @property
    def agent(self) -> bytes:
        """What a peer needs to connect; travels in the handshake."""
        ...

    def connect(self, peer: str, agent: bytes) -> None:
        """Learn of a peer by its engine id. Again with the same bytes: no effect.

        Raises:
            TransferError: the bytes are not understood, or the peer cannot be reached.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Idempotent."""
        ...

    def submit(self, bound: BoundTransfer, peer: str) -> TransferHandle:
        """Start moving the bytes; a read where the backend pulls, else a write.

        Raises:
            TransferError: it could not be started; nothing moves.
        """
        ...

    def close(self) -> None:
        """Unregister everything. Idempotent."""
        ...
