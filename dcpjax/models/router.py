"""Which experts a token goes to, and with what weights. The same on every rank, in float32."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Integer

from dcpjax.config.glm import ExpertsConfig
from dcpjax.models.layers import parameter

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by: all scores of a token may be 0."""


class Routes(NamedTuple):
    """The experts of each token, the best first, and their weights."""

    experts: Integer[Array, "T k"]
    weights: Float32[Array, "T k"]


class Router(nnx.Module):
    """Scores are sigmoids. The bias counts where experts are chosen, and not in their weights.

    With groups, a group's score is the sum of its two best biased ones; a token chooses among the
    experts of the best groups alone. The lowest index is first among equals.
    """

    def __init__(self, config: ExpertsConfig, width: int) -> None:
        self.weight = parameter((config.num_experts, width), (None, "embed"), jnp.float32)
        self.bias = parameter((config.num_experts,), (None,), jnp.float32)
        self.config = config

    def choose(self, x: Float[Array, "T E"]) -> Routes:
        """The experts of each token by number."""
        scores, biased = self._scores(x)
        _, experts = lax.top_k(biased, self.config.num_per_token)
        return Routes(experts, self._weights(jnp.take_along_axis(scores, experts, axis=1)))

    def spread(self, x: Float[Array, "T E"]) -> Float32[Array, "T n"]:
        """The weights of all experts of the model, 0 of those not chosen; in float32 alone."""
        scores, biased = self._scores(x)
        is_chosen = is_among_largest(biased, self.config.num_per_token)
        return self._weights(jnp.where(is_chosen, scores, 0.0))

    def _scores(self, x: Array) -> tuple[Float32[Array, "T n"], Float32[Array, "T n"]]:
        """Plain, and biased with −inf for what may not be chosen."""
        logits = jnp.matmul(
            x.astype(jnp.float32), self.weight[...].T, precision=lax.Precision.HIGHEST
        )
        scores = nnx.sigmoid(logits)
        biased = scores + self.bias[...][None]
        config = self.config
        if config.groups_per_token == config.num_groups:
            return scores, biased
        grouped = biased.reshape(x.shape[0], config.num_groups, -1)
        is_open = is_among_largest(_sum_of_two_best(grouped), config.groups_per_token)
        grouped = jnp.where(is_open[..., None], grouped, -jnp.inf)
        return scores, grouped.reshape(biased.shape)

    def _weights(self, chosen: Float32[Array, "T c"]) -> Float32[Array, "T c"]:
        if self.config.is_normalised:
            chosen = chosen / (jnp.sum(chosen, axis=1, keepdims=True) + LEAST_SUM)
        return chosen * self.config.scale


def is_among_largest(values: Float32[Array, "... n"], count: int) -> Bool[Array, "... n"]:
    """Whether a value is among the ``count`` largest of the last axis, the first among equals.

    ``count`` rounds of a maximum and the least place of it, both of floats: Neuron has no top-k of
    so few and no reduction of integers. −inf is chosen last.
    """
    places = lax.broadcasted_iota(jnp.float32, values.shape, values.ndim - 1)
    is_chosen = jnp.zeros(values.shape, jnp.bool_)
    for _ in range(count):
        left = jnp.where(is_chosen, -jnp.inf, values)
        is_best = (left == jnp.max(left, axis=-1, keepdims=True)) & ~is_chosen
        first = jnp.min(jnp.where(is_best, places, jnp.inf), axis=-1, keepdims=True)
        is_chosen |= places == first
    return is_chosen


def _sum_of_two_best(groups: Float32[Array, "T g s"]) -> Float32[Array, "T g"]:
    best = is_among_largest(groups, 1)
    second = jnp.max(jnp.where(best, -jnp.inf, groups), axis=-1)
    return jnp.max(groups, axis=-1) + second
