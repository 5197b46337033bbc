"""How long a simulated engine's steps take: estimated, or along lines through recorded ones.

A table of an engine whose programs have few shapes is better read by
:mod:`dcpjax.planner.shaped_steps`.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dcpjax.errors import ConfigError
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import Device
from dcpjax.planner.models import ModelShape
from dcpjax.planner.steps import decode_step, prefill_step

TOKEN_GRAIN, PRIOR_GRAIN = 64, 1024
"""Tokens that estimates of prompt chunks are rounded to, so that few are computed."""
SHORT_CONTEXT, LONG_CONTEXT = 2048, 131_072
"""Contexts between which the slope of a decode step is taken."""


Chunk = tuple[int, int]
"""Tokens of a prompt that one step computes, and the tokens of the prompt before them."""


class StepTimes(Protocol):
    """Seconds of an engine's steps."""

    def decode(self, batch: int) -> tuple[float, float]:
        """Of a step of ``batch`` sequences: at no context, and more for each cached token."""
        ...

    def with_prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        """Of a step with these chunks, and ``batch`` sequences at no context beside them."""
        ...


class ChunkTimes(Protocol):
    """Seconds of chunks and answers that are alone in their steps."""

    def decode(self, batch: int) -> tuple[float, float]: ...

    def prefill(self, tokens: int, prior: int) -> float:
        """Of a chunk."""
        ...

    @property
    def fixed(self) -> float:
        """The part of a chunk's time that chunks and answers of one step have in common."""
        ...


def added_up(steps: ChunkTimes, chunks: Sequence[Chunk], batch: int) -> float:
    """Seconds of a step that does one thing after the other, and only once what all have in
    common."""
    seconds = [steps.prefill(tokens, prior) for tokens, prior in chunks]
    answers = steps.decode(batch)[0] if batch else 0.0
    alone = 0 if batch else 1
    shared = [max(0.0, one - steps.fixed) for one in seconds[alone:]]
    return answers + sum(seconds[:alone]) + sum(shared)


@dataclass(frozen=True)
class ConstantSteps:
    """Steps that take what they are told: for checks by hand."""

    decode_seconds: float
    prefill_seconds: float
    per_cached_token: float = 0.0
    fixed: float = 0.0

    def decode(self, batch: int) -> tuple[float, float]:
        del batch
        return self.decode_seconds, self.per_cached_token

    def prefill(self, tokens: int, prior: int) -> float:
        del tokens, prior
        return self.prefill_seconds

    def with_prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        return added_up(self, chunks, batch)


@dataclass(frozen=True)
class EstimatedSteps:
    """Steps of a deployment as :mod:`dcpjax.planner.steps` estimates them."""

    model: ModelShape
    device: Device
    deployment: Deployment

    def decode(self, batch: int) -> tuple[float, float]:
        return _decode_line(self, batch)

    def prefill(self, tokens: int, prior: int) -> float:
        rounded = max(TOKEN_GRAIN, round(tokens / TOKEN_GRAIN) * TOKEN_GRAIN)
        return _prefill_seconds(self, rounded, round(prior / PRIOR_GRAIN) * PRIOR_GRAIN)

    def with_prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        return added_up(self, chunks, batch)

    @property
    def fixed(self) -> float:
        return _launch_seconds(self)


@functools.lru_cache(maxsize=65536)
def _decode_line(steps: EstimatedSteps, batch: int) -> tuple[float, float]:
    """Through the estimates at a long context, and at that from which on sparse attention is full,
    and the choice that ranks exchange."""
    start = SHORT_CONTEXT
    if steps.model.indexer is not None:
        start = steps.model.indexer.topk * steps.deployment.dcp
    low, high = (
        decode_step(steps.model, steps.device, steps.deployment, batch, context).seconds
        for context in (start, LONG_CONTEXT)
    )
    slope = (high - low) / (batch * (LONG_CONTEXT - start))
    return low - slope * batch * start, slope


@functools.lru_cache(maxsize=65536)
def _prefill_seconds(steps: EstimatedSteps, tokens: int, prior: int) -> float:
    return prefill_step(steps.model, steps.device, steps.deployment, tokens, prior).seconds


@functools.lru_cache(maxsize=64)
def _launch_seconds(steps: EstimatedSteps) -> float:
    step = prefill_step(steps.model, steps.device, steps.deployment, TOKEN_GRAIN, 0)
    return step.by_part()["launches"]


@dataclass(frozen=True)
class RecordedSteps:
    """Lines through recorded steps.

    ``decode = a + b · batch + c · cached tokens``, ``prefill = d + e · tokens + f · tokens ·
    (prior + tokens / 2)``.
    """

    decode_line: tuple[float, float, float]
    prefill_line: tuple[float, float, float]

    def decode(self, batch: int) -> tuple[float, float]:
        fixed, per_sequence, per_token = self.decode_line
        return fixed + per_sequence * batch, per_token

    def prefill(self, tokens: int, prior: int) -> float:
        fixed, per_token, per_pair = self.prefill_line
        return fixed + tokens * (per_token + per_pair * (prior + tokens / 2))

    @property
    def fixed(self) -> float:
        return self.prefill_line[0]

    def with_prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        return added_up(self, chunks, batch)


def fit_steps(
    decode: Sequence[Sequence[float]], prefill: Sequence[Sequence[float]]
) -> RecordedSteps:
    """Lines through rows of (batch, cached tokens, seconds) and of (tokens, prior, seconds)."""
    decode_rows = [(1.0, batch, cached) for batch, cached, _ in decode]
    prefill_rows = [(1.0, tokens, tokens * (prior + tokens / 2)) for tokens, prior, _ in prefill]
    (a, b, c), (d, e, f) = (
        fit(rows, [seconds for *_, seconds in table])
        for rows, table in ((decode_rows, decode), (prefill_rows, prefill))
    )
    return RecordedSteps((a, b, c), (d, e, f))


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """A coefficient for each column, by least squares of the relative error, none below 0.

    Columns whose coefficient would be negative are left out, the worst first.

    Raises:
        ConfigError: a step that takes no time.
    """
    for one in seconds:
        if not 0 < one < math.inf:
            raise ConfigError("recorded steps take some seconds each", seconds=one)
    matrix = np.asarray(rows, float) / np.asarray(seconds, float)[:, None]
    columns = list(range(matrix.shape[1]))
    found: Any = np.zeros(matrix.shape[1])
    while columns:
        some, *_ = np.linalg.lstsq(matrix[:, columns], np.ones(len(matrix)), rcond=None)
        if (some >= 0).all():
            found[columns] = some
            break
        del columns[int(np.argmin(some * np.abs(matrix[:, columns]).max(axis=0)))]
    return [float(one) for one in found]
