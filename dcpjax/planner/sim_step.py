"""What a simulated engine is, and one of its steps: the numbers, without what happens to them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcpjax.errors import ConfigError
from dcpjax.planner.sim_job import Job
from dcpjax.planner.step_times import StepTimes

PromptShape = Callable[[Sequence[int]], tuple[int, int]]
"""(rows, width) of a step's block of prompts, by what is left of each, in their order."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine (one copy of the attention).

    Attributes:
        num_pages: of ``page_tokens`` tokens each: virtual pages, all ranks together.
        host_pages: pages that the host's memory keeps of what was evicted.
        host_seconds: to copy a page back from there.
        max_batch: sequences at the same time.
        chunk: prompt tokens of a step.
        acceptance: tokens that a decode step yields for each sequence.
        prompt_shape: how an engine whose programs have few shapes chooses one, instead of taking
            ``chunk`` tokens of as many prompts as it may be.
        looks_ahead: a step is planned when the one before it begins, so that devices never wait:
            what comes in between has to wait for a step more.

    Raises:
        ConfigError: sizes below 1, or an acceptance that is no number from 1 on.
    """

    steps: StepTimes
    num_pages: int
    page_tokens: int = 64
    host_pages: int = 0
    host_seconds: float = 0.0
    max_batch: int = 256
    chunk: int = 2048
    acceptance: float = 1.0
    prompt_shape: PromptShape | None = None
    looks_ahead: bool = False

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_tokens", "max_batch", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1", **{name: getattr(self, name)})
        if not 1 <= self.acceptance < math.inf:
            raise ConfigError(
                "a step yields a token or more for each sequence", acceptance=self.acceptance
            )

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_tokens

    def pages(self, num_tokens: int) -> int:
        """Pages of a sequence."""
        return -(-num_tokens // self.page_tokens)

    def holds(self, job: Job) -> bool:
        """Whether a request fits into an empty engine."""
        return job.num_tokens <= self.num_tokens


@dataclass(frozen=True, eq=False)
class Step:
    """One step, or a run of ``num_steps`` decode steps, each ``growth`` seconds longer."""

    begin: float
    num_steps: int
    seconds: float  # of the first
    growth: float
    is_run: bool

    @property
    def end(self) -> float:
        return self.begin + self._seconds_of(self.num_steps)

    def _seconds_of(self, steps: int) -> float:
        return steps * self.seconds + self.growth * steps * (steps - 1) / 2

    def steps_until(self, time: float) -> int:
        """The steps that have ended at ``time``, and the one that is computed then."""
        low, high = 1, self.num_steps
        while low < high:
            middle = (low + high) // 2
            low, high = (
                (low, middle)
                if self.begin + self._seconds_of(middle) >= time
                else (middle + 1, high)
            )
        return low

    def first(self, steps: int) -> "Step":
        return Step(self.begin, steps, self.seconds, self.growth, self.is_run)
