"""``dcpjax simulate``: what a trace does to a cluster."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from dcpjax.cli.options import SectionCommand, WrongSettings, option
from dcpjax.cli.tables import Size, need_matplotlib, show_sections, write_figures, write_text
from dcpjax.planner.sim_cluster import Failure, Routing

if TYPE_CHECKING:
    from dcpjax.planner import Cluster, Objective
    from dcpjax.planner.traces import Trace

SIZE = Size()


@click.command("simulate", cls=SectionCommand)
@click.argument("model")
@option("Cluster", "--device", required=True, help="h100, h200, b200, b300, trn2 or trn3")
@option("Cluster", "--prefill", help="engines that compute prompts; default: --decode does")
@option(
    "Cluster",
    "--decode",
    required=True,
    help="engines that generate, as '2 x TP8 DCP4'; or a cluster, as plan prints it",
)
@option("Cluster", "--routing", type=click.Choice(get_args(Routing)), default="least_loaded")
@option("Cluster", "--host-gib", default=0.0, help="host memory of a prompt engine for prefixes")
@option("Cluster", "--max-num-seqs", default=256, help="sequences of an engine at the same time")
@option("Cluster", "--max-num-batched-tokens", default=8192, help="prompt tokens of a step")
@option("Cluster", "--draft-tokens", default=0, help="tokens that the draft layer proposes")
@option("Cluster", "--acceptance-length", type=float, help="tokens of a step; default: as measured")
@option(
    "Cluster",
    "--kv-cache-dtype",
    default="auto",
    help="as of dcpjax serve; auto: fp8_ds_mla for latents, where it goes, else bfloat16",
)
@option(
    "Cluster",
    "--steps",
    type=click.Path(path_type=Path),
    help="table of recorded step times (JSON) instead of estimates",
)
@option(
    "Cluster",
    "--fail",
    "failures",
    multiple=True,
    metavar="ROLE:INDEX:TIME:SECONDS",
    help="an engine that fails, as decode:0:60:30; may be given several times",
)
@option(
    "Traffic",
    "--trace",
    type=click.Path(path_type=Path),
    help="Mooncake JSON lines, agentic JSON (Weka; a file or folder) or Azure CSV",
)
@option("Traffic", "--trace-kind", type=click.Choice(["mooncake", "weka", "azure"]))
@option("Traffic", "--max-requests", type=int, help="only so many sessions of the trace")
@option("Traffic", "--request-rate", type=float, help="sessions per second, instead of the trace's")
@option("Traffic", "--concurrency", type=int, help="so many sessions at a time, whatever the rate")
@option("Traffic", "--no-think-times", is_flag=True, help="do not pause between turns")
@option(
    "Traffic", "--max-model-len", type=SIZE, help="longer sequences are left out; default: none"
)
@option(
    "Generated traffic", "--num-requests", default=200, help="requests, where no trace is given"
)
@option(
    "Generated traffic", "--num-input", type=SIZE, default="8K", help="tokens of a first prompt"
)
@option("Generated traffic", "--num-output", type=SIZE, default="256", help="tokens of an answer")
@option("Generated traffic", "--num-turns", default=1, help="turns of a session")
@option("Generated traffic", "--shared", default=0, help="first tokens that all prompts share")
@option("Generated traffic", "--think", default=0.0, help="seconds between turns, on average")
@option("Generated traffic", "--seed", default=0, help="the same seed makes the same traffic")
@option("Objectives", "--ttft", type=float, help="seconds to the first token, at most")
@option("Objectives", "--tpot", type=float, help="seconds per further token, at most")
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object instead of tables")
@option("Output", "--plots", type=click.Path(path_type=Path), help="folder for pictures (SVG)")
@option("Output", "--html", type=click.Path(path_type=Path), help="file for one page with all")
def simulate_command(
    model: str,
    as_json: bool,
    plots: Path | None,
    html: Path | None,
    concurrency: int | None,
    no_think_times: bool,
    ttft: float | None,
    tpot: float | None,
    **options: Any,
) -> None:
    """Replay a trace of requests through simulated engines that serve MODEL.

    Engines are written as in '2 x TP8 DCP4', 'PCP8 DCP8' or 'PCP8 layer split', and
    clusters as dcpjax plan prints them. Without --trace the traffic is made up.

    \b
    Example: prompts on one node, answers on another
        dcpjax simulate glm-5.2 --device h200 --prefill 'PCP8 DCP8' --decode 'TP8 DCP8' \\
            --trace conversations/ --concurrency 16 --draft-tokens 3
    """
    from dcpjax.planner import simulate
    from dcpjax.planner.sections import report_sections

    if plots or html:
        need_matplotlib()
    trace = _traffic(options)
    report = simulate(
        trace,
        _cluster(model, trace, options),
        concurrency=concurrency,
        think_times=not no_think_times,
        objective=_objective(ttft, tpot),
    )
    sections = report_sections(report)
    if plots or html:
        from dcpjax.planner.page import render_page
        from dcpjax.planner.plots import plot_report

        figures = {"times": plot_report(report)}
        if plots:
            write_figures(plots, figures)
        if html:
            write_text(html, render_page(f"{model}: {trace.name}", sections, figures))
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        show_sections(sections)


def _traffic(options: dict[str, Any]) -> "Trace":
    """The trace that is named, or one that is made up."""
    from dcpjax.planner import Workload, generate_trace

    path, rate = options["trace"], options["request_rate"]
    if path is not None:
        trace = _read_trace(path, options["trace_kind"], options["max_requests"])
        trace = trace if rate is None else trace.at_rate(rate)
    else:
        names = ("num_requests", "num_input", "num_output", "num_turns", "shared", "think")
        workload = Workload(
            rate=1.0 if rate is None else rate, **{name: options[name] for name in names}
        )
        trace = generate_trace(workload, options["seed"])
    return _limited(trace, options["max_model_len"])


def _cluster(model: str, trace: "Trace", options: dict[str, Any]) -> "Cluster":
    from dcpjax.engine.plan import StepShapes
    from dcpjax.planner import (
        Candidate,
        ShapedSteps,
        build_cluster,
        find_device,
        find_model,
        read_steps,
    )

    engine = {"draft_tokens": options["draft_tokens"], "cache_dtype": options["kv_cache_dtype"]}
    candidate = Candidate.parse(options["decode"], options["prefill"], **engine)
    steps = read_steps(options["steps"]) if options["steps"] else None
    prompt_shape = None
    if isinstance(steps, ShapedSteps):
        prompt_shape = StepShapes(steps.decode_rows, steps.prefill_shapes).best_prefill
    return build_cluster(
        find_model(model),
        find_device(options["device"]),
        candidate,
        context=max(turn.num_input + turn.num_output for turn in trace.turns),
        host_gib=options["host_gib"],
        max_batch=options["max_num_seqs"],
        chunk=options["max_num_batched_tokens"],
        acceptance=options["acceptance_length"],
        routing=options["routing"],
        failures=[_failure(text) for text in options["failures"]],
        steps=steps,
        prompt_shape=prompt_shape,
    )


def _read_trace(path: Path, kind: str | None, max_requests: int | None) -> "Trace":
    from dcpjax.planner import load_trace

    trace = load_trace(path, kind)
    if max_requests is None:
        return trace
    if max_requests < 1:
        raise WrongSettings(f"--max-requests is at least 1, not {max_requests}")
    return trace.head(max_requests)


def _limited(trace: "Trace", max_model_len: int | None) -> "Trace":
    if max_model_len is None:
        return trace
    limited = trace.limited(max_model_len)
    if not limited.sessions:
        raise WrongSettings(f"no session of the trace is within {max_model_len:,} tokens")
    return limited


def _objective(ttft: float | None, tpot: float | None) -> "Objective | None":
    from dcpjax.planner import Objective

    limits = {name: value for name, value in (("ttft", ttft), ("tpot", tpot)) if value is not None}
    return Objective(**limits) if limits else None


def _failure(text: str) -> Failure:
    try:
        role, index, time, seconds = text.split(":")
        numbers = float(time), float(seconds)
        number = int(index)
    except ValueError as error:
        raise WrongSettings(f"--fail is ROLE:INDEX:TIME:SECONDS, not {text!r}") from error
    if role not in ("prefill", "decode"):
        raise WrongSettings(f"--fail names prefill or decode, not {role!r}")
    return Failure(*numbers, role, number)
