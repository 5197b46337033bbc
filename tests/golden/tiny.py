"""Tiny random models as Hugging Face folders, written without torch and the same on every machine.

``RandomState`` is frozen by NumPy's policy, ``Generator`` is not. The vocabulary and the inner
width are padded on every mesh with an even number of ranks.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dcpjax.models.huggingface import read_config
from dcpjax.models.tensors import expected_tensors

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 49,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "rope_theta": 500.0},
    "mqa": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": _LLAMA3_ROPE, "rope_theta": 500.0, "tie_word_embeddings": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,  # not hidden size / heads
    },
}
PROMPT_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 150)
SCORED_LENGTH = 80
"""Tokens of the sequence whose logits are recorded at every position."""


def write_tiny_model(folder: Path, name: str, **changed: Any) -> Path:
    """The model ``name`` of CONFIGS as a folder that transformers and dcpjax read.

    With other settings where ``changed`` has them.
    """
    return write_random_model(folder, name, _BASE | CONFIGS[name] | changed)


def write_random_model(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """A folder with ``config`` and weights that depend on ``name`` and their own names alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(read_config(folder)[0])
    tensors = {tensor: _values(name, tensor, shape) for tensor, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _values(model: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """Large enough that attention looks at few tokens and logits are far from flat."""
    values = _random(f"{model} {tensor}").standard_normal(shape)
    if len(shape) == 1:
        return (0.3 * values + tensor.endswith("norm.weight")).astype(np.float32)
    gain = 3.0 if tensor.startswith(("model.embed_tokens", "lm_head")) else 1.5
    return (gain * shape[-1] ** -0.5 * values).astype(np.float32)


def _random(name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(name.encode()))


def random_tokens(name: str, length: int, vocab_size: int = _BASE["vocab_size"]) -> list[int]:
    """Token ids that depend on ``name``."""
    return _random(name).randint(0, vocab_size, length).tolist()
