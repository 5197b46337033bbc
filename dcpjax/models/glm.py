"""GLM-5 and the DeepSeek-V3 family as seen by one rank inside ``shard_map``."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Integer

from dcpjax.attention.chosen import Choice
from dcpjax.attention.views import AnyBlock, gather_prior
from dcpjax.cache.parts import INDEXER, LATENT
from dcpjax.cache.pool import Pools
from dcpjax.config import GlmConfig
from dcpjax.mesh import padded
from dcpjax.models.glm_layer import GlmLayer, run_layer
from dcpjax.models.latent_attention import (
    CacheNames,
    Place,
    Priors,
    latent_angles,
    stored_parts,
)
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
        blocks: tuple[AnyBlock, ...],
        pools: Pools,
        rank: Integer[Array, ""],
    ) -> tuple[Float[Array, "T E"], Pools]:
        """Run all layers over the tokens of all blocks; what is cached goes into the pools."""
        x = self.embedding(tokens, rank)
        positions = jnp.concatenate([block.positions for block in blocks])
        angles = latent_angles(positions, self.config)
        names = CacheNames(has_whole_keys=self.sharding.has_whole_index)
        choices: tuple[Choice, ...] = ()
        priors = self._priors(0, blocks, pools, names, {})
        for number, layer in enumerate(self.layers):
            x, pools, choices = run_layer(
                layer,
                x,
                angles,
                blocks,
                pools,
                self._place(number),
                choices,
                rank,
                priors,
                names=names,
            )
            priors = self._priors(number + 1, blocks, pools, names, priors)
        return x, pools

    def _place(self, number: int) -> Place:
        num_choosing = sum(map(self.config.has_indexer, range(number)))
        return Place(jnp.int32(number), jnp.int32(num_choosing))

    def _priors(
        self,
        number: int,
        blocks: tuple[AnyBlock, ...],
        pools: Pools,
        names: CacheNames,
        before: Priors,
    ) -> Priors:
        """What a layer reads besides the pools, by part; behind the last layer nothing.

        Args:
            before: of the layer before.
        """
        if number == len(self.layers):
            return {}
        place, (latents, keys) = self._place(number), stored_parts(self.config, self.sharding)
        done = tuple(copy for copies in before.values() for copy in copies)
        latent = gather_prior(pools[LATENT], place.latent, blocks, latents, done)
        priors = {LATENT: latent}
        if self.config.has_indexer(number) and not names.has_whole_keys:
            priors[INDEXER] = gather_prior(pools[INDEXER], place.indexer, blocks, keys, latent)
        return priors

    def logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """This rank's share of the vocabulary's logits, float32."""
        return self.head_logits(self.norm(x))

    def head_logits(self, x: Float[Array, "R E"]) -> Float[Array, "R v"]:
        """As :meth:`logits`, of states that are normalised already."""
        return (self.embedding if self.is_tied else self.head).logits(x)
