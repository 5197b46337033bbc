"""What the next step computes. Host only: no arrays, no devices, no clock.

The engine calls ``schedule`` while the step before is still running and commits that one after
dispatching the new one. So a plan may continue a request by a token that only the device knows,
and a committed step may hold results of a request that has ended since: they are dropped.

Invariants:

* Requests start in the order of arrival and are preempted from the latest on, so the first one
  always progresses.
* A loading request has a slot and pages like a running one, but cannot be preempted: something
  outside writes into its pages. Every load ends in bounded time, so this only delays the others.
* Device steps run in the order of their plans. Therefore pages and slots are reused as soon as
  their request ends, although a step in flight may still write into them: whoever gets them next
  writes in a later step, and reads only what it wrote or what was registered. The overrun of an
  ended request writes at a position behind its registered pages, which are full.
"""

import dataclasses
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from dcpjax.cache.prefix import PagePool
from dcpjax.engine.plan import Drain as Drain
from dcpjax.engine.plan import Segment as Segment
from dcpjax.engine.plan import StepPlan as StepPlan
from dcpjax.engine.plan import StepShapes as StepShapes
from dcpjax.engine.plan import next_segment
from dcpjax.engine.remote_kv import KVEvents, KVExport, KVLoad, PageHolds, prompt_digest
from dcpjax.engine.request import (
    FinishReason,
    Request,
    Status,
    TokenLogprobs,
    TokenOutput,
    length_limit,
)
from dcpjax.engine.residency import Admission, Residency
from dcpjax.errors import ConfigError, RequestError


@dataclass(frozen=True)
class SchedulerStats:
    """Gauges of now and counters since the start; prefix counters are in prompt tokens."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_prompt_tokens: int
    num_generation_tokens: int
    page_usage: float


class Scheduler:
    """Continuous batching, first come first served.

    Each step gives one token to every sequence that is being generated and computes chunks of the
    first prompts beside. A request that starts gets the pages of all its known tokens and of the
    next one; where pages run out later, the latest request is preempted and recomputed.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        shapes: StepShapes,
        enable_prefix_caching: bool = True,
    ) -> None:
        if max_num_seqs > max(shapes.decode_rows):
            raise ConfigError(
                "a compiled shape has a decode row for each of max_num_seqs sequences",
                max_num_seqs=max_num_seqs,
                decode_rows=shapes.decode_rows,
            )
        self._pool = pool
        self._shapes = shapes
        self._max_model_len = max_model_len
        self._residency = Residency(pool, enable_prefix_caching=enable_prefix_caching)
        self._free_slots = list(range(max_num_seqs))  # a heap: low rows first
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._uncommitted: deque[StepPlan] = deque()
        self._ended: list[TokenOutput] = []  # outside a commit: aborted or failed
        self._kv_events = KVEvents()
        self._landed: list[Request] = []  # not yet in a plan's ``started``
        self._exports = PageHolds(pool)
        self._orphans = PageHolds(pool)  # of loads whose request was aborted
        self._num_accepted = 0
        self._num_preemptions = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished, steps uncommitted or ends not yet reported."""
        return bool(self._running or self._waiting or self._uncommitted or self._ended)

    @property
    def num_exports(self) -> int:
        """Prompts whose pages are kept for other engines."""
        return len(self._exports)

    @property
    def num_loading(self) -> int:
        """Requests whose KV is on the way, those that were aborted meanwhile included."""
        loading = sum(r.status is Status.LOADING for r in self._running.values())
        return loading + len(self._orphans)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            page_usage=self._pool.usage,
        )

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: its prompt is empty or its id is in use.
            ContextLengthError: it could not end even if it had the whole pool.
        """
        request_id = request.request_id
        holds = (self._running, self._waiting, self._orphans, self._exports)
        if any(request_id in hold for hold in holds):
            raise RequestError("request ids are unique", param="request_id", request_id=request_id)
        pool_tokens = self._pool.num_pages * self._pool.page_size
        request.max_length = length_limit(request, self._max_model_len, pool_tokens)
        request.place = self._num_accepted
        self._num_accepted += 1
        self._waiting[request_id] = request

    def abort(self, request_id: str) -> None:
        """End a request now; without effect on an unknown or ended one.

        Its ABORT output comes with the next ``commit`` or ``take_ended``. A step in flight may
        go on writing into its pages, see the module's invariants.
        """
        request = self._running.get(request_id) or self._waiting.get(request_id)
        if request is None:
            return
        self._ended.append(request.output((), FinishReason.ABORT))
        if request.status is Status.LOADING:
            self._orphans.hold(request_id, request.page_ids)
        elif request.remote_kv is not None:
            self._kv_events.unwanted[request_id] = request.remote_kv
        self._finish(request)

    def take_ended(self) -> list[TokenOutput]:
        """The outputs of requests aborted or failed since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # KV of other engines

    def take_kv_events(self) -> KVEvents:
        """What is wanted of other engines since the last call.

        Each load has to end in :meth:`land` or :meth:`fail_load`, also if its request is aborted,
        and each export in :meth:`end_export`: only then are the pages used for anything else.
        """
        events, self._kv_events = self._kv_events, KVEvents()
        return events

    def land(self, load: KVLoad) -> None:
        """The KV of a load is in its pages: go on with the tokens behind it."""
        if self._orphans.release(load.request_id):
            return
        request = self._running[load.request_id]
        request.status, request.remote_kv = Status.RUNNING, None
        request.num_scheduled = load.stop_token
        self._residency.register(request, load.first_token, load.stop_token)
        self._landed.append(request)

    def fail_load(self, load: KVLoad, *, error: str | None, is_settled: bool = True) -> None:
        """What is in the pages of a load cannot be used.

        Args:
            error: ends the request with this message; None: its prompt is computed here.
            is_settled: nothing writes into the pages any more; else :meth:`settle_load` follows.
        """
        request = self._running.get(load.request_id)
        if request is None:  # aborted; its pages are kept
            if is_settled:
                self.settle_load(load)
            return
        if not is_settled:
            self._orphans.hold(load.request_id, request.page_ids)
        request.remote_kv = None
        if error is None:
            self._requeue(request)
        else:
            output = request.output((), FinishReason.ERROR)
            self._ended.append(dataclasses.replace(output, error=error))
            self._finish(request)

    def settle_load(self, load: KVLoad) -> None:
        """Nothing writes any more into the pages of a load that failed or was aborted."""
        self._orphans.release(load.request_id)

    def end_export(self, request_id: str) -> bool:
        """The pages of a prompt are not needed by another engine any more."""
        return self._exports.release(request_id)

    def schedule(self) -> StepPlan | Drain | None:
        """Plan the next step; at most one step is uncommitted when it is called.

        Returns:
            None when there is nothing to compute before the step in flight is committed, and
            without one only when no request is left or all of them wait for the end of loads or
            exports. DRAIN, with nothing changed, when a request
            must be preempted but a step is in flight.
        """
        assert len(self._uncommitted) <= 1, "a third step was planned before the first's commit"
        if self._num_missing_pages() > self._pool.num_available:
            if self._uncommitted:
                return Drain.DRAIN
            self._preempt_until_pages_suffice()
        for request in self._running.values():
            self._residency.grow(request)
        ready = [request for request in self._running.values() if request.can_continue]
        generating = [request for request in ready if request.num_uncomputed == 1]
        prompts = [request for request in ready if request.num_uncomputed > 1]
        admissions, loading = self._admissible(self._shapes.max_prefill_rows - len(prompts))
        remaining = [item.num_uncomputed for item in [*prompts, *admissions]]
        rows, width = self._shapes.best_prefill(remaining)
        started = self._start(admissions[: max(rows - len(prompts), 0)], loading)
        plan = StepPlan(
            decode=tuple(next_segment(request, 1) for request in generating),
            prefill=tuple(next_segment(request, width) for request in [*prompts[:rows], *started]),
            prefill_width=width,
            started=(*self._landed, *started),
        )
        if not plan.segments:
            return None
        self._landed = []
        self._uncommitted.append(plan)
        return plan

    def commit(
        self,
        plan: StepPlan,
        sampled: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[TokenLogprobs]] | None = None,
    ) -> list[TokenOutput]:
        """Take the results of the oldest uncommitted plan.

        Args:
            sampled: the new tokens of each of ``plan.sampling``, at least one each.
            logprobs: the same shape; empty entries where a request asked for none.

        Returns:
            what each request gained, after the outputs of requests aborted or failed meanwhile.
        """
        assert self._uncommitted and self._uncommitted[0] is plan, "plans are committed in order"
        self._uncommitted.popleft()
        if logprobs is None:
            logprobs = [()] * len(sampled)
        # An ended request is dropped; a preempted one cannot be here, preemption waits for commit.
        for segment in plan.segments:
            if segment.request.status is Status.RUNNING:
                self._residency.register(segment.request, segment.start, segment.stop)
        outputs = self.take_ended()
        for segment, tokens, details in zip(plan.sampling, sampled, logprobs, strict=True):
            if segment.request.status is Status.RUNNING:
                outputs.append(self._append(segment.request, tokens, details))
        return outputs

    def check_integrity(self) -> None:
        """Assert that slots and pages are held by running requests, loads and exports alone."""
        running = list(self._running.values())
        slots = [request.slot for request in running]
        assert not {None, *self._free_slots}.intersection(slots), "a running request has no slot"
        assert len(set(slots)) == len(slots), "two requests have the same slot"
        assert not any(r.page_ids for r in self._waiting.values()), "a waiting request has pages"
        held = {page for request in running for page in request.page_ids}
        held |= self._exports.pages | self._orphans.pages
        in_use = self._pool.num_pages - self._pool.num_available
        assert len(held) == in_use, f"{in_use} pages are held, {len(held)} by somebody known"
        self._pool.check_integrity(is_idle=not held)

    # Pages run out

    def _num_missing_pages(self) -> int:
        return sum(self._residency.num_missing(request) for request in self._running.values())

    def _preempt_until_pages_suffice(self) -> None:
        # The latest goes first even if it is the one in need: the oldest is never preempted for a
        # younger one, and alone it has all pages, which suffice or add() would have refused it.
        while self._num_missing_pages() > self._pool.num_available:
            running = (r for r in self._running.values() if r.status is Status.RUNNING)
            request = max(running, key=lambda other: other.place)
            is_alone = len(self._running) == 1 and not self._exports and not self._orphans
            assert not is_alone, "a request alone does not fit into the pool"
            assert not request.num_pending, "a request with a token in flight is preempted"
            request.num_preemptions += 1
            self._num_preemptions += 1
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Back to its place in the queue, without pages."""
        self._release(request)
        request.status = Status.WAITING
        self._waiting[request.request_id] = request
        in_order = sorted(self._waiting.values(), key=lambda waiting: waiting.place)
        self._waiting = OrderedDict((waiting.request_id, waiting) for waiting in in_order)

    # Start

    def _admissible(self, max_prompts: int) -> tuple[list[Admission], list[Admission]]:
        """The first waiting requests that can start together, in order; changes nothing.

        One page per running request stays available, else the newcomer would soon be preempted.

        Returns:
            those to compute, at most ``max_prompts``, and those whose KV is to be loaded.
        """
        prompts: list[Admission] = []
        loading: list[Admission] = []
        spent = 0
        for request in self._waiting.values():
            num_started = len(prompts) + len(loading)
            is_load = request.remote_kv is not None
            if num_started == len(self._free_slots) or not (is_load or len(prompts) < max_prompts):
                break
            admission = self._residency.admission(request)
            spent += admission.cost
            if spent + len(self._running) + num_started > self._pool.num_available:
                break
            (loading if is_load else prompts).append(admission)
        return prompts, loading

    def _start(self, prompts: list[Admission], loading: list[Admission]) -> list[Request]:
        """Give pages and slots; the requests to compute are returned."""
        in_order = sorted([*prompts, *loading], key=lambda admission: admission.request.place)
        self._residency.admit(in_order)
        for admission in in_order:
            request = admission.request
            request.slot = heapq.heappop(self._free_slots)
            request.status = Status.RUNNING
            self._running[request.request_id] = self._waiting.pop(request.request_id)
            self._count_start(request)
        for admission in loading:
            self._begin_load(admission.request)
        return [admission.request for admission in prompts]

    def _begin_load(self, request: Request) -> None:
        assert request.remote_kv is not None, "a request without remote KV is loaded"
        request.status = Status.LOADING
        self._kv_events.loads.append(
            KVLoad(
                request_id=request.request_id,
                remote=request.remote_kv,
                page_ids=tuple(request.page_ids),
                first_token=request.num_cached,
                # The last token is computed here: its logits are wanted.
                stop_token=max(request.num_tokens - 1, request.num_cached),
            )
        )

    def _count_start(self, request: Request) -> None:
        if request.num_cached_at_start is not None:
            return  # started before: recomputation is neither new work nor a hit
        request.num_cached_at_start = request.num_cached
        self._num_prompt_tokens += request.num_tokens
        if self._residency.has_prefix_cache:
            self._num_prefix_queries += request.num_tokens
            self._num_prefix_hits += request.num_cached

    # Results and the end

    def _append(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> TokenOutput:
        request.num_pending -= 1
        assert len(tokens) == 1 or not request.num_pending, "look-ahead knows one token per step"
        accepted, reason, stop_token = request.append(tokens)
        self._num_generation_tokens += len(accepted)
        if reason is not None:
            if request.exports_kv:
                self._export(request)
            self._finish(request)
        return request.output(accepted, reason, stop_token, logprobs[: len(accepted)])

    def _export(self, request: Request) -> None:
        prompt, request_id = request.prompt_token_ids, request.request_id
        pages = request.page_ids[: self._pool.num_pages_for(len(prompt))]
        held = self._exports.hold(request_id, pages)
        export = KVExport(request_id, held, len(prompt), prompt_digest(prompt))
        self._kv_events.exports.append(export)

    def _finish(self, request: Request) -> None:
        if request.status is Status.WAITING:
            del self._waiting[request.request_id]
        else:
            self._release(request)
        request.status = Status.FINISHED

    def _release(self, request: Request) -> None:
        del self._running[request.request_id]
        assert request.slot is not None, "a running request has no slot"
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
        self._landed = [other for other in self._landed if other is not request]
        self._residency.release(request)
