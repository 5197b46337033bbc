"""Step times of a server, shape by shape, as its clients can tell: from requests sent on purpose.

The server computes prompts in blocks of the shapes (1, SHORT), (ROWS, SHORT) and (1, LONG), with
all decode rows beside them, and chooses the block that wastes least. A prompt of four short chunks
that is alone therefore takes three steps more than one of a single chunk, and what is left of the
time to a first token when its steps are taken off is the way through the server.
"""

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from bench_serve import stream_once
from bench_workers import StreamTimes, make_prompt

SHORT, ROWS, LONG = 64, 4, 512
DECODE_ROWS = (1, 2, 4, 8)
ANSWER = 24
"""Tokens of the answers by which steps without prompts are measured."""
REPEATS = 3
LEAST = 1e-5
"""Seconds, instead of a difference that noise has made negative."""


@dataclass
class StepTable:
    """Rows of :func:`dcpjax.planner.fit_shapes`, and seconds of the way through the server."""

    decode: list[list[float]] = field(default_factory=list)
    prompts: list[list[float]] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def __add__(self, other: "StepTable") -> "StepTable":
        return StepTable(
            self.decode + other.decode,
            self.prompts + other.prompts,
            self.latencies + other.latencies,
        )

    @property
    def latency(self) -> float:
        return statistics.median(self.latencies)


async def ask_together(
    url: str, prompts: Sequence[tuple[int, ...]], tokens: int
) -> list[StreamTimes]:
    """All prompts at the same time."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        return await asyncio.gather(*(stream_once(http, prompt, tokens) for prompt in prompts))


def measure_steps(url: str, salts: Iterator[int]) -> StepTable:
    """The table of a server without other requests."""
    table = StepTable(_decode_rows(url, salts))
    for _ in range(REPEATS):
        table += _prompt_rows(url, salts)
    return table


def _ask(url: str, salts: Iterator[int], count: int, length: int, tokens: int) -> list[StreamTimes]:
    prompts = [make_prompt(length, salt) for salt in itertools.islice(salts, count)]
    return asyncio.run(ask_together(url, prompts, tokens))


def _decode_rows(url: str, salts: Iterator[int]) -> list[list[float]]:
    """The answer that begins last sees no prompt any more."""
    rows: list[list[float]] = []
    cases = [*((count, SHORT) for count in DECODE_ROWS), (ROWS, 2 * LONG)]
    for count, length in cases:
        streams = _ask(url, salts, count, length, ANSWER)
        last = max(streams, key=lambda stream: stream.first)
        rows.append([count, count * (length + ANSWER / 2), last.inter_token_seconds])
    return rows


def _prompt_rows(url: str, salts: Iterator[int]) -> StepTable:
    def first_token(length: int, count: int = 1) -> float:
        """Until the last of so many prompts has its first token."""
        streams = _ask(url, salts, count, length, 2)
        return max(stream.first for stream in streams) - min(stream.asked for stream in streams)

    one = first_token(SHORT)
    short = max((first_token(4 * SHORT) - one) / 3, LEAST)
    latency = max(one - short, LEAST)
    long = first_token(LONG)
    longer = first_token(2 * LONG)
    # Of the first prompt two chunks are computed or planned when the others arrive.
    together = first_token(4 * SHORT, ROWS)
    rows: list[list[float]] = [
        [1, SHORT, 0, short],
        [ROWS, SHORT, SHORT, max((together - latency - 2 * short) / 4, LEAST)],
        [1, LONG, 0, max(long - latency, LEAST)],
        [1, LONG, LONG, max(longer - long, LEAST)],
    ]
    return StepTable([], rows, [latency])
