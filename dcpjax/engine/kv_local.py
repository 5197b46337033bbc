"""One engine's side of KV transfers: its memory, its backend, and how a bound transfer is moved.

Knows no requests. Used by the threads of :mod:`kv_source` and :mod:`kv_target`.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dcpjax.errors import TransferError
from dcpjax.transfer.backend import TransferBackend, TransferHandle, TransferState
from dcpjax.transfer.bind import bind
from dcpjax.transfer.handshake import EngineInfo
from dcpjax.transfer.memory import SequenceMemory
from dcpjax.transfer.plan import plan_transfer

_POLL_SECONDS = 0.0005


@dataclass
class TransferStats:
    """Sums over the transfers that this engine started. Changed under a lock by several threads."""

    num_transfers: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    num_expired: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **changes: float) -> None:
        with self._lock:
            for name, value in changes.items():
                setattr(self, name, getattr(self, name) + value)

    def shown(self) -> dict[str, float]:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}


class LocalKV:
    """This engine as its peers know it, and the way to move KV from or to them."""

    def __init__(self, info: EngineInfo, backend: TransferBackend, *, timeout: float) -> None:
        self.info = info
        self.backend = backend
        self.timeout = timeout
        self.stats = TransferStats()
        self._backend_lock = threading.Lock()

    def connect(self, peer: EngineInfo) -> None:
        with self._backend_lock:
            self.backend.connect(peer.engine_id, peer.agent_metadata)

    def disconnect(self, engine_id: str) -> None:
        with self._backend_lock:
            self.backend.disconnect(engine_id)

    def pull(
        self, peer: EngineInfo, peer_pages: Sequence[int], pages: Sequence[int], span: range
    ) -> None:
        """Read the tokens ``span`` of a sequence from a peer's pages into ours."""
        self._move(peer, _sequence(peer, peer_pages), _sequence(self.info, pages), span)

    def push(
        self, peer: EngineInfo, peer_pages: np.ndarray, pages: Sequence[int], span: range
    ) -> None:
        """Write the tokens ``span`` of a sequence from our pages into a peer's."""
        self._move(peer, _sequence(self.info, pages), _sequence(peer, peer_pages), span)

    def _move(
        self, peer: EngineInfo, source: SequenceMemory, target: SequenceMemory, span: range
    ) -> None:
        """Plan, bind, move, and return when nothing moves any more.

        Raises:
            TransferError: it was refused, failed or took too long.
        """
        started = time.monotonic()
        plan = plan_transfer(
            source.placement, target.placement, num_tokens=span.stop, first_token=span.start
        )
        bound = bind(plan, source, target)
        if not bound.num_bytes:
            return
        with self._backend_lock:
            handle = self.backend.submit(bound, peer.engine_id)
        try:
            while (state := self._poll(handle)) is TransferState.MOVING:
                if time.monotonic() - started > self.timeout:
                    raise TransferError(
                        "a transfer ends in time", timeout=self.timeout, peer=peer.engine_id
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            with self._backend_lock:
                handle.release()
        if state is TransferState.FAILED:
            raise TransferError("a transfer does not fail", peer=peer.engine_id)
        self.stats.add(
            num_transfers=1,
            num_bytes=bound.num_bytes,
            num_descriptors=bound.num_blocks,
            seconds=time.monotonic() - started,
        )

    def _poll(self, handle: TransferHandle) -> TransferState:
        with self._backend_lock:
            return handle.poll()

    def close(self) -> None:
        with self._backend_lock:
            self.backend.close()


def _sequence(engine: EngineInfo, page_ids: Sequence[int] | np.ndarray) -> SequenceMemory:
    return SequenceMemory(engine.placement, engine.regions, page_ids)
