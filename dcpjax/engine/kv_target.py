"""The consumer's side: brings the KV of prompts that other engines computed.

Every source has threads of its own here, so that one that hangs costs its own requests only: while
its transfers are not settled, it is asked for nothing more. ``on_end`` hears of the end of every
load, and of its pages when nothing can write into them any more.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_local import LocalKV, UnsettledError
from dcpjax.engine.kv_peer import SourcePeer
from dcpjax.engine.remote_kv import KVLoad, RemoteKV
from dcpjax.errors import DcpjaxError

_log = logging.getLogger(__name__)

_Place = tuple[str, str, int]  # engine id, host and port: what a request says is no more than that


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
        on_overdue: called, from any thread, with the id of a request that was given up because it
            has waited for room for too long.
    """

    def __init__(
        self,
        local: LocalKV,
        config: KVTransferConfig,
        on_end: Callable[[LoadEnd], None],
        on_overdue: Callable[[str], None],
    ) -> None:
        self._local = local
        self._on_end = on_end
        self._on_overdue = on_overdue
        self._patience = config.kv_wait_timeout
        self._lock = threading.Lock()
        self._sources: dict[_Place, SourcePeer] = {}
        self._wanted: set[str] = set()  # loads that have not ended and were not abandoned
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
        source.begin(load.request_id)
        with self._lock:
            self._wanted.add(load.request_id)
        source.loaders.submit(self._run, source, load)

    def abandon(self, request_id: str) -> None:
        """The request of a load was aborted: what is still being computed need not come."""
        with self._lock:
            self._wanted.discard(request_id)

    def cancel(self, request_id: str, remote: RemoteKV) -> None:
        """A request that was expected and not started does not want its KV any more."""
        source = self._source(remote)
        source.forget(request_id)
        source.give_up_later(remote.request_id)

    def close(self) -> None:
        """Leave all sources. What still moves goes on until the backend is closed. Idempotent."""
        self._closing.set()
        self._local.stop_waiting()
        self._heart.join()
        with self._lock:
            sources = list(self._sources.values())
            self._sources.clear()
        for source in sources:
            source.close()

    def _source(self, remote: RemoteKV) -> SourcePeer:
        place = (remote.engine_id, remote.host, remote.port)
        with self._lock:
            if place not in self._sources:
                self._sources[place] = SourcePeer(self._local, remote, self._closing)
            self._sources[place].touch()
            return self._sources[place]

    # In threads of its own.

    def _run(self, source: SourcePeer, load: KVLoad) -> None:
        end = LoadEnd(load)
        settle: Callable[[], None] | None = None
        try:
            source.load(load, lambda: load.request_id in self._wanted)
        except UnsettledError as error:
            end, settle = LoadEnd(load, str(error), is_settled=False), error.settle
        except DcpjaxError as error:
            end = LoadEnd(load, str(error))
        except Exception:  # whatever it was: a load that never ends would hold its pages for ever
            _log.exception("loading KV of request %s", load.request_id)
            end = LoadEnd(load, "the engine failed to load KV; its log has the reason")
        source.forget(load.request_id)
        self.abandon(load.request_id)
        if end.reason is not None:
            self._local.stats.add(num_failed=1)
            _log.warning("KV of request %s was not loaded: %s", load.request_id, end.reason)
        self._on_end(end)
        if settle is not None:
            settled = dataclasses.replace(end, is_settled=True)
            source.hang(settle, lambda: self._on_end(settled))

    def _beat(self) -> None:
        while not self._closing.wait(self._interval):
            with self._lock:
                sources = list(self._sources.values())
            for source in sources:
                self._drop_waiting(source)
                source.beat_once()
            self._leave_idle()

    def _drop_waiting(self, source: SourcePeer) -> None:
        """Two engines could else wait for ever, each for the pages that it holds for the other."""
        for request_id in source.drop_waiting(self._patience):
            self._local.stats.add(num_failed=1)
            _log.warning("KV of request %s is given up: there was no room in time", request_id)
            self._on_overdue(request_id)

    def _leave_idle(self) -> None:
        with self._lock:
            idle = [place for place, source in self._sources.items() if source.is_idle]
            sources = [self._sources.pop(place) for place in idle]
        for source in sources:
            source.close()
            source.disconnect()
