"""Tiny random models with a latent cache as Hugging Face folders, the same on every machine.

At least 16 index heads and ten times more tokens than ``index_topk``: with less, nothing sparse is
tested. Six heads are padded on most meshes, eight experts are split over up to eight ranks.
"""

from pathlib import Path
from typing import Any

from tests.golden.tiny import SCORED_LENGTH, random_tokens, write_random_model

_BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 41,
    "moe_intermediate_size": 12,  # torch multiplies groups of rows of 16 bytes
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 8}
_GLM = {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **_INDEXER}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
GLM_CONFIGS: dict[str, dict[str, Any]] = {
    # Layers 0, 1 and 3 choose, layer 2 takes what layer 1 has chosen.
    "periodic": _GLM | {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 2},
    "listed": _GLM
    | {
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "shared", "full"],
        "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
        "n_shared_experts": 2,
    },
    "v32": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        **_INDEXER,
    },
    "v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rope_parameters": _YARN,
        "max_position_embeddings": 128,
        "n_group": 2,
    },
}


def write_tiny_glm(folder: Path, name: str, seed: int = 0, **changed: Any) -> Path:
    """The model ``name`` of GLM_CONFIGS, with other settings where ``changed`` has them."""
    return write_random_model(folder, f"{name} {seed}", _BASE | GLM_CONFIGS[name] | changed)


def scored_tokens(name: str) -> list[int]:
    """The sequence whose logits are recorded at every position."""
    return random_tokens(f"{name} scored", SCORED_LENGTH, _BASE["vocab_size"])
