"""Llama 3's rope scaling from the factors that a GGUF file stores instead of its parameters."""

import math

import numpy as np

from dcpjax.config import RopeScaling
from dcpjax.errors import CheckpointError


def scaling_from_factors(factors: np.ndarray, head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling that divides frequency i by ``factors[i]`` [head_dim / 2]; None if all are 1.

    All Llama 3 models share every parameter but the factor, which is the largest one stored; what
    does not fit that form is refused.

    Raises:
        CheckpointError: the factors are those of another scheme.
    """
    largest = float(factors.max(initial=1.0))
    scaling = RopeScaling("llama3", factor=max(largest, 1.0))
    expected = _llama3_factors(scaling, head_dim, theta)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(
            "rope_freqs.weight holds the factors of Llama 3's rope scaling",
            found=factors[:8].tolist(),
            expected=expected[:8].tolist(),
        )
    return scaling if largest > 1 else None


def _llama3_factors(scaling: RopeScaling, head_dim: int, theta: float) -> np.ndarray:
    """Divisors [head_dim / 2]: 1 for short waves, ``factor`` for long ones, a blend between."""
    wave_lengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_max_position / wave_lengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - blend) / scaling.factor + blend)).astype(np.float32)
