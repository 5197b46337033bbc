"""Traces that are made up: random lengths, arrivals and turns, the same for the same seed."""

import random
from dataclasses import dataclass

from dcpjax.errors import ConfigError
from dcpjax.planner.trace_files import Session, Turn
from dcpjax.planner.traces import Trace

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Workload:
    """What requests look like; lengths vary around their means by ``spread``.

    Attributes:
        num_requests: in all sessions.
        rate: sessions that start per second, at random times.
        num_input: prompt tokens of a first turn.
        num_turns: of a session; each sends what came before, its answer and ``turn_input`` more.
        shared: tokens at the beginning of every prompt that are the same in all sessions.
        think: seconds between turns.
        spread: standard deviation of the logarithm of lengths.

    Raises:
        ConfigError: counts below 1, a rate of 0, negative times.
    """

    num_requests: int = 100
    rate: float = 1.0
    num_input: int = 8192
    num_output: int = 256
    num_turns: int = 1
    turn_input: int = 1024
    shared: int = 0
    think: float = 0.0
    spread: float = 0.3

    def __post_init__(self) -> None:
        for name in ("num_requests", "num_input", "num_output", "num_turns", "turn_input"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1", **{name: getattr(self, name)})
        for name in ("shared", "think", "spread"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is at least 0", **{name: getattr(self, name)})
        if not self.rate > 0:
            raise ConfigError("rate is above 0", rate=self.rate)
        if self.shared > self.num_input:
            raise ConfigError(
                "the shared beginning is part of the prompt",
                shared=self.shared,
                num_input=self.num_input,
            )


def generate_trace(workload: Workload, seed: int = 0) -> Trace:
    """Sessions with exponential gaps between their starts."""
    chance = random.Random(seed)
    sessions: list[Session] = []
    time, left, next_id = 0.0, workload.num_requests, 1 << 40
    while left:
        num_turns = min(left, workload.num_turns)
        turns, next_id = _turns(workload, num_turns, chance, next_id)
        sessions.append(Session(time, turns))
        time += chance.expovariate(workload.rate)
        left -= num_turns
    return Trace("generated", tuple(sessions), BLOCK_SIZE)


def _turns(
    workload: Workload, count: int, chance: random.Random, next_id: int
) -> tuple[tuple[Turn, ...], int]:
    length = max(workload.shared, _length(workload.num_input, workload.spread, chance))
    blocks = list(range(min(workload.shared, length) // BLOCK_SIZE))
    turns: list[Turn] = []
    for index in range(count):
        missing = length // BLOCK_SIZE - len(blocks)
        blocks += range(next_id, next_id + missing)
        next_id += missing
        num_output = _length(workload.num_output, workload.spread, chance)
        think = chance.expovariate(1 / workload.think) if index and workload.think else 0.0
        turns.append(Turn(length, num_output, tuple(blocks), think))
        length += num_output + _length(workload.turn_input, workload.spread, chance)
    return tuple(turns), next_id


def _length(mean: int, spread: float, chance: random.Random) -> int:
    """A length around the mean: log-normal, of that mean."""
    return max(1, round(mean * chance.lognormvariate(-spread * spread / 2, spread)))
