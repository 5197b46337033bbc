"""``dcpjax plan``: which cluster, does it fit, what it does, and how to start it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcpjax.cli.options import SectionCommand, option
from dcpjax.cli.tables import Size, need_matplotlib, show_sections, write_figures, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dcpjax.planner import Demand
    from dcpjax.planner.search import SearchResult

SIZE = Size()


@click.command("plan", cls=SectionCommand)
@click.argument("model")
@option("Devices", "--device", required=True, help="h100, h200, b200, b300, trn2 or trn3")
@option("Devices", "--num-devices", type=int, required=True, help="devices in all")
@option(
    "Devices", "--host-gib", default=0.0, help="host memory of each prefill engine for prefixes"
)
@option("Traffic", "--context", type=SIZE, help="longest sequence, as in 1M; default: the model's")
@option("Traffic", "--num-input", type=SIZE, help="prompt tokens of a usual request; default: 1/8")
@option("Traffic", "--num-output", type=SIZE, default="512", help="tokens of a usual answer")
@option("Traffic", "--hit-rate", default=0.0, help="share of prompt tokens that were seen before")
@option("Traffic", "--concurrency", default=16, help="users, each with one request at a time")
@option("Traffic", "--think", default=0.0, help="seconds between an answer and the next request")
@option("Objectives", "--ttft", type=float, help="seconds to the first token, at most")
@option("Objectives", "--tpot", type=float, help="seconds per further token, at most")
@option("Engine", "--draft-tokens", type=int, help="of the draft layer; default: 3 if there is one")
@option(
    "Engine",
    "--kv-cache-dtype",
    default="auto",
    help="as of dcpjax serve; auto: fp8_ds_mla for latents, where it goes, else bfloat16",
)
@option("Engine", "--model-path", help="MODEL of the printed commands, as a folder of weights")
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object instead of tables")
@option("Output", "--plots", type=click.Path(path_type=Path), help="folder for pictures (SVG)")
@option("Output", "--html", type=click.Path(path_type=Path), help="file for one page with all")
def plan_command(
    model: str,
    as_json: bool,
    plots: Path | None,
    html: Path | None,
    **options: Any,
) -> None:
    """Find the best way to serve MODEL on some devices, without any of them.

    MODEL is a known name (glm-5.2, deepseek-v3.2, qwen3-8b, llama-3.1-70b, smollm2-135m, glm-tiny,
    …), or a config.json or the folder of one.

    \b
    Example: contexts of 1M tokens on two nodes
        dcpjax plan glm-5.2 --device h200 --num-devices 16 --context 1M --hit-rate 0.9
    """
    from dcpjax.planner import search
    from dcpjax.planner.document import plan_document, plan_sections

    if plots or html:
        need_matplotlib()
    result = search(
        model,
        options["device"],
        options["num_devices"],
        _demand(model, options),
        draft_tokens=options["draft_tokens"],
        cache_dtype=options["kv_cache_dtype"],
        host_gib=options["host_gib"],
        model_argument=options["model_path"],
    )
    document = plan_document(result)
    figures = _figures(result) if plots or html else {}
    if plots:
        write_figures(plots, figures)
    if html:
        from dcpjax.planner.page import render_page

        title = (
            f"{document['model']['name']} on {result.num_devices} × {document['device']['title']}"
        )
        write_text(html, render_page(title, plan_sections(document), figures))
    if as_json:
        click.echo(json.dumps(document))
    else:
        show_sections(plan_sections(document))


def _demand(model: str, options: dict[str, Any]) -> "Demand":
    """What is asked for; a usual request has an eighth of the longest context unless told."""
    from dcpjax.planner import Demand, find_model

    context = options["context"] or find_model(model).max_context
    objectives = {name: options[name] for name in ("ttft", "tpot") if options[name] is not None}
    return Demand(
        context=context,
        num_input=options["num_input"] or max(1, context // 8),
        num_output=options["num_output"],
        hit_rate=options["hit_rate"],
        concurrency=options["concurrency"],
        think=options["think"],
        **objectives,
    )


def _figures(result: "SearchResult") -> "dict[str, Figure]":
    """The pictures of a plan, by what they show."""
    from dcpjax.planner import plots
    from dcpjax.planner.memory import deployment_parts
    from dcpjax.planner.transfers import transfer_cost

    setting = result.setting
    model, device = setting.model, setting.device
    point = result.winner or result.points[0]
    decode, prefill = point.candidate.decode, point.candidate.prefill
    batch = max(1, round(point.batch))
    figures = {
        "frontier": plots.plot_frontier(result.points, result.frontier),
        "capacity by dcp": plots.plot_capacity(model, device, decode),
        "time per token by context": plots.plot_tpot(model, device, decode, batch),
    }
    if prefill is not None:
        part = deployment_parts(model, decode)[0]
        sides = [engine.part_placement(part, model) for engine in (prefill, decode)]
        cost = transfer_cost(model, prefill, decode, setting.demand.context)
        figures["reshard"] = plots.plot_reshard(sides[0], sides[1], 16)
        figures["transfer time"] = plots.plot_transfer(cost, device)
    return figures
