"""The producer's side: prompts whose pages are kept until another engine has their KV.

The engine's thread opens exports, the side channel's answers calls, and one more frees what nobody
asks for any longer. Pages themselves are the scheduler's; it hears of the end of an export through
``on_end``.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_local import LocalKV
from dcpjax.engine.kv_offers import Offer
from dcpjax.engine.kv_writers import Writers
from dcpjax.engine.remote_kv import KVExport
from dcpjax.errors import PeerError
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.frames import pack_page_ids
from dcpjax.transfer.handshake import meet, welcome
from dcpjax.transfer.lease import Landing, LeaseTable
from dcpjax.transfer.messages import (
    Abort,
    Aborted,
    Claim,
    Claimed,
    Computed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Landed,
    Push,
    Pushed,
    Released,
    Wait,
    Welcome,
)
from dcpjax.transfer.side_channel import SideChannelServer

_SWEEPS_PER_LEASE = 20


class KVSource:
    """Serves the KV of finished prompts to other engines.

    Args:
        on_end: called, from any thread, with the id of a request whose pages may be freed.
        check_alive: raises the EngineDeadError of an engine of which a process is gone or failed.
    """

    def __init__(
        self,
        local: LocalKV,
        config: KVTransferConfig,
        on_end: Callable[[str], None],
        check_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._local = local
        self._on_end = on_end
        self._check_alive = check_alive
        self._leases = LeaseTable(config.kv_lease_duration, config.kv_lease_extension)
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        self._writers = Writers(local)
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

    def export(self, export: KVExport, *, num_ready: int | None = None) -> dict[str, Any]:
        """Offer a prompt; returns what another engine needs to load it.

        Args:
            num_ready: its tokens that are computed, where :meth:`advance` or :meth:`withdraw`
                follow; None: all of them.
        """
        offer = Offer(export, export.num_tokens if num_ready is None else num_ready)
        with self._lock:  # before the lease: what is held can be looked up
            self._offers[export.request_id] = offer
        self._leases.open(export.request_id)
        if offer.is_computing:
            self._leases.pin(export.request_id)  # it lasts as long as the computation at least
        info = self._local.info
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_is_partial": offer.is_computing,
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
            "pcp_size": info.pcp_size,
            "transfer_mode": "pull" if self._local.backend.pulls else "push",
        }

    def advance(self, request_id: str, num_ready: int) -> None:
        """More of an early offer is computed; nobody may want it any more."""
        with self._lock:
            offer = self._offers.get(request_id)
            if offer is None or not offer.is_computing:
                return
            offer.num_ready = num_ready
        self._tell(offer)
        if not offer.is_computing:
            self._leases.heartbeat([request_id])  # from here on it is like any other
            self._unpin(request_id)

    def withdraw(self, request_id: str) -> None:
        """The rest of an early offer will not come; who takes it hears of it and gives it up."""
        with self._lock:
            offer = self._offers.get(request_id)
            if offer is None or not offer.is_computing:
                return
            offer.is_withdrawn = True
            is_wanted = bool(offer.targets)
        self._tell(offer)
        if not is_wanted:
            self._leases.close(request_id)
        self._unpin(request_id)

    def _tell(self, offer: Offer) -> None:
        with self._lock:
            waiting, offer.waiting = offer.waiting, []
        offer.answer(waiting)

    def close(self) -> None:
        """Stop serving. Idempotent.

        What is being written ends first, or is ended, so that its target hears of it, and so that
        no new engine at this address speaks while this one writes.
        """
        self._closing.set()
        for request_id in list(self._offers):  # what is not computed yet will not be
            self.withdraw(request_id)
        self._writers.wait()
        self._local.close()  # what still moves has failed now, which ends the pushes
        self._greeter.shutdown(cancel_futures=True)
        self._writers.close()
        self._server.close()
        self._sweeper.join()

    # Calls of consumers, in the side channel's thread.

    def hello(self, call: Hello) -> Welcome | Future[Welcome]:
        theirs = meet(self._local.info, call)
        if self._local.backend.pulls:
            return welcome(self._local.info)
        return self._greeter.submit(self._welcome_target, theirs)  # connecting takes its time

    def wait(self, call: Wait) -> Computed | Future[Computed]:
        """Answered when there are more tokens, at the next sweep at the latest."""
        with self._lock:
            offer = self._offers.get(call.request_id)
            if offer is None:
                raise PeerError(
                    "the source holds the pages until they are read", request_id=call.request_id
                )
            offer.check_not_withdrawn()
            if offer.num_ready > call.num_tokens or not offer.is_computing:
                return Computed(num_tokens=offer.num_ready)
            answer: Future[Computed] = Future()
            offer.waiting.append(answer)
            return answer

    def push(self, call: Push) -> Future[Pushed]:
        self._writers.check_met(call.target_engine_id)
        if self._closing.is_set():
            raise PeerError("an engine that closes writes nothing", request_id=call.request_id)
        if not self._leases.pin(call.request_id):
            raise PeerError("the pages of a request are held", request_id=call.request_id)
        offer = self._want(call.request_id, call.target_engine_id)
        assert offer is not None, "a pinned offer has not ended"
        try:
            offer.check_computed(call.num_tokens)
            return self._writers.push(call, offer.export, lambda: self._unpin(call.request_id))
        except PeerError:
            self._unpin(call.request_id)
            raise

    def landed(self, call: Landed) -> Released:
        self._check_alive()  # what was read of a process that has failed may be anything
        landing = self._leases.land(call.request_id, call.target_ranks, call.num_target_ranks)
        if landing is Landing.RELEASED:
            self._local.stats.add(num_handed_over=1)
            self._end(call.request_id)
        return Released(ok=landing is not Landing.UNKNOWN)

    def claim(self, call: Claim) -> Claimed:
        """Raises PeerError unless the request is held and was offered like that."""
        held = self._leases.heartbeat([call.request_id])
        offer = self._want(call.request_id, call.target_engine_id)
        if not held or offer is None:
            raise PeerError(
                "the source holds the pages until they are read", request_id=call.request_id
            )
        export = offer.export
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
        held = self._leases.heartbeat(call.request_ids)
        for request_id in held:
            self._want(request_id, call.target_engine_id)
        return HeartbeatReply(request_ids=tuple(held))

    def abort(self, call: Abort) -> Aborted | Future[Aborted]:
        """The offer ends unless another target wants it too."""
        with self._lock:
            offer = self._offers.get(call.request_id)
            if offer is not None:
                offer.targets.discard(call.target_engine_id)
            is_wanted = offer is not None and bool(offer.targets)
        if not is_wanted and self._leases.close(call.request_id):
            self._end(call.request_id)
        return self._writers.aborted(call.request_id, call.target_engine_id)

    def _want(self, request_id: str, target: str) -> Offer | None:
        """Note that an engine wants an offer. None: there is no such offer any more."""
        with self._lock:
            offer = self._offers.get(request_id)
            if offer is not None:
                offer.targets.add(target)
            return offer

    # In threads of its own.

    def _welcome_target(self, target: EngineInfo) -> Welcome:
        self._writers.meet(target)
        return welcome(self._local.info)

    def _unpin(self, request_id: str) -> None:
        if self._leases.unpin(request_id):
            self._end(request_id)

    def _sweep(self) -> None:
        while not self._closing.wait(self._sweep_seconds):
            for request_id in self._leases.expire():
                self._local.stats.add(num_expired=1)
                self._end(request_id)
            with self._lock:
                offers = list(self._offers.values())
            for offer in offers:  # whoever waits hears that this engine lives
                self._tell(offer)
            self._writers.forget_idle()

    def _end(self, request_id: str) -> None:
        with self._lock:
            self._offers.pop(request_id, None)
        self._on_end(request_id)
