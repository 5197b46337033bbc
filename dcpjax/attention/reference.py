"""Dense attention in float32: what everything else is compared with. Owes nothing to the rest."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer


def attention_reference(
    q: Float[Array, "T H D"],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K Dv"],
    q_positions: Integer[Array, " T"],
    k_positions: Integer[Array, " S"],
    *,
    scale: float,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """Causal attention by position; H is a multiple of K.

    ``out = softmax(scale · q kᵀ) v`` over the keys whose position is at most the query's, and
    ``lse = log Σ exp(scale · q kᵀ)``. A query that sees nothing has out 0 and lse −inf.
    """
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, repeat, axis=1), jnp.repeat(v, repeat, axis=1)
    scores = scale * jnp.einsum("thd,shd->ths", q, k, precision=lax.Precision.HIGHEST)
    visible = (k_positions[None, :] <= q_positions[:, None])[:, None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    exps = jnp.exp(scores - highest)
    total = jnp.sum(exps, axis=-1, keepdims=True)
    weights = exps / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("ths,shd->thd", weights, v, precision=lax.Precision.HIGHEST)
    lse = jnp.where(total > 0, jnp.log(total) + highest, -jnp.inf)
    return out, lse[..., 0]
