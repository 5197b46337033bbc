"""Tiny models with a latent cache as Hugging Face folders, hand-made: no width equals another."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dcpjax.models.huggingface import read_config
from dcpjax.models.tensors import expected_tensors

GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 67,
    "hidden_size": 20,
    "intermediate_size": 23,
    "moe_intermediate_size": 7,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "index_topk_freq": 2,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
V32 = GLM | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk_freq": 1,
}
V3 = {key: value for key, value in GLM.items() if not key.startswith("index_")} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}


def write_config(folder: Path, values: dict[str, Any] = GLM) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def random_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Different values for every tensor that the config in ``folder`` asks for."""
    shapes = expected_tensors(read_config(folder)[0])
    return {
        name: np.random.default_rng(zlib.crc32(name.encode()))
        .standard_normal(shape)
        .astype(np.float32)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, values: dict[str, Any] = GLM) -> dict[str, np.ndarray]:
    """A folder with config and tensors; returns the tensors."""
    tensors = random_tensors(write_config(folder, values))
    save_file(tensors, folder / "model.safetensors")
    return tensors
