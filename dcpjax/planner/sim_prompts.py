"""The prompts that a simulated engine computes, and what its next step takes of them."""

from collections.abc import Sequence
from dataclasses import dataclass

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
        sizes = self._sizes([job.turn.num_input - job.computed for job in self._jobs])
        chunks = [
            PromptChunk(job, tokens, job.computed)
            for job, tokens in zip(self._jobs, sizes, strict=False)
        ]
        for chunk in chunks:
            chunk.job.computed += chunk.tokens
        self._jobs = [job for job in self._jobs if job.computed < job.turn.num_input]
        return tuple(chunks)

    def _sizes(self, left: Sequence[int]) -> list[int]:
        """Tokens of the first prompts' chunks, of which so many are left."""
        if not left:
            return []
        if self._spec.prompt_shape is not None:
            rows, width = self._spec.prompt_shape(left)
            return [min(tokens, width) for tokens in left[:rows]]
        sizes, room = list[int](), self._spec.chunk
        for tokens in left:
            if not room:
                break
            sizes.append(min(tokens, room))
            room -= sizes[-1]
        return sizes


def step_seconds(spec: EngineSpec, chunks: Sequence[PromptChunk], batch: int) -> float:
    """Of a step with these chunks, at no context of ``batch`` answers beside them.

    With a prompt's first chunk, the pages that the host has kept of it are copied back.
    """
    pages = sum(chunk.job.host_tokens for chunk in chunks if chunk.is_first) / spec.page_tokens
    computed = spec.steps.with_prompts([(one.tokens, one.prior) for one in chunks], batch)
    return computed + pages * spec.host_seconds
