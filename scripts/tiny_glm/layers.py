"""The pieces of a layer that look at one token at a time, and RoPE.

Parameters are a flat dict under the published tensor names, matrices as [out, in]; only the experts
of a layer are stacked, [experts, out, in]. Everything is float32, without rank promotion.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from scripts.tiny_glm.config import GlmConfig

Params = Mapping[str, jax.Array]


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T


def broadcast_last(vector: jax.Array, like: jax.Array) -> jax.Array:
    """``vector`` [D] with as many axes as ``like``."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def rms_norm(params: Params, name: str, x: jax.Array, eps: float) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale * broadcast_last(params[f"{name}.weight"], x)


def layer_norm(params: Params, name: str, x: jax.Array, eps: float) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    return centred * scale * broadcast_last(weight, x) + broadcast_last(bias, x)


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """RoPE of pairs (x0, x1), (x2, x3)...; the first members come out first, then the second ones.

    Args:
        x: [B, T, heads, width].
        positions: [T].
    """
    width = x.shape[-1]
    frequency = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def mlp(params: Params, name: str, x: jax.Array) -> jax.Array:
    gate, up = linear(params, f"{name}.gate_proj", x), linear(params, f"{name}.up_proj", x)
    return linear(params, f"{name}.down_proj", jax.nn.silu(gate) * up)


def route(params: Params, name: str, config: GlmConfig, x: jax.Array) -> jax.Array:
    """The weight of each expert for each token, [..., experts]; 0 for those not chosen.

    The bias takes part in the choice only.
    """
    scores = jax.nn.sigmoid(linear(params, name, x))
    bias = params[f"{name}.e_score_correction_bias"]
    choice = scores + broadcast_last(bias, scores)
    chosen = _largest(_mask_groups(choice, config), config.num_experts_per_tok)
    weights = jnp.where(chosen, scores, 0.0)
    return weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * config.routed_scaling_factor


def _mask_groups(choice: jax.Array, config: GlmConfig) -> jax.Array:
    """−inf outside the best groups; a group is as good as its two best experts together."""
    grouped = choice.reshape(*choice.shape[:-1], config.n_group, -1)
    merits = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    kept = _largest(merits, config.topk_group)[..., None]
    return jnp.where(kept, grouped, -jnp.inf).reshape(choice.shape)


def _largest(values: jax.Array, count: int) -> jax.Array:
    """True at the ``count`` largest of the last axis, the first ones where some are equal."""
    _, indices = jax.lax.top_k(values, count)
    return jax.nn.one_hot(indices, values.shape[-1], dtype=jnp.bool_).any(axis=-2)


def experts(
    params: Params, name: str, config: GlmConfig, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Chosen experts plus the shared one, and each expert's share of the choices [experts].

    All experts see all tokens: at this size one large product is faster than sorting tokens.
    """
    weights = route(params, f"{name}.gate", config, x)
    load = (weights > 0).mean(axis=tuple(range(x.ndim - 1))) / config.num_experts_per_tok
    gate, up, down = (
        params[f"{name}.experts.{part}.weight"] for part in ("gate_proj", "up_proj", "down_proj")
    )
    num_experts, width, hidden = gate.shape
    inner = jax.nn.silu(x @ gate.reshape(-1, hidden).T) * (x @ up.reshape(-1, hidden).T)
    weighted = inner.reshape(*x.shape[:-1], num_experts, width) * weights[..., None]
    stacked_down = down.transpose(0, 2, 1).reshape(-1, hidden)
    routed = weighted.reshape(*x.shape[:-1], -1) @ stacked_down
    return routed + mlp(params, f"{name}.shared_experts", x), load
