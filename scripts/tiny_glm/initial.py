"""Weights to start from: random, but for a pair of heads in each of two layers.

Recall takes two steps. A head of layer 0 tells of each token which one stood before it; a head of
layer 1 then looks for the token whose predecessor is the present token: it is the one wanted. Left
to itself training finds these two only after a long plateau, so two heads of each layer begin as
such. What is copied from there and what is done with it is learnt, and everything may move away
from where it starts.
"""

import jax
import jax.numpy as jnp
import numpy as np

from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.model import EMBEDDING, layer_name, param_shapes

_HEADS = 2
_EMBEDDING_DEVIATION = 0.5
_CONSTANT = 2.0
"""Of the first component of every embedding: what a query that asks for a distance is made of."""
_SHARPNESS = (10.0, 5.0, 4.0, 2.0, 1.0)
"""By which each of RoPE's frequencies, the fastest first, raises the score of the token before."""
_MATCH_GAIN = 1.6
"""Of queries and keys in layer 1: a match then scores about 10, a chance resemblance 0 ± 2."""

_Arrays = dict[str, np.ndarray]


def initial_params(config: GlmConfig, seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    params = {
        name: _initial(random, name, shape, config) for name, shape in param_shapes(config).items()
    }
    _look_one_back(params, config)
    _write_apart(params, config)
    _look_for_predecessor(params, config)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def _initial(
    random: np.random.Generator, name: str, shape: tuple[int, ...], config: GlmConfig
) -> np.ndarray:
    """Norms 1, biases 0, matrices by their fan-in; each layer adds little at first."""
    if name.endswith("bias"):
        return np.zeros(shape)
    if len(shape) == 1:
        return np.ones(shape)
    deviation = _EMBEDDING_DEVIATION if name.startswith(EMBEDDING) else shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation *= _damping(config)
    return random.normal(0.0, deviation, shape)


def _damping(config: GlmConfig) -> float:
    return (2 * config.num_hidden_layers) ** -0.5


def _look_one_back(params: _Arrays, config: GlmConfig) -> None:
    """Keys carry the constant turned by their position; queries carry it turned by one position
    less than their own, so that the product is largest one token back."""
    name = f"{layer_name(0)}.self_attn"
    params[f"{EMBEDDING}.weight"][:, 0] = _CONSTANT
    residual = params[f"{name}.q_a_proj.weight"]
    residual[0], residual[0, 0] = 0.0, 1.0
    amplitude = _amplitude(config)
    queries = _queries(params, config, 0)
    queries[:_HEADS] = 0.0
    queries[:_HEADS, config.qk_nope_head_dim :, 0] = _turned(amplitude, -1.0, config)
    keys = params[f"{name}.kv_a_proj_with_mqa.weight"][config.kv_lora_rank :]
    keys[:, 0] = _turned(amplitude, 0.0, config)


def _write_apart(params: _Arrays, config: GlmConfig) -> None:
    """The heads write what they have found into components that embeddings leave free."""
    width = _HEADS * config.v_head_dim
    params[f"{EMBEDDING}.weight"][:, -width:] = 0.0
    output = params[f"{layer_name(0)}.self_attn.o_proj.weight"]
    output[:, :width] = 0.0
    output[-width:, :width] = np.eye(width)


def _look_for_predecessor(params: _Arrays, config: GlmConfig) -> None:
    """Queries say of the present token what keys say of their predecessor: layer 0's values."""
    name, before = f"{layer_name(1)}.self_attn", f"{layer_name(0)}.self_attn"
    width, nope, rank = _HEADS * config.v_head_dim, config.qk_nope_head_dim, config.kv_lora_rank
    latent = params[f"{name}.kv_a_proj_with_mqa.weight"][:rank]
    latent[:width] = 0.0
    latent[:width, -width:] = np.eye(width)
    latent[width:, -width:] = 0.0
    residual = params[f"{name}.q_a_proj.weight"]
    residual[:rank] = params[f"{before}.kv_a_proj_with_mqa.weight"][:rank]
    residual[:, -width:] = 0.0
    told = _expanded(params, config, 0)[:_HEADS, nope:].reshape(width, rank)
    queries, keys = _queries(params, config, 1), _expanded(params, config, 1)
    for head in range(_HEADS):
        part = np.roll(np.arange(width), -head * (width - nope))[:nope]
        queries[head], keys[head, :nope] = 0.0, 0.0
        queries[head, : len(part), :rank] = _MATCH_GAIN * told[part]
        keys[head, np.arange(len(part)), part] = _MATCH_GAIN
    params[f"{name}.o_proj.weight"][:, :width] /= _damping(config)


def _queries(params: _Arrays, config: GlmConfig, layer: int) -> np.ndarray:
    """A view of q_b_proj by heads, [heads, qk_head_dim, q_lora_rank]."""
    weight = params[f"{layer_name(layer)}.self_attn.q_b_proj.weight"]
    return weight.reshape(config.num_attention_heads, -1, config.q_lora_rank)


def _expanded(params: _Arrays, config: GlmConfig, layer: int) -> np.ndarray:
    """A view of kv_b_proj by heads, [heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]."""
    weight = params[f"{layer_name(layer)}.self_attn.kv_b_proj.weight"]
    return weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)


def _amplitude(config: GlmConfig) -> np.ndarray:
    """Of query and key at each frequency, for a product of ``_SHARPNESS`` after scaling."""
    sharpness = np.zeros(config.qk_rope_head_dim // 2)
    count = min(len(sharpness), len(_SHARPNESS))
    sharpness[:count] = _SHARPNESS[:count]
    free = _HEADS * config.v_head_dim / config.hidden_size
    spread = _EMBEDDING_DEVIATION**2 * (1 - free) + _CONSTANT**2 / config.hidden_size
    constant = _CONSTANT / spread**0.5
    # The residual has it once among components of about 1, and is normalised itself.
    in_residual = constant / (1 + constant**2 / config.q_lora_rank) ** 0.5
    return np.sqrt(sharpness * config.qk_head_dim**0.5 / (constant * in_residual))


def _turned(amplitude: np.ndarray, positions: float, config: GlmConfig) -> np.ndarray:
    width = 2 * len(amplitude)
    angle = positions * config.rope_theta ** (-np.arange(0, width, 2) / width)
    pairs = np.stack([amplitude * np.cos(angle), amplitude * np.sin(angle)], axis=-1)
    return pairs.ravel()
