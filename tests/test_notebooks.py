"""Each notebook runs from top to bottom; its claims are its own asserts."""

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
TEXTS = sorted((ROOT / "notebooks").glob("*.py"))
SECONDS_PER_CELL = 120


def reader_environment() -> dict[str, str]:
    """Ours without the settings of conftest.py: a notebook sets up its own devices."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def run(notebook: nbformat.NotebookNode) -> None:
    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute(env=reader_environment())


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_notebook_runs(text: Path):
    run(jupytext.read(text))


def test_a_false_claim_fails():
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(jupytext.reads("# %%\nassert 1 == 2", fmt="py:percent"))
