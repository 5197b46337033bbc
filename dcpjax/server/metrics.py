"""Prometheus metrics, under the names of vLLM where the meaning is the same.

What the engine counts is read from ``Engine.stats()`` at the moment of a scrape; what only a
client can feel, latencies and how requests ended, is observed here. One registry per server.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from dcpjax.engine.request import FinishReason

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKENS = tuple(2.0**i for i in range(21))

# name of the metric: key in stats(), help
_GAUGES: Mapping[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_requests_running", "requests that are being computed"),
    "vllm:num_requests_waiting": ("num_requests_waiting", "requests that wait for room"),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage", "used share of the KV pages, 0 to 1"),
    "dcpjax:kv_page_fragmentation": (
        "kv_page_fragmentation",
        "1 - longest run of free KV pages / free pages: short runs make transfers slow",
    ),
    "dcpjax:kv_bytes_per_rank": ("kv_bytes_per_rank", "bytes of the KV pool on one rank"),
    "dcpjax:kv_tokens_capacity": ("kv_tokens_capacity", "tokens that the KV pool can hold"),
    "dcpjax:acceptance_length": (
        "acceptance_length",
        "tokens per verification of drafts, the one behind them included; 1 without",
    ),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:prompt_tokens": ("prompt_tokens", "prompt tokens of started requests"),
    "vllm:generation_tokens": ("generation_tokens", "generated tokens"),
    "vllm:num_preemptions": ("num_preemptions", "requests that lost their pages and started over"),
    "dcpjax:num_recomputations": (
        "num_recomputations",
        "requests that started over because ranks had different prefixes",
    ),
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "tokens looked up in the prefix cache"),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "tokens found in the prefix cache"),
    "dcpjax:steps": ("steps", "steps of the engine"),
    "dcpjax:compilations_after_warmup": (
        "compilations_after_warmup",
        "programs compiled while serving; should stay 0",
    ),
}
# The same of stats()["speculation"].
_SPECULATION_COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:spec_decode_num_drafts": ("num_verifications", "verifications of drafts"),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "drafts that were verified"),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "drafts that were accepted"),
}
# The same of stats()["kv_transfer"]. vLLM's histograms of single transfers are sums here.
_TRANSFER_COUNTERS: Mapping[str, tuple[str, str]] = {
    "dcpjax:kv_transfers": ("num_transfers", "KV transfers that were completed"),
    "dcpjax:kv_transfer_bytes": ("num_bytes", "bytes that they moved"),
    "dcpjax:kv_transfer_descriptors": ("num_descriptors", "pieces that they moved"),
    "dcpjax:kv_transfer_seconds": ("seconds", "seconds that they took"),
    "vllm:nixl_num_failed_transfers": ("num_failed", "KV loads or sends that failed"),
    "dcpjax:kv_handed_over": ("num_handed_over", "prompts whose KV another engine has taken"),
    "vllm:nixl_num_kv_expired_reqs": ("num_expired", "prompts whose KV nobody took in time"),
}
_TRANSFER_GAUGES: Mapping[str, tuple[str, str]] = {
    "dcpjax:kv_leases": ("num_leases", "prompts whose KV others may still take"),
    "dcpjax:kv_quarantined_pages": (
        "num_quarantined_pages",
        "pages of failed loads into which a silent engine may still write",
    ),
}

_PROMPT_GAUGES: Mapping[str, tuple[str, str]] = {
    "dcpjax:prompt_work_balance": (
        "balance",
        "attention work on prompts of the busiest PCP rank over the mean",
    ),
    "dcpjax:prompt_copy_bytes": ("copy_bytes", "most bytes of copies of layers that a rank holds"),
}
"""Of stats()["pcp"]."""


class _EngineCollector(Collector):
    """Turns one ``Engine.stats()`` into metrics. Holds the latest, for the next scrape."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: Mapping[str, Any] = {}

    def collect(self) -> Iterator[Metric]:
        if not self.stats:
            return
        for name, (key, help) in _GAUGES.items():
            yield self._gauge(name, help, self.stats[key])
        yield from self._counters(_COUNTERS, self.stats)
        if (speculation := self.stats.get("speculation")) is not None:
            yield from self._counters(_SPECULATION_COUNTERS, speculation)
            yield self._accepted_per_position(speculation["num_accepted_tokens_per_pos"])
        if (transfers := self.stats.get("kv_transfer")) is not None:
            yield from self._counters(_TRANSFER_COUNTERS, transfers)
            for name, (key, help) in _TRANSFER_GAUGES.items():
                yield self._gauge(name, help, transfers[key])
        if (prompts := self.stats.get("pcp")) is not None:
            for name, (key, help) in _PROMPT_GAUGES.items():
                yield self._gauge(name, help, prompts[key])
        num_shapes = len(self.stats["compiled_shapes"])
        yield self._gauge("dcpjax:compiled_shapes", "programs compiled in warm-up", num_shapes)
        yield self._cache_config()
        audit = self.stats["audit"]
        yield self._gauge(
            "dcpjax:audited_steps", "compiled steps that were audited", audit["steps"]
        )
        yield self._gauge(
            "dcpjax:audit_temporary_bytes",
            "largest temporary memory of a compiled step",
            audit["temporary_bytes"],
        )

    def _counters(
        self, names: Mapping[str, tuple[str, str]], stats: Mapping[str, Any]
    ) -> Iterator[Metric]:
        for name, (key, help) in names.items():
            counter = CounterMetricFamily(name, help, labels=["model_name"])
            counter.add_metric([self._model_name], stats[key])
            yield counter

    def _accepted_per_position(self, counts: Sequence[int]) -> Metric:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        help = "verifications that accepted the draft at this position"
        counter = CounterMetricFamily(name, help, labels=["model_name", "position"])
        for position, count in enumerate(counts):
            counter.add_metric([self._model_name, str(position)], count)
        return counter

    def _gauge(self, name: str, help: str, value: float | int) -> Metric:
        family = GaugeMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _cache_config(self) -> Metric:
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("vllm:cache_config_info", "shape of the KV pool", labels=labels)
        values = [self._model_name, str(self.stats["block_size"]), str(self.stats["num_pages"])]
        family.add_metric(values, 1)
        return family


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "arrival to first token", _SECONDS, model_name
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "between two tokens", _SECONDS, model_name
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "mean time between tokens of one request",
            _SECONDS,
            model_name,
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "arrival to last token", _SECONDS, model_name
        )
        self.prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "tokens of a prompt", _TOKENS, model_name
        )
        self.generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "tokens of an answer", _TOKENS, model_name
        )
        ended = Counter(
            "vllm:request_success",
            "requests by how they ended",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self.ended = {reason: ended.labels(model_name, reason.value) for reason in FinishReason}

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...], model_name: str
    ) -> Histogram:
        family = Histogram(name, help, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(model_name)

    def render(self, stats: Mapping[str, Any] | None) -> bytes:
        """The text of one scrape. None: the engine is gone, its last numbers stay."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self._registry)


@dataclass
class SequenceTimer:
    """Observes one sequence from its arrival to its end."""

    metrics: Metrics
    num_prompt_tokens: int
    arrival: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._first: float | None = None
        self._last = self.arrival
        self._num_tokens = 0
        self._has_ended = False

    def add_tokens(self, count: int) -> None:
        """Tokens have arrived together; their waiting time is shared among them."""
        if count == 0:
            return
        now = self.clock()
        if self._first is None:
            self._first = now
            self.metrics.time_to_first_token.observe(now - self.arrival)
        else:
            for _ in range(count):
                self.metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now
        self._num_tokens += count

    def end(self, reason: FinishReason) -> None:
        """The sequence is over; a second call changes nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics = self.metrics
        metrics.ended[reason].inc()
        metrics.e2e_latency.observe(self.clock() - self.arrival)
        metrics.prompt_tokens.observe(self.num_prompt_tokens)
        metrics.generation_tokens.observe(self._num_tokens)
        if self._first is not None and self._num_tokens > 1:
            span = self._last - self._first
            metrics.time_per_output_token.observe(span / (self._num_tokens - 1))
