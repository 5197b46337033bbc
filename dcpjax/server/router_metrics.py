"""Prometheus metrics of the router: how calls ended, what was asked again, and of each engine."""

import enum
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from dcpjax.server.router_peers import Peers, Role

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


class Outcome(enum.Enum):
    """How a call ended for the client."""

    SUCCESS = "success"
    CLIENT_ERROR = "client_error"
    SERVER_ERROR = "server_error"
    BROKEN = "broken"  # an error after the first byte
    LEFT = "left"  # the client did not wait


class _PeerCollector(Collector):
    """What is known of the engines at the moment of a scrape."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "dcpjax:router_healthy", "whether an engine is healthy", labels=["role", "url"]
        )
        legs = GaugeMetricFamily(
            "dcpjax:router_open_legs", "calls that an engine works on", labels=["role", "url"]
        )
        for role in Role:
            for peer in self._peers.of(role):
                healthy.add_metric([role.value, peer.url], peer.is_healthy)
                legs.add_metric([role.value, peer.url], peer.num_open)
        yield from (healthy, legs)


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, peers: Peers) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_PeerCollector(peers))
        calls = self._counter("calls", "calls by how they ended", "outcome")
        self.calls = {outcome: calls.labels(outcome.value) for outcome in Outcome}
        failed = self._counter("failed_legs", "calls to engines without a usable answer", "role")
        self.failed_legs = {role: failed.labels(role.value) for role in Role}
        self.fallbacks = Counter(
            "dcpjax:router_fallbacks",
            "prompts that a decode engine computed as no prefill engine could",
            registry=self._registry,
        )
        self.repeated_prefills = Counter(
            "dcpjax:router_repeated_prefills",
            "prompts that were computed again as no decode engine could go on",
            registry=self._registry,
        )
        seconds = Histogram(
            "dcpjax:router_leg_seconds",
            "until the answer of an engine began; a prefill engine's is complete then",
            ["role"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.leg_seconds = {role: seconds.labels(role.value) for role in Role}

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(f"dcpjax:router_{name}", help, [label], registry=self._registry)

    def render(self) -> bytes:
        """The text of one scrape."""
        return generate_latest(self._registry)
