"""What the next step computes. Host only: no arrays, no devices, no clock.

The engine calls ``schedule`` while the step before is still running and commits that one after
dispatching the new one. So a plan may continue a request by a token that only the device knows,
and a committed step may hold results of a request that has ended since: they are dropped.

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
from dataclasses import dataclass

from dcpjax.cache.prefix import PagePool
from dcpjax.engine.lineup import Lineup
from dcpjax.engine.plan import Drain as Drain
from dcpjax.engine.plan import Segment as Segment
from dcpjax.engine.plan import StepPlan as StepPlan
from dcpjax.engine.plan import StepShapes as StepShapes
from dcpjax.engine.plan import next_segment
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
    next one; where pages run out later, the latest request is preempted and recomputed. ``remote``
    is told how loads and exports end.
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
        self._lineup = Lineup(self._residency, max_num_seqs)
        self.remote = RemoteWork(pool, self._residency, self._lineup)
        self._uncommitted: deque[StepPlan] = deque()
        self._num_preemptions = 0
        self._num_prefix_queries = 0
        self._num_prefix_hits = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished, steps uncommitted or ends not yet reported."""
        return bool(self._lineup or self._uncommitted or self._lineup.has_ended)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._lineup.running),
            num_waiting=len(self._lineup.waiting),
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
        request = self._lineup.get(request_id)
        if request is not None:
            self.remote.abandon(request)
            self._lineup.end(request, FinishReason.ABORT)

    def take_ended(self) -> list[TokenOutput]:
        """The outputs of requests aborted or failed since the last call."""
        return self._lineup.take_ended()

    def schedule(self) -> StepPlan | Drain | None:
        """Plan the next step; at most one step is uncommitted when it is called.

        Returns:
            None when there is nothing to compute before the step in flight is committed, and
            without one only when no request is left or all of them wait for the end of loads or
            exports. DRAIN, with nothing changed, when a request must be preempted but a step is in
            flight.
        """
        assert len(self._uncommitted) <= 1, "a third step was planned before the first's commit"
        if self._num_missing_pages() > self._pool.num_available:
            if self._uncommitted:
                return Drain.DRAIN
            self._preempt_until_pages_suffice()
        for request in self._lineup.running.values():
            self._residency.grow(request)
        ready = [request for request in self._lineup.running.values() if request.can_continue]
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
                self._note_computed(segment)
        outputs = self.take_ended()
        for segment, tokens, details in zip(plan.sampling, sampled, logprobs, strict=True):
            if segment.request.status is Status.RUNNING:
                outputs.append(self._append(segment.request, tokens, details))
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
            self._num_preemptions += 1
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
            self._count_start(admission.request)
        for admission in loading:
            self.remote.begin_load(admission.request)
        for admission in prompts:
            if admission.request.exports_early:
                self.remote.begin_export(admission.request)
        return [admission.request for admission in prompts]

    def _count_start(self, request: Request) -> None:
        if request.num_cached_at_start is not None:
            return  # started before: recomputation is neither new work nor a hit
        request.num_cached_at_start = request.num_cached
        self._num_prompt_tokens += request.num_tokens
        if self._residency.has_prefix_cache:
            self._num_prefix_queries += request.num_tokens
            self._num_prefix_hits += request.num_cached

    # Results and the end

    def _note_computed(self, segment: Segment) -> None:
        self._residency.register(segment.request, segment.start, segment.stop)
        if segment.request.exports_early:
            self.remote.advance(segment.request, segment.stop)

    def _append(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> TokenOutput:
        request.num_pending -= 1
        assert len(tokens) == 1 or not request.num_pending, "look-ahead knows one token per step"
        accepted, reason, stop_token = request.append(tokens)
        self._num_generation_tokens += len(accepted)
        if reason is not None:
            if request.exports_kv:
                self.remote.export(request)
            self._lineup.finish(request)
        return request.output(accepted, reason, stop_token, logprobs[: len(accepted)])
