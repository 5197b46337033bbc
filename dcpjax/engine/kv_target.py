"""The consumer's side: brings the KV of prompts that other engines computed.

Every source has threads of its own here, so that one that hangs costs its own requests only. A load
ends exactly once, in ``on_end``, and only when nothing can write into its pages any more.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_local import LocalKV, UnsettledError
from dcpjax.engine.kv_peer import RemoteSource
from dcpjax.engine.remote_kv import KVLoad, RemoteKV
from dcpjax.errors import DcpjaxError

_UNUSED_SECONDS = 60.0
"""After which a source is forgotten. It may have been restarted since, under another identity, or
never have been there; and if it is asked again, that costs a handshake."""

_log = logging.getLogger(__name__)

_Place = tuple[str, str, int]
"""Engine id, host and port. All of them: a request that is wrong about an engine's address does not
change it for the others."""


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
        self._sources: dict[_Place, RemoteSource] = {}
        self._closing = threading.Event()
        self._interval = config.heartbeat_interval
        self._heart = threading.Thread(target=self._beat, name="dcpjax-kv-heartbeat", daemon=True)
        self._heart.start()

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        """A request has arrived: from now on its source is told that it is still wanted."""
        with self._lock:  # held until a source is in use, so that it is not forgotten meanwhile
            self._source(remote).expect(request_id, remote)

    def start(self, load: KVLoad) -> None:
        """Bring the KV of a load, in the background."""
        with self._lock:
            source = self._source(load.remote)
            source.submit(self._run, source, load)

    def cancel(self, request_id: str, remote: RemoteKV) -> None:
        """A request that was expected and not started does not want its KV any more."""
        with self._lock:
            source = self._source(remote)
            source.forget(request_id)
            source.submit(source.give_up, remote.request_id)

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

    def _source(self, remote: RemoteKV) -> RemoteSource:
        place = (remote.engine_id, remote.host, remote.port)
        if place not in self._sources:
            self._sources[place] = RemoteSource(self._local, remote, self._closing)
        return self._sources[place]

    # In threads of its own.

    def _run(self, source: RemoteSource, load: KVLoad) -> None:
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
                self._forget_unused(time.monotonic() - _UNUSED_SECONDS)
                sources = list(self._sources.values())
            for source in sources:
                source.beat_once()

    def _forget_unused(self, since: float) -> None:
        unused = [place for place, source in self._sources.items() if source.is_unused(since)]
        for place in unused:
            source = self._sources.pop(place)
            source.close()
            source.disconnect()
