"""Softmax over keys that come a few at a time: the state, one step, the end. Always float32.

Rows of one KV head's queries are one matrix, so every product is batched over KV heads alone.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


class Running(NamedTuple):
    """Highest score, sum of exponentials and weighted values of the keys seen so far."""

    highest: Float[Array, "K Q"]
    total: Float[Array, "K Q"]
    values: Float[Array, "K Q Dv"]


def nothing_seen(rows: tuple[int, int], value_width: int) -> Running:
    """The state of [K, Q] rows before their first key."""
    return Running(jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, value_width)))


def attend(
    running: Running,
    queries: Array,
    keys: Float[Array, "K S D"],
    values: Float[Array, "K S Dv"],
    scale: float,
    visible: Array | None = None,
    counted: Array | None = None,
) -> Running:
    """One step of the online softmax.

    Args:
        visible: [·, ·, S], which scores exist.
        counted: [·, ·, S], which keys count; the others are copies of keys that do.
    """
    scores = _product("kqd,ksd->kqs", queries, keys)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    highest = jnp.maximum(running.highest, scale * jnp.max(scores, axis=-1))
    exps = jnp.exp(scale * scores - _finite(highest)[..., None])
    if counted is not None:
        exps = jnp.where(counted, exps, 0.0)
    keep = jnp.exp(running.highest - _finite(highest))
    return Running(
        highest,
        running.total * keep + jnp.sum(exps, axis=-1),
        running.values * keep[..., None] + _product("kqs,ksd->kqd", exps, values),
    )


def finish(running: Running) -> tuple[Float[Array, "K Q Dv"], Float[Array, "K Q"]]:
    """out, lse; (0, −inf) for a row that saw nothing."""
    seen = running.total > 0
    out = running.values / jnp.where(seen, running.total, 1.0)[..., None]
    lse = jnp.where(seen, _finite(running.highest) + jnp.log(running.total), -jnp.inf)
    return out, lse


def _product(equation: str, a: Array, b: Array) -> Float[Array, "..."]:
    """Product in the type of ``b``, accumulated in float32.

    The scale of attention is applied to its result: in bfloat16 it would be rounded, which changes
    the temperature of the softmax.
    """
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(
        equation, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32
    )


def _finite(highest: Array) -> Array:
    """The highest score, 0 where nothing was seen: −inf − −inf would be NaN."""
    return jnp.where(highest > -jnp.inf, highest, 0.0)
