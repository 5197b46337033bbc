"""One engine that computes prompts, as an engine that loads their KV knows it.

Blocks as long as the other side does not answer, so all that is asked of it runs in threads of its
own.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from dcpjax.engine.kv_local import LocalKV, UnsettledError
from dcpjax.engine.remote_kv import KVLoad, RemoteKV
from dcpjax.errors import DcpjaxError, PeerError, TransferError
from dcpjax.transfer.engine_info import EngineInfo
from dcpjax.transfer.frames import PeerRefusedError, pack_page_ids
from dcpjax.transfer.handshake import hello, meet
from dcpjax.transfer.messages import MAX_IDS, Abort, Claim, Heartbeat, Landed, Push, Wait
from dcpjax.transfer.side_channel import channel_address
from dcpjax.transfer.side_channel_client import PeerGoneError, SideChannelClient, is_deserted

_HELLO_SECONDS = 5.0
_CALL_SECONDS = 10.0
_LOAD_THREADS = 2
_REMIND_SECONDS = 60.0
"""Between two warnings about pages that a silent source may still write into."""
_HELD = "the source holds the pages until they are read"
_IDLE_SECONDS = 600.0
"""A source that nobody has asked for so long is left; it may not even exist any more."""

_log = logging.getLogger(__name__)


class SourcePeer:
    """One engine that computes prompts, as this one knows it."""

    def __init__(self, local: LocalKV, remote: RemoteKV, closing: threading.Event) -> None:
        self._local = local
        self._engine_id = remote.engine_id
        self._address = remote.host, remote.port
        self._client = SideChannelClient(channel_address(remote.host, remote.port))
        self._lock = threading.Lock()
        self._info: EngineInfo | None = None
        self._expected: dict[str, str] = {}  # our request id -> theirs
        self._waiting: dict[str, float] = {}  # those without room yet -> since when
        self._is_beating = False
        self._closing = closing
        self._hanging: set[threading.Thread] = set()
        self._last_used = time.monotonic()
        name = f"dcpjax-kv-{remote.engine_id[:8]}"
        self.loaders = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix=name)
        self._heart = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-heart")

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        with self._lock:
            self._expected[request_id] = remote.request_id
            self._waiting[request_id] = time.monotonic()

    def begin(self, request_id: str) -> None:
        """There is room for an expected request."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._expected.pop(request_id, None)
            self._waiting.pop(request_id, None)

    def drop_waiting(self, seconds: float) -> list[str]:
        """Give up those that have waited for room for so long; returns their ids."""
        horizon = time.monotonic() - seconds
        with self._lock:
            overdue = [name for name, since in self._waiting.items() if since <= horizon]
            theirs = [self._expected.pop(name) for name in overdue]
            for name in overdue:
                del self._waiting[name]
        for request_id in theirs:
            self.give_up_later(request_id)
        return overdue

    def touch(self) -> None:
        """Somebody is about to use it."""
        self._last_used = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Whether nobody wants anything of it, and has not for a while."""
        with self._lock:
            is_wanted = self._expected or self._hanging
        return not is_wanted and time.monotonic() - self._last_used > _IDLE_SECONDS

    def close(self) -> None:
        """End what it is asked, and leave no thread behind."""
        self._client.close()  # first: whoever waits for an answer waits no more
        self.loaders.shutdown(cancel_futures=True)
        self._heart.shutdown(cancel_futures=True)
        with self._lock:
            hanging = list(self._hanging)
        for thread in hanging:
            thread.join()

    def disconnect(self) -> None:
        """Have the backend forget it, if it knows it. Nothing moves any more."""
        if self._info is None:
            return
        try:
            self._local.disconnect(self._info)
        except TransferError as error:  # it is known under another address too, and in use there
            _log.info("engine %s is not forgotten: %s", self._engine_id, error)

    def hang(self, settle: Callable[[], None], then: Callable[[], None]) -> None:
        """Ask for nothing more until ``settle`` has returned, and do something then."""

        def run() -> None:
            settle()
            with self._lock:
                self._hanging.discard(thread)
            then()

        thread = threading.Thread(target=run, name="dcpjax-kv-settle", daemon=True)
        with self._lock:
            self._hanging.add(thread)
        thread.start()

    def give_up_later(self, request_id: str) -> None:
        with contextlib.suppress(RuntimeError):  # closed: the lease ends by itself
            self.loaders.submit(self.give_up, request_id)

    def load(self, load: KVLoad, is_wanted: Callable[[], bool]) -> None:
        """Bring the KV of a load into its pages, as far as it is computed, until it is all there.

        Args:
            is_wanted: asked from time to time while it is still being computed.

        Raises:
            DcpjaxError: it is not there, and nothing writes into the pages any more.
        """
        request_id = load.remote.request_id
        if load.first_token == load.stop_token:  # all of it is here already
            self.give_up_later(request_id)
            return
        self._check_not_hanging()
        info = self._handshake()
        self._local.connect(info)  # of no effect where it is known
        self._claim(load.remote)  # not ours to give up before this is right
        try:
            for span in self._spans(info, load, is_wanted):
                self._bring(info, load, span)
            released = self._client.landed(self._landed(request_id), timeout_s=_CALL_SECONDS)
        except DcpjaxError:
            self.give_up_later(request_id)
            raise
        if not released.ok:
            raise TransferError(_HELD, request_id=request_id)

    def _check_not_hanging(self) -> None:
        with self._lock:
            hanging = len(self._hanging)
        if hanging:
            raise TransferError(
                "a source is asked for more when its transfers have ended",
                engine_id=self._engine_id,
                unsettled=hanging,
            )

    def _landed(self, request_id: str) -> Landed:
        num_ranks = self._local.info.num_ranks
        return Landed(
            engine_id=self._engine_id,
            request_id=request_id,
            target_ranks=tuple(range(num_ranks)),
            num_target_ranks=num_ranks,
        )

    def give_up(self, request_id: str) -> bool:
        """Tell the source that a request is not wanted. Returns whether it writes no more."""
        call = Abort(
            engine_id=self._engine_id,
            request_id=request_id,
            target_engine_id=self._local.info.engine_id,
        )
        try:
            self._client.abort(call, timeout_s=_CALL_SECONDS)
        except PeerGoneError:  # another engine is there, so the one that could write is gone
            return True
        except PeerError:
            return False
        return True

    def _settle(self, request_id: str) -> None:
        """Until the source writes no more: it says so, or is gone. No silence is long enough."""
        warned = -math.inf
        while not (
            self.give_up(request_id) or is_deserted(*self._address, timeout_s=_CALL_SECONDS)
        ):
            if time.monotonic() - warned >= _REMIND_SECONDS:
                warned = time.monotonic()
                _log.warning(
                    "engine %s may still write KV of request %s and does not answer: the pages "
                    "stay out of use until it does, or is gone",
                    self._engine_id,
                    request_id,
                )
            if self._closing.wait(1.0):
                return
        _log.info("engine %s writes no KV of request %s any more", self._engine_id, request_id)

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
                call = Heartbeat(
                    engine_id=self._engine_id,
                    target_engine_id=self._local.info.engine_id,
                    request_ids=wanted,
                )
                self._client.heartbeat(call, timeout_s=_CALL_SECONDS)
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
        with self._lock:
            self._info = info
        return info

    def _claim(self, remote: RemoteKV) -> None:
        """Nothing is taken from pages that are somebody else's by now, or always were."""
        call = Claim(
            engine_id=self._engine_id,
            request_id=remote.request_id,
            target_engine_id=self._local.info.engine_id,
            prompt_digest=remote.prompt_digest,
            page_ids=pack_page_ids(remote.page_ids),
        )
        self._client.claim(call, timeout_s=_CALL_SECONDS)

    def _spans(
        self, info: EngineInfo, load: KVLoad, is_wanted: Callable[[], bool]
    ) -> Iterator[range]:
        """The tokens to load, piece by piece as they are computed. Pieces end with a virtual page
        of the source, beyond which its next step writes."""
        start, page = load.first_token, info.page_size * info.dcp_size
        num_ready = start if load.remote.is_partial else load.stop_token
        while start < load.stop_token:
            stop = num_ready // page * page if num_ready < load.stop_token else load.stop_token
            if stop > start:
                yield range(start, stop)
                start = stop
            else:
                num_ready = self._wait(load.remote.request_id, num_ready, is_wanted)

    def _wait(self, request_id: str, num_tokens: int, is_wanted: Callable[[], bool]) -> int:
        if not is_wanted():
            raise TransferError("a request is loaded as long as it lasts", request_id=request_id)
        call = Wait(engine_id=self._engine_id, request_id=request_id, num_tokens=num_tokens)
        return self._client.wait(call, timeout_s=_CALL_SECONDS).num_tokens

    def _bring(self, info: EngineInfo, load: KVLoad, span: range) -> None:
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
            self._info = None  # the next load greets it again, should it have forgotten us
            raise
        except PeerError as error:  # it may have begun to write
            raise UnsettledError(
                error.rule, lambda: self._settle(call.request_id), **error.values
            ) from error
