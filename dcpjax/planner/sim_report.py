"""What a simulation shows, in the terms of the usual benchmarks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcpjax.errors import ConfigError
from dcpjax.planner.sim_cluster import Cluster, ClusterState
from dcpjax.planner.sim_job import Job


@dataclass(frozen=True)
class Spread:
    """Of one time over all requests, in seconds; percentiles by nearest rank."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(ranked: Sequence[float], percent: float) -> float:
    """The smallest of the ascending values that at least ``percent`` % do not exceed."""
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def spread(values: Sequence[float]) -> Spread:
    ranked = sorted(values)
    p50, p90, p99 = (percentile(ranked, percent) for percent in (50, 90, 99))
    return Spread(sum(ranked) / len(ranked), p50, p90, p99, ranked[-1])


@dataclass(frozen=True)
class Objective:
    """What a request has to keep to be good: seconds to the first token, and per further one."""

    ttft: float = math.inf
    tpot: float = math.inf

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0):
            raise ConfigError("objectives are above 0", ttft=self.ttft, tpot=self.tpot)

    def share(self, jobs: Sequence[Job]) -> float:
        """Of the requests that keep it."""
        good = sum(1 for job in jobs if job.ttft <= self.ttft and job.tpot <= self.tpot)
        return good / len(jobs)


@dataclass(frozen=True)
class EngineReport:
    """One engine, and the share of the time in which it computed."""

    role: str
    busy_share: float


@dataclass(frozen=True)
class Report:
    """The result of a simulation.

    Attributes:
        duration: seconds from the first arrival to the last token.
        ttft, tpot, latency: time to first token, per further output token, in all.
        prefill_queue: arrival to the first prompt chunk.
        decode_queue: prompt computed to KV landed, transfer included.
        interactivity: 1 / (90th percentile of latency per output token): AgentX's tokens per second
            and user, with the time to first token in it.
        device_throughput: prompt (cached or not) and output tokens per second and device.
        hit_rate: share of prompt tokens that were not computed.
        mean_present: requests in the system, averaged over time.
        good_share: of the requests within the objective, where there is one.
    """

    trace: str
    num_requests: int
    num_devices: int
    duration: float
    ttft: Spread
    tpot: Spread
    latency: Spread
    prefill_queue: Spread
    decode_queue: Spread
    interactivity: float
    output_throughput: float
    request_throughput: float
    device_throughput: float
    hit_rate: float
    mean_present: float
    good_share: float | None
    restarts: int
    transferred_tokens: int
    engines: tuple[EngineReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_report(
    trace: str,
    cluster: Cluster,
    jobs: Sequence[Job],
    state: ClusterState,
    *,
    area: float,
    end: float,
    objective: Objective | None = None,
) -> Report:
    """Measure what happened to the requests.

    Args:
        area: time integral of the requests in the system.
        end: when the last one left.
    """
    begin = min(job.sent for job in jobs)
    duration = end - begin or 1e-12
    inputs = sum(job.turn.num_input for job in jobs)
    outputs = sum(job.turn.num_output for job in jobs)
    per_output = sorted(job.latency / job.turn.num_output for job in jobs)
    slow = percentile(per_output, 90)
    return Report(
        trace=trace,
        num_requests=len(jobs),
        num_devices=cluster.num_devices,
        duration=duration,
        ttft=spread([job.ttft for job in jobs]),
        tpot=spread([job.tpot for job in jobs]),
        latency=spread([job.latency for job in jobs]),
        prefill_queue=spread([job.started - job.sent for job in jobs]),
        decode_queue=spread([job.joined - job.prefilled for job in jobs]),
        interactivity=1 / slow if slow else math.inf,
        output_throughput=outputs / duration,
        request_throughput=len(jobs) / duration,
        device_throughput=(inputs + outputs) / duration / cluster.num_devices,
        hit_rate=sum(job.cached_tokens for job in jobs) / inputs,
        mean_present=area / duration,
        good_share=None if objective is None else objective.share(jobs),
        restarts=sum(job.attempt for job in jobs),
        transferred_tokens=state.transferred_tokens,
        engines=tuple(
            EngineReport(role, engine.busy_seconds / duration)
            for role, engines in (("prefill", state.prefill), ("decode", state.decode))
            for engine in engines
        ),
    )
