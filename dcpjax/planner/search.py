"""The best clusters for a demand: a frontier, a winner, and what would make it better."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dcpjax.errors import ConfigError
from dcpjax.planner.cache_parts import PLAIN, check_cache_dtype, scales_obstacle
from dcpjax.planner.candidates import Candidate, Engines, Rejected, candidates, find_engines
from dcpjax.planner.crossover import dcp_crossover
from dcpjax.planner.demand import Demand
from dcpjax.planner.evaluate import Point, Setting, evaluate
from dcpjax.planner.hardware import Device, all_constants, find_device
from dcpjax.planner.launch import Launch, launch
from dcpjax.planner.memory import Capacity, check_host_memory
from dcpjax.planner.models import Model, ModelShape, find_model
from dcpjax.planner.provenance import kinds_of
from dcpjax.planner.served_model import ServedModel, served_model

LOADS = (0.25, 0.5, 1, 2, 4, 8)
"""Multiples of the demand's concurrency that the frontier is drawn over."""
MORE = 1.1
"""How much more of a thing the sensitivity asks about."""


@dataclass(frozen=True)
class Sensitivity:
    """The winner with 10 % more of something: factors of throughput and interactivity."""

    what: str
    throughput: float
    interactivity: float


@dataclass(frozen=True)
class SearchResult:
    """What a plan says.

    Attributes:
        points: every cluster at the demand's concurrency, the best first.
        frontier: of throughput per device against interactivity, over several concurrencies.
        winner: the best that keeps the objectives; None where none does.
        servable: the best that this version of dcpjax serves, with its commands.
        obstacle: why it is not the winner, or the best of all where nothing keeps the objectives;
            None where it is.
        served: MODEL of the commands.
        crossovers: for each DCP size of the winner's decode engine, the context from which it is
            faster than TP alone; None: never.
    """

    setting: Setting
    num_devices: int
    prefill: Engines
    decode: Engines
    points: tuple[Point, ...]
    frontier: tuple[Point, ...]
    winner: Point | None
    servable: tuple[Point, Launch] | None
    obstacle: str | None
    served: ServedModel
    sensitivity: tuple[Sensitivity, ...]
    crossovers: dict[str, int | None]

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        return (*self.prefill.rejected, *self.decode.rejected)

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Names of the constants that the result rests on, by kind."""
        return kinds_of((*self.setting.device.constants, *all_constants()))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was decided for who asked, and why."""
        model = self.setting.model
        obstacle = scales_obstacle(model)
        is_auto = next(iter(self.decode.capacities)).cache_dtype == "auto"
        if not is_auto or model.latent is None or obstacle is None:
            return ()
        return (f"the cache is {PLAIN}, as fp8_ds_mla does not go with this model: {obstacle}",)

    def room(self, candidate: Candidate) -> tuple[Capacity | None, Capacity]:
        """What fits into an engine of either side."""
        return _room(candidate, self.prefill, self.decode)


def search(
    model: Model,
    device: str | Device,
    num_devices: int,
    demand: Demand,
    *,
    draft_tokens: int | None = None,
    cache_dtype: str = "auto",
    host_gib: float = 0.0,
    model_argument: str | None = None,
) -> SearchResult:
    """Look at all clusters of ``num_devices`` devices.

    Args:
        draft_tokens: that the draft layer proposes; default 3 where the model has one.
        host_gib: memory of the host for evicted prefixes, per prefill engine.
        model_argument: MODEL of the commands; default: what serves, or a placeholder.

    Raises:
        ConfigError: a context that the model does not have or that fits into no engine (by how
            much), no devices, a negative host memory, a type that the cache does not have.
    """
    shape, chip = find_model(model), find_device(device)
    check_cache_dtype(shape, cache_dtype)
    _check(shape, num_devices, demand, host_gib)
    drafts = (3 if shape.mtp_layers else 0) if draft_tokens is None else draft_tokens
    if drafts and not shape.mtp_layers:
        raise ConfigError("the model has a draft layer", model=shape.name, draft_tokens=drafts)
    setting = Setting(shape, chip, demand, host_gib)
    prefill, decode = (
        find_engines(
            shape, chip, role, demand, num_devices, draft_tokens=drafts, cache_dtype=cache_dtype
        )
        for role in ("prefill", "decode")
    )
    if not decode.capacities:
        raise ConfigError(f"the context fits into an engine. {_nearest(decode)}")
    clusters = list(candidates(prefill, decode, num_devices))
    if not clusters:
        raise ConfigError(
            "engines that hold the context fill the devices exactly", num_devices=num_devices
        )
    points = ranked(_evaluate_all(setting, clusters, prefill, decode))
    best = [point for point in points if demand.is_met(point.ttft, point.tpot)]
    winner = best[0] if best else None
    served = ServedModel(model_argument) if model_argument else served_model(model, shape)
    servable, obstacle = _first_servable(setting, (*best, *points), served.argument)
    return SearchResult(
        setting,
        num_devices,
        prefill,
        decode,
        tuple(points),
        _frontier_over_loads(setting, clusters, prefill, decode),
        winner,
        servable,
        obstacle,
        served,
        _sensitivity(setting, winner or points[0], prefill, decode),
        _crossovers(setting, winner or points[0]),
    )


def _check(model: ModelShape, num_devices: int, demand: Demand, host_gib: float) -> None:
    if num_devices < 1:
        raise ConfigError("there is at least one device", num_devices=num_devices)
    check_host_memory(host_gib)
    if demand.context > model.max_context:
        raise ConfigError(
            "the context is at most what the model was made for: it is "
            f"{demand.context - model.max_context:,} tokens too long",
            context=demand.context,
            max_position_embeddings=model.max_context,
        )


def _nearest(engines: Engines) -> str:
    """Why the largest engine does not hold the context."""
    largest = max(engines.rejected, key=lambda item: item.deployment.num_devices)
    same = [r for r in engines.rejected if r.deployment.dcp == largest.deployment.num_devices]
    return (same[-1] if same else largest).reason


def _room(
    candidate: Candidate, prefill: Engines, decode: Engines
) -> tuple[Capacity | None, Capacity]:
    source = prefill.capacities[candidate.prefill] if candidate.prefill else None
    return source, decode.capacities[candidate.decode]


def _evaluate_all(
    setting: Setting, clusters: Iterable[Candidate], prefill: Engines, decode: Engines
) -> list[Point]:
    return [evaluate(setting, cluster, *_room(cluster, prefill, decode)) for cluster in clusters]


def ranked(points: Iterable[Point]) -> list[Point]:
    """By throughput, then by interactivity."""
    return sorted(points, key=lambda p: (-round(p.device_throughput, 6), -p.interactivity))


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other exceeds in throughput per device and interactivity, by interactivity."""
    kept: list[Point] = []
    for point in ranked(points):
        if not kept or point.interactivity > kept[-1].interactivity:
            kept.append(point)
    return tuple(reversed(kept))


def _frontier_over_loads(
    setting: Setting, clusters: Sequence[Candidate], prefill: Engines, decode: Engines
) -> tuple[Point, ...]:
    points: list[Point] = []
    for load in LOADS:
        users = max(1, round(setting.demand.concurrency * load))
        demand = replace(setting.demand, concurrency=users)
        points += _evaluate_all(replace(setting, demand=demand), clusters, prefill, decode)
    return pareto(points)


def _first_servable(
    setting: Setting, points: Iterable[Point], argument: str
) -> tuple[tuple[Point, Launch] | None, str | None]:
    """The first cluster that this version serves, and why the very first is not."""
    obstacle: str | None = None
    for point in points:
        try:
            return (point, launch(setting, point.candidate, argument)), obstacle
        except ConfigError as error:
            obstacle = obstacle or str(error)
    return None, obstacle


def _sensitivity(
    setting: Setting, point: Point, prefill: Engines, decode: Engines
) -> tuple[Sensitivity, ...]:
    device = setting.device
    source, target = _room(point.candidate, prefill, decode)
    accepted = setting.accepted(point.candidate.decode)
    changes: dict[str, tuple[Setting, float]] = {
        "memory bandwidth": (_with(setting, memory_tb_s=device.memory_tb_s * MORE), 0.0),
        "compute": (
            _with(
                setting,
                bf16_tflops=device.bf16_tflops * MORE,
                fp8_tflops=device.fp8_tflops * MORE,
            ),
            0.0,
        ),
        "links within a node": (_with(setting, scale_up_gb_s=device.scale_up_gb_s * MORE), 0.0),
        "links between nodes": (_with(setting, scale_out_gb_s=device.scale_out_gb_s * MORE), 0.0),
        "memory": (setting, (MORE - 1) * target.memory_bytes),
    }
    if point.candidate.decode.draft_tokens:
        changes["accepted tokens"] = (replace(setting, acceptance=accepted * MORE), 0.0)
    found: list[Sensitivity] = []
    for what, (changed, more) in changes.items():
        rooms = (_enlarged(source, more) if source else None, _enlarged(target, more))
        better = evaluate(changed, point.candidate, *rooms)
        found.append(
            Sensitivity(
                what,
                better.device_throughput / point.device_throughput,
                better.interactivity / point.interactivity,
            )
        )
    return tuple(found)


def _with(setting: Setting, **changes: float) -> Setting:
    return replace(setting, device=replace(setting.device, **changes))


def _enlarged(room: Capacity, more_bytes: float) -> Capacity:
    pages = room.num_pages + int(more_bytes // room.page_bytes)
    return replace(room, memory_bytes=room.memory_bytes + more_bytes, num_pages=pages)


def _crossovers(setting: Setting, point: Point) -> dict[str, int | None]:
    decode = point.candidate.decode
    batch = max(1, round(point.batch))
    sizes = [dcp for dcp in range(2, decode.tp + 1) if decode.tp % dcp == 0]
    found: dict[str, int | None] = {}
    for dcp in sizes:
        deployment = replace(decode, dcp=dcp)
        found[deployment.label()] = dcp_crossover(setting.model, setting.device, deployment, batch)
    return found
