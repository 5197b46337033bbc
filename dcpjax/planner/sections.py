"""Titled tables, on a terminal or a page, and a simulation as such tables."""

from dataclasses import asdict, dataclass

from dcpjax.planner.sim_report import Report, Spread


@dataclass(frozen=True)
class Section:
    """One table with a sentence about it; no columns: only sentences."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def report_sections(report: Report) -> list[Section]:
    """A simulation as tables."""
    times = [
        ("time to first token, s", report.ttft, 1.0),
        ("time per output token, ms", report.tpot, 1e3),
        ("whole request, s", report.latency, 1.0),
        ("wait for prefill, s", report.prefill_queue, 1.0),
        ("wait for decode and transfer, s", report.decode_queue, 1.0),
    ]
    numbers = [
        ("requests", f"{report.num_requests:,} in {report.duration:,.1f} s"),
        ("tokens/s/device, prompts included", f"{report.device_throughput:,.0f}"),
        ("output tokens/s", f"{report.output_throughput:,.1f}"),
        ("tokens/s/user, 90th percentile with TTFT", f"{report.interactivity:.1f}"),
        ("prompt tokens from the prefix cache", f"{report.hit_rate:.1%}"),
        ("requests present, on average", f"{report.mean_present:.1f}"),
        ("begun again after a failure", f"{report.restarts}"),
    ]
    if report.good_share is not None:
        numbers.append(("within the objectives", f"{report.good_share:.1%}"))
    engines = tuple(
        (f"{engine.role} {number}", f"{engine.busy_share:.1%}")
        for number, engine in enumerate(report.engines)
    )
    return [
        Section(f"Simulation of {report.trace}", ("what", "how much"), tuple(numbers)),
        Section(
            "Times",
            ("time", "mean", "p50", "p90", "p99", "max"),
            tuple((name, *_cells(spread, scale)) for name, spread, scale in times),
        ),
        Section("Engines", ("engine", "busy"), engines),
    ]


def _cells(spread: Spread, scale: float) -> tuple[str, ...]:
    return tuple(f"{value * scale:,.2f}" for value in asdict(spread).values())
