"""Shapes of published models as bare config.json files: what a program is lowered from."""

import shutil
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "neuron" / "configs"
"""``qwen3-235b-attention`` has that model's attention; a dense MLP stands in for its experts."""


def write_config(name: str, folder: Path) -> str:
    """The path of a copy of this model's config.json."""
    return str(shutil.copy(CONFIGS / f"{name}.json", folder / f"{name}.json"))
