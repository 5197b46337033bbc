"""The producer's side: prompts whose pages are kept until another engine has their KV.

The engine's thread opens exports, the side channel's answers calls, one more frees what nobody asks
for any longer, and each engine that is written to has threads of its own, so that one that hangs
holds up nobody else. Pages themselves are the scheduler's; it hears of the end of an export through
``on_end``.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.remote_kv import KVExport
from dcpjax.errors import PeerError, TransferError
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.frames import pack_page_ids, unpack_page_ids
from dcpjax.transfer.handshake import meet, welcome
from dcpjax.transfer.lease import Landing, LeaseTable
from dcpjax.transfer.messages import (
    Abort,
    Aborted,
    Claim,
    Claimed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Landed,
    Push,
    Pushed,
    Released,
    Welcome,
)
from dcpjax.transfer.side_channel import SideChannelServer

_SWEEPS_PER_LEASE = 20
_PUSH_THREADS = 2
_CLOSE_SECONDS = 10.0
"""What is being written has so long to arrive when this engine closes."""
_FORGET_SECONDS = 3600.0
"""A target that has asked for nothing for so long is left: it may have been restarted, with another
engine id. One that is still there says Hello again, since it leaves idle sources much earlier."""


@dataclass
class _Target:
    """An engine that has said Hello, and the threads that write to it."""

    info: EngineInfo
    pushers: ThreadPoolExecutor
    last_used: float


class KVSource:
    """Serves the KV of finished prompts to other engines.

    Args:
        on_end: called, from any thread, with the id of a request whose pages may be freed.
    """

    def __init__(
        self, local: LocalKV, config: KVTransferConfig, on_end: Callable[[str], None]
    ) -> None:
        self._local = local
        self._on_end = on_end
        self._leases = LeaseTable(config.kv_lease_duration, config.kv_lease_extension)
        self._lock = threading.Lock()
        self._exports: dict[str, KVExport] = {}
        self._targets: dict[str, _Target] = {}
        self._pushes: dict[str, list[Future[Pushed]]] = {}
        self._greeter = ThreadPoolExecutor(1, thread_name_prefix="dcpjax-kv-greet")
        self._closing = threading.Event()
        self._sweep_seconds = config.kv_lease_duration / _SWEEPS_PER_LEASE
        self._sweeper = threading.Thread(target=self._sweep, name="dcpjax-kv-leases", daemon=True)
        self._server = SideChannelServer(
            self, engine_id=local.info.engine_id, host=config.kv_ip, port=config.kv_port
        )
        self._host = config.host
        self._sweeper.start()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def export(self, export: KVExport) -> dict[str, Any]:
        """Offer a computed prompt; returns what another engine needs to load it."""
        with self._lock:  # before the lease: what is held can be looked up
            self._exports[export.request_id] = export
        self._leases.open(export.request_id)
        info = self._local.info
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": info.engine_id,
            "remote_request_id": export.request_id,
            "remote_block_ids": list(export.page_ids),
            "remote_block_size": info.page_size,
            "remote_num_tokens": export.num_tokens,
            "remote_prompt_digest": export.prompt_digest,
            "remote_host": self._host,
            "remote_port": self._server.port,
            "tp_size": info.tp_size,
            "dcp_size": info.dcp_size,
            "transfer_mode": "pull" if self._local.backend.pulls else "push",
        }

    def close(self) -> None:
        """Stop serving. Idempotent.

        What is being written ends first, or is ended, so that its target hears of it, and so that
        no new engine at this address speaks while this one writes.
        """
        self._closing.set()
        with self._lock:
            pushes = [push for pushes in self._pushes.values() for push in pushes]
        wait(pushes, timeout=_CLOSE_SECONDS)
        self._local.close()  # what still moves has failed now, which ends the pushes
        self._greeter.shutdown(cancel_futures=True)
        for target in self._targets.values():
            target.pushers.shutdown(cancel_futures=True)
        self._server.close()
        self._sweeper.join()

    # Calls of consumers, in the side channel's thread.

    def hello(self, call: Hello) -> Welcome | Future[Welcome]:
        theirs = meet(self._local.info, call)
        if self._local.backend.pulls:
            return welcome(self._local.info)
        return self._greeter.submit(self._welcome_target, theirs)  # connecting takes its time

    def push(self, call: Push) -> Future[Pushed]:
        target = self._use_target(call.target_engine_id)
        if self._closing.is_set():
            raise PeerError("an engine that closes writes nothing", request_id=call.request_id)
        if not self._leases.pin(call.request_id):
            raise PeerError("the pages of a request are held", request_id=call.request_id)
        with self._lock:  # pinned, so it has not ended
            export = self._exports[call.request_id]
            future = target.pushers.submit(self._push, call, target.info, export)
            self._pushes.setdefault(call.request_id, []).append(future)
        future.add_done_callback(lambda done: self._push_ended(call.request_id, done))
        return future

    def _use_target(self, engine_id: str) -> _Target:
        with self._lock:
            target = self._targets.get(engine_id)
            if target is None:
                raise PeerError("a target says Hello first", target=engine_id)
            target.last_used = time.monotonic()
            return target

    def landed(self, call: Landed) -> Released:
        landing = self._leases.land(call.request_id, call.target_ranks, call.num_target_ranks)
        if landing is Landing.RELEASED:
            self._end(call.request_id)
        return Released(ok=landing is not Landing.UNKNOWN)

    def claim(self, call: Claim) -> Claimed:
        """Raises PeerError unless the request is held and was offered like that."""
        held = self._leases.heartbeat([call.request_id])
        with self._lock:
            export = self._exports.get(call.request_id)
        if not held or export is None:
            raise PeerError(
                "the source holds the pages until they are read", request_id=call.request_id
            )
        offered = pack_page_ids(export.page_ids), export.prompt_digest
        if (call.page_ids, call.prompt_digest) != offered:
            raise PeerError(
                "a prompt is taken from the pages in which it was offered",
                request_id=call.request_id,
                offered=len(export.page_ids),
                pages=len(call.page_ids) // 4,
            )
        return Claimed()

    def heartbeat(self, call: Heartbeat) -> HeartbeatReply:
        return HeartbeatReply(request_ids=tuple(self._leases.heartbeat(call.request_ids)))

    def abort(self, call: Abort) -> Aborted | Future[Aborted]:
        if self._leases.close(call.request_id):
            self._end(call.request_id)
        with self._lock:
            pushes = list(self._pushes.get(call.request_id, ()))
        return _aborted_after(pushes)

    # In threads of its own.

    def _welcome_target(self, target: EngineInfo) -> Welcome:
        self._local.connect(target)
        with self._lock:
            if target.engine_id not in self._targets:
                name = f"dcpjax-kv-push-{target.engine_id[:8]}"
                pushers = ThreadPoolExecutor(_PUSH_THREADS, thread_name_prefix=name)
                self._targets[target.engine_id] = _Target(target, pushers, 0.0)
            self._targets[target.engine_id].last_used = time.monotonic()
        return welcome(self._local.info)

    def _push(self, call: Push, target: EngineInfo, export: KVExport) -> Pushed:
        page_ids = unpack_page_ids(call.page_ids, num_pages=_fewest_pages(target))
        span = range(call.first_token, call.num_tokens)
        if span.stop > export.num_tokens:
            raise PeerError(
                "only tokens that were computed are sent",
                num_tokens=span.stop,
                computed=export.num_tokens,
            )
        self._local.push(target, page_ids, export.page_ids, span)
        return Pushed()

    def _push_ended(self, request_id: str, push: Future[Pushed]) -> None:
        """It is over, or was cancelled before it began."""
        if not push.cancelled() and push.exception() is not None:
            self._local.stats.add(num_failed=1)
        with self._lock:
            self._pushes[request_id].remove(push)
            if not self._pushes[request_id]:
                del self._pushes[request_id]
        if self._leases.unpin(request_id):
            self._end(request_id)

    def _sweep(self) -> None:
        while not self._closing.wait(self._sweep_seconds):
            for request_id in self._leases.expire():
                self._local.stats.add(num_expired=1)
                self._end(request_id)
            self._forget_targets()

    def _forget_targets(self) -> None:
        horizon = time.monotonic() - _FORGET_SECONDS
        with self._lock:
            idle = [id for id, target in self._targets.items() if target.last_used < horizon]
            targets = [self._targets.pop(engine_id) for engine_id in idle]
        for target in targets:
            target.pushers.shutdown(wait=False)  # what hangs goes on, and ends its thread
            with contextlib.suppress(TransferError):  # it hangs: known to the backend until close
                self._local.disconnect(target.info.engine_id)

    def _end(self, request_id: str) -> None:
        with self._lock:
            self._exports.pop(request_id, None)
        self._on_end(request_id)


def _fewest_pages(target: EngineInfo) -> int:
    """Page ids below this are valid on every rank that holds something."""
    return min(region.num_pages for region in target.regions if region.num_bytes)


def _aborted_after(pushes: list[Future[Pushed]]) -> Aborted | Future[Aborted]:
    """The answer to an Abort, when all of what writes for the request is over.

    There may be several: a router that gets no answer of a target asks another one.
    """
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
