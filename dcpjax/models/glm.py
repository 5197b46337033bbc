"""GLM-5 and the DeepSeek-V3 family as seen by one rank inside ``shard_map``."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Integer

from dcpjax.attention.block import Block
from dcpjax.attention.chosen import Choice
from dcpjax.cache.pool import Pools
from dcpjax.config import GlmConfig
from dcpjax.mesh import padded
from dcpjax.models.glm_layer import GlmLayer, run_layer
from dcpjax.models.latent_attention import CacheNames, Place, latent_angles
from dcpjax.models.layers import Embedding, RMSNorm
from dcpjax.models.mtp import Draft
from dcpjax.models.sharding import Sharding


class Glm(nnx.Module):
    """Tokens to hidden states, hidden states to logits. The layers are always unrolled."""

    def __init__(self, config: GlmConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        vocab = padded(config.vocab_size, sharding.ranks)
        self.embedding = Embedding(vocab, config.hidden_size, dtype, sharding.form)
        self.layers = nnx.List(
            GlmLayer(config, sharding, dtype, number=number) for number in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.head = Embedding(vocab, config.hidden_size, dtype, sharding.form)
        if config.num_draft_layers:
            self.draft = Draft(config, sharding, dtype)
        self.is_tied = config.tie_word_embeddings
        self.config, self.sharding = config, sharding

    def hidden_states(
        self,
        tokens: Integer[Array, " T"],
        blocks: tuple[Block, ...],
        pools: Pools,
        rank: Integer[Array, ""],
    ) -> tuple[Float[Array, "T E"], Pools]:
        """Run all layers over the tokens of all blocks; what is cached goes into the pools."""
        x = self.embedding(tokens, rank)
        positions = jnp.concatenate([block.positions for block in blocks])
        angles = latent_angles(positions, self.config)
        names = CacheNames(has_whole_keys=self.sharding.has_whole_index)
        choices: tuple[Choice, ...] = ()
        num_choosing = 0
        for number, layer in enumerate(self.layers):
            place = Place(jnp.int32(number), jnp.int32(num_choosing))
            num_choosing += self.config.has_indexer(number)
            x, pools, choices = run_layer(
                layer, x, angles, blocks, pools, place, choices, rank, names=names
            )
        return x, pools

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """This rank's share of the vocabulary's logits, float32."""
        return self.head_logits(self.norm(x))

    def head_logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """As :meth:`logits`, of states that are normalised already."""
        return (self.embedding if self.is_tied else self.head).logits(x)
