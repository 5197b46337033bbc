"""Say whether each notebook and its text twin hold the same cells; --write renews the notebooks.

A pair is ``x.py`` (percent format, what people edit and review) and ``x.ipynb`` (what people open).
Outputs and metadata of the notebook are not compared.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make x.ipynb from each x.py")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: notebooks/")
    options = parser.parse_args()
    if options.write:
        for text in sorted(options.folder.glob("*.py")):
            jupytext.write(jupytext.read(text), text.with_suffix(".ipynb"))
    problems = list(differences(options.folder))
    for problem in problems:
        print(problem)
    if problems:
        print("scripts/check_notebooks.py --write makes the notebooks from their text")
    return 1 if problems else 0


def differences(folder: Path) -> Iterator[str]:
    """One sentence per pair that is incomplete or out of step."""
    stems = {path.with_suffix("") for path in folder.glob("*.py")}
    stems |= {path.with_suffix("") for path in folder.glob("*.ipynb")}
    for stem in sorted(stems):
        text, notebook = stem.with_suffix(".py"), stem.with_suffix(".ipynb")
        missing = [path.name for path in (text, notebook) if not path.exists()]
        if missing:
            yield f"{stem.name}: {missing[0]} is missing"
        elif cells(jupytext.read(text)) != cells(nbformat.read(notebook, as_version=4)):
            yield f"{stem.name}: {text.name} and {notebook.name} hold different cells"


def cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


if __name__ == "__main__":
    sys.exit(main())
