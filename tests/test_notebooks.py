"""Each notebook runs from top to bottom; its claims are its own asserts."""

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from scripts.plain_code import plain_code
from tests.conftest import IS_PLAIN

ROOT = Path(__file__).resolve().parent.parent
TEXTS = sorted((ROOT / "notebooks").glob("*.py"))
SECONDS_PER_CELL = 120


def reader_environment() -> dict[str, str]:
    """Ours without the devices of conftest.py, since a notebook sets up its own."""
    flags = plain_code() if IS_PLAIN else []
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


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


def check_pairs(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    script = ROOT / "scripts" / "check_notebooks.py"
    command = [sys.executable, str(script), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_pairs_in_step_pass_and_others_are_named(tmp_path: Path):
    text = tmp_path / "pair.py"
    text.write_text("# %% [markdown]\n# A title\n\n# %%\nx = 1\n")
    missing = check_pairs(tmp_path)
    assert (missing.returncode, "pair.ipynb is missing" in missing.stdout) == (1, True)
    assert check_pairs(tmp_path, "--write").returncode == 0
    assert check_pairs(tmp_path).returncode == 0
    text.write_text(text.read_text().replace("x = 1", "x = 2"))
    changed = check_pairs(tmp_path)
    assert (changed.returncode, "hold different cells" in changed.stdout) == (1, True)
    text.unlink()
    assert "pair.py is missing" in check_pairs(tmp_path).stdout
