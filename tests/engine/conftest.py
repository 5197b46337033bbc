"""A tiny model with random weights that the engine's tests share."""

import json
from pathlib import Path

import pytest

from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.golden.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers, four query heads, two KV heads, 131 tokens."""
    return open_checkpoint(str(write_tiny_model(tmp_path_factory.mktemp("models") / "gqa", "gqa")))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same config without weights, for ``load_format="dummy"``."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("models") / "bare", "gqa")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    return open_checkpoint(str(folder), weights=False)
