"""Transfers over Mooncake's transfer engine: the source's side writes.

Peers find each other without a metadata service ("P2PHANDSHAKE"); the agent bytes are the session
"host:port". The package ``mooncake-transfer-engine-non-cuda`` serves hosts without a GPU over TCP;
it needs the system's libibverbs.

Pieces are submitted one by one: of a batch the library tells the state of the first piece only, or
gives up on all at the first that fails while others still move. Each piece is acknowledged by the
peer, so DONE means landed. A peer that is killed fails them at once; one that stands still keeps
them MOVING, as it will still take what the connection holds. The first write to a peer opens it,
which the library gives 60 s, and meanwhile no other peer can be opened.

The library prints to stderr, at the level of ``MC_LOG_LEVEL``, ERROR unless set.
"""

import importlib
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.backend import FinalTransfer, TransferHandle, TransferState
from dcpjax.transfer.bind import BoundTransfer
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.sides import OwnMemory, Peers, used_ranks

SESSION = re.compile(rb"[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5}")
NO_BATCH = (0, -1, 2**64 - 1)  # what the library returns instead of a batch that it started
SUCCEEDED, FAILED = 1, -1  # other states of a batch are not final
# Pieces under way to one peer. More were no faster; the library's queue per peer
# refuses more than about a thousand.
WINDOW = 32
PAUSE = 0.0005  # seconds between two looks at a full window

Piece = tuple[int, int, int]  # source address, target address, bytes


def load_library() -> Any:
    """The module ``mooncake.engine``, quiet.

    Raises:
        TransferError: it is not installed, or a system library is missing.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise TransferError(
            "Mooncake is not usable; `pip install mooncake-transfer-engine-non-cuda` brings it, "
            "and the system has to bring libibverbs",
            reason=str(error),
        ) from error


class MooncakeBackend:
    """Writes to peers through Mooncake.

    Args:
        host: the address of this host, as peers reach it.
        protocol: "tcp", or "rdma".
        device: RDMA devices, comma-separated; empty for all.
    """

    name = "mooncake"
    pulls = False

    def __init__(self, *, host: str = "127.0.0.1", protocol: str = "tcp", device: str = "") -> None:
        self._host = host
        self._memory = OwnMemory()
        self._peers: Peers[Writer] = Peers()
        self._engine: Any = load_library().TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device)
        if status != 0:
            raise TransferError(
                "Mooncake starts", host=host, protocol=protocol, device=device, status=status
            )

    def register(self, regions: Sequence[RankMemory]) -> None:
        regions = self._memory.register(regions)
        addresses = [region.address for region in regions]
        sizes = [region.num_bytes for region in regions]
        status = self._engine.batch_register_memory(addresses, sizes) if regions else 0
        if status != 0:
            raise TransferError(
                "Mooncake registers the memory of all ranks", sizes=sizes, status=status
            )

    @property
    def agent(self) -> bytes:
        _ = self._memory.regions  # registered and not closed
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, peer: str, agent: bytes) -> None:
        _ = self._memory.regions
        if self._peers.is_known(peer, agent):
            return
        if not SESSION.fullmatch(agent):
            raise PeerError("a Mooncake session is host:port", peer=peer, agent=agent[:256])
        self._peers.add(peer, agent, Writer(self._engine, agent.decode()))

    def disconnect(self, peer: str) -> None:
        writer = self._peers.get(peer)
        if writer is None:
            return
        if writer.is_busy:
            raise TransferError("a peer is forgotten when nothing moves any more", peer=peer)
        writer.close()
        self._peers.remove(peer)

    def submit(self, bound: BoundTransfer, peer: str) -> TransferHandle:
        writer = self._peers.connection(peer)
        source, _ = used_ranks(bound)
        self._memory.check_holds(source)
        if not source:
            return FinalTransfer(TransferState.DONE)
        return writer.write(bound)

    def close(self) -> None:
        for writer in self._peers.connections():
            writer.close()
        self._peers = Peers()
        self._memory.close()
        self._engine = None  # the last reference: ends its threads and its registrations


class MooncakeTransfer:
    """One write; its writer's thread moves it on."""

    def __init__(self, bound: BoundTransfer, session: str) -> None:
        self.bound = bound
        self.state = TransferState.MOVING
        self._session = session

    def poll(self) -> TransferState:
        return self.state

    def release(self) -> None:
        if self.state is TransferState.MOVING:
            raise TransferError(
                "a transfer is released when nothing moves any more", peer=self._session
            )


class Writer:
    """A thread that writes the transfers to one peer, one after the other.

    So a peer that stands still costs no other peer anything.
    """

    def __init__(self, engine: Any, session: str) -> None:
        self._engine: Any = engine
        self._session = session
        self._queue: queue.SimpleQueue[MooncakeTransfer | None] = queue.SimpleQueue()
        self._last: MooncakeTransfer | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"write {session}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._last is not None and self._last.state is TransferState.MOVING

    def write(self, bound: BoundTransfer) -> MooncakeTransfer:
        self._last = MooncakeTransfer(bound, self._session)
        self._queue.put(self._last)
        return self._last

    def close(self) -> None:
        """Start nothing more and fail what is under way."""
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join()
        self._engine = None

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            arrived = self._move(pieces(transfer.bound))
            transfer.state = TransferState.DONE if arrived else TransferState.FAILED

    def _move(self, todo: Iterator[Piece]) -> bool:
        """Write pieces until all have arrived, or one has not and nothing moves any more."""
        moving: list[int] = []
        is_well = True
        while not self._is_closing.is_set():
            if is_well:
                is_well = self._fill(moving, todo)
            if not moving:
                return is_well
            states = {batch: self._engine.transfer_check_status(batch) for batch in moving}
            moving = [batch for batch in moving if states[batch] not in (SUCCEEDED, FAILED)]
            is_well = is_well and FAILED not in states.values()
            if len(moving) == len(states):
                time.sleep(PAUSE)
        return False

    def _fill(self, moving: list[int], todo: Iterator[Piece]) -> bool:
        """Submit pieces up to the window; whether the library took them."""
        while len(moving) < WINDOW and (piece := next(todo, None)) is not None:
            source, target, num_bytes = piece
            batch = self._engine.transfer_submit_write(self._session, source, target, num_bytes)
            if batch in NO_BATCH:
                return False
            moving.append(batch)
        return True


def pieces(bound: BoundTransfer) -> Iterator[Piece]:
    """The contiguous runs of all paths."""
    for path in bound.paths:
        columns = (column.tolist() for column in bound.addresses(path))
        yield from zip(*columns, strict=True)
