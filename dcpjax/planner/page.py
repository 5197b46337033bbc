"""One self-contained HTML page of tables and pictures: no scripts, nothing from elsewhere."""
# pyright: basic

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.planner.sections import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
p { max-width: 46rem; margin: .5rem 0 }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: left; padding: .25rem 1.1rem .25rem 0; border-bottom: 1px solid #ddd;
  white-space: nowrap; vertical-align: bottom }
td:last-child { white-space: normal; min-width: 8rem }
.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto }
.figures { display: flex; flex-wrap: wrap; gap: 1.5rem 2rem; margin-top: 2.2rem }
figure { margin: 0; flex: 0 1 34rem; min-width: 0 }
figcaption { color: #666; font-size: .85rem }
svg { max-width: 100%; height: auto }
"""
_NUMBER = re.compile(r"[+\u2212-]?\d[\d,.]*( ?(%|s|ms|GB|GiB|of \d+))?")
"""Cells of columns that are set flush right."""


def render_page(title: str, sections: Sequence[Section], figures: "Mapping[str, Figure]") -> str:
    """The page.

    Args:
        figures: by what they show, for those who cannot see them.
    """
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [_section(section) for section in sections]
    if figures:
        drawn = "\n".join(_figure(name, figure) for name, figure in figures.items())
        body.append(f'<div class="figures">\n{drawn}\n</div>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    parts += [_note(note) for note in section.notes]
    if section.columns:
        columns = zip(*section.rows, strict=True) if section.rows else [()] * len(section.columns)
        kinds = [_kind(cells) for cells in columns]
        head = _row("th", section.columns, kinds)
        rows = "\n".join(_row("td", row, kinds) for row in section.rows)
        parts.append(f"<table>\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody>\n</table>")
    return "\n".join(parts)


def _kind(cells: Iterable[str]) -> str:
    """The class of a column's cells."""
    return ' class="number"' if all(map(_NUMBER.fullmatch, cells)) else ""


def _row(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    inside = (
        f"<{tag}{scope}{kind}>{html.escape(cell)}</{tag}>"
        for cell, kind in zip(cells, kinds, strict=True)
    )
    return f"<tr>{''.join(inside)}</tr>"


def _note(note: str) -> str:
    """A sentence, or a command with an option on each line, as a shell takes it."""
    if note.startswith("dcpjax "):
        lines = note.replace(" --", " \\\n    --")
        return f"<pre>{html.escape(lines)}</pre>"
    return f"<p>{html.escape(note)}</p>"


def _figure(name: str, figure: "Figure") -> str:
    drawing = svg(figure)
    return (
        f'<figure role="img" aria-label="{html.escape(name)}">\n{drawing}\n'
        f"<figcaption>{html.escape(name)}</figcaption>\n</figure>"
    )


def svg(figure: Any) -> str:
    """The picture as an element for a page, text as outlines."""
    import matplotlib

    file = io.StringIO()
    # Names inside the picture are the same for the same picture; no date.
    with matplotlib.rc_context({"svg.hashsalt": "dcpjax"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
