"""Which clusters a search looks at: how devices are split, and how each side shards its cache."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dcpjax.errors import ConfigError
from dcpjax.planner.demand import Demand
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.engine_words import engines_label, parse_engines
from dcpjax.planner.hardware import Device
from dcpjax.planner.memory import Capacity, capacity
from dcpjax.planner.models import ModelShape

_ARROW = " → "
_PROMPTS_INCLUDED = ", prompts included"


@dataclass(frozen=True)
class Candidate:
    """Engines that compute prompts and engines that generate; all of a side are equal.

    Attributes:
        prefill: None where the decode engines compute prompts, too.
    """

    decode: Deployment
    num_decode: int
    prefill: Deployment | None = None
    num_prefill: int = 0

    @property
    def num_devices(self) -> int:
        prefill = self.prefill.num_devices * self.num_prefill if self.prefill else 0
        return prefill + self.decode.num_devices * self.num_decode

    def label(self) -> str:
        """``1 × PCP8 DCP8 → 1 × TP8 DCP8``, or ``2 × TP8, prompts included``."""
        decode = engines_label(self.num_decode, self.decode)
        if self.prefill is None:
            return decode + _PROMPTS_INCLUDED
        return engines_label(self.num_prefill, self.prefill) + _ARROW + decode

    @classmethod
    def parse(cls, decode: str, prefill: str | None = None, **settings: Any) -> "Candidate":
        """The cluster that words say.

        Args:
            decode: engines that generate, or a whole cluster as :meth:`label` writes it.
            prefill: engines that compute prompts, where ``decode`` does not say them.
            settings: further ones of all deployments.

        Raises:
            ConfigError: words that are not understood, sizes that do not fit together, or prompts
                that are given to two kinds of engines.
        """
        source, arrow, target = decode.rpartition(_ARROW.strip())
        says_prompts = bool(arrow) or decode.endswith(_PROMPTS_INCLUDED)
        if prefill is not None and says_prompts:
            raise ConfigError(
                "engines that compute prompts are said once", decode=decode, prefill=prefill
            )
        num_decode, engine = parse_engines(target.removesuffix(_PROMPTS_INCLUDED), **settings)
        source = source if arrow else prefill
        if source is None:
            return cls(engine, num_decode)
        num_prefill, other = parse_engines(source, **settings)
        return cls(engine, num_decode, other, num_prefill)


@dataclass(frozen=True)
class Rejected:
    """An engine that cannot serve the demand, and why."""

    role: str
    deployment: Deployment
    reason: str


@dataclass(frozen=True)
class Engines:
    """What passed and what did not, of one side."""

    capacities: dict[Deployment, Capacity]
    rejected: tuple[Rejected, ...]


def prefill_deployments(size: int, draft_tokens: int, cache_dtype: str) -> Iterator[Deployment]:
    """Ways for ``size`` devices to compute prompts."""
    common: dict[str, Any] = {"draft_tokens": draft_tokens, "cache_dtype": cache_dtype}
    yield from decode_deployments(size, draft_tokens, cache_dtype)
    for pcp in range(2, size + 1):
        if size % pcp:
            continue
        ranks: dict[str, Any] = {"pcp": pcp, "tp": size // pcp, **common}
        yield Deployment(**ranks)
        for dcp in dict.fromkeys((pcp, size)):
            yield Deployment(dcp=dcp, prefill_kv="sharded", **ranks)
        yield Deployment(prefill_kv="layer_split", **ranks)


def decode_deployments(size: int, draft_tokens: int, cache_dtype: str) -> Iterator[Deployment]:
    """Ways for ``size`` devices to generate: copies, or tensor parallel with any DCP."""
    common: dict[str, Any] = {"draft_tokens": draft_tokens, "cache_dtype": cache_dtype}
    if size > 1:
        yield Deployment(dp=size, **common)
    for dcp in range(1, size + 1):
        if size % dcp == 0:
            yield Deployment(tp=size, dcp=dcp, **common)


def engine_sizes(num_devices: int, device: Device) -> list[int]:
    """Powers of two, at most a node."""
    sizes = [1]
    while sizes[-1] * 2 <= min(num_devices, device.node):
        sizes.append(sizes[-1] * 2)
    return sizes


def find_engines(
    model: ModelShape,
    device: Device,
    role: str,
    demand: Demand,
    num_devices: int,
    *,
    draft_tokens: int,
    cache_dtype: str = "auto",
) -> Engines:
    """All engines of one side that hold the longest context, and why the others do not."""
    make = prefill_deployments if role == "prefill" else decode_deployments
    passed: dict[Deployment, Capacity] = {}
    rejected: list[Rejected] = []
    for size in engine_sizes(num_devices, device):
        for deployment in make(size, draft_tokens, cache_dtype):
            try:
                room = capacity(model, device, deployment, context=demand.context)
            except ConfigError as error:
                rejected.append(Rejected(role, deployment, f"{deployment.label()}: {error}"))
                continue
            if room.missing_bytes(demand.context):
                rejected.append(Rejected(role, deployment, room.explain(demand.context)))
            else:
                passed[deployment] = room
    return Engines(passed, tuple(rejected))


def candidates(prefill: Engines, decode: Engines, num_devices: int) -> Iterator[Candidate]:
    """All clusters of exactly ``num_devices`` devices, prompts apart or not."""
    for engine in decode.capacities:
        if num_devices % engine.num_devices == 0 and engine.dp == 1:
            yield Candidate(engine, num_devices // engine.num_devices)
    for source in prefill.capacities:
        for target in decode.capacities:
            for count in range(1, num_devices // source.num_devices + 1):
                left = num_devices - count * source.num_devices
                if left and left % target.num_devices == 0:
                    yield Candidate(target, left // target.num_devices, source, count)
