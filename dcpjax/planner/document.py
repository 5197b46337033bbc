"""A plan as data for JSON, and as titled tables for people."""

import math
from dataclasses import asdict
from typing import Any

from dcpjax.planner.evaluate import Point
from dcpjax.planner.hardware import GIB
from dcpjax.planner.memory import Capacity, deployment_parts
from dcpjax.planner.parameters import count_parameters
from dcpjax.planner.search import SearchResult
from dcpjax.planner.sections import Section
from dcpjax.planner.transfers import naive_bytes, transfer_cost

MOST_CLUSTERS = 10
"""Clusters that a plan lists; JSON has all."""


def plan_document(result: SearchResult) -> dict[str, Any]:
    """Everything that a search found, as JSON takes it; times in seconds, sizes in bytes."""
    setting = result.setting
    engines = (*result.prefill.capacities.values(), *result.decode.capacities.values())
    rooms = {room.deployment: room for room in engines}
    best = result.winner or result.points[0]
    return {
        "model": _model(result),
        "device": {"name": setting.device.name, "title": setting.device.title},
        "num_devices": result.num_devices,
        "demand": {
            name: value for name, value in asdict(setting.demand).items() if value != math.inf
        },
        "memory": [_memory(room, setting.demand.context) for room in rooms.values()],
        "rejected": [
            {"role": item.role, "engine": item.deployment.label(), "reason": item.reason}
            for item in result.rejected
        ],
        "clusters": [_point(point) for point in result.points],
        "frontier": [_point(point) for point in result.frontier],
        "winner": _point(result.winner) if result.winner else None,
        "transfer": _transfer(result, best),
        "sensitivity": [asdict(item) for item in result.sensitivity],
        "crossovers": result.crossovers,
        "assumptions": list(result.assumptions),
        "launch": _launch(result),
        "rests_on": result.kinds,
    }


def _model(result: SearchResult) -> dict[str, Any]:
    model = result.setting.model
    deployment = next(iter(result.decode.capacities))
    parts = deployment_parts(model, deployment)
    return {
        "name": model.name,
        "source": model.source,
        "kind": model.kind,
        "parameters": asdict(count_parameters(model)),
        "cache_dtype": deployment.stored_dtype(model),
        "kv_parts": [{**asdict(part), "total": part.total} for part in parts],
        "kv_bytes_per_token": sum(part.total for part in parts),
    }


def _memory(room: Capacity, context: int) -> dict[str, Any]:
    return {
        "engine": room.deployment.label(),
        "devices": room.deployment.num_devices,
        "used": {item.name: item.num_bytes for item in room.used},
        "free": room.free_bytes,
        "bytes_per_token_and_rank": room.rank_token_bytes,
        "tokens": room.total_tokens,
        "requests_of_context": room.num_requests(context),
    }


def _point(point: Point) -> dict[str, Any]:
    values = asdict(point)
    values["cluster"] = point.candidate.label()
    return values


def _transfer(result: SearchResult, point: Point) -> dict[str, Any] | None:
    candidate, setting = point.candidate, result.setting
    if candidate.prefill is None:
        return None
    tokens = setting.demand.context
    cost = transfer_cost(setting.model, candidate.prefill, candidate.decode, tokens)
    ranks = candidate.decode.dcp
    return {
        "cluster": candidate.label(),
        "tokens": tokens,
        "bytes": cost.num_bytes,
        "bytes_into_busiest_rank": cost.busiest_target_bytes,
        "naive_bytes": naive_bytes(cost, ranks),
        "plan_runs": cost.num_runs,
        "descriptors": cost.num_descriptors,
        "scattered_descriptors": cost.scattered_descriptors,
        "wire_seconds": cost.wire_seconds(setting.device),
        "posting_seconds": cost.posting_seconds(),
        "seconds": cost.seconds(setting.device),
        "bytes_by_path": cost.bytes_by_path.tolist(),
    }


def _launch(result: SearchResult) -> dict[str, Any]:
    """Commands, and why they are not those of the best cluster; no cluster: there are none."""
    named = {"model": result.served.argument, "obstacle": result.obstacle}
    if result.servable is None:
        return {"cluster": None, **named, "is_winner": False, "commands": [], "notes": []}
    point, found = result.servable
    about_model = [result.served.note] if result.served.note else []
    return {
        "cluster": point.candidate.label(),
        **named,
        "is_winner": point is result.winner,
        "commands": list(found.commands),
        "notes": [*about_model, *found.notes],
    }


def plan_sections(document: dict[str, Any]) -> list[Section]:
    """The same as tables."""
    return [
        _cache_section(document),
        _memory_section(document),
        _rejected_section(document),
        _cluster_section("Clusters", document["clusters"][:MOST_CLUSTERS], document),
        _cluster_section("Frontier", document["frontier"], document),
        _verdict_section(document),
        *_transfer_sections(document),
        _launch_section(document),
        Section(
            "What this rests on",
            ("kind", "constants"),
            tuple((kind, ", ".join(names)) for kind, names in document["rests_on"].items()),
        ),
    ]


def _cache_section(document: dict[str, Any]) -> Section:
    model = document["model"]
    rows = [
        (
            p["name"],
            f"{p['layers']}",
            f"{p['heads']}",
            f"{p['bytes_per_token']:,}",
            f"{p['total']:,}",
        )
        for p in model["kv_parts"]
    ]
    context = document["demand"]["context"]
    total = model["kv_bytes_per_token"]
    whole = sum(n for name, n in model["parameters"].items() if name != "mtp")
    note = (
        f"{whole / 1e9:.1f} B parameters. {total:,} bytes of KV a token in {model['cache_dtype']}; "
        f"{context:,} tokens are {total * context / GIB:.2f} GiB"
    )
    columns = ("part", "layers", "heads", "bytes a head and layer", "bytes a token")
    notes = (note, *document["assumptions"])
    return Section(f"{model['name']}: the cache", columns, tuple(rows), notes)


def _memory_section(document: dict[str, Any]) -> Section:
    rows = [
        (
            item["engine"],
            f"{sum(item['used'].values()) / GIB:.1f}",
            f"{item['free'] / GIB:.1f}",
            f"{item['bytes_per_token_and_rank']:,.0f}",
            f"{item['tokens']:,}",
            f"{item['requests_of_context']}",
        )
        for item in document["memory"]
    ]
    context = document["demand"]["context"]
    columns = ("engine", "used GiB", "free GiB", "bytes a token and rank", "tokens", "requests")
    note = f"Of one {document['device']['title']}; requests: sequences of {context:,} tokens"
    return Section("Engines that hold the context", columns, tuple(rows), (note,))


def _rejected_section(document: dict[str, Any]) -> Section:
    """Only engines whose weights fit; of the others the number."""
    reasons = [item["reason"] for item in document["rejected"]]
    close = dict.fromkeys(reason for reason in reasons if reason.endswith("short"))
    others = len(dict.fromkeys(reasons)) - len(close)
    more = (f"{others} smaller or unfit engines are left out",) if others else ()
    return Section("Engines that do not hold it, and why", notes=(*close, *more))


def _cluster_section(title: str, points: list[dict[str, Any]], document: dict[str, Any]) -> Section:
    columns = (
        "cluster",
        "users",
        "tokens/s/device",
        "tokens/s/user",
        "TTFT",
        "TPOT",
        "batch",
        "hit",
    )
    rows = [
        (
            p["cluster"],
            f"{p['concurrency']}",
            f"{p['device_throughput']:,.0f}",
            f"{p['interactivity']:.1f}",
            f"{p['ttft']:.2f} s",
            f"{p['tpot'] * 1e3:.1f} ms",
            f"{p['batch']:.1f} of {p['max_batch']}",
            f"{p['hit_rate']:.0%}",
            p["bottleneck"],
        )
        for p in points
    ]
    demand = document["demand"]
    note = (
        f"Requests of {demand['num_input']:,} tokens in, {demand['num_output']:,} out, "
        f"{demand['hit_rate']:.0%} seen before; tokens/s/user counts the wait for the first"
    )
    return Section(title, (*columns, "bottleneck"), tuple(rows), (note,))


def _verdict_section(document: dict[str, Any]) -> Section:
    winner = document["winner"]
    rows = [
        (
            f"10 % more {s['what']}",
            f"{s['throughput'] - 1:+z.1%}",
            f"{s['interactivity'] - 1:+z.1%}",
        )
        for s in document["sensitivity"]
    ]
    crossovers = [
        f"{engine} is faster than TP alone {_from(context)}"
        for engine, context in document["crossovers"].items()
    ]
    if winner:
        verdict = f"Winner: {winner['cluster']}. Bottleneck: {winner['bottleneck']}"
    else:
        best = document["clusters"][0]
        verdict = (
            f"No cluster keeps the objectives. Nearest in throughput: {best['cluster']}, "
            f"TTFT {best['ttft']:.2f} s, TPOT {best['tpot'] * 1e3:.1f} ms"
        )
    columns = ("with", "throughput", "interactivity")
    return Section("Verdict", columns, tuple(rows), (verdict, *crossovers))


def _from(context: int | None) -> str:
    return "at no context" if context is None else f"from {context:,} tokens on"


def _transfer_sections(document: dict[str, Any]) -> list[Section]:
    cost = document["transfer"]
    if cost is None:
        return []
    rows = (
        ("bytes moved", f"{cost['bytes'] / 1e9:.2f} GB"),
        ("if every rank got everything", f"{cost['naive_bytes'] / 1e9:.2f} GB"),
        ("into the busiest rank", f"{cost['bytes_into_busiest_rank'] / 1e9:.2f} GB"),
        ("runs in the plan", f"{cost['plan_runs']:,}"),
        ("descriptors, pages side by side", f"{cost['descriptors']:,}"),
        ("descriptors, pages scattered", f"{cost['scattered_descriptors']:,}"),
        ("posting", f"{cost['posting_seconds'] * 1e3:.1f} ms"),
        ("on the wire", f"{cost['wire_seconds'] * 1e3:.1f} ms"),
        ("in all", f"{cost['seconds'] * 1e3:.1f} ms"),
    )
    title = f"Handing over {cost['tokens']:,} tokens, {cost['cluster']}"
    return [Section(title, ("what", "how much"), rows)]


def _launch_section(document: dict[str, Any]) -> Section:
    launch = document["launch"]
    best = "winner" if document["winner"] else "nearest"
    lines: list[str] = []
    if launch["obstacle"]:
        lines.append(f"The {best} is not served by this version: {launch['obstacle']}")
    if launch["cluster"] is None:
        lines.append("Nor is any other of these clusters")
    else:
        start = "The best that is: " if launch["obstacle"] else ""
        lines += [start + launch["cluster"], *launch["notes"], *launch["commands"]]
    return Section("Commands", notes=tuple(lines))
