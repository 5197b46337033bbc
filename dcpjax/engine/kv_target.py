"""The consumer's side: brings the KV of prompts that other engines computed.

Every source has threads of its own here, so that one that hangs costs its own requests only. A load
ends exactly once, in ``on_end``, and only when nothing can write into its pages any more.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_local import LocalKV, UnsettledError
from dcpjax.engine.remote_kv import KVLoad, RemoteKV
from dcpjax.errors import DcpjaxError, PeerError, TransferError
from dcpjax.transfer.handshake import EngineInfo, hello, meet
from dcpjax.transfer.messages import (
    MAX_IDS,
    Abort,
    Heartbeat,
    Landed,
    PeerRefusedError,
    Push,
    pack_page_ids,
)
from dcpjax.transfer.side_channel import channel_address
from dcpjax.transfer.side_channel_client import PeerGoneError, SideChannelClient

_HELLO_SECONDS = 5.0
_CALL_SECONDS = 10.0
_LOAD_THREADS = 2
_SILENCES = 10
"""Timeouts of a transfer after which a source that was asked to write and is silent counts as dead.
Its own writes end within one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadEnd:
    """A load is over.

    Attributes:
        reason: why it failed; None: its KV is in place.
        is_settled: nothing writes into its pages any more.
    """

    load: KVLoad
    reason: str | None = None
    is_settled: bool = True


class KVTarget:
    """Loads KV from other engines.

    Args:
        on_end: called, from any thread, once when a load ends, and once more when its pages are
            settled if they were not then.
    """

    def __init__(
        self,
        local: LocalKV,
        config: KVTransferConfig,
        on_end: Callable[[LoadEnd], None],
    ) -> None:
        self._local = local
        self._on_end = on_end
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._closing = threading.Event()
        self._interval = config.heartbeat_interval
        self._heart = threading.Thread(target=self._beat, name="dcpjax-kv-heartbeat", daemon=True)
        self._heart.start()

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        """A request has arrived: from now on its source is told that it is still wanted."""
        self._source(remote).expect(request_id, remote)

    def start(self, load: KVLoad) -> None:
        """Bring the KV of a load, in the background."""
        source = self._source(load.remote)
        source.loaders.submit(self._run, source, load)

    def cancel(self, request_id: str, remote: RemoteKV) -> None:
        """A request that was expected and not started does not want its KV any more."""
        source = self._source(remote)
        source.forget(request_id)
        source.loaders.submit(source.give_up, remote.request_id)

    def close(self) -> None:
        """Wait for what still moves and leave all sources. Idempotent."""
        self._closing.set()
        self._local.stop_waiting()
        self._heart.join()
        with self._lock:
            sources = list(self._sources.values())
            self._sources.clear()
        for source in sources:
            source.close()

    def _source(self, remote: RemoteKV) -> "_Source":
        with self._lock:
            if remote.engine_id not in self._sources:
                self._sources[remote.engine_id] = _Source(self._local, remote, self._closing)
            return self._sources[remote.engine_id]

    # In threads of its own.

    def _run(self, source: "_Source", load: KVLoad) -> None:
        end = LoadEnd(load)
        settle: Callable[[], None] | None = None
        try:
            source.load(load)
        except UnsettledError as error:
            end, settle = LoadEnd(load, str(error), is_settled=False), error.settle
        except DcpjaxError as error:
            end = LoadEnd(load, str(error))
        except Exception:  # whatever it was: a load that never ends would hold its pages for ever
            _log.exception("loading KV of request %s", load.request_id)
            end = LoadEnd(load, "the engine failed to load KV; its log has the reason")
        source.forget(load.request_id)
        if end.reason is not None:
            self._local.stats.add(num_failed=1)
            _log.warning("KV of request %s was not loaded: %s", load.request_id, end.reason)
        self._on_end(end)
        if settle is not None:
            settle()
            self._on_end(dataclasses.replace(end, is_settled=True))

    def _beat(self) -> None:
        while not self._closing.wait(self._interval):
            with self._lock:
                sources = list(self._sources.values())
            for source in sources:
                source.beat_once()


class _Source:
    """One engine that computes prompts, as this one knows it."""

    def __init__(self, local: LocalKV, remote: RemoteKV, closing: threading.Event) -> None:
        self._local = local
        self._engine_id = remote.engine_id
        self._client = SideChannelClient(channel_address(remote.host, remote.port))
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None
        self._expected: dict[str, str] = {}  # our request id -> theirs
        self._is_beating = False
        self._closing = closing
        name = f"dcpjax-kv-{remote.engine_id[:8]}"
        self.loaders = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix=name)
        self._heart = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-heart")

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        with self._lock:
            self._expected[request_id] = remote.request_id

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._expected.pop(request_id, None)

    def close(self) -> None:
        self.loaders.shutdown(cancel_futures=True)
        self._client.close()
        self._heart.shutdown(cancel_futures=True)
        self._local.disconnect(self._engine_id)

    def load(self, load: KVLoad) -> None:
        """Bring the KV of a load into its pages.

        Raises:
            DcpjaxError: it is not there, and nothing writes into the pages any more.
        """
        request_id = load.remote.request_id
        try:
            info = self._handshake()
            self._bring(info, load)
            released = self._client.landed(self._landed(request_id), timeout_s=_CALL_SECONDS)
        except DcpjaxError:
            self.loaders.submit(self.give_up, request_id)
            raise
        if not released.ok:
            raise TransferError(
                "the source holds the pages until they are read", request_id=request_id
            )

    def _landed(self, request_id: str) -> Landed:
        num_ranks = self._local.info.placement.num_ranks
        return Landed(
            engine_id=self._engine_id,
            request_id=request_id,
            target_ranks=tuple(range(num_ranks)),
            num_target_ranks=num_ranks,
        )

    def give_up(self, request_id: str) -> bool:
        """Tell the source that a request is not wanted. Returns whether it writes no more."""
        call = Abort(engine_id=self._engine_id, request_id=request_id)
        try:
            self._client.abort(call, timeout_s=_CALL_SECONDS)
        except PeerGoneError:  # another engine is there, so the one that could write is gone
            return True
        except PeerError:
            return False
        return True

    def _settle(self, request_id: str) -> None:
        """Until the source writes no more, or has been silent for so long that it must be dead."""
        deadline = time.monotonic() + _SILENCES * self._local.timeout
        while not self.give_up(request_id) and time.monotonic() < deadline:
            if self._closing.wait(1.0):
                return

    def beat_once(self) -> None:
        """Tell the source which requests are wanted, unless it has not answered the last time."""
        with self._lock:
            if self._is_beating or not self._expected:
                return
            self._is_beating = True
        self._heart.submit(self._beat)

    def _beat(self) -> None:
        try:
            with self._lock:
                request_ids = list(dict.fromkeys(self._expected.values()))
            for start in range(0, len(request_ids), MAX_IDS):
                wanted = tuple(request_ids[start : start + MAX_IDS])
                self._client.heartbeat(
                    Heartbeat(engine_id=self._engine_id, request_ids=wanted),
                    timeout_s=_CALL_SECONDS,
                )
        except PeerError as error:
            _log.info("no heartbeat to engine %s: %s", self._engine_id, error)
        finally:
            self._is_beating = False

    def _handshake(self) -> EngineInfo:
        with self._lock:
            if self._info is not None:
                return self._info
        greeting = hello(self._local.info, engine_id=self._engine_id)
        answer = self._client.hello(greeting, timeout_s=_HELLO_SECONDS)
        info = meet(self._local.info, answer, expected_engine_id=self._engine_id)
        self._local.connect(info)
        with self._lock:
            self._info = info
        return info

    def _bring(self, info: EngineInfo, load: KVLoad) -> None:
        span = range(load.first_token, load.stop_token)
        if not span:
            return
        if self._local.backend.pulls:
            self._local.pull(info, load.remote.page_ids, load.page_ids, span)
            return
        call = Push(
            engine_id=self._engine_id,
            request_id=load.remote.request_id,
            target_engine_id=self._local.info.engine_id,
            first_token=span.start,
            num_tokens=span.stop,
            page_ids=pack_page_ids(load.page_ids),
        )
        try:
            self._client.push(call, timeout_s=self._local.timeout)
        except (PeerRefusedError, PeerGoneError):
            raise
        except PeerError as error:  # it may have begun to write
            raise UnsettledError(
                error.rule, lambda: self._settle(call.request_id), **error.values
            ) from error
