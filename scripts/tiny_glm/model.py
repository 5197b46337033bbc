"""The whole forward pass: layers, logits, and what the indexers are trained on.

An indexer is trained apart from everything else: it reads its layer's input through a
``stop_gradient``, and what it chooses passes no gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from scripts.tiny_glm import attention
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.layers import Params, experts, linear, mlp, rms_norm

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}"


@dataclass(frozen=True)
class Attending:
    """How a pass attends.

    ``is_sparse``: to the indexer's choice; otherwise to all earlier tokens. ``trains_indexer``: the
    indexers' divergences are wanted. ``noise``: a seed; random numbers take the place of the
    indexers' scores.
    """

    is_sparse: bool
    trains_indexer: bool = False
    noise: int | None = None

    @property
    def needs_scores(self) -> bool:
        return self.is_sparse or self.trains_indexer


class Index(NamedTuple):
    """One indexer's scores [B, T, T] (None if nobody wants them) and its choice [B, 1, T, T]."""

    scores: jax.Array | None
    selection: jax.Array


Loads = dict[int, jax.Array]
"""By layer: the share of each expert in all choices, [experts]."""


class Output(NamedTuple):
    """``hidden`` [B, T, hidden] is normalised; ``divergence`` a sum over indexers, [B, T]."""

    hidden: jax.Array
    logits: jax.Array
    divergence: jax.Array
    loads: Loads


def forward(params: Params, config: GlmConfig, tokens: jax.Array, attending: Attending) -> Output:
    """Logits [B, T, vocabulary] of token ids [B, T]."""
    x = params[f"{EMBEDDING}.weight"][tokens]
    positions = jnp.arange(tokens.shape[1])
    divergence, loads = jnp.zeros(tokens.shape), Loads()
    for group in indexer_groups(config):
        x, more, of_group = _layers_of_one_indexer(params, config, x, positions, group, attending)
        divergence, loads = divergence + more, loads | of_group
    hidden = rms_norm(params, FINAL_NORM, x, config.rms_norm_eps)
    return Output(hidden, linear(params, HEAD, hidden), divergence, loads)


def indexer_groups(config: GlmConfig) -> list[list[int]]:
    """Layers by the indexer that they use: a full one, then the shared ones after it."""
    starts = [layer for layer in range(config.num_hidden_layers) if config.has_indexer(layer)]
    stops = [*starts[1:], config.num_hidden_layers]
    return [list(range(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def _layers_of_one_indexer(
    params: Params,
    config: GlmConfig,
    x: jax.Array,
    positions: jax.Array,
    layers: list[int],
    attending: Attending,
) -> tuple[jax.Array, jax.Array, Loads]:
    index, attended, loads = None, jnp.zeros(()), Loads()
    for layer in layers:
        normed = rms_norm(params, f"{layer_name(layer)}.input_layernorm", x, config.rms_norm_eps)
        if index is None:
            index = make_index(params, config, layer, normed, positions, attending)
        added, probabilities = self_attention(params, config, layer, normed, positions, index)
        attended = attended + probabilities
        x, load = feed_forward(params, config, layer, x + added)
        loads |= load
    assert index is not None, "a group has at least one layer"
    return x, divergence_of(index, attended / len(layers), attending), loads


def make_index(
    params: Params,
    config: GlmConfig,
    layer: int,
    normed: jax.Array,
    positions: jax.Array,
    attending: Attending,
) -> Index:
    """What the layer's indexer says of its input ``normed`` [B, T, hidden]."""
    everything = attention.causal(normed.shape[1])[None, None]
    if not attending.needs_scores:
        return Index(None, everything)
    name = f"{layer_name(layer)}.self_attn"
    normed = jax.lax.stop_gradient(normed)
    residual = jax.lax.stop_gradient(attention.query_residual(params, name, normed))
    scores = attention.index_scores(params, f"{name}.indexer", config, normed, residual, positions)
    if attending.noise is not None:
        scores = jax.random.normal(jax.random.key(1000 * attending.noise + layer), scores.shape)
    if not attending.is_sparse:
        return Index(scores, everything)
    return Index(scores, attention.select(jax.lax.stop_gradient(scores), config.index_topk))


def self_attention(
    params: Params,
    config: GlmConfig,
    layer: int,
    normed: jax.Array,
    positions: jax.Array,
    index: Index,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`attention.attend`."""
    name = f"{layer_name(layer)}.self_attn"
    residual = attention.query_residual(params, name, normed)
    queries = attention.project_queries(params, name, config, residual, positions)
    keys = attention.project_keys(params, name, config, normed, positions)
    return attention.attend(params, name, queries, keys, index.selection)


def feed_forward(
    params: Params, config: GlmConfig, layer: int, x: jax.Array
) -> tuple[jax.Array, Loads]:
    """``x`` plus what the layer's MLP or experts add to it."""
    name = layer_name(layer)
    normed = rms_norm(params, f"{name}.post_attention_layernorm", x, config.rms_norm_eps)
    if config.is_sparse_mlp(layer):
        added, load = experts(params, f"{name}.mlp", config, normed)
        return x + added, {layer: load}
    return x + mlp(params, f"{name}.mlp", normed), {}


def divergence_of(index: Index, attended: jax.Array, attending: Attending) -> jax.Array:
    """What the indexer is trained on [B, T]; 0 where it is not trained."""
    if index.scores is None or not attending.trains_indexer:
        return jnp.zeros(attended.shape[:2])
    target = jax.lax.stop_gradient(attended)
    return attention.index_divergence(index.scores, target)


def param_shapes(config: GlmConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter, the MTP layer's included."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (vocab, hidden)}
    for layer in range(config.num_hidden_layers + 1):
        shapes |= _prefixed(layer_name(layer), _layer_shapes(config, layer))
    mtp: dict[str, tuple[int, ...]] = {"eh_proj.weight": (hidden, 2 * hidden)}
    mtp |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= _prefixed(layer_name(config.mtp_layer), mtp)
    return shapes | {f"{FINAL_NORM}.weight": (hidden,), f"{HEAD}.weight": (vocab, hidden)}


def _layer_shapes(config: GlmConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes = _prefixed("self_attn", _attention_shapes(config))
    if config.has_indexer(layer):
        shapes |= _prefixed("self_attn.indexer", _indexer_shapes(config))
    shapes |= _prefixed("mlp", _mlp_shapes(config, config.is_sparse_mlp(layer)))
    norms = ("input_layernorm", "post_attention_layernorm")
    return shapes | {f"{name}.weight": (hidden,) for name in norms}


def _attention_shapes(config: GlmConfig) -> dict[str, tuple[int, ...]]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    return {
        "q_a_proj.weight": (config.q_lora_rank, hidden),
        "q_a_layernorm.weight": (config.q_lora_rank,),
        "q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm.weight": (config.kv_lora_rank,),
        "kv_b_proj.weight": (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            config.kv_lora_rank,
        ),
        "o_proj.weight": (hidden, heads * config.v_head_dim),
    }


def _indexer_shapes(config: GlmConfig) -> dict[str, tuple[int, ...]]:
    heads, width = config.index_n_heads, config.index_head_dim
    return {
        "wq_b.weight": (heads * width, config.q_lora_rank),
        "wk.weight": (width, config.hidden_size),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, config.hidden_size),
    }


def _mlp_shapes(config: GlmConfig, is_sparse: bool) -> dict[str, tuple[int, ...]]:
    hidden, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    if not is_sparse:
        return _gated_shapes(hidden, config.intermediate_size)
    routed = {name: (count, *shape) for name, shape in _gated_shapes(hidden, width).items()}
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (count, hidden)}
    shapes["gate.e_score_correction_bias"] = (count,)
    shapes |= _prefixed("experts", routed)
    return shapes | _prefixed(
        "shared_experts", _gated_shapes(hidden, width * config.n_shared_experts)
    )


def _gated_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
    }


def _prefixed(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}
