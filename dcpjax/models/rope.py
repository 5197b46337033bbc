"""Rotary position embedding: frequencies, angles, rotation."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Integer

from dcpjax.config import GlmConfig, LlamaConfig, RopeScaling

Angles = tuple[Float[Array, "T 1 half"], Float[Array, "T 1 half"]]
"""Cosine and sine of each token's rotary angles, float32."""


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


def yarn_frequencies(config: GlmConfig) -> tuple[float, ...]:
    """As :func:`rope_frequencies`, of the rotated columns of a latent-cache model.

    YaRN (arXiv 2309.00071, §3.2): columns that turn often in the original context stay, those that
    turn less than once are slowed by the factor, with a ramp over the columns between.
    """
    half, yarn = config.qk_rope_head_dim // 2, config.rope_scaling
    plain = [config.rope_theta ** (-i / half) for i in range(half)]
    if yarn is None:
        return tuple(plain)

    def column(turns: float) -> float:
        """The column, as a real number, that turns so often in the original context."""
        waves = yarn.original_max_position / (turns * 2 * math.pi)
        return half * math.log(waves) / math.log(config.rope_theta)

    first = max(math.floor(column(yarn.beta_fast)), 0)
    last = min(math.ceil(column(yarn.beta_slow)), config.qk_rope_head_dim - 1)
    length = max(last - first, 0.001)
    slowed = [min(max((i - first) / length, 0.0), 1.0) for i in range(half)]
    return tuple(
        rate * (1 - share + share / yarn.factor) for rate, share in zip(plain, slowed, strict=True)
    )


def yarn_scale(config: GlmConfig) -> float:
    """What YaRN multiplies rotated columns by: ``mscale`` over ``mscale_all_dim``, if both are."""
    yarn = config.rope_scaling
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn.attention_scale(yarn.mscale) / yarn.attention_scale(yarn.mscale_all_dim)
    return yarn.attention_scale(1.0)


def rope_angles(
    positions: Integer[Array, " T"], frequencies: Sequence[float], scale: float = 1.0
) -> Angles:
    """Cosine and sine of each position's angles times ``scale``, float32."""
    rates = jnp.asarray(frequencies, jnp.float32)
    angles = positions.astype(jnp.float32)[:, None] * rates[None, :]
    return scale * jnp.cos(angles)[:, None, :], scale * jnp.sin(angles)[:, None, :]


def rotate(x: Float[Array, "T h D"], angles: Sequence[Array]) -> Float[Array, "T h D"]:
    """Rotary embedding on column pairs (i, i + D/2)."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
