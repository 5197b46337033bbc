"""What a layer with an indexer computes for it: keys of its tokens, queries, weights of heads."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from dcpjax.config import GlmConfig
from dcpjax.models.layers import LayerNorm, matmul, parameter
from dcpjax.models.rope import Angles, rotate

LATENT_EPS = 1e-6
"""Of the norms inside MLA, whatever the model's own is."""


class Indexer(nnx.Module):
    """Queries, keys and head weights of the lightning indexer; the same on every rank."""

    def __init__(self, config: GlmConfig, dtype: DTypeLike) -> None:
        indexer = config.indexer
        assert indexer is not None, "only models with an indexer have this module"
        heads, width = indexer.num_heads, indexer.head_dim
        self.q_b = parameter((config.q_lora_rank, heads, width), (None, None, None), dtype)
        self.k = parameter((config.hidden_size, width), ("embed", None), dtype)
        self.k_norm = LayerNorm(width, LATENT_EPS, dtype)
        self.weights = parameter((config.hidden_size, heads), ("embed", None), jnp.float32)
        self.rope_width, self.top_k = config.qk_rope_head_dim, indexer.top_k

    def keys(self, x: Float[Array, "T E"], angles: Angles) -> Float[Array, "T 1 D"]:
        return self._rotate(self.k_norm(matmul(x, self.k[...]))[:, None], angles)

    def queries(
        self, x: Float[Array, "T E"], q_latent: Float[Array, "T R"], angles: Angles
    ) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
        """Queries, and the weight of each head's score."""
        weights = matmul(x.astype(jnp.float32), self.weights[...])
        heads = weights.shape[-1] ** -0.5
        return self._rotate(matmul(q_latent, self.q_b[...]), angles), weights * heads

    def _rotate(self, x: Array, angles: Angles) -> Array:
        turned, rest = jnp.split(x, (self.rope_width,), axis=-1)
        return jnp.concatenate([rotate(turned, angles), rest], axis=-1)
