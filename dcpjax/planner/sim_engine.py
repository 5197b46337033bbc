"""A simulated engine: continuous batching, chunked prompts, admission by pages.

Prefill, decode and mixed engines are one class; they differ in what they are given. An engine is
always in a step while it has something to compute. A run of decode steps with nothing else to do is
one event, because nothing can change meanwhile; what arrives cuts it at the end of a step.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcpjax.planner.events import EventQueue
from dcpjax.planner.sim_job import Job
from dcpjax.planner.sim_pool import PagePool
from dcpjax.planner.sim_prompts import PromptChunk, Prompts, step_seconds
from dcpjax.planner.sim_step import EngineSpec, Step


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a step computes beside the answers that go on: chunks, and answers that begin because
    their KV has landed."""

    chunks: tuple[PromptChunk, ...] = ()
    landed: tuple[Job, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.landed


class Engine:
    """The state of one engine; ``on_prefilled`` and ``on_finished`` say what happens next.

    Attributes:
        decodes_first_token: the first token comes out of a decode step, since the prompt was
            computed elsewhere.
    """

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        events: EventQueue,
        block_tokens: int,
        *,
        decodes_first_token: bool,
        on_prefilled: Callable[["Engine", Job], None],
        on_finished: Callable[["Engine", Job], None],
    ) -> None:
        self.number, self.spec, self.events = number, spec, events
        self.pool = PagePool(spec.num_pages, spec.host_pages)
        self.is_alive, self.busy_seconds, self.num_steps = True, 0.0, 0
        self.jobs: dict[int, Job] = {}
        self.waiting: deque[Job] = deque()
        self.prefilling = Prompts(spec)
        self._decoding: list[tuple[int, int, Job]] = []
        self._new: list[Job] = []
        self._landed: list[Job] = []
        self._cached = 0.0
        self._stride = max(1, spec.page_tokens // block_tokens) if block_tokens else 1
        self._ids_are_pages = bool(block_tokens) and block_tokens <= spec.page_tokens
        self._pages_per_id = max(1, block_tokens // spec.page_tokens) if block_tokens else 1
        self._decodes_first_token = decodes_first_token
        self._on_prefilled, self._on_finished = on_prefilled, on_finished
        self._on_reserved: Callable[[Engine, Job], None] | None = None
        self._step: Step | None = None
        self._plan = _Plan()
        self._next: _Plan | None = None
        self._firsts: Sequence[Job] = ()
        self._is_between_steps = False

    # What others ask

    @property
    def load(self) -> int:
        """Requests that are here, waiting or not."""
        return len(self.jobs)

    @property
    def is_idle(self) -> bool:
        """Neither in a step nor about to begin one."""
        return self._step is None and not self._is_between_steps

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def prefix_tokens(self, job: Job) -> int:
        """Tokens of the prompt that are in the pool now."""
        return self.pool.count_hits(self.page_ids(job)) * self.spec.page_tokens

    def prefix_hit(self, job: Job) -> int:
        """Tokens of an admitted request's prompt that were in the pool already."""
        return len(job.holdings[self.number].blocks) * self.spec.page_tokens

    def page_ids(self, job: Job) -> Sequence[int]:
        """The ids of the full pages of a prompt. The id of a page is that of its last block; a
        block of several pages is as many ids."""
        blocks = job.turn.blocks
        if self._ids_are_pages:
            return blocks[self._stride - 1 :: self._stride]
        count = self._pages_per_id
        return [block * count + part for block in blocks for part in range(count)]

    # What happens to requests

    def add(self, job: Job) -> None:
        """Queue a request that this engine computes from its beginning."""
        self.jobs[job.number] = job
        self.waiting.append(job)
        self.wake()

    def receive_with(self, on_reserved: Callable[["Engine", Job], None]) -> None:
        """From now on admitted requests are not computed: ``on_reserved`` has them moved here."""
        self._on_reserved = on_reserved

    def join(self, job: Job) -> None:
        """The KV of an admitted request has landed: decode it."""
        job.joined = self.events.now
        self._landed.append(job)
        self.wake()

    def go_on(self, job: Job) -> None:
        """Decode a request whose prompt the last step has computed here."""
        self._new.append(job)

    def leave(self, job: Job) -> None:
        """Give up the pages of a request that goes on elsewhere, or is given up."""
        self.jobs.pop(job.number, None)
        if job in self.waiting:
            self.waiting.remove(job)
        holding = job.holdings.pop(self.number, None)
        if holding is not None:
            self.pool.release(holding)
        self.wake()

    def fail(self) -> list[Job]:
        """Lose everything; returns the requests that were here."""
        lost = list(self.jobs.values())
        self.is_alive, self._step = False, None
        self.jobs, self._decoding, self._new, self._landed = {}, [], [], []
        self._plan, self._next, self._firsts = _Plan(), None, ()
        self._is_between_steps = False
        self.waiting.clear()
        self.prefilling.clear()
        self._cached = 0.0
        self.pool = PagePool(self.spec.num_pages, self.spec.host_pages)
        for job in lost:
            job.holdings.pop(self.number, None)
        return lost

    def recover(self) -> None:
        self.is_alive = True

    # Steps

    def wake(self) -> None:
        """Something may have become possible: begin a step, or end a run of steps early.

        What comes at the same moment begins together.
        """
        if not self.is_alive or self._is_between_steps:
            return
        if self._step is None:
            self._is_between_steps = True
            self.events.after(0.0, self._begin)
        elif self._step.is_run and (self._landed or self._can_admit()):
            self._cut_run(self._step)

    def _can_admit(self) -> bool:
        return bool(self.waiting) and len(self._decoding) < self.spec.max_batch

    def _begin(self) -> None:
        """Start a step if there is something to compute, and plan the next one if that is due."""
        if not self.is_alive or self._step is not None:
            return
        self._plan = plan = self._take_plan()
        self._is_between_steps = False
        self._start_decoding(plan.landed)
        if not plan.chunks and not self._decoding:
            return
        for chunk in plan.chunks:
            if chunk.is_first:
                chunk.job.started = self.events.now
        seconds = step_seconds(self.spec, plan.chunks, len(self._decoding))
        if self._decoding:
            seconds += self.spec.steps.decode(len(self._decoding))[1] * self._cached
        if self.spec.looks_ahead:
            self._next = self._make_plan()
        is_run = not plan.chunks and (self._next is None or self._next.is_empty)
        steps = self._decoding[0][0] - self.num_steps if is_run else 1
        self._begin_step(Step(self.events.now, steps, seconds, self._growth(), is_run))

    def _take_plan(self) -> _Plan:
        """The plan that was made when the last step began; a new one where it was for nothing."""
        plan, self._next = self._next, None
        if plan is None or (plan.is_empty and not self._decoding and not self._new):
            return self._make_plan()
        return plan

    def _make_plan(self) -> _Plan:
        self._admit()
        landed, self._landed = tuple(self._landed), []
        return _Plan(self.prefilling.take(), landed)

    def _growth(self) -> float:
        """Seconds by which each decode step is longer than the one before."""
        if not self._decoding:
            return 0.0
        _, per_token = self.spec.steps.decode(len(self._decoding))
        return per_token * len(self._decoding) * self.spec.acceptance

    def _begin_step(self, step: "Step") -> None:
        self._step = step
        self.events.at(step.end, lambda: self._end_step(step))

    def _cut_run(self, step: "Step") -> None:
        """End the run with the step that is being computed."""
        done = step.steps_until(self.events.now)
        if done < step.num_steps:
            self._begin_step(step.first(done))

    def _end_step(self, step: "Step") -> None:
        if step is not self._step:
            return  # cut, or the engine failed
        self._step, self._is_between_steps = None, True
        self.busy_seconds += step.end - step.begin
        self._finish_decodes(step)
        self._finish_chunks()
        self._begin()

    def _admit(self) -> None:
        """Take waiting requests in their order while there are pages and places."""
        while self.waiting and self._num_running() < self.spec.max_batch:
            job = self.waiting[0]
            pages = self.spec.pages(job.num_tokens)
            reservation = self.pool.reserve(self.page_ids(job), pages)
            if reservation is None:
                return
            self.waiting.popleft()
            job.holdings[self.number] = reservation.holding
            if self._on_reserved is not None:
                self._on_reserved(self, job)
            else:
                self.prefilling.add(job, reservation)

    def _num_running(self) -> int:
        return len(self.jobs) - len(self.waiting)

    def _finish_chunks(self) -> None:
        chunks, self._plan = self._plan.chunks, _Plan()
        for chunk in chunks:
            if chunk.is_last:
                job = chunk.job
                job.prefilled = self.events.now
                self.pool.publish(job.holdings[self.number], self.page_ids(job))
                self._on_prefilled(self, job)

    def _start_decoding(self, landed: Sequence[Job]) -> None:
        """Requests whose prompt is here join the batch."""
        begun, self._new = [*self._new, *landed], []
        for job in begun:
            left = job.turn.num_output - (not self._decodes_first_token)
            job.step_joined = self.num_steps
            job.last_step = self.num_steps + max(1, math.ceil(left / self.spec.acceptance))
            heapq.heappush(self._decoding, (job.last_step, job.number, job))
            self._cached += job.turn.num_input
            if self._decodes_first_token:
                self.pool.publish(job.holdings[self.number], self.page_ids(job))
        self._firsts = begun if self._decodes_first_token else ()

    def _finish_decodes(self, step: "Step") -> None:
        """Count the steps, and let go whoever has all tokens."""
        if not self._decoding:
            return
        for job in self._firsts:
            job.first_token = step.begin + step.seconds
        self._firsts = ()
        self.num_steps += step.num_steps
        self._cached += len(self._decoding) * step.num_steps * self.spec.acceptance
        while self._decoding and self._decoding[0][0] <= self.num_steps:
            _, _, job = heapq.heappop(self._decoding)
            steps = self.num_steps - job.step_joined
            self._cached -= job.turn.num_input + steps * self.spec.acceptance
            job.finished = self.events.now
            self.release(job)
            self._on_finished(self, job)

    def release(self, job: Job) -> None:
        """Give up the pages of a request that is done, at the end of a step."""
        del self.jobs[job.number]
        self.pool.release(job.holdings.pop(self.number))
