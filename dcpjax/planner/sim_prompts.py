"""The prompts that a simulated engine computes, and what its next step takes of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcpjax.planner.sim_job import Job
from dcpjax.planner.sim_pool import Reservation
from dcpjax.planner.sim_step import EngineSpec


@dataclass(frozen=True, eq=False)
class PromptChunk:
    """Tokens of a prompt that one step computes, ``prior`` tokens after its beginning."""

    job: Job
    tokens: int
    prior: int

    @property
    def is_first(self) -> bool:
        return self.prior == self.job.cached_tokens

    @property
    def is_last(self) -> bool:
        return self.prior + self.tokens == self.job.turn.num_input

    @property
    def is_rest(self) -> bool:
        """One last token: to an engine whose programs have few shapes, the same as an answer's."""
        return self.tokens == 1 and not self.is_first


class Prompts:
    """Prompts of which not everything is in a step or planned yet, first come first served."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job, found: Reservation) -> None:
        """What of the prompt is left to compute: at least its last token."""
        size, last = self._spec.page_tokens, job.turn.num_input - 1
        job.cached_tokens = min(last, (found.device_pages + found.host_pages) * size)
        job.host_tokens = found.host_pages * size
        job.computed = job.cached_tokens
        self._jobs.append(job)

    def clear(self) -> None:
        self._jobs.clear()

    def take(self) -> tuple[PromptChunk, ...]:
        """The chunks of the next step; from now on they count as computed."""
        chunks = self._few_shapes() if self._spec.prompt_shape else self._any_sizes()
        for chunk in chunks:
            chunk.job.computed += chunk.tokens
        self._jobs = [job for job in self._jobs if job.computed < job.turn.num_input]
        return tuple(chunks)

    def _any_sizes(self) -> list[PromptChunk]:
        """Of the first prompts, so much together as a step computes."""
        chunks, room = list[PromptChunk](), self._spec.chunk
        for job in self._jobs:
            if not room:
                break
            chunks.append(PromptChunk(job, min(_left(job), room), job.computed))
            room -= chunks[-1].tokens
        return chunks

    def _few_shapes(self) -> list[PromptChunk]:
        """Rows of one width, and rests beside them."""
        chosen = [PromptChunk(job, _left(job), job.computed) for job in self._jobs]
        rests = [chunk for chunk in chosen if chunk.is_rest]
        prompts = [chunk for chunk in chosen if not chunk.is_rest]
        if not prompts or self._spec.prompt_shape is None:
            return rests
        rows, width = self._spec.prompt_shape([chunk.tokens for chunk in prompts])
        cut = (replace(chunk, tokens=min(chunk.tokens, width)) for chunk in prompts[:rows])
        return [*rests, *cut]


def _left(job: Job) -> int:
    return job.turn.num_input - job.computed


def step_seconds(spec: EngineSpec, chunks: Sequence[PromptChunk], batch: int) -> float:
    """Of a step with these chunks, at no context of ``batch`` answers beside them.

    With a prompt's first chunk, the pages that the host has kept of it are copied back.
    """
    pages = sum(chunk.job.host_tokens for chunk in chunks if chunk.is_first) / spec.page_tokens
    if spec.prompt_shape is not None:
        batch += sum(chunk.is_rest for chunk in chunks)
        chunks = [chunk for chunk in chunks if not chunk.is_rest]
    computed = spec.steps.with_prompts([(one.tokens, one.prior) for one in chunks], batch)
    return computed + pages * spec.host_seconds
