"""Transfers over NIXL: the target's side reads. One agent per process serves all its ranks.

NIXL comes as the package ``nixl-cu12`` or ``nixl-cu13`` and needs neither torch nor a GPU. Between
processes of one host ``submit`` copies with the kernel's help (CMA) before it returns, without the
interpreter lock; over TCP and RDMA the library's own thread moves the bytes.

What the libraries print: the C++ half of NIXL to stderr, at the level of ``NIXL_LOG_LEVEL``; the
Python half to the logger ``nixl``, which :func:`load_library` hands to the root logger; UCX to
``UCX_LOG_FILE``, stderr unless set, at the level of ``UCX_LOG_LEVEL``. Nothing goes to stdout.

A peer that is killed breaks its connections, and each of its transfers fails at once. A host that
vanishes is noticed by UCX's keepalive (``UCX_KEEPALIVE_INTERVAL``, 20 s). A peer that stands still
is not noticed: bytes that it had begun to send over TCP were seen to land after the request had
been cancelled and even after the agents had been separated; so a transfer stays MOVING until the
library says that it is over, and only :meth:`NixlBackend.close` ends one earlier.

Over TCP the process that is read from has to answer, and UCX 1.23 ends it (abort in
``ucp_request.inl``) when its reader is gone while it still has thousands of answers to give: seen
after it had stood still. CMA, NVLink and RDMA read without its help. Mooncake is the better choice
where there is only TCP.
"""

import contextlib
import importlib
import logging
import os
import threading
import uuid
import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.backend import FinalTransfer, TransferHandle, TransferState
from dcpjax.transfer.bind import BoundTransfer
from dcpjax.transfer.memory import RankMemory
from dcpjax.transfer.sides import OwnMemory, Peers, used_ranks

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
# The library's parser of agent metadata crashes on some damaged bytes; so they travel with a sum.
AGENT_MAGIC = b"dcpjax nixl 1\n"
CHECKSUM_BYTES = 4
PROGRESS_MICROSECONDS = 1000
"""A peer's first message waits so long at most; what is read of memory does not wait at all."""

_patching = threading.Lock()


def load_library() -> ModuleType:
    """NIXL's Python module, quiet on stdout.

    Raises:
        TransferError: none is installed.
    """
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    raise_exceptions = logging.raiseExceptions
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        logging.raiseExceptions = raise_exceptions  # NIXL changes it for the whole process
        _redirect_logger()
        return module
    raise TransferError(
        "NIXL is not installed; `pip install --no-deps nixl-cu12` (or nixl-cu13) brings it",
        tried=MODULES,
    )


class NixlBackend:
    """Reads from peers through NIXL.

    Args:
        mem_type: what the regions are: "DRAM", or "VRAM" for device memory.
        plugins: NIXL backends; "UCX" for shared memory, TCP, InfiniBand and NVLink, "LIBFABRIC"
            for EFA (from host memory where the device cannot be registered).
    """

    name = "nixl"
    pulls = True

    def __init__(self, *, mem_type: str = "DRAM", plugins: Sequence[str] = ("UCX",)) -> None:
        library = load_library()
        self._errors = _error_types(library)
        self._mem_type = mem_type
        self._memory = OwnMemory()
        self._registered: Any = None
        self._peers: Peers[str] = Peers()
        self._transfers: set[NixlTransfer] = set()
        config = library.nixl_agent_config(backends=list(plugins))
        try:
            with _calm_progress_thread(library):
                self._agent: Any = library.nixl_agent(uuid.uuid4().hex, config)
        except self._errors as error:
            raise TransferError("NIXL starts with these plugins", plugins=plugins) from error
        missing = sorted(set(plugins) - set(self._agent.backends))
        if missing:
            raise TransferError(
                "NIXL knows the wanted plugins", missing=missing, known=self._agent.plugin_list
            )

    def register(self, regions: Sequence[RankMemory]) -> None:
        regions = self._memory.register(regions)
        if not regions:
            return
        rows = [(region.address, region.num_bytes, region.device_id) for region in regions]
        try:
            self._registered = self._agent.register_memory(
                np.array(rows, np.uint64), self._mem_type
            )
        except self._errors as error:
            raise TransferError("NIXL registers the memory of all ranks", rows=rows) from error

    @property
    def agent(self) -> bytes:
        _ = self._memory.regions  # registered and not closed
        metadata = self._agent.get_agent_metadata()
        return AGENT_MAGIC + _checksum(metadata) + metadata

    def connect(self, peer: str, agent: bytes) -> None:
        _ = self._memory.regions
        if self._peers.is_known(peer, agent):
            return
        metadata = _checked_metadata(peer, agent)
        try:
            name = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise PeerError("NIXL understands the peer's metadata", peer=peer) from error
        self._peers.add(peer, agent, name)

    def disconnect(self, peer: str) -> None:
        name = self._peers.get(peer)
        if name is None:
            return
        if any(transfer.peer == peer and transfer.is_moving for transfer in self._transfers):
            raise TransferError("a peer is forgotten when nothing moves any more", peer=peer)
        self._peers.remove(peer)
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            pass  # the library forgot it when the connection broke

    def submit(self, bound: BoundTransfer, peer: str) -> TransferHandle:
        name = self._peers.connection(peer)
        source, target = used_ranks(bound)
        self._memory.check_holds(target)
        if not source:
            return FinalTransfer(TransferState.DONE)
        local, remote = self._descriptors(bound)
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, name)
        except self._errors as error:
            raise TransferError("NIXL reaches the peer's memory", peer=peer) from error
        transfer = NixlTransfer(self._agent, self._errors, handle, peer)
        transfer.start()
        self._transfers = {held for held in self._transfers if held.is_held} | {transfer}
        return transfer

    def close(self) -> None:
        for transfer in self._transfers:
            transfer.end()
        self._transfers = set()
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
        self._memory.close()
        self._peers = Peers()
        self._registered = self._agent = None  # the last reference: ends its threads, sockets

    def _descriptors(self, bound: BoundTransfer) -> tuple[Any, Any]:
        """The local and the remote list: contiguous runs of all paths as (address, bytes, device).

        Strided lists prepared once per peer, and indices into them per request, were tried: they
        save 0.2 to 1.8 ms of a transfer of 0.74 GB, which moves no faster for it, and make a handle
        per path and a cache out of one call.
        """
        local, remote = [], []
        for path in bound.paths:
            source, target, num_bytes = bound.addresses(path)
            source_device = bound.source_ranks[path.source_rank].device_id
            target_device = bound.target_ranks[path.target_rank].device_id
            remote.append(_rows(source, num_bytes, source_device))
            local.append(_rows(target, num_bytes, target_device))
        return tuple(
            self._agent.get_xfer_descs(np.concatenate(rows), self._mem_type)
            for rows in (local, remote)
        )


class NixlTransfer:
    """One read; all its pieces end together."""

    def __init__(
        self, agent: Any, errors: tuple[type[Exception], ...], handle: Any, peer: str
    ) -> None:
        self.peer = peer
        self._agent: Any = agent
        self._errors = errors
        self._handle: Any = handle
        self._state = TransferState.MOVING

    @property
    def is_moving(self) -> bool:
        return self.poll() is TransferState.MOVING

    @property
    def is_held(self) -> bool:
        """Whether the library still has something of it."""
        return self._handle is not None

    def start(self) -> None:
        """Post it. A peer that is gone makes it fail, as later in :meth:`poll`."""
        self._ask(self._agent.transfer)

    def poll(self) -> TransferState:
        if self._state is TransferState.MOVING:
            self._ask(self._agent.check_xfer_state)
        return self._state

    def release(self) -> None:
        if self.is_moving:
            raise TransferError(
                "a transfer is released when nothing moves any more", peer=self.peer
            )
        self.end()

    def end(self) -> None:
        """Let go of the library's handle, in any state; idempotent."""
        if self._handle is None:
            return
        if self._state is TransferState.MOVING:
            self._state = TransferState.FAILED
        try:
            self._handle.release()
        except self._errors:
            pass  # it could not cancel what still moves; that ends with the agent
        self._handle = self._agent = None  # no reference that would keep the agent alive

    def _ask(self, question: Any) -> None:
        try:
            answer = question(self._handle)
        except self._errors:
            answer = "ERR"
        if answer != "PROC":
            self._state = TransferState.DONE if answer == "DONE" else TransferState.FAILED


@contextlib.contextmanager
def _calm_progress_thread(library: ModuleType) -> Iterator[None]:
    """Let an agent that is made here look for messages of its peers every PROGRESS_MICROSECONDS.

    The library's Python half asks for 0, which it has no argument for: then the thread of every
    agent keeps a processor core busy for ever, also of one that nobody talks to.
    """
    bindings: Any = importlib.import_module(f"{library.__name__}._bindings")
    original = bindings.nixlAgent

    def make(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_MICROSECONDS
        return original(name, config)

    with _patching:
        bindings.nixlAgent = make
        try:
            yield
        finally:
            bindings.nixlAgent = original


def _redirect_logger() -> None:
    """Take away the handler that writes to stdout; the logger is then like any other."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.NOTSET)


def _error_types(library: ModuleType) -> tuple[type[Exception], ...]:
    """What NIXL raises: it has no common base class."""
    bindings = importlib.import_module(f"{library.__name__}._bindings")
    found = [value for value in vars(bindings).values() if isinstance(value, type)]
    return tuple(value for value in found if issubclass(value, Exception))


def _checksum(metadata: bytes) -> bytes:
    return zlib.crc32(metadata).to_bytes(CHECKSUM_BYTES, "big")


def _checked_metadata(peer: str, agent: bytes) -> bytes:
    """The library's part of agent bytes, whole and as it was sent."""
    start = len(AGENT_MAGIC) + CHECKSUM_BYTES
    metadata = agent[start:]
    if agent[:start] != AGENT_MAGIC + _checksum(metadata):
        raise PeerError(
            "agent bytes are NIXL metadata with their checksum",
            peer=peer,
            num_bytes=len(agent),
            start=agent[: len(AGENT_MAGIC)],
        )
    return metadata


def _rows(address: np.ndarray, num_bytes: np.ndarray, device: int) -> np.ndarray:
    """[n, 3] as NIXL takes them."""
    return np.stack([address, num_bytes, np.full_like(address, device)], axis=1).astype(np.uint64)
