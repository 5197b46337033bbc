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

from dcpjax.engine.kv_moves import Moved, Plans, SequenceMove
from dcpjax.engine.kv_staging import StagingArea, put_in_order, transfers
from dcpjax.errors import TransferError
from dcpjax.transfer import agents
from dcpjax.transfer.backend import TransferBackend, TransferHandle, TransferState
from dcpjax.transfer.bind import BoundTransfer, bind
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.plan import TransferPlan
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
            agents.connect(self.backend, peer)

    def disconnect(self, peer: EngineInfo) -> None:
        with self._backend_lock:
            agents.disconnect(self.backend, peer)

    def pull(
        self, peer: EngineInfo, peer_pages: Sequence[int], pages: Sequence[int], span: range
    ) -> None:
        """Read the tokens ``span`` of a sequence from a peer's pages into ours, in all parts.

        Raises:
            UnsettledError: it takes too long, and our pages may still be written.
            TransferError: it was refused or has failed; nothing moves any more.
        """
        move = SequenceMove(peer, peer_pages, self.info, pages, span)
        staged = [part for part, plan in move.plans.items() if self._wants_staging(part, plan)]
        # A source that hangs keeps the staging pages; others need not wait for it.
        if staged and self._staging_lock.acquire(timeout=_STAGING_SECONDS):
            moved = self._pull_staged(move, staged)
        else:
            staged, moved = [], []
        direct = {part: plan for part, plan in move.plans.items() if part not in staged}
        if direct:
            moved.append(self._read(move, direct, move.bind(direct)))
        self.last_transfer = move.shown(moved, self.backend.name)

    def _wants_staging(self, part: str, plan: TransferPlan) -> bool:
        own = self.info.part(part)
        if self._staging is None or own.field_bytes:  # rows are put in order, not their fields
            return False
        return is_staging_faster(plan, token_bytes=own.token_bytes)

    def _pull_staged(self, move: SequenceMove, parts: Sequence[str]) -> list[Moved]:
        """Through the staging pages, whose lock is held, and released when nothing lands there."""
        with ExitStack() as held:
            held.callback(self._staging_lock.release)
            try:
                return [moved for part in parts for moved in self._pull_part_staged(move, part)]
            except UnsettledError as error:
                error.when_settled(held.pop_all().close)
                raise

    def _pull_part_staged(self, move: SequenceMove, part: str) -> Iterator[Moved]:
        assert self._staging is not None, "nothing is staged without a place"
        source, target = move.memory(part)
        own, page_size = self.info.part(part), source.placement.page_size
        staging = self._staging.cut(own, page_size)
        rounds = transfers(
            source.placement,
            target.placement,
            move.span,
            token_bytes=own.token_bytes,
            num_pages=len(staging.page_ids),
        )
        for plan, is_staged in rounds:
            bound = bind(plan, source, target, staging=staging if is_staged else None)
            yield self._read(move, {part: plan}, bound)
            put_in_order(bound, own, page_size)

    def _read(self, move: SequenceMove, plans: Plans, bound: BoundTransfer) -> Moved:
        started = time.monotonic()
        with self._moving(move.source, bound) as handle:
            if not self._is_settled(handle, time.monotonic() + self.timeout):
                raise UnsettledError(
                    "a transfer ends in time",
                    lambda: self._settle(handle),
                    timeout=self.timeout,
                    peer=move.source.engine_id,
                )
        return self._arrived(plans, bound, started)

    def push(
        self, peer: EngineInfo, peer_pages: np.ndarray, pages: Sequence[int], span: range
    ) -> None:
        """Write the tokens ``span`` of a sequence from our pages into a peer's, in all its parts.

        Returns, or raises TransferError, when nothing moves any more, however long that takes: it
        is the peer that has to know.
        """
        move = SequenceMove(self.info, pages, peer, peer_pages, span)
        bound, started = move.bind(move.plans), time.monotonic()
        with self._moving(peer, bound) as handle:
            while not self._is_settled(handle, math.inf):  # this side closes, which will end it
                time.sleep(_LONGEST_PAUSE)
        moved = self._arrived(move.plans, bound, started)
        self.last_transfer = move.shown([moved], self.backend.name)

    @contextmanager
    def _moving(self, peer: EngineInfo, bound: BoundTransfer) -> Iterator[TransferHandle]:
        """Start a transfer; see at the end that everything has arrived."""
        with self._backend_lock:
            handle = agents.submit(self.backend, bound, peer)
        yield handle
        with self._backend_lock:
            state = handle.poll()
            handle.release()
        if state is not TransferState.DONE:
            raise TransferError("the transfer of a prompt's KV failed", peer=peer.engine_id)

    def _arrived(self, plans: Plans, bound: BoundTransfer, started: float) -> Moved:
        moved = Moved(plans, bound, time.monotonic() - started)
        self.stats.add(
            num_transfers=1,
            num_bytes=bound.num_bytes,
            num_descriptors=bound.num_blocks,
            seconds=moved.seconds,
        )
        return moved

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
