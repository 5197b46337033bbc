"""How long a simulated engine's steps take: estimated, or from a table that was recorded."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dcpjax.errors import ConfigError
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.hardware import Device
from dcpjax.planner.models import ModelShape
from dcpjax.planner.steps import decode_step, prefill_step

TOKEN_GRAIN, PRIOR_GRAIN = 64, 1024
"""Tokens that estimates of prompt chunks are rounded to, so that few are computed."""
LONG_CONTEXT = 131_072
"""Context at which the slope of a decode step is taken."""


class StepTimes(Protocol):
    """Seconds of an engine's steps."""

    def decode(self, batch: int) -> tuple[float, float]:
        """Of a step of ``batch`` sequences: at no context, and more for each cached token."""
        ...

    def prefill(self, tokens: int, prior: int) -> float:
        """Of a chunk of a prompt after ``prior`` tokens of it, alone in its step."""
        ...

    @property
    def fixed(self) -> float:
        """The part of a chunk's time that chunks and answers of one step have in common."""
        ...


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

    @property
    def fixed(self) -> float:
        return _launch_seconds(self)


@functools.lru_cache(maxsize=65536)
def _decode_line(steps: EstimatedSteps, batch: int) -> tuple[float, float]:
    """Through the estimates at 2K tokens, where sparse attention is full, and at a long context."""
    start = 2048
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

    Attributes:
        widths: chunks that were compiled, ascending: a chunk takes as long as the next wider one.
    """

    decode_line: tuple[float, float, float]
    prefill_line: tuple[float, float, float]
    widths: tuple[int, ...] = ()

    def decode(self, batch: int) -> tuple[float, float]:
        fixed, per_sequence, per_token = self.decode_line
        return fixed + per_sequence * batch, per_token

    def prefill(self, tokens: int, prior: int) -> float:
        fixed, per_token, per_pair = self.prefill_line
        width = _width(tokens, self.widths)
        return fixed + width * (per_token + per_pair * (prior + width / 2))

    @property
    def fixed(self) -> float:
        return self.prefill_line[0]


def read_steps(path: Path) -> RecordedSteps:
    """A table of recorded steps, as JSON.

    ``{"decode": [[batch, cached tokens, seconds], …], "prefill": [[tokens, prior, seconds], …]}``,
    and where chunks were compiled for some widths only ``"widths": [64, 512]``.

    Raises:
        ConfigError: no such table.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return fit_steps(table["decode"], table["prefill"], table.get("widths", ()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"a table of steps has lists decode and prefill of three numbers each: {error!r}",
            path=str(path),
        ) from error


def fit_steps(
    decode: Sequence[Sequence[float]],
    prefill: Sequence[Sequence[float]],
    widths: Sequence[int] = (),
) -> RecordedSteps:
    """Least squares of the relative error, no coefficient below 0."""
    decode_rows = [(1.0, batch, cached) for batch, cached, _ in decode]
    chunks = [(_width(tokens, widths), prior) for tokens, prior, _ in prefill]
    prefill_rows = [(1.0, tokens, tokens * (prior + tokens / 2)) for tokens, prior in chunks]
    return RecordedSteps(
        _fit(decode_rows, [seconds for *_, seconds in decode]),
        _fit(prefill_rows, [seconds for *_, seconds in prefill]),
        tuple(widths),
    )


def _width(tokens: float, widths: Sequence[int]) -> float:
    """Tokens that a chunk computes, padding included."""
    return next((width for width in widths if width >= tokens), tokens)


def _fit(
    rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]
) -> tuple[float, float, float]:
    """Columns whose coefficient would be negative are left out, the worst first."""
    matrix = np.asarray(rows, float) / np.asarray(seconds, float)[:, None]
    columns = [0, 1, 2]
    found: Any = np.zeros(3)
    while columns:
        some, *_ = np.linalg.lstsq(matrix[:, columns], np.ones(len(matrix)), rcond=None)
        if (some >= 0).all():
            found[columns] = some
            break
        del columns[int(np.argmin(some * np.abs(matrix[:, columns]).max(axis=0)))]
    return float(found[0]), float(found[1]), float(found[2])
