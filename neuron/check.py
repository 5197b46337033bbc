"""``python -m neuron.check MODEL_OR_CONFIG``: what an engine's programs are, and what they break.

Needs neither a Trainium device nor its compiler, nor the weights of the model. Exit code 0: no
program breaks a rule. 1: some do. 2: something to put right first.
"""

import json
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console

from dcpjax.cli.options import SectionCommand, option
from neuron.options import (
    COMMAND,
    engine_config,
    engine_options,
    machine_options,
    program_options,
)
from neuron.program import Program
from neuron.report import report
from neuron.report_text import show_report
from neuron.targets import Target, find_target

EXIT_BROKEN = 1


@click.command("neuron.check", cls=SectionCommand, context_settings=COMMAND)
@machine_options
@engine_options
@program_options
@option("Programs", "--all-buckets", is_flag=True, help="every shape, not the largest of each kind")
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object")
def main(**options: Any) -> None:
    """Report on the steps of an engine for MODEL, and on every rule that they break.

    MODEL is what dcpjax serve takes, or a config.json alone: weights are inputs of the programs.

    \b
    Example
        python -m neuron.check ./config.json --target trn2 --lnc 2 --tp 32 --dcp 4
    """
    from neuron.programs import Deployment, build_programs

    target, lnc = find_target(options["target"]), options["lnc"]
    target.check_lnc(lnc)
    deployment = Deployment(engine_config(options), target, lnc, options["draft_tokens"])
    programs = build_programs(deployment, all_buckets=options["all_buckets"])
    if not check(programs, target, lnc, options["operators"], as_json=options["as_json"]):
        raise SystemExit(EXIT_BROKEN)


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
