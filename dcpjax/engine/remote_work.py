"""The loads and exports of a scheduler: what is wanted of others, and how it ends. Host only.

A loading request has a slot and pages like a running one, but cannot be preempted: something
outside writes into its pages. Every load ends in bounded time, so this only delays the others.
"""

from dcpjax.cache.prefix import PagePool
from dcpjax.engine.lineup import Lineup
from dcpjax.engine.remote_kv import KVEvents, KVExport, KVLoad, PageHolds, prompt_digest
from dcpjax.engine.request import FinishReason, Request, Status
from dcpjax.engine.residency import Residency


class RemoteWork:
    """KV on its way from and to other engines.

    Each load that :meth:`take_events` tells of has to end in :meth:`land` or :meth:`fail_load`,
    also if its request is aborted, and each export in :meth:`end_export`: only then are the pages
    used for anything else.
    """

    def __init__(self, pool: PagePool, residency: Residency, lineup: Lineup) -> None:
        self._pool = pool
        self._residency = residency
        self._lineup = lineup
        self._events = KVEvents()
        self._exports = PageHolds(pool)
        self._orphans = PageHolds(pool)  # of loads whose request was aborted

    def __contains__(self, request_id: str) -> bool:
        """Whether pages are held for a request of this id, which may have ended."""
        return request_id in self._orphans or request_id in self._exports

    @property
    def pages(self) -> set[int]:
        """Held beyond the end of their requests."""
        return self._exports.pages | self._orphans.pages

    @property
    def num_loading(self) -> int:
        """Requests whose KV is on the way, those that were aborted meanwhile included."""
        loading = sum(r.status is Status.LOADING for r in self._lineup.running.values())
        return loading + len(self._orphans)

    def take_events(self) -> KVEvents:
        """What is wanted of other engines since the last call."""
        events, self._events = self._events, KVEvents()
        return events

    # What the scheduler decides

    def begin_load(self, request: Request) -> None:
        """A request has started whose KV is elsewhere."""
        assert request.remote_kv is not None, "a request without remote KV is loaded"
        request.status = Status.LOADING
        self._events.loads.append(
            KVLoad(
                request_id=request.request_id,
                remote=request.remote_kv,
                page_ids=tuple(request.page_ids),
                first_token=request.num_cached,
                # The last token is computed here: its logits are wanted.
                stop_token=max(request.num_tokens - 1, request.num_cached),
            )
        )

    def begin_export(self, request: Request) -> None:
        """A request has started whose prompt another engine takes while it is computed."""
        self._events.early_exports.append(self._hold(request))
        self.advance(request, request.num_cached)

    def advance(self, request: Request, num_computed: int) -> None:
        """The first tokens of an early export are in its pages."""
        num_prompt = len(request.prompt_token_ids)
        self._events.progress[request.request_id] = min(num_computed, num_prompt)

    def export(self, request: Request) -> None:
        """A request is about to finish whose prompt another engine goes on with."""
        if not request.exports_early:
            self._events.exports.append(self._hold(request))

    def withdraw(self, request: Request) -> None:
        """A request is about to lose its pages: what it has offered early will not come."""
        if request.exports_early:
            self._events.withdrawn.append(request.request_id)
            request.exports_early = request.exports_kv = False

    def _hold(self, request: Request) -> KVExport:
        prompt, request_id = request.prompt_token_ids, request.request_id
        pages = request.page_ids[: self._pool.num_pages_for(len(prompt))]
        held = self._exports.hold(request_id, pages)
        return KVExport(request_id, held, len(prompt), prompt_digest(prompt))

    def abandon(self, request: Request) -> None:
        """A request is about to be aborted, in whatever state."""
        if request.status is Status.RUNNING:
            self.withdraw(request)
        if request.status is Status.LOADING:
            self._orphans.hold(request.request_id, request.page_ids)
            self._events.abandoned.append(request.request_id)
        elif request.remote_kv is not None:
            self._events.unwanted[request.request_id] = request.remote_kv

    # What happened elsewhere

    def land(self, load: KVLoad) -> None:
        """The KV of a load is in its pages: go on with the tokens behind it."""
        if self._orphans.release(load.request_id):
            return
        request = self._lineup.running[load.request_id]
        request.status, request.remote_kv = Status.RUNNING, None
        request.num_scheduled = load.stop_token
        self._residency.register(request, load.first_token, load.stop_token)
        self._lineup.landed.append(request)

    def fail_load(self, load: KVLoad, *, error: str | None, is_settled: bool = True) -> None:
        """What is in the pages of a load cannot be used.

        Args:
            error: ends the request with this message; None: its prompt is computed here.
            is_settled: nothing writes into the pages any more; else :meth:`settle_load` follows.
        """
        request = self._lineup.running.get(load.request_id)
        if request is None:  # aborted; its pages are kept
            if is_settled:
                self.settle_load(load)
            return
        if not is_settled:
            self._orphans.hold(load.request_id, request.page_ids)
        request.remote_kv = None
        if error is None:
            self._lineup.requeue(request)
        else:
            self._lineup.end(request, FinishReason.ERROR, error)

    def stop_waiting(self, request_id: str, *, error: str | None) -> None:
        """The KV of a request is given up, if there is no room for it by now.

        Args:
            error: ends the request with this message; None: its prompt is computed here.
        """
        request = self._lineup.waiting.get(request_id)
        if request is None or request.remote_kv is None:
            return
        request.remote_kv = None
        if error is not None:
            self._lineup.end(request, FinishReason.ERROR, error)

    def settle_load(self, load: KVLoad) -> None:
        """Nothing writes any more into the pages of a load that failed or was aborted."""
        self._orphans.release(load.request_id)

    def end_export(self, request_id: str) -> bool:
        """The pages of a prompt are not needed by another engine any more."""
        return self._exports.release(request_id)
