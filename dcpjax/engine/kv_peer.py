"""One engine that computes prompts, as a consumer of its KV knows it.

Has threads of its own, so that an engine that hangs costs its own requests only.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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


class RemoteSource:
    """Messages to one engine, and loads from it.

    Args:
        remote: of any request whose KV is there.
        closing: set when nobody waits for anything any more.
    """

    def __init__(self, local: LocalKV, remote: RemoteKV, closing: threading.Event) -> None:
        self._local = local
        self._engine_id = remote.engine_id
        self._client = SideChannelClient(channel_address(remote.host, remote.port))
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None
        self._expected: dict[str, str] = {}  # our request id -> theirs
        self._num_jobs = 0
        self._last_use = time.monotonic()
        self._is_beating = False
        self._is_closed = False
        self._closing = closing
        name = f"dcpjax-kv-{remote.engine_id[:8]}"
        self._loaders = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix=name)
        self._heart = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-heart")

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        with self._lock:
            self._expected[request_id] = remote.request_id

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._expected.pop(request_id, None)

    def submit(self, job: Callable[..., object], *args: object) -> None:
        """Do this in the background, unless the source is being closed."""
        with self._lock:
            if not self._is_closed:
                self._num_jobs += 1
                self._loaders.submit(self._do, job, *args)

    def _do(self, job: Callable[..., object], *args: object) -> None:
        try:
            job(*args)
        finally:
            with self._lock:
                self._num_jobs -= 1
                self._last_use = time.monotonic()

    def is_unused(self, since: float) -> bool:
        """Whether nobody has wanted anything of it since then, in monotonic seconds."""
        with self._lock:
            is_wanted = self._num_jobs or self._expected or self._is_beating
            return not is_wanted and self._last_use < since

    def close(self) -> None:
        """Wait for what is under way. What is still moving then ends with the backend."""
        with self._lock:
            self._is_closed = True
        self._loaders.shutdown(cancel_futures=True)
        self._client.close()
        self._heart.shutdown(cancel_futures=True)

    def disconnect(self) -> None:
        """Let the backend forget the engine, if it has met it."""
        if self._info is not None:
            with contextlib.suppress(TransferError):  # in use under another name of its host
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
            self.submit(self.give_up, request_id)
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
        info = self._info
        if info is None:
            greeting = hello(self._local.info, engine_id=self._engine_id)
            answer = self._client.hello(greeting, timeout_s=_HELLO_SECONDS)
            info = meet(self._local.info, answer, expected_engine_id=self._engine_id)
        self._local.connect(info)
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
