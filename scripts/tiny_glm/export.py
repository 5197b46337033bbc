"""Weights to a Hugging Face folder and back, under the published tensor names."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from scripts.tiny_glm.config import EOS_IDS, GlmConfig
from scripts.tiny_glm.layers import Params
from scripts.tiny_glm.model import param_shapes
from scripts.tiny_glm.tokenizer import PAD, TOKEN_IDS, write_tokenizer

WEIGHTS_FILE = "model.safetensors"
_IN_FLOAT32 = ("mlp.gate.weight", "e_score_correction_bias", "indexer.weights_proj.weight")


def export(folder: Path, config: GlmConfig, params: Params) -> None:
    """Write everything that a server needs. What is there already is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _stored(name, value) for name, value in _unstacked(params)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_json(folder / "config.json", config.to_json())
    generation = {"eos_token_id": EOS_IDS, "pad_token_id": TOKEN_IDS[PAD]}
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder)


def load(folder: Path, config: GlmConfig) -> dict[str, jax.Array]:
    """The parameters of an exported folder, float32, experts stacked."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return {
        name: jnp.asarray(_stacked(tensors, name, shape), jnp.float32)
        for name, shape in param_shapes(config).items()
    }


def stored_params(params: Params) -> dict[str, jax.Array]:
    """The parameters as they come back from a folder: rounded to the types of the file."""
    return {
        name: jnp.asarray(_stored(name, np.asarray(value)).astype(np.float32))
        for name, value in params.items()
    }


def _unstacked(params: Params) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in params.items():
        array = np.asarray(value)
        if ".mlp.experts." not in name:
            yield name, array
            continue
        for expert, part in enumerate(array):
            yield _expert_name(name, expert), part


def _expert_name(name: str, expert: int) -> str:
    return name.replace(".experts.", f".experts.{expert}.")


def _stacked(tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if ".mlp.experts." not in name:
        return tensors[name].astype(np.float32)
    parts = [tensors[_expert_name(name, expert)] for expert in range(shape[0])]
    return np.stack(parts).astype(np.float32)


def _stored(name: str, value: np.ndarray) -> np.ndarray:
    dtype = np.float32 if name.endswith(_IN_FLOAT32) else ml_dtypes.bfloat16
    return np.ascontiguousarray(value).astype(dtype)


def write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
