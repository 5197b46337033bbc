"""The draft layer (multi-token prediction): from a token's hidden state and the next token to a
state that predicts the token after that.

It runs with DCP off: its cache is whole on every rank, because it would gain nothing from sharding
one layer, and drafts come without exchanges.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from dcpjax.attention.block import Block
from dcpjax.attention.chosen import Choice
from dcpjax.cache.parts import DRAFT_INDEXER, DRAFT_LATENT
from dcpjax.cache.pool import Pools
from dcpjax.config import GlmConfig
from dcpjax.models.glm_layer import GlmLayer, run_layer
from dcpjax.models.latent_attention import CacheNames, Place, latent_angles
from dcpjax.models.layers import RMSNorm, matmul, parameter
from dcpjax.models.sharding import Sharding

_CACHE = CacheNames(DRAFT_LATENT, DRAFT_INDEXER)


class Draft(nnx.Module):
    """A projection of embedding and hidden state together, a decoder layer, a norm."""

    def __init__(self, config: GlmConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        width = config.hidden_size
        self.embedding_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.projection = parameter((2 * width, width), (None, "embed"), dtype)
        self.layer = GlmLayer(config, sharding, dtype, number=config.num_layers)
        self.norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.config = config

    def __call__(
        self,
        embedded: Float[Array, "T E"],
        hidden: Float[Array, "T E"],
        blocks: tuple[Block, ...],
        pools: Pools,
        rank: Array,
        choices: tuple[Choice, ...] = (),
    ) -> tuple[Float[Array, "T E"], Pools, tuple[Choice, ...]]:
        """One draft of every token.

        Args:
            embedded: the next token of each one.
            hidden: what predicts the next token, normalised: the model's, or that of the draft
                before.
            blocks: whole on every rank.
            choices: attend to these; without them the layer chooses itself.

        Returns:
            states that predict the token after the next, normalised; the pools; what was chosen.
        """
        positions = jnp.concatenate([block.positions for block in blocks])
        # As the published models were trained: the first token has none before it.
        embedded = jnp.where((positions == 0)[:, None], jnp.zeros((), embedded.dtype), embedded)
        both = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        x = matmul(jnp.concatenate(both, axis=-1), self.projection[...])
        angles = latent_angles(positions, self.config)
        place = Place(jnp.int32(0), jnp.int32(0))
        x, pools, choices = run_layer(
            self.layer,
            x,
            angles,
            blocks,
            pools,
            place,
            choices,
            rank,
            names=_CACHE,
            chooses=not choices,
        )
        return self.norm(x), pools, choices
