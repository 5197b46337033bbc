"""The engines that a producer writes to, where the backend pushes, and what is being written.

Each has threads of its own, so that one that hangs holds up nobody else.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.remote_kv import KVExport
from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.frames import unpack_page_ids
from dcpjax.transfer.messages import Aborted, Push, Pushed

_PUSH_THREADS = 2
_CLOSE_SECONDS = 10.0
"""What is being written has so long to arrive when this engine closes."""
_FORGET_SECONDS = 3600.0
"""A target that has asked for nothing for so long is left: it may have been restarted, with another
engine id. One that is still there says Hello again, since it leaves idle sources much earlier."""

_Key = tuple[str, str]  # request id, engine id of the target


@dataclass
class _Target:
    """An engine that has said Hello, and the threads that write to it."""

    info: EngineInfo
    pushers: ThreadPoolExecutor
    last_used: float


class Writers:
    """Writes prompts into pages of other engines. Every method may be called from any thread."""

    def __init__(self, local: LocalKV) -> None:
        self._local = local
        self._lock = threading.Lock()
        self._targets: dict[str, _Target] = {}
        self._pushes: dict[_Key, list[Future[Pushed]]] = {}

    def meet(self, info: EngineInfo) -> None:
        """Get ready to write to an engine. Connecting takes its time."""
        self._local.connect(info)
        with self._lock:
            if info.engine_id not in self._targets:
                name = f"dcpjax-kv-push-{info.engine_id[:8]}"
                pushers = ThreadPoolExecutor(_PUSH_THREADS, thread_name_prefix=name)
                self._targets[info.engine_id] = _Target(info, pushers, 0.0)
            self._targets[info.engine_id].last_used = time.monotonic()

    def check_met(self, engine_id: str) -> None:
        """Raise PeerError for an engine that has not said Hello, or has been forgotten since."""
        with self._lock:
            if engine_id not in self._targets:
                raise PeerError("a target says Hello first", target=engine_id)

    def push(self, call: Push, export: KVExport, then: Callable[[], None]) -> Future[Pushed]:
        """Begin to write.

        Args:
            then: called, from any thread, when nothing of it moves any more.

        Raises:
            PeerError: the target has not said Hello.
        """
        key = call.request_id, call.target_engine_id
        with self._lock:
            target = self._targets.get(call.target_engine_id)
            if target is None:
                raise PeerError("a target says Hello first", target=call.target_engine_id)
            target.last_used = time.monotonic()
            future = target.pushers.submit(self._push, call, target.info, export)
            self._pushes.setdefault(key, []).append(future)
        future.add_done_callback(lambda done: self._push_ended(key, done, then))
        return future

    def aborted(self, request_id: str, engine_id: str) -> Aborted | Future[Aborted]:
        """The answer to an Abort, when all that writes for the request into this target is over."""
        with self._lock:
            pushes = list(self._pushes.get((request_id, engine_id), ()))
        return _aborted_after(pushes)

    def wait(self) -> None:
        """Give what is being written a while to arrive."""
        with self._lock:
            pushes = [push for pushes in self._pushes.values() for push in pushes]
        wait(pushes, timeout=_CLOSE_SECONDS)

    def close(self) -> None:
        """End all threads, once nothing moves any more."""
        for target in self._targets.values():
            target.pushers.shutdown(cancel_futures=True)

    def forget_idle(self) -> None:
        """Leave the targets that have asked for nothing for long."""
        horizon = time.monotonic() - _FORGET_SECONDS
        with self._lock:
            idle = [id for id, target in self._targets.items() if target.last_used < horizon]
            targets = [self._targets.pop(engine_id) for engine_id in idle]
        for target in targets:
            target.pushers.shutdown(wait=False)  # what hangs goes on, and ends its thread
            with contextlib.suppress(TransferError):  # it hangs: known to the backend until close
                self._local.disconnect(target.info)

    def _push(self, call: Push, target: EngineInfo, export: KVExport) -> Pushed:
        page_ids = unpack_page_ids(call.page_ids, num_pages=target.num_pages)
        span = range(call.first_token, call.num_tokens)
        self._local.push(target, page_ids, export.page_ids, span)
        return Pushed()

    def _push_ended(self, key: _Key, push: Future[Pushed], then: Callable[[], None]) -> None:
        """It is over, or was cancelled before it began."""
        if not push.cancelled() and push.exception() is not None:
            self._local.stats.add(num_failed=1)
        with self._lock:
            self._pushes[key].remove(push)
            if not self._pushes[key]:
                del self._pushes[key]
        then()


def _aborted_after(pushes: list[Future[Pushed]]) -> Aborted | Future[Aborted]:
    if not pushes:
        return Aborted()
    answer: Future[Aborted] = Future()

    def look(_: object) -> None:
        while pushes and pushes[-1].done():
            pushes.pop()
        if pushes:
            pushes[-1].add_done_callback(look)
        else:
            answer.set_result(Aborted())

    pushes[-1].add_done_callback(look)
    return answer
