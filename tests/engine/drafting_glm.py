"""A tiny sparse model whose draft layer is right more often than not, without any training.

What a layer adds to a token's embedding is small, so the next token follows from the last one more
than from all before; the draft layer passes the embedding of the next token on.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from tests.golden.tiny_glm import write_tiny_glm

DAMPING = 0.02
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "n_routed_experts": 12,  # for 1, 3 and 4 ranks
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": False,
}
DRAFT = "model.layers.2."


def drafting_glm(folder: Path, **changed: Any) -> Checkpoint:
    """61 tokens, two layers of which the second takes the choice of the first, a draft layer."""
    checkpoint = open_checkpoint(str(write_tiny_glm(folder, "periodic", **SHAPE | changed)))
    return replace(checkpoint, read=lambda name: _changed(name, checkpoint.read(name)))


def _changed(name: str, values: np.ndarray) -> np.ndarray:
    if name == f"{DRAFT}eh_proj.weight":  # the next token's embedding, and something of the state
        return np.hstack([np.eye(len(values), dtype=np.float32), 0.45 * values[:, len(values) :]])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return DAMPING * values
    return np.ones_like(values) if name.endswith(("norm.weight", "layernorm.weight")) else values
