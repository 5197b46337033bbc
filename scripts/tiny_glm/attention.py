"""MLA and the lightning indexer over whole sequences, as training needs them.

``Selection`` says which keys a query may see. Dense attention is a selection of all earlier tokens,
so there is one attention function; the indexer is trained on the probabilities that it returns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from scripts.tiny_glm.config import A_NORM_EPS, GlmConfig
from scripts.tiny_glm.layers import Params, layer_norm, linear, rms_norm, rotate

_CHUNK = 128
"""Queries that are computed together."""


class Keys(NamedTuple):
    """Keys [B, S, heads, qk_head_dim] and values [B, S, heads, v_head_dim] of a layer."""

    keys: jax.Array
    values: jax.Array


def causal(length: int) -> jax.Array:
    """[T, T], True where the key is not later than the query."""
    return jnp.tri(length, dtype=jnp.bool_)


def query_residual(params: Params, name: str, x: jax.Array) -> jax.Array:
    """[B, T, q_lora_rank]: what the queries of attention and of the indexer are made of."""
    return rms_norm(
        params, f"{name}.q_a_layernorm", linear(params, f"{name}.q_a_proj", x), A_NORM_EPS
    )


def project_queries(
    params: Params, name: str, config: GlmConfig, residual: jax.Array, positions: jax.Array
) -> jax.Array:
    """[B, T, heads, qk_head_dim], rotated."""
    shape = (*residual.shape[:2], config.num_attention_heads, config.qk_head_dim)
    queries = linear(params, f"{name}.q_b_proj", residual).reshape(shape)
    plain, rope = jnp.split(queries, [config.qk_nope_head_dim], axis=-1)
    return jnp.concatenate([plain, rotate(rope, positions, config.rope_theta)], axis=-1)


def project_keys(
    params: Params, name: str, config: GlmConfig, x: jax.Array, positions: jax.Array
) -> Keys:
    compressed = linear(params, f"{name}.kv_a_proj_with_mqa", x)
    latent, rope = jnp.split(compressed, [config.kv_lora_rank], axis=-1)
    latent = rms_norm(params, f"{name}.kv_a_layernorm", latent, A_NORM_EPS)
    rope = rotate(rope[:, :, None, :], positions, config.rope_theta)
    width = config.qk_nope_head_dim + config.v_head_dim
    expanded = linear(params, f"{name}.kv_b_proj", latent)
    expanded = expanded.reshape(*x.shape[:2], config.num_attention_heads, width)
    plain, values = jnp.split(expanded, [config.qk_nope_head_dim], axis=-1)
    shared = jnp.broadcast_to(rope, (*plain.shape[:3], config.qk_rope_head_dim))
    return Keys(jnp.concatenate([plain, shared], axis=-1), values)


def attend(
    params: Params,
    name: str,
    queries: jax.Array,
    keys: Keys,
    selection: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The layer's output [B, T, hidden], and where it would look if it saw all earlier tokens.

    The latter is what an indexer is trained on: the probabilities [B, T, T] of dense attention,
    averaged over heads. The published recipe takes those of the selected tokens only, once
    attention is sparse; at this size all of them cost little, and a token that is never selected
    can be learnt from them.

    Args:
        selection: [B, 1, T, T] or [1, 1, T, T], True at the keys that a query sees, none later
            than its row.
    """
    parts = [
        _attend(queries[:, start:stop], _first(keys, stop), selection[:, :, start:stop, :stop])
        for start, stop in query_chunks(queries.shape[1])
    ]
    merged = jnp.concatenate([part for part, _ in parts], axis=1)
    attended = jnp.concatenate([_padded(part, merged.shape[1]) for _, part in parts], axis=1)
    return linear(params, f"{name}.o_proj", merged), attended


def query_chunks(length: int) -> list[tuple[int, int]]:
    """Ranges of queries that are computed together, with the keys up to their last one only."""
    starts = range(0, length, _CHUNK)
    return [(start, min(start + _CHUNK, length)) for start in starts]


def _attend(queries: jax.Array, keys: Keys, selection: jax.Array) -> tuple[jax.Array, jax.Array]:
    scores = jnp.einsum("bthd,bshd->bhts", queries, keys.keys) * queries.shape[-1] ** -0.5
    probabilities = jax.nn.softmax(jnp.where(selection, scores, -1e30), axis=-1)
    merged = jnp.einsum("bhts,bshd->bthd", probabilities, keys.values)
    length, num_keys = scores.shape[2:]
    visible = causal(num_keys)[None, None, num_keys - length :]
    dense = jax.nn.softmax(jnp.where(visible, jax.lax.stop_gradient(scores), -1e30), axis=-1)
    return merged.reshape(*merged.shape[:2], -1), dense.mean(axis=1)


def _first(keys: Keys, stop: int) -> Keys:
    return Keys(keys.keys[:, :stop], keys.values[:, :stop])


def _padded(part: jax.Array, length: int) -> jax.Array:
    """The last axis with zeros up to ``length``."""
    return jnp.pad(part, ((0, 0), (0, 0), (0, length - part.shape[-1])))


def index_scores(
    params: Params,
    name: str,
    config: GlmConfig,
    x: jax.Array,
    residual: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The indexer's scores [B, T, T]; what stands for later keys means nothing."""
    shape = (*x.shape[:2], config.index_n_heads, config.index_head_dim)
    queries = linear(params, f"{name}.wq_b", residual).reshape(shape)
    keys = layer_norm(params, f"{name}.k_norm", linear(params, f"{name}.wk", x), A_NORM_EPS)
    queries = _rotate_first(config, queries, positions)
    keys = _rotate_first(config, keys[:, :, None, :], positions)[:, :, 0, :]
    weights = linear(params, f"{name}.weights_proj", x) * config.index_n_heads**-0.5
    length = x.shape[1]
    parts = [
        _padded(_score(queries[:, start:stop], keys[:, :stop], weights[:, start:stop]), length)
        for start, stop in query_chunks(length)
    ]
    return jnp.concatenate(parts, axis=1)


@jax.checkpoint  # products of all index heads are too large to be kept for the backward pass
def _score(queries: jax.Array, keys: jax.Array, weights: jax.Array) -> jax.Array:
    batch, length, heads, width = queries.shape
    flat = queries.reshape(batch, length * heads, width)
    products = jnp.einsum("bnd,bsd->bns", flat, keys) * width**-0.5
    products = jax.nn.relu(products).reshape(batch, length, heads, -1)
    return jnp.einsum("bth,bths->bts", weights, products)


def _rotate_first(config: GlmConfig, x: jax.Array, positions: jax.Array) -> jax.Array:
    rope, plain = jnp.split(x, [config.qk_rope_head_dim], axis=-1)
    return jnp.concatenate([rotate(rope, positions, config.rope_theta), plain], axis=-1)


def select(scores: jax.Array, topk: int) -> jax.Array:
    """[B, 1, T, T]: the ``topk`` best earlier keys of each query, the lowest position on ties."""
    batch, length, _ = scores.shape
    visible = jnp.broadcast_to(causal(length)[None], scores.shape)
    if topk < length:
        _, indices = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), topk)
        rows = jnp.arange(batch)[:, None, None], jnp.arange(length)[None, :, None]
        chosen = jnp.zeros_like(visible).at[rows[0], rows[1], indices].set(True)
        visible = visible & chosen
    return visible[:, None]


def index_divergence(scores: jax.Array, probabilities: jax.Array) -> jax.Array:
    """Cross entropy of the indexer's softmax against attention, per query [B, T].

    Args:
        probabilities: [B, T, T], attention of the layers that use this indexer, their mean.
    """
    masked = jnp.where(causal(scores.shape[1])[None], scores, -1e30)
    return -(probabilities * jax.nn.log_softmax(masked, axis=-1)).sum(axis=-1)
