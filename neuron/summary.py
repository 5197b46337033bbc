"""What ``neuron.compile`` says at the end."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from neuron.jobs import Compiled, Failed
from neuron.manifest import ProgramRecord

Results = Sequence[Compiled | Failed]


def show_summary(records: Sequence[ProgramRecord], results: Results, *, as_json: bool) -> None:
    """Print one line per program, and on standard error the end of the log of each that failed.

    Args:
        results: of the records, in their order; empty where nothing was to be compiled.
    """
    rows = [_row(record, result) for record, result in zip_longest(records, results)]
    if as_json:
        click.echo(json.dumps({"programs": rows}))
    else:
        Console().print(_table(rows))
    failed = [result for result in results if isinstance(result, Failed)]
    for result in failed:
        click.echo(f"\n{result.job.name}: {result.failure}\n{result.tail}", err=True)
        click.echo(f"all of it: {result.logs}", err=True)
    if failed:
        click.echo(f"\n{len(failed)} of {len(results)} programs did not compile", err=True)


def _row(record: ProgramRecord, result: Compiled | Failed | None) -> dict[str, Any]:
    attempts = () if result is None else result.attempts
    return {
        "name": record.name,
        "state": "written" if result is None else result.state,
        "attempts": len(attempts),
        "seconds": round(sum(attempt.seconds for attempt in attempts), 3),
        "neff_bytes": None if record.neff is None else record.neff.num_bytes,
        "failure": record.failure,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("program", "state", "attempts", "seconds", "NEFF bytes")
    for row in rows:
        size = "" if row["neff_bytes"] is None else f"{row['neff_bytes']:,}"
        attempts, seconds = str(row["attempts"]), f"{row['seconds']:.1f}"
        table.add_row(row["name"], row["state"], attempts, seconds, size)
    return table
