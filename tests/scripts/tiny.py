"""Configs of the tiny GLM's architecture that are small enough for loops, and random weights."""

from dataclasses import replace

import jax
import numpy as np

from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.initial import initial_params
from scripts.tiny_glm.model import param_shapes

SMALL = GlmConfig(
    vocab_size=512,
    hidden_size=48,
    intermediate_size=56,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=24,
    qk_nope_head_dim=20,
    qk_rope_head_dim=8,
    v_head_dim=12,
    index_head_dim=16,
    index_topk=8,
)
SHALLOW = replace(SMALL, num_hidden_layers=2, index_topk_freq=2, index_skip_topk_offset=1)
"""A full layer and a shared one, for what compiles many programs."""
PUBLISHED_PATTERN = replace(
    SMALL,
    num_hidden_layers=7,
    first_k_dense_replace=3,
    index_topk_freq=4,
    index_skip_topk_offset=3,
)
GROUPS = replace(
    SMALL, n_routed_experts=12, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
)


def random_params(config: GlmConfig, seed: int) -> dict[str, jax.Array]:
    """Weights with nothing at its neutral value: norms, biases and the routers' bias vary too."""
    random = np.random.default_rng(seed)
    params = initial_params(config, seed)
    for name, shape in param_shapes(config).items():
        if len(shape) == 1:
            noise = random.normal(0.0, 0.2, shape).astype(np.float32)
            params[name] = params[name] + noise
    return params


def random_tokens(config: GlmConfig, seed: int, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length))
