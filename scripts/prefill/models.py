"""Models with random weights, as config.json has them.

No two widths of one model are equal, so that a product in a compiled program tells by its sizes
what it is about.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcpjax.config import GlmConfig, ModelConfig
from dcpjax.models.checkpoint import Checkpoint, open_checkpoint
from dcpjax.models.weights import random_weights

LAYERS = 8

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GLM: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "moe_intermediate_size": 144,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 200,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 32,
    "v_head_dim": 56,
    "first_k_dense_replace": LAYERS,  # experts are chosen at run time, so their work is not known
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 512,
    "index_topk_freq": 4,  # layers 0, 1, 2 and 6 choose
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1 << 20,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
}
MODELS = {"llama": LLAMA, "glm": GLM}


def write_model(folder: Path, values: Mapping[str, Any]) -> Checkpoint:
    """A model that has these values as its config.json in ``folder``; its weights are made up."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(values)))
    return random_weights(open_checkpoint(str(folder), weights=False), 0)


def score_widths(model: ModelConfig) -> dict[str, int]:
    """Over how many values a query and a key are multiplied, by what is done so."""
    if not isinstance(model, GlmConfig):
        return {"attention": model.head_dim}
    widths = {"attention": model.latent_width}
    if model.indexer is not None:
        widths["indexer"] = model.indexer.head_dim
    return widths
