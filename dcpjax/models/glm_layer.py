"""One decoder layer of GLM-5 and the DeepSeek-V3 family."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from dcpjax.attention.chosen import Choice
from dcpjax.attention.paired import PairedBlock
from dcpjax.attention.views import AnyBlock
from dcpjax.cache.pool import Pools
from dcpjax.config import GlmConfig
from dcpjax.mesh import padded
from dcpjax.models.experts import Experts
from dcpjax.models.latent_attention import CacheNames, LatentAttention, Place, Priors
from dcpjax.models.layers import MLP, RMSNorm
from dcpjax.models.rope import Angles
from dcpjax.models.sharding import Sharding


class GlmLayer(nnx.Module):
    """A decoder layer: latent attention, then a dense MLP or experts."""

    def __init__(
        self, config: GlmConfig, sharding: Sharding, dtype: DTypeLike, *, number: int
    ) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = LatentAttention(
            config, sharding, dtype, has_indexer=config.has_indexer(number)
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.has_experts = config.has_experts(number)
        if self.has_experts:
            self.mlp: nnx.Module = Experts(config, sharding, dtype)
        else:
            inner = padded(config.intermediate_size, sharding.ranks)
            self.mlp = MLP(config.hidden_size, inner, dtype, sharding.form)

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles,
        blocks: tuple[AnyBlock, ...],
        pools: Pools,
        place: Place,
        choices: tuple[Choice, ...],
        rank: Array,
        names: CacheNames,
        chooses: bool = True,
        priors: Priors | None = None,
    ) -> tuple[Float[Array, "T E"], Pools, tuple[Choice, ...]]:
        attended, pools, choices = self.attention(
            self.attention_norm(x), angles, blocks, pools, place, choices, names, chooses, priors
        )
        x = x + attended
        inner = self.mlp_norm(x)
        if self.has_experts:
            is_real = jnp.concatenate([block.is_real for block in blocks])
            own = sum(b.rows * b.width for b in blocks if isinstance(b, PairedBlock))
            return x + self.mlp(inner, rank, is_real, own), pools, choices
        return x + self.mlp(inner), pools, choices


@partial(jax.jit, static_argnames=("names", "chooses"))
def run_layer(
    layer: GlmLayer,
    x: Array,
    angles: Angles,
    blocks: tuple[AnyBlock, ...],
    pools: Pools,
    place: Place,
    choices: tuple[Choice, ...],
    rank: Array,
    priors: Priors | None = None,
    *,
    names: CacheNames,
    chooses: bool = True,
) -> tuple[Array, Pools, tuple[Choice, ...]]:
    """One layer. Jitted so that layers of one kind share one trace; XLA sees them unrolled."""
    return layer(x, angles, blocks, pools, place, choices, rank, names, chooses, priors)
