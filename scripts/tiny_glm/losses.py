"""What training minimises, and the numbers that tell how it goes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from scripts.tiny_glm import mtp
from scripts.tiny_glm.config import GlmConfig
from scripts.tiny_glm.layers import Params
from scripts.tiny_glm.model import Attending, Loads, Output, forward

MTP_WEIGHT = 0.3
_UNGUESSABLE_WEIGHT = 0.1
"""What an indexer's row counts where the next token cannot be guessed."""


class Metrics(NamedTuple):
    """Means over tokens by weight, in nats; accuracies in [0, 1]. Losses not asked for are 0."""

    next_token: jax.Array
    accuracy: jax.Array
    drafts: jax.Array
    draft_accuracies: jax.Array
    divergence: jax.Array
    loads: Loads


def total_loss(
    params: Params,
    config: GlmConfig,
    tokens: jax.Array,
    weights: jax.Array,
    attending: Attending,
    num_drafts: int,
) -> tuple[jax.Array, Metrics]:
    """All losses of a batch of rows [B, T]; ``num_drafts`` MTP steps are trained."""
    output = forward(params, config, tokens, attending)
    next_token, accuracy = _prediction(output.logits, tokens, weights, ahead=1)
    drafts = _draft_losses(params, config, output, tokens, weights, attending, num_drafts)
    divergence = _weighted(output.divergence + drafts.divergence, _index_weights(weights))
    total = next_token + MTP_WEIGHT * drafts.loss + divergence
    loads = output.loads | drafts.loads
    return total, Metrics(next_token, accuracy, drafts.loss, drafts.accuracies, divergence, loads)


class _Drafts(NamedTuple):
    loss: jax.Array
    accuracies: jax.Array
    divergence: jax.Array
    loads: Loads


def _draft_losses(
    params: Params,
    config: GlmConfig,
    output: Output,
    tokens: jax.Array,
    weights: jax.Array,
    attending: Attending,
    num_drafts: int,
) -> _Drafts:
    """The MTP layer on the row's own tokens. Without drafts only its indexer is trained."""
    draft, state, divergence = mtp.first_draft(
        params, config, output.hidden, shifted(tokens, 1), attending
    )
    loads = draft.loads
    found = []
    for step in range(num_drafts):
        if step:
            draft = mtp.next_draft(params, config, draft, shifted(tokens, step + 1), step, state)
        found.append(_prediction(draft.logits, tokens, weights, ahead=step + 2))
    if not found:
        return _Drafts(jnp.zeros(()), jnp.zeros(0), divergence, loads)
    losses, accuracies = (jnp.stack(values) for values in zip(*found, strict=True))
    return _Drafts(losses.mean(), accuracies, divergence, loads)


def shifted(tokens: jax.Array, by: int) -> jax.Array:
    """Token t + ``by`` at place t; the last ``by`` places hold what does not count."""
    return jnp.roll(tokens, -by, axis=1)


def _prediction(
    logits: jax.Array, tokens: jax.Array, weights: jax.Array, ahead: int
) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy of place t predicting token t + ``ahead``."""
    logits, wanted, weights = logits[:, :-ahead], tokens[:, ahead:], weights[:, ahead:]
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], axis=-1)[..., 0]
    is_right = (logits.argmax(axis=-1) == wanted).astype(jnp.float32)
    return _weighted(loss, weights), _weighted(is_right, weights)


def _weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    return (values * weights).sum() / (weights.sum() + 1e-6)


def _index_weights(weights: jax.Array) -> jax.Array:
    """A row of the indexer matters as much as the token that is predicted from it."""
    return _UNGUESSABLE_WEIGHT + shifted(weights, 1)
