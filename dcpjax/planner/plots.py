"""Pictures of plans, each with one message. matplotlib is imported when one is made."""
# pyright: basic

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dcpjax.layout import KVPlacement
from dcpjax.planner.deployment import Deployment
from dcpjax.planner.evaluate import Point
from dcpjax.planner.hardware import Device, constant
from dcpjax.planner.memory import capacity
from dcpjax.planner.models import ModelShape
from dcpjax.planner.sim_report import Report
from dcpjax.planner.steps import acceptance_length, decode_step
from dcpjax.planner.transfers import TransferCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#d9730d", "#4d6461", "#ad1a72", "#0f7b6c", "#dfab01", "#6940a5", "#e03e3e")


def _axes(title: str, x: str, y: str, size: tuple[float, float] = (6.4, 3.6)) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_capacity(model: ModelShape, device: Device, deployment: Deployment) -> "Figure":
    """Tokens that an engine holds, for every DCP size: nearly N times as many."""
    sizes = [dcp for dcp in range(1, deployment.tp + 1) if deployment.tp % dcp == 0]
    rooms = [capacity(model, device, replace(deployment, dcp=dcp)) for dcp in sizes]
    tokens = [room.tokens / 1e6 for room in rooms]
    figure, axes = _axes(
        f"DCP multiplies the tokens that fit: {model.name}, TP{deployment.tp}, {device.title}",
        "decode context parallel size",
        "million tokens",
    )
    bars = axes.bar([str(size) for size in sizes], tokens, color=COLOURS[0])
    axes.bar_label(bars, [f"{count:.2f}" for count in tokens], fontsize=9)
    return figure


def plot_tpot(model: ModelShape, device: Device, deployment: Deployment, batch: int) -> "Figure":
    """Time per output token against context, TP alone and with DCP: where the lines cross."""
    contexts = np.geomspace(1024, model.max_context, 60)
    figure, axes = _axes(
        f"Where DCP gets faster: {batch} sequences, {model.name}, TP{deployment.tp}",
        "context, tokens",
        "ms per output token",
    )
    accepted = acceptance_length(model, deployment.draft_tokens)
    sizes = [dcp for dcp in range(1, deployment.tp + 1) if deployment.tp % dcp == 0]
    for dcp, colour in zip(sizes, COLOURS, strict=False):
        engine = replace(deployment, dcp=dcp)
        times = [decode_step(model, device, engine, batch, c).seconds for c in contexts]
        axes.plot(contexts, np.array(times) * 1e3 / accepted, color=colour, label=engine.label())
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def plot_reshard(source: KVPlacement, target: KVPlacement, num_pages: int) -> "Figure":
    """Layers × pages of a sequence: the receiver as colour, the sender as shade."""
    figure, axes = _axes(
        "One transfer, cut by receiver (colour) and by sender (shade)",
        "page of the sequence, by receiving rank",
        "layer, by the rank that sends its first page",
        (6.4, 4.2),
    )
    layers, tokens = np.arange(source.layers)[:, None], np.arange(num_pages) * target.page_size
    senders = _first_holder(source, layers, tokens[None, :])
    receivers = _first_holder(target, layers, tokens[None, :])
    ranks = itertools.product(range(source.num_ranks), range(target.num_ranks))
    palette = np.array([_mixed(*path) for path in ranks])
    table = palette[senders * target.num_ranks + receivers]
    axes.imshow(table, aspect="auto", interpolation="nearest")
    pages = [str(rank) for rank in receivers[0]]
    if len(set(senders[0])) > 1:  # senders have other tokens, not other layers
        pages = [f"{page}\n← {rank}" for page, rank in zip(pages, senders[0], strict=True)]
        axes.set_xlabel("page of the sequence, by receiving ← sending rank")
        axes.set_ylabel("layer")
    axes.set_xticks(range(num_pages), pages, fontsize=7)
    edges = np.flatnonzero(np.diff(senders[:, 0], prepend=-1))
    if len(edges) > 1:
        names = [f"{layer} (rank {senders[layer, 0]})" for layer in edges]
        axes.set_yticks(edges, names, fontsize=7)
    return figure


def _first_holder(placement: KVPlacement, layers: Any, tokens: Any) -> Any:
    """The first rank that holds each (layer, token)."""
    holds = [placement.holds(rank, layers, 0, tokens) for rank in range(placement.num_ranks)]
    return np.argmax(np.array(np.broadcast_arrays(*holds)), axis=0)


def _mixed(sender: int, receiver: int) -> tuple[float, float, float]:
    """A colour for a path: the hue of the receiver, darker or lighter by the sender."""
    from matplotlib.colors import to_rgb

    shade = 0.25 + 0.5 * (sender % 2)
    red, green, blue = to_rgb(COLOURS[receiver % len(COLOURS)])
    return tuple(part + (1 - part) * shade for part in (red, green, blue))  # type: ignore[return-value]


def plot_cliff(users: Sequence[int], reports: dict[str, Sequence[Report]]) -> "Figure":
    """Median time to the first token against users: flat while everybody fits, then a wall."""
    figure, axes = _axes(
        "A cliff, not a slope: what does not fit waits for an answer to end",
        "users at the same time",
        "median time to first token, s",
    )
    for (name, results), colour in zip(reports.items(), COLOURS, strict=False):
        axes.plot(users, [r.ttft.p50 for r in results], "o-", color=colour, label=name, ms=4)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def plot_frontier(points: Sequence[Point], frontier: Sequence[Point]) -> "Figure":
    """Throughput per device against interactivity; labelled: what nothing else beats."""
    figure, axes = _axes(
        "What one user gets, and what a device does",
        "output tokens/s and user, wait included",
        "tokens/s and device",
    )
    axes.scatter(
        [p.interactivity for p in points],
        [p.device_throughput for p in points],
        s=12,
        color="#bbbbbb",
        label="other clusters",
    )
    best = sorted(frontier, key=lambda point: point.interactivity)
    axes.plot(
        [p.interactivity for p in best],
        [p.device_throughput for p in best],
        "o-",
        color=COLOURS[0],
        label="frontier",
    )
    for point in best:
        where = (point.interactivity, point.device_throughput)
        text = f"{point.candidate.label()}, {point.concurrency} users"
        axes.annotate(text, where, fontsize=7, xytext=(5, 4), textcoords="offset points")
    right = max(p.interactivity for p in (*points, *best))
    axes.set_xlim(0, 1.75 * right)  # room for the label of the last point
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.legend(frameon=False, loc="lower right")
    return figure


def plot_transfer(cost: TransferCost, device: Device) -> "Figure":
    """Time to land against descriptors: posting takes over from the wire. Marked: the plan."""
    counts = np.geomspace(1, 1e7, 100)
    wire, each = cost.wire_seconds(device), constant("descriptor_us").value * 1e-6
    figure, axes = _axes(
        f"{cost.busiest_target_bytes / 1e9:.2f} GB over one link: merged runs decide",
        "descriptors of a rank",
        "seconds until it has landed",
    )
    axes.plot(counts, wire + counts * each, color=COLOURS[0], label="in all")
    axes.plot(counts, counts * each, "--", color=COLOURS[1], label="posting")
    axes.axhline(wire, ls=":", color=COLOURS[2], label="the wire alone")
    planned = [cost.descriptors_per_target(scattered=scattered) for scattered in (False, True)]
    for count, name, marker in zip(planned, ("side by side", "scattered"), "os", strict=True):
        label = f"this plan, pages {name}"
        axes.plot([count], [wire + count * each], marker, color=COLOURS[3], label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    return figure


def plot_report(report: Report) -> "Figure":
    """Where a request's time goes, at the median and the 90th percentile."""
    figure, axes = _axes("Times of requests", "seconds", "", (6.4, 2.8))
    names = ("wait for prefill", "wait for decode", "first token", "whole request")
    spreads = (report.prefill_queue, report.decode_queue, report.ttft, report.latency)
    places = np.arange(len(names))
    axes.barh(places - 0.2, [s.p50 for s in spreads], 0.38, color=COLOURS[0], label="median")
    axes.barh(places + 0.2, [s.p90 for s in spreads], 0.38, color=COLOURS[1], label="90 %")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.legend(frameon=False)
    return figure
