"""Functions and modules that every decoder uses, written for one rank's share of the weights."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer

from dcpjax.config import LlamaConfig, RopeScaling
from dcpjax.form import StepForm
from dcpjax.mesh import ALL_RANKS

Angles = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]
"""Cosine and sine of each token's rotary angles, float32."""


def parameter(
    shape: Sequence[int], axes: Sequence[str | None], dtype: DTypeLike
) -> nnx.Param[Array]:
    """A parameter of this global, padded shape; ``axes``: see ``mesh.LOGICAL_AXES``."""
    return nnx.Param(jnp.zeros(tuple(shape), dtype), axes=tuple(axes))


def sum_ranks(
    x: Array, axes: str | tuple[str, ...] = ALL_RANKS, *, scattered: bool = False
) -> Array:
    """The sum over mesh axes; free where they have one rank (XLA:CPU would make a call of it).

    Args:
        scattered: as a reduce-scatter and an all-gather, see ``StepForm``.
    """
    names = (axes,) if isinstance(axes, str) else axes
    ranks = math.prod(map(lax.axis_size, names))
    if ranks == 1:
        return x
    if not scattered:
        return lax.psum(x, axes)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % ranks))
    share = lax.psum_scatter(flat, axes, tiled=True)
    return lax.all_gather(share, axes, tiled=True)[: x.size].reshape(x.shape)


def matmul(x: Float[Array, "T E"], weight: Float[Array, "E ..."]) -> Float[Array, "T ..."]:
    """``x · weight`` over the first axis of the weight, accumulated in float32, in x's type."""
    flat = weight.reshape(weight.shape[0], -1)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.matmul(x, flat, precision=precision)
    return out.reshape(x.shape[0], *weight.shape[1:])


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float, dtype: DTypeLike) -> None:
        self.weight = parameter((width,), (None,), dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype) * weight


class Embedding(nnx.Module):
    """Token embedding split over the vocabulary; also the output head where the two are tied."""

    def __init__(self, vocab: int, width: int, dtype: DTypeLike, form: StepForm) -> None:
        self.weight = parameter((vocab, width), ("vocab", "embed"), dtype)
        self.form = form

    def __call__(
        self, tokens: Integer[Array, " T"], rank: Integer[Array, ""]
    ) -> Float[Array, "T E"]:
        weight = self.weight[...]
        local = tokens - rank * weight.shape[0]
        is_here = (local >= 0) & (local < weight.shape[0])
        inside = jnp.clip(local, 0, weight.shape[0] - 1)  # Neuron's gathers bound nothing
        rows = jnp.take(weight, inside, axis=0, mode="clip")
        rows = jnp.where(is_here[:, None], rows, jnp.zeros((), rows.dtype))
        return sum_ranks(rows, scattered=self.form.scattered_sums)

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """This rank's share of the vocabulary's logits, float32."""
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.einsum(
            "re,ve->rv",
            x,
            self.weight[...],
            precision=precision,
            preferred_element_type=jnp.float32,
        )


class MLP(nnx.Module):
    """``down(silu(gate(x)) · up(x))``, the inner width split over all ranks.

    Gate and up are one product: ``gate_up[:, 0]`` and ``gate_up[:, 1]``.
    """

    def __init__(self, width: int, inner: int, dtype: DTypeLike, form: StepForm) -> None:
        self.gate_up = parameter((width, 2, inner), ("embed", None, "ffn"), dtype)
        self.down = parameter((inner, width), ("ffn", "embed"), dtype)
        self.form = form

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return sum_ranks(self.summand(x), scattered=self.form.scattered_sums)

    def summand(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """What this rank's columns add to the result."""
        return gated_mlp(x, self.gate_up[...], self.down[...])


def gated_mlp(
    x: Float[Array, "T E"], gate_up: Float[Array, "E 2 I"], down: Float[Array, "I E"]
) -> Float[Array, "T E"]:
    """``down(silu(gate(x)) · up(x))``."""
    inner = matmul(x, gate_up)
    return matmul(nnx.silu(inner[:, 0]) * inner[:, 1], down)


def rope_frequencies(config: LlamaConfig) -> tuple[float, ...]:
    """Angle per position of each column pair: ``theta ** (−2i / head_dim)``, scaled."""
    half = config.head_dim // 2
    plain = [config.rope_theta ** (-i / half) for i in range(half)]
    if config.rope_scaling is None:
        return tuple(plain)
    return tuple(_scale_frequency(value, config.rope_scaling) for value in plain)


def _scale_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Linear: all slowed by the factor. Llama 3: only the long waves, with a ramp between."""
    if scaling.kind == "linear":
        return frequency / scaling.factor
    waves = scaling.original_max_position * frequency / (2 * math.pi)  # in the original context
    ramp = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = min(max(ramp, 0.0), 1.0)
    return frequency * (keep + (1 - keep) / scaling.factor)


def rope_angles(positions: Integer[Array, " T"], frequencies: Sequence[float]) -> Angles:
    """Cosine and sine of each position's angles, float32."""
    rates = jnp.asarray(frequencies, jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * rates[None, :]
    return jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]


def rotate(x: Float[Array, "T h D"], angles: Sequence[Array]) -> Float[Array, "T h D"]:
    """Rotary embedding on column pairs (i, i + D/2)."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
