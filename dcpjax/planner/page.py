"""One self-contained HTML page of tables and pictures: no scripts, nothing from elsewhere."""
# pyright: basic

import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcpjax.planner.sections import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd;
  font-variant-numeric: tabular-nums }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto } figure { margin: 1rem 0 }
svg { max-width: 100%; height: auto }
"""


def render_page(title: str, sections: Sequence[Section], figures: "Mapping[str, Figure]") -> str:
    """The page.

    Args:
        figures: by what they show, for those who cannot see them.
    """
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [_section(section) for section in sections]
    body += [_figure(name, figure) for name, figure in figures.items()]
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
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in section.columns)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in section.rows
        )
        parts.append(
            f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
        )
    return "\n".join(parts)


def _note(note: str) -> str:
    tag = "pre" if note.startswith("dcpjax ") else "p"
    return f"<{tag}>{html.escape(note)}</{tag}>"


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
