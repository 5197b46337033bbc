"""Simulated engines together: who gets a request, how its KV moves, what fails."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dcpjax.errors import ConfigError
from dcpjax.planner.events import EventQueue
from dcpjax.planner.sim_engine import Engine
from dcpjax.planner.sim_job import Job
from dcpjax.planner.sim_step import EngineSpec

Routing = Literal["round_robin", "least_loaded", "prefix"]
PREFIX_WEIGHT, LOAD_WEIGHT = 3.0, 2.0
"""Of the share of a prompt that an engine has, and of the share of the load that it has."""


@dataclass(frozen=True)
class Failure:
    """An engine that loses everything at ``time`` and is back ``seconds`` later.

    Raises:
        ConfigError: times that do not come.
    """

    time: float
    seconds: float
    role: Literal["prefill", "decode"]
    index: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.time < math.inf and 0 < self.seconds < math.inf):
            raise ConfigError(
                "an engine fails at a time from 0 on, for some seconds",
                time=self.time,
                seconds=self.seconds,
            )


@dataclass(frozen=True)
class Cluster:
    """Engines and what is between them.

    Attributes:
        prefill: none: the decode engines compute prompts, too.
        num_devices: of all engines, for throughput per device.
        latency: seconds that a request and its first token are on the way between a client and an
            engine, which keep no step waiting.
        transfer_base: seconds of a transfer of nothing.
        transfer_per_token: seconds more for each token; transfers into one engine queue up.
        routing: how an engine is chosen, in both roles.

    Raises:
        ConfigError: no decode engine, or failures of engines that are not there.
    """

    decode: tuple[EngineSpec, ...]
    prefill: tuple[EngineSpec, ...] = ()
    num_devices: int = 1
    latency: float = 0.0
    transfer_base: float = 0.0
    transfer_per_token: float = 0.0
    routing: Routing = "least_loaded"
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("a cluster has a decode engine", decode=0)
        for failure in self.failures:
            if not 0 <= failure.index < len(getattr(self, failure.role)):
                raise ConfigError("what fails is an engine of the cluster", failure=failure)

    def check_fits(self, num_tokens: int) -> None:
        """Refuse a request that no engine could ever hold.

        Raises:
            ConfigError: with what is missing.
        """
        for role in ("prefill", "decode"):
            specs: Sequence[EngineSpec] = getattr(self, role)
            if not specs:
                continue
            best = max(spec.num_tokens for spec in specs)
            if num_tokens > best:
                raise ConfigError(
                    f"the longest sequence fits into a {role} engine: it is "
                    f"{num_tokens - best:,} tokens too long",
                    num_tokens=num_tokens,
                    capacity=best,
                )


class ClusterState:
    """The engines while they run. ``on_finished`` is called with each request that is done."""

    def __init__(self, cluster: Cluster, events: EventQueue, block_tokens: int) -> None:
        self.cluster, self.events = cluster, events
        self.on_finished: Callable[[Job], None] | None = None
        self._turn = {"prefill": 0, "decode": 0}
        self._links: dict[int, float] = {}
        self.transferred_tokens = 0
        self._held: list[tuple[str, Job]] = []
        is_split = bool(cluster.prefill)
        self.decode = [
            Engine(
                number,
                spec,
                events,
                block_tokens,
                decodes_first_token=is_split,
                on_prefilled=self._decode_here,
                on_finished=self._finish,
            )
            for number, spec in enumerate(cluster.decode)
        ]
        self.prefill = [
            Engine(
                len(cluster.decode) + number,
                spec,
                events,
                block_tokens,
                decodes_first_token=False,
                on_prefilled=self._hand_over,
                on_finished=self._finish,
            )
            for number, spec in enumerate(cluster.prefill)
        ]
        for engine in self.decode if is_split else ():
            engine.receive_with(self._transfer)
        for failure in cluster.failures:
            self._schedule(failure)

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    def submit(self, job: Job) -> None:
        """Send a request to the engine that computes its prompt."""
        role = "prefill" if self.prefill else "decode"
        if self.cluster.latency:
            self.events.after(self.cluster.latency, lambda: self._send(role, job))
        else:  # at once: in the order of what else happens now
            self._send(role, job)

    def _send(self, role: str, job: Job) -> None:
        engine = self._choose(role, job)
        if engine is None:  # all have failed: until one is back
            self._held.append((role, job))
        else:
            engine.add(job)

    def _choose(self, role: str, job: Job) -> Engine | None:
        engines: list[Engine] = getattr(self, role)
        alive = [engine for engine in engines if engine.is_alive and engine.spec.holds(job)]
        if not alive:
            return None
        if self.cluster.routing == "round_robin":
            self._turn[role] += 1
            return alive[(self._turn[role] - 1) % len(alive)]
        if self.cluster.routing == "least_loaded" or len(alive) == 1:
            return min(alive, key=lambda engine: engine.load)
        most = max(1, *(engine.load for engine in alive))

        def worth(engine: Engine) -> float:
            share = engine.prefix_tokens(job) / job.turn.num_input
            return PREFIX_WEIGHT * share - LOAD_WEIGHT * engine.load / most

        return max(alive, key=worth)

    def _decode_here(self, engine: Engine, job: Job) -> None:
        job.first_token = job.joined = self.events.now
        if job.turn.num_output == 1:
            job.finished = self.events.now
            engine.release(job)
            self._finish(engine, job)
        else:
            engine.go_on(job)

    def _hand_over(self, engine: Engine, job: Job) -> None:
        """The prompt is computed: a decode engine takes it when it has room; the pages stay."""
        del engine
        self._send("decode", job)

    def _transfer(self, target: Engine, job: Job) -> None:
        """Move what the target lacks, after what is already on the way to it."""
        attempt, missing = job.attempt, max(0, job.turn.num_input - target.prefix_hit(job))
        self.transferred_tokens += missing
        seconds = self.cluster.transfer_base + missing * self.cluster.transfer_per_token
        begin = max(self.events.now, self._links.get(target.number, 0.0))
        self._links[target.number] = begin + seconds

        def land() -> None:
            if job.attempt != attempt:
                return
            for source in self.prefill:
                if job.number in source.jobs:
                    source.leave(job)
            target.join(job)

        self.events.at(begin + seconds, land)

    def _finish(self, engine: Engine, job: Job) -> None:
        del engine
        if self.on_finished is not None:
            self.on_finished(job)

    def _schedule(self, failure: Failure) -> None:
        engine: Engine = getattr(self, failure.role)[failure.index]

        def fail() -> None:
            for job in engine.fail():
                self._held = [held for held in self._held if held[1] is not job]
                for other in self.engines:
                    if job.number in other.jobs:
                        other.leave(job)
                job.begin_again()
                self.submit(job)

        def recover() -> None:
            engine.recover()
            held, self._held = self._held, []
            for role, job in held:
                self._send(role, job)

        self.events.at(failure.time, fail)
        self.events.at(failure.time + failure.seconds, recover)
