"""``python -m neuron.environment``: is this process set up for Neuron, and this machine?

Exit code 0: nothing is wrong. 1: something is, and the table says what to do. On the host that only
compiles, ``--settings-only`` leaves the devices out.
"""

import dataclasses
import json
import os
from collections.abc import Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dcpjax.cli.options import SectionCommand, option
from dcpjax.config.neuron_settings import COORDINATOR, Finding, Situation, check_settings
from neuron.machine import check_machine, look
from neuron.options import COMMAND

EXIT_WRONG = 1
_STYLES = {"ok": "green", "advice": "yellow", "wrong": "bold red"}


@click.command("neuron.environment", cls=SectionCommand, context_settings=COMMAND)
@option("Situation", "--nodes", default=1, help="machines that run one engine together")
@option("Situation", "--lnc", default=2, help="physical cores of a logical one, as compiled")
@option("Situation", "--transfer", is_flag=True, help="KV moves between engines of this machine")
@option(
    "Situation",
    "--transfer-between-machines",
    "between_machines",
    is_flag=True,
    help="KV moves to or from engines of other machines",
)
@option("Situation", "--coordinator", help=f"host:port of jax.distributed; default: {COORDINATOR}")
@option("Output", "--settings-only", is_flag=True, help="do not look at this machine's devices")
@option("Output", "--json", "as_json", is_flag=True, help="print one JSON object")
def main(
    nodes: int,
    lnc: int,
    transfer: bool,
    between_machines: bool,
    coordinator: str | None,
    settings_only: bool,
    as_json: bool,
) -> None:
    """Check what has to be set for an engine on Neuron.

    \b
    Example: two engines of one machine that hand KV over
        python -m neuron.environment --transfer
    """
    situation = Situation(nodes, lnc, transfer or between_machines, between_machines, coordinator)
    findings = check_settings(situation, os.environ)
    if not settings_only:
        findings += check_machine(situation, look())
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": rows}))
    else:
        _show(findings)
    if any(finding.level == "wrong" for finding in findings):
        raise click.exceptions.Exit(EXIT_WRONG)


def _show(findings: Sequence[Finding]) -> None:
    """A line for each, and below why it matters and what to do where it is not as it should be."""
    table = Table("", "setting", "found", "wanted")
    table.columns[1].no_wrap = True
    for item in findings:
        level = f"[{_STYLES[item.level]}]{item.level}[/]"
        table.add_row(level, item.name, escape(item.found), item.wanted)
    Console().print(table)
    for item in findings:
        if item.level != "ok":
            click.echo(f"{item.level}: {item.name}: {item.reason}\n    {item.fix}")


if __name__ == "__main__":
    main(prog_name="python -m neuron.environment")
