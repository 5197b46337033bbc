"""What the next step computes. Host only: no arrays, no devices, no clock.

The engine calls ``schedule`` while the step before is still running and commits that one after
dispatching the new one. So a plan may continue a request by a token that only the device knows,
and a committed step may hold results of a request that has ended since: they are dropped.

With a drafter there is no look-ahead: how far a request has come is known when its step is
committed, and the next one is planned from there. Drafts get pages like the tokens of a step, but
nobody loses any for them. The keys and values of rejected ones stay where they are, behind the
computed tokens: the tokens that come there are written before anybody reads.

Invariants:

* Requests start in the order of arrival and are preempted from the latest on, so the first one
  always progresses.
* Device steps run in the order of their plans. Therefore pages and slots are reused as soon as
  their request ends, although a step in flight may still write into them: whoever gets them next
  writes in a later step, and reads only what it wrote or what was registered. The overrun of an
  ended request writes at a position behind its registered pages, which are full.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict

from dcpjax.cache.prefix import PagePool
from dcpjax.engine.counters import Counters, SchedulerStats
from dcpjax.engine.drafting import Drafter, Drafting
from dcpjax.engine.lineup import Lineup
from dcpjax.engine.plan import Drain as Drain
from dcpjax.engine.plan import Segment as Segment
from dcpjax.engine.plan import StepPlan as StepPlan
from dcpjax.engine.plan import StepShapes as StepShapes
from dcpjax.engine.plan import next_segment, verification
from dcpjax.engine.remote_work import RemoteWork
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


class Scheduler:
    """Continuous batching, first come first served.

    Each step gives one token to every sequence that is being generated, more where drafts are
    accepted, and computes chunks of the first prompts beside. A request that starts gets the pages
    of all its known tokens and of the next one; where pages run out later, the latest request is
    preempted and recomputed. ``remote`` is told how loads and exports end.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        max_model_len: int,
        shapes: StepShapes,
        enable_prefix_caching: bool = True,
        drafter: Drafter | None = None,
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
        self._lineup = Lineup(self._residency, max_num_seqs)
        self.remote = RemoteWork(pool, self._residency, self._lineup)
        self._uncommitted: deque[StepPlan] = deque()
        self.drafting = Drafting(drafter, shapes.max_drafts)
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished, steps uncommitted or ends not yet reported."""
        return bool(self._lineup or self._uncommitted or self._lineup.has_ended)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._lineup.running),
            num_waiting=len(self._lineup.waiting),
            page_usage=self._pool.usage,
            **asdict(self._counters),
        )

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: its prompt is empty or its id is in use.
            ContextLengthError: it could not end even if it had the whole pool.
        """
        request_id = request.request_id
        if request_id in self._lineup or request_id in self.remote:
            raise RequestError("request ids are unique", param="request_id", request_id=request_id)
        pool_tokens = self._pool.num_pages * self._pool.page_size
        request.max_length = length_limit(request, self._max_model_len, pool_tokens)
        self._lineup.append(request)

    def abort(self, request_id: str) -> None:
        """End a request now; without effect on an unknown or ended one.

        Its ABORT output comes with the next ``commit`` or ``take_ended``. A step in flight may
        go on writing into its pages, see the module's invariants.
        """
        self._end(request_id, FinishReason.ABORT)

    def fail(self, request_id: str, error: str) -> None:
        """As :meth:`abort`, with an ERROR output that says why."""
        self._end(request_id, FinishReason.ERROR, error)

    def recompute(self, request_id: str, num_agreed: int, error: str) -> None:
        """Drop what the oldest uncommitted step and those behind it compute of a running request.

        It starts over as after a preemption, with no more of its tokens from the cache than the
        first ``num_agreed``. A request to which this happens again fails with ``error``.
        """
        request = self._lineup.running.get(request_id)
        if request is None or request.status is not Status.RUNNING:
            return
        self._residency.distrust(request, num_agreed)
        if request.num_recomputations:
            self.fail(request_id, error)
            return
        request.num_recomputations += 1
        self._counters.num_recomputations += 1
        self.remote.withdraw(request)
        request.status = Status.VOID

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        request = self._lineup.get(request_id)
        if request is not None:
            self.remote.abandon(request)
            self._lineup.end(request, reason, error)

    def take_ended(self) -> list[TokenOutput]:
        """The outputs of requests aborted or failed since the last call."""
        return self._lineup.take_ended()

    def schedule(self) -> StepPlan | Drain | None:
        """Plan the next step. At most one is uncommitted when it is called, none with a drafter.

        Returns:
            None when there is nothing to compute before the step in flight is committed, and
            without one only when no request is left or all of them wait for the end of loads or
            exports. DRAIN, with nothing changed, when a request must be preempted or recomputed but
            a step is in flight.
        """
        assert len(self._uncommitted) <= 1, "a third step was planned before the first's commit"
        running = self._lineup.running
        if void := [request for request in running.values() if request.status is Status.VOID]:
            if self._uncommitted:
                return Drain.DRAIN
            for request in void:
                request.num_pending = 0
                self._lineup.requeue(request)
        if self.drafting.is_on:
            assert not self._uncommitted, "drafts follow from the commit of the step before"
            self.drafting.propose(running.values())
            if self._num_missing_pages() > self._pool.num_available:
                self.drafting.forget(running.values())
        if self._num_missing_pages() > self._pool.num_available:
            if self._uncommitted:
                return Drain.DRAIN
            self._preempt_until_pages_suffice()
        for request in running.values():
            self._residency.grow(request)
        ready = [request for request in running.values() if request.can_continue]
        generating = [request for request in ready if request.num_uncomputed == 1]
        prompts = [request for request in ready if request.num_uncomputed > 1]
        admissions, loading = self._admissible(self._shapes.max_prefill_rows - len(prompts))
        remaining = [item.num_uncomputed for item in [*prompts, *admissions]]
        rows, width = self._shapes.best_prefill(remaining)
        started = self._start(admissions[: max(rows - len(prompts), 0)], loading)
        plan = StepPlan(
            decode=tuple(verification(request) for request in generating),
            prefill=tuple(next_segment(request, width) for request in [*prompts[:rows], *started]),
            prefill_width=width,
            started=(*self._lineup.landed, *started),
        )
        if not plan.segments:
            return None
        self._lineup.landed = []
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
            sampled: the new tokens of each of ``plan.sampling``: its accepted drafts, if any, and
                one more.
            logprobs: the same shape; empty entries where a request asked for none.

        Returns:
            what each request gained, after the outputs of requests aborted or failed meanwhile.
        """
        assert self._uncommitted and self._uncommitted[0] is plan, "plans are committed in order"
        self._uncommitted.popleft()
        if logprobs is None:
            logprobs = [()] * len(sampled)
        # What is ended or void is dropped; a preempted one cannot be here, preemption waits for
        # commit.
        for segment in plan.segments:
            if segment.request.status is Status.RUNNING:
                self._note_computed(segment)
        outputs = self.take_ended()
        for segment, tokens, details in zip(plan.sampling, sampled, logprobs, strict=True):
            if segment.request.status is Status.RUNNING:
                outputs.append(self._append(segment, tokens, details))
        return outputs

    def check_integrity(self) -> None:
        """Assert that slots and pages are held by running requests, loads and exports alone."""
        self._lineup.check_integrity()
        running = self._lineup.running.values()
        held = self.remote.pages.union(*(request.page_ids for request in running))
        in_use = self._pool.num_pages - self._pool.num_available
        assert len(held) == in_use, f"{in_use} pages are held, {len(held)} by somebody known"
        self._pool.check_integrity(is_idle=not held)

    # Pages run out

    def _num_missing_pages(self) -> int:
        return sum(
            self._residency.num_missing(request) for request in self._lineup.running.values()
        )

    def _preempt_until_pages_suffice(self) -> None:
        # The latest goes first even if it is the one in need: the oldest is never preempted for a
        # younger one, and alone it has all pages, which suffice or add() would have refused it.
        while self._num_missing_pages() > self._pool.num_available:
            running = (r for r in self._lineup.running.values() if r.status is Status.RUNNING)
            request = max(running, key=lambda other: other.place)
            is_alone = len(self._lineup.running) == 1 and not self.remote.pages
            assert not is_alone, "a request alone does not fit into the pool"
            assert not request.num_pending, "a request with a token in flight is preempted"
            request.num_preemptions += 1
            self._counters.num_preemptions += 1
            self.remote.withdraw(request)
            self._lineup.requeue(request)

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
        for request in self._lineup.waiting.values():
            num_started = len(prompts) + len(loading)
            is_load = request.remote_kv is not None
            if num_started == self._lineup.num_free_slots or not (
                is_load or len(prompts) < max_prompts
            ):
                break
            admission = self._residency.admission(request)
            spent += admission.cost
            if spent + len(self._lineup.running) + num_started > self._pool.num_available:
                break
            (loading if is_load else prompts).append(admission)
        return prompts, loading

    def _start(self, prompts: list[Admission], loading: list[Admission]) -> list[Request]:
        """Give pages and slots; the requests to compute are returned."""
        in_order = sorted([*prompts, *loading], key=lambda admission: admission.request.place)
        self._lineup.start(in_order)
        for admission in in_order:
            self._counters.add_start(
                admission.request, has_prefix_cache=self._residency.has_prefix_cache
            )
        for admission in loading:
            self.remote.begin_load(admission.request)
        for admission in prompts:
            if admission.request.exports_early:
                self.remote.begin_export(admission.request)
        return [admission.request for admission in prompts]

    # Results and the end

    def _note_computed(self, segment: Segment) -> None:
        self._residency.register(segment.request, segment.start, segment.stop)
        if segment.request.exports_early:
            self.remote.advance(segment.request, segment.stop)

    def _append(
        self, segment: Segment, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> TokenOutput:
        request = segment.request
        request.num_pending -= 1
        assert len(tokens) <= 1 + segment.drafts.count, "more drafts are accepted than there were"
        self.drafting.counts.add(segment.drafts.count, len(tokens) - 1)
        added, reason, stop_token = request.append(tokens)
        self._counters.num_generation_tokens += len(added)
        self._note_accepted(segment, len(added) - 1)
        if reason is not None:
            if request.exports_kv:
                self.remote.export(request)
            self._lineup.finish(request)
        return request.output(added, reason, stop_token, logprobs[: len(added)])

    def _note_accepted(self, segment: Segment, num_accepted: int) -> None:
        """Drafts have become tokens of their request; the last token is not computed yet."""
        segment.request.num_scheduled += num_accepted
        self._residency.register(segment.request, segment.stop, segment.stop + num_accepted)
