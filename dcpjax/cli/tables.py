"""Titled tables on a terminal, and the files that a report can be written to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from dcpjax.cli.options import WrongSettings
from dcpjax.errors import ConfigError
from dcpjax.planner.demand import parse_size
from dcpjax.planner.sections import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NARROWEST = 160
"""Columns of a table where the output is no terminal."""


class Size(click.ParamType):
    """A count such as 64K or 1M = 1,048,576."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def show_sections(sections: Sequence[Section]) -> None:
    """Print them; commands stand alone on their lines, to be copied."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = NARROWEST
    for section in sections:
        console.print(f"\n{section.title}", style="bold")
        for note in section.notes:
            click.echo(note)
        if section.columns:
            table = Table(*section.columns, box=None, pad_edge=False, header_style="dim")
            for row in section.rows:
                table.add_row(*row)
            console.print(table)


def write_text(path: Path, text: str) -> None:
    """Write a report.

    Raises:
        WrongSettings: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WrongSettings(f"cannot write {path}: {error}") from error


def write_figures(folder: Path, figures: "Mapping[str, Figure]") -> None:
    """Write each picture as SVG, named by what it shows.

    Raises:
        WrongSettings: the folder cannot be made or written to.
    """
    from dcpjax.planner.page import svg

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongSettings(f"cannot make {folder}: {error}") from error
    for name, figure in figures.items():
        write_text(folder / f"{name.replace(' ', '_')}.svg", svg(figure) + "\n")


def need_matplotlib() -> None:
    """Refuse pictures where matplotlib is not installed.

    Raises:
        WrongSettings: with what to install.
    """
    try:
        import matplotlib as matplotlib
    except ModuleNotFoundError as error:
        raise WrongSettings("pictures need matplotlib: install dcpjax[plots]") from error
