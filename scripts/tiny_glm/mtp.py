"""The MTP layer: it drafts the token after the next one.

Row t takes the target's normalised hidden state of token t and the embedding of token t + 1,
stands at position t, and predicts token t + 2. At position 0 the embedding counts as zero. A later
draft of the same row takes the normalised hidden state of the draft before it and the token drafted
there, stands one position further, and attends to the very tokens that the first draft chose.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from scripts.tiny_glm import attention
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.layers import Params, linear, rms_norm
from scripts.tiny_glm.model import (
    EMBEDDING,
    HEAD,
    Attending,
    Index,
    Loads,
    divergence_of,
    feed_forward,
    layer_name,
    make_index,
)


class DraftState(NamedTuple):
    """What later drafts of all rows need: keys and the choice of the first drafts."""

    keys: attention.Keys
    index: Index


class Draft(NamedTuple):
    """Hidden state [B, T, hidden], normalised, and logits [B, T, vocabulary] of one draft step."""

    hidden: jax.Array
    logits: jax.Array
    loads: Loads


def first_draft(
    params: Params,
    config: GlmConfig,
    hidden: jax.Array,
    next_tokens: jax.Array,
    attending: Attending,
) -> tuple[Draft, DraftState, jax.Array]:
    """The first draft of every row, and the indexer's divergence [B, T].

    Args:
        hidden: the target's, [B, T, hidden].
        next_tokens: token t + 1 of each row t, [B, T].
    """
    layer = config.mtp_layer
    positions = jnp.arange(hidden.shape[1])
    x = _combine(params, config, hidden, next_tokens, positions)
    normed = rms_norm(params, f"{layer_name(layer)}.input_layernorm", x, config.rms_norm_eps)
    index = make_index(params, config, layer, normed, positions, attending)
    name = f"{layer_name(layer)}.self_attn"
    keys = attention.project_keys(params, name, config, normed, positions)
    state = DraftState(keys, index)
    draft, probabilities = _draft(params, config, x, positions, state)
    return draft, state, divergence_of(index, probabilities, attending)


def next_draft(
    params: Params,
    config: GlmConfig,
    before: Draft,
    drafted: jax.Array,
    step: int,
    state: DraftState,
) -> Draft:
    """Draft number ``step`` (the first is 0) of every row, from the one before it.

    Args:
        drafted: the token that each row drafted last, [B, T].
    """
    positions = jnp.arange(drafted.shape[1]) + step
    x = _combine(params, config, before.hidden, drafted, positions)
    return _draft(params, config, x, positions, state)[0]


def _combine(
    params: Params, config: GlmConfig, hidden: jax.Array, tokens: jax.Array, positions: jax.Array
) -> jax.Array:
    name = layer_name(config.mtp_layer)
    embedded = params[f"{EMBEDDING}.weight"][tokens]
    embedded = jnp.where(positions[None, :, None] == 0, 0.0, embedded)
    pair = (
        rms_norm(params, f"{name}.enorm", embedded, config.rms_norm_eps),
        rms_norm(params, f"{name}.hnorm", hidden, config.rms_norm_eps),
    )
    return linear(params, f"{name}.eh_proj", jnp.concatenate(pair, axis=-1))


def _draft(
    params: Params, config: GlmConfig, x: jax.Array, positions: jax.Array, state: DraftState
) -> tuple[Draft, jax.Array]:
    layer, name = config.mtp_layer, layer_name(config.mtp_layer)
    normed = rms_norm(params, f"{name}.input_layernorm", x, config.rms_norm_eps)
    residual = attention.query_residual(params, f"{name}.self_attn", normed)
    queries = attention.project_queries(params, f"{name}.self_attn", config, residual, positions)
    added, probabilities = attention.attend(
        params, f"{name}.self_attn", queries, state.keys, state.index.selection
    )
    x, loads = feed_forward(params, config, layer, x + added)
    hidden = rms_norm(params, f"{name}.shared_head.norm", x, config.rms_norm_eps)
    return Draft(hidden, linear(params, HEAD, hidden), loads), probabilities
