"""Step times of an engine whose programs have few shapes, recorded shape by shape.

Such an engine computes so many decode rows, used or not, and with a prompt the most of them; so
what a step takes follows from its shape, and from the tokens that it reads.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcpjax.errors import ConfigError
from dcpjax.planner.step_times import Chunk, RecordedSteps, fit, fit_steps

Row = Sequence[float]


@dataclass(frozen=True)
class ShapedSteps:
    """Seconds of each shape.

    Attributes:
        decode_shapes: (rows, seconds) at no context, ascending.
        prompt_shapes: ((rows, width), seconds) of a step with such a block of prompts and the most
            decode rows beside it, by size.
        per_cached_token: seconds more for each token that an answer reads.
        per_pair: seconds more for each pair of a prompt's token and one before its chunk.
    """

    decode_shapes: tuple[tuple[int, float], ...]
    prompt_shapes: tuple[tuple[tuple[int, int], float], ...]
    per_cached_token: float
    per_pair: float

    def decode(self, batch: int) -> tuple[float, float]:
        fitting = (seconds for rows, seconds in self.decode_shapes if rows >= batch)
        return next(fitting, self.decode_shapes[-1][1]), self.per_cached_token

    def with_prompts(self, chunks: Sequence[Chunk], batch: int) -> float:
        if not chunks:
            return self.decode(batch)[0] if batch else 0.0
        longest = max(tokens for tokens, _ in chunks)
        fitting = (
            seconds
            for (rows, width), seconds in self.prompt_shapes
            if rows >= len(chunks) and width >= longest
        )
        pairs = sum(tokens * prior for tokens, prior in chunks)
        return next(fitting, self.prompt_shapes[-1][1]) + self.per_pair * pairs

    @property
    def prefill_shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, width) of the blocks of prompts."""
        return tuple(shape for shape, _ in self.prompt_shapes)

    @property
    def decode_rows(self) -> tuple[int, ...]:
        return tuple(rows for rows, _ in self.decode_shapes)


def fit_shapes(decode: Sequence[Row], prompts: Sequence[Row]) -> ShapedSteps:
    """From rows of (decode rows, cached tokens, seconds) and (rows, width, prior, seconds).

    ``prior``: tokens before each chunk, of which there are as many as rows, all full. What was
    recorded several times counts once, by its median: machines are busy with other things at times.

    Raises:
        ConfigError: no rows.
    """
    if not decode or not prompts:
        raise ConfigError(
            "a table of shapes has steps of decode and of prompts",
            decode=len(decode),
            prompts=len(prompts),
        )
    decode, prompts = _medians(decode), _medians(prompts)
    sizes = sorted({int(rows) for rows, _, _ in decode})
    blocks = sorted({(int(r), int(w)) for r, w, _, _ in prompts}, key=lambda b: (b[0] * b[1], b))
    decode_times = fit(
        [[*(float(rows == size) for size in sizes), cached] for rows, cached, _ in decode],
        [seconds for *_, seconds in decode],
    )
    prompt_times = fit(
        [
            [*(float((r, w) == block) for block in blocks), r * w * prior]
            for r, w, prior, _ in prompts
        ],
        [seconds for *_, seconds in prompts],
    )
    return ShapedSteps(
        tuple(zip(sizes, decode_times[:-1], strict=True)),
        tuple(zip(blocks, prompt_times[:-1], strict=True)),
        decode_times[-1],
        prompt_times[-1],
    )


def _medians(rows: Sequence[Row]) -> list[list[float]]:
    """The rows without repetitions; the last number is the median of theirs."""
    seconds: dict[tuple[float, ...], list[float]] = {}
    for *what, one in rows:
        seconds.setdefault(tuple(what), []).append(one)
    return [[*what, statistics.median(several)] for what, several in seconds.items()]


def read_steps(path: Path) -> RecordedSteps | ShapedSteps:
    """A table of recorded steps, as JSON.

    ``{"decode": [[batch, cached tokens, seconds], …], "prefill": [[tokens, prior, seconds], …]}``,
    or, where programs have few shapes, ``{"decode": [[rows, cached tokens, seconds], …], "prompts":
    [[rows, width, prior, seconds], …]}``.

    Raises:
        ConfigError: no such table.
    """
    try:
        table: Any = json.loads(path.read_text(encoding="utf-8"))
        if "prompts" in table:
            return fit_shapes(table["decode"], table["prompts"])
        return fit_steps(table["decode"], table["prefill"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "a table of steps has lists decode, of three numbers each, and prefill or prompts, of "
            f"three or four: {error!r}",
            path=str(path),
        ) from error
