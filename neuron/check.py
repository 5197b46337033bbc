"""``python -m neuron.check MODEL_OR_CONFIG``: what an engine's programs are, and what they break.

Needs neither a Trainium device nor its compiler, nor the weights of the model. Exit code 0: no
program breaks a rule. 1: some do. 2: something to put right first.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import click
from rich.console import Console

from dcpjax.cli.options import SectionCommand, option
from dcpjax.config import EngineConfig
from neuron.options import engine_config, engine_options, machine_options
from neuron.program import Program
from neuron.report import report
from neuron.report_text import show_report
from neuron.targets import Target, find_target

EXIT_BROKEN = 1


def engine_programs(
    config: EngineConfig, target: Target, lnc: int, draft_tokens: int, *, all_buckets: bool
) -> Sequence[Program]:
    """The programs that an engine of these settings runs on this chip."""
    from neuron.programs import Deployment, build_programs

    on_neuron = dataclasses.replace(config, device="neuron")
    deployment = Deployment(on_neuron, target, lnc, draft_tokens)
    return build_programs(deployment, all_buckets=all_buckets)


@click.command(
    "neuron.check",
    cls=SectionCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@machine_options
@engine_options
@option("Programs", "--draft-tokens", default=4, help="tokens of a segment that is verified")
@option("Programs", "--all-buckets", is_flag=True, help="every shape, not the largest of each kind")
@option(
    "Programs",
    "--operators",
    type=click.File(),
    help="what neuronx-cc list-operators has printed: no program has others",
)
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object")
@click.argument("model")
def main(**options: Any) -> None:
    """Report on the steps of an engine for MODEL, and on every rule that they break.

    MODEL is what dcpjax serve takes, or a config.json alone: weights are inputs of the programs.

    \b
    Example
        python -m neuron.check ./config.json --target trn2 --lnc 2 --tp 32 --dcp 4
    """
    target = find_target(options["target"])
    target.check_lnc(options["lnc"])
    operators = read_operators(options["operators"])
    programs = engine_programs(
        engine_config(options),
        target,
        options["lnc"],
        options["draft_tokens"],
        all_buckets=options["all_buckets"],
    )
    if not check(programs, target, options["lnc"], operators, as_json=options["as_json"]):
        raise SystemExit(EXIT_BROKEN)


def read_operators(file: TextIO | None) -> frozenset[str] | None:
    """Opcodes from what ``neuronx-cc list-operators`` has printed, one a line; None without it.

    Raises:
        click.UsageError: the file has none.
    """
    if file is None:
        return None
    names = (line.strip().lower().replace("_", "-") for line in file)
    operators = frozenset(name for name in names if name)
    if not operators:
        raise click.UsageError("--operators is a file with one opcode a line, and this is empty")
    return operators


def check(
    programs: Iterable[Program],
    target: Target,
    lnc: int,
    operators: frozenset[str] | None = None,
    *,
    as_json: bool = False,
) -> bool:
    """Print a report for each program; whether none of them breaks a rule."""
    reports = [report(one, target, lnc=lnc, operators=operators) for one in programs]
    if as_json:
        click.echo(json.dumps({"programs": [one.to_json() for one in reports]}))
    else:
        console = Console(soft_wrap=True)
        for one in reports:
            show_report(one, console)
    return not any(one.errors for one in reports)


if __name__ == "__main__":
    main(prog_name="python -m neuron.check")
