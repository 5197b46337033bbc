"""One engine's side of KV transfers: its memory, its backend, and how a bound transfer is moved.

Knows no requests. Used by the threads of :mod:`kv_source` and :mod:`kv_target`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcpjax.engine.kv_staging import StagingArea, put_in_order, transfers
from dcpjax.errors import TransferError
from dcpjax.transfer.backend import TransferBackend, TransferHandle, TransferState
from dcpjax.transfer.bind import BoundTransfer, bind
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.memory import SequenceMemory
from dcpjax.transfer.plan import TransferPlan, plan_transfer
from dcpjax.transfer.staging import is_staging_faster

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.01  # seconds between two looks at a transfer
_STAGING_SECONDS = 5.0
"""After so long without staging pages a transfer moves its many short pieces directly."""


class UnsettledError(TransferError):
    """A transfer is given up, and may still write into pages of this engine.

    ``settle`` returns when it does not any more, or when this engine closes.
    """

    def __init__(self, rule: str, settle: Callable[[], None], **values: object) -> None:
        super().__init__(rule, **values)
        self.settle = settle

    def when_settled(self, then: Callable[[], None]) -> None:
        """Have ``settle`` do something more at its end."""
        settle = self.settle

        def both() -> None:
            settle()
            then()

        self.settle = both


@dataclass
class TransferStats:
    """Sums over the transfers that this engine started. Changed under a lock by several threads.

    ``num_handed_over`` and ``num_expired`` are a producer's: prompts that another engine has, and
    prompts that nobody took in time.
    """

    num_transfers: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    num_handed_over: int = 0
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

    def __init__(
        self,
        info: EngineInfo,
        backend: TransferBackend,
        *,
        timeout: float,
        staging: StagingArea | None = None,
    ) -> None:
        self.info = info
        self.backend = backend
        self.timeout = timeout
        self._staging = staging
        self._staging_lock = threading.Lock()
        self.stats = TransferStats()
        self.last_transfer: dict[str, Any] | None = None
        self._backend_lock = threading.Lock()
        self._closing = threading.Event()

    def connect(self, peer: EngineInfo) -> None:
        with self._backend_lock:
            self.backend.connect(peer.engine_id, peer.agent_metadata)

    def disconnect(self, engine_id: str) -> None:
        with self._backend_lock:
            self.backend.disconnect(engine_id)

    def pull(
        self, peer: EngineInfo, peer_pages: Sequence[int], pages: Sequence[int], span: range
    ) -> None:
        """Read the tokens ``span`` of a sequence from a peer's pages into ours.

        Raises:
            UnsettledError: it takes too long, and our pages may still be written.
            TransferError: it was refused or has failed; nothing moves any more.
        """
        source, target = _sequence(peer, peer_pages), _sequence(self.info, pages)
        plan = plan_transfer(
            source.placement, target.placement, num_tokens=span.stop, first_token=span.start
        )
        wants_staging = self._staging is not None and is_staging_faster(
            plan, token_bytes=self.info.token_bytes
        )
        # A source that hangs keeps the staging pages; others need not wait for it.
        if wants_staging and self._staging_lock.acquire(timeout=_STAGING_SECONDS):
            self._pull_staged(peer, source, target, span)
        else:
            self._read(peer, plan, bind(plan, source, target))

    def _pull_staged(
        self, peer: EngineInfo, source: SequenceMemory, target: SequenceMemory, span: range
    ) -> None:
        """Through the staging pages, whose lock is held, and released when nothing lands there."""
        assert self._staging is not None, "nothing is staged without a place"
        staging = self._staging.cut(self.info, peer.page_size)
        plans = transfers(
            source.placement,
            target.placement,
            span,
            token_bytes=self.info.token_bytes,
            num_pages=len(staging.page_ids),
        )
        with ExitStack() as held:
            held.callback(self._staging_lock.release)
            try:
                for plan, is_staged in plans:
                    bound = bind(plan, source, target, staging=staging if is_staged else None)
                    self._read(peer, plan, bound)
                    put_in_order(bound, self.info, peer.page_size)
            except UnsettledError as error:
                error.when_settled(held.pop_all().close)
                raise

    def _read(self, peer: EngineInfo, plan: TransferPlan, bound: BoundTransfer) -> None:
        with self._moving(peer, plan, bound) as handle:
            if not self._is_settled(handle, time.monotonic() + self.timeout):
                raise UnsettledError(
                    "a transfer ends in time",
                    lambda: self._settle(handle),
                    timeout=self.timeout,
                    peer=peer.engine_id,
                )

    def push(
        self, peer: EngineInfo, peer_pages: np.ndarray, pages: Sequence[int], span: range
    ) -> None:
        """Write the tokens ``span`` of a sequence from our pages into a peer's.

        Returns, or raises TransferError, when nothing moves any more, however long that takes: it
        is the peer that has to know.
        """
        source, target = _sequence(self.info, pages), _sequence(peer, peer_pages)
        plan = plan_transfer(
            source.placement, target.placement, num_tokens=span.stop, first_token=span.start
        )
        with self._moving(peer, plan, bind(plan, source, target)) as handle:
            while not self._is_settled(handle, math.inf):  # this side closes, which will end it
                time.sleep(_LONGEST_PAUSE)

    @contextmanager
    def _moving(
        self, peer: EngineInfo, plan: TransferPlan, bound: BoundTransfer
    ) -> Iterator[TransferHandle]:
        """Start a transfer; see at the end that everything has arrived."""
        started = time.monotonic()
        with self._backend_lock:
            handle = self.backend.submit(bound, peer.engine_id)
        yield handle
        with self._backend_lock:
            state = handle.poll()
            handle.release()
        if state is not TransferState.DONE:
            raise TransferError("the transfer of a prompt's KV failed", peer=peer.engine_id)
        seconds = time.monotonic() - started
        self.last_transfer = _shown(plan, bound, self.backend.name, seconds)
        self.stats.add(
            num_transfers=1,
            num_bytes=bound.num_bytes,
            num_descriptors=bound.num_blocks,
            seconds=seconds,
        )

    def _is_settled(self, handle: TransferHandle, deadline: float) -> bool:
        """Wait until nothing moves any more, or until the deadline, or until this side closes."""
        pause = _SHORTEST_PAUSE
        while self._is_moving(handle):
            if time.monotonic() > deadline or self._closing.wait(pause):
                return False
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _is_moving(self, handle: TransferHandle) -> bool:
        with self._backend_lock:
            return handle.poll() is TransferState.MOVING

    def _settle(self, handle: TransferHandle) -> None:
        if self._is_settled(handle, math.inf):
            with self._backend_lock:
                handle.release()

    def stop_waiting(self) -> None:
        """This side is about to close: whoever waits for a transfer need not any more."""
        self._closing.set()

    def close(self) -> None:
        with self._backend_lock:
            self.backend.close()


def _sequence(engine: EngineInfo, page_ids: Sequence[int] | np.ndarray) -> SequenceMemory:
    return SequenceMemory(engine.placement, engine.regions, page_ids)


def _shown(
    plan: TransferPlan, bound: BoundTransfer, backend: str, seconds: float
) -> dict[str, Any]:
    """A transfer for people: bytes and pieces, [source ranks][target ranks].

    Pieces that lie one behind the other on both sides count one by one, though a library may move
    them together.
    """
    item_bytes = max(rank.token_bytes for rank in bound.source_ranks)
    pieces = np.zeros((plan.source.num_ranks, plan.target.num_ranks), int)
    for path in bound.paths:
        pieces[path.source_rank, path.target_rank] = path.num_blocks
    return {
        "backend": backend,
        "num_tokens": plan.num_tokens - plan.first_token,
        "num_bytes": bound.num_bytes,
        "seconds": seconds,
        "bytes": plan.bytes_by_path(item_bytes).tolist(),
        "pieces": pieces.tolist(),
    }
