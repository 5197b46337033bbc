"""Multi-head latent attention (MLA) as seen by one rank inside ``shard_map``.

What is cached of a token is one row that all heads read. Up-projections are absorbed: queries are
turned into the latent's space, attend there, and what they found is projected to values afterwards.
With an indexer, a query attends to chosen tokens alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.block import Block, split_blocks
from dcpjax.attention.chosen import Choice, attend_chosen, choose
from dcpjax.attention.decode import decode_attention, merge_heads, write_block
from dcpjax.attention.indexer import Query
from dcpjax.cache.parts import INDEXER, LATENT
from dcpjax.cache.pool import Pools
from dcpjax.cache.rows import RowFormat
from dcpjax.config import GlmConfig
from dcpjax.mesh import DCP
from dcpjax.models.layers import LayerNorm, RMSNorm, matmul, parameter, sum_ranks
from dcpjax.models.rope import Angles, rope_angles, rotate, yarn_frequencies, yarn_scale
from dcpjax.models.sharding import Sharding

_LATENT_EPS = 1e-6  # of the norms inside MLA, whatever the model's own is


class Place(NamedTuple):
    """Where a layer's rows are: its number in the pools of latents and of indexer keys."""

    latent: Integer[Array, ""]
    indexer: Integer[Array, ""]


@dataclass(frozen=True)
class CacheNames:
    """The pools of a stack of layers, and whether every rank keeps the indexer's keys whole."""

    latent: str = LATENT
    indexer: str = INDEXER
    has_whole_keys: bool = False


class Indexer(nnx.Module):
    """Queries, keys and head weights of the lightning indexer; the same on every rank."""

    def __init__(self, config: GlmConfig, dtype: DTypeLike) -> None:
        indexer = config.indexer
        assert indexer is not None, "only models with an indexer have this module"
        heads, width = indexer.num_heads, indexer.head_dim
        self.q_b = parameter((config.q_lora_rank, heads, width), (None, None, None), dtype)
        self.k = parameter((config.hidden_size, width), ("embed", None), dtype)
        self.k_norm = LayerNorm(width, _LATENT_EPS, dtype)
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


class LatentAttention(nnx.Module):
    """MLA with absorbed projections, over all tokens or over those that the indexer chooses."""

    def __init__(
        self, config: GlmConfig, sharding: Sharding, dtype: DTypeLike, *, has_indexer: bool
    ) -> None:
        width, latent = config.hidden_size, config.kv_lora_rank
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        heads = sharding.heads.groups * sharding.heads.group_heads
        self.q_a = parameter((width, config.q_lora_rank), ("embed", None), dtype)
        self.q_a_norm = RMSNorm(config.q_lora_rank, _LATENT_EPS, dtype)
        self.q_b = parameter(
            (config.q_lora_rank, heads, nope + rope), (None, "q_heads", "head_dim"), dtype
        )
        self.kv_a = parameter((width, latent + rope), ("embed", None), dtype)
        self.kv_a_norm = RMSNorm(latent, _LATENT_EPS, dtype)
        self.k_b = parameter((heads, nope, latent), ("q_heads", None, None), dtype)
        self.v_b = parameter((heads, latent, config.v_head_dim), ("q_heads", None, None), dtype)
        self.o = parameter(
            (heads, config.v_head_dim, width), ("q_heads", "head_dim", "embed"), dtype
        )
        if has_indexer:
            self.indexer = Indexer(config, dtype)
        self.has_indexer, self.is_sparse = has_indexer, config.indexer is not None
        self.nope, self.latent, self.scale = nope, latent, config.softmax_scale
        self.sharding, self.form = sharding, sharding.form

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles,
        blocks: tuple[Block, ...],
        pools: Pools,
        place: Place,
        choices: tuple[Choice, ...],
        names: CacheNames,
        chooses: bool = True,
    ) -> tuple[Float[Array, "T E"], Pools, tuple[Choice, ...]]:
        """Project, write everything into the pools, choose, then attend.

        Args:
            choices: of the last layer before that chose; returned if this one does not.
            chooses: whether this one does, if it has an indexer.
        """
        q_latent = self.q_a_norm(matmul(x, self.q_a[...]))
        rows = self._latent_rows(x, angles)
        pools = dict(pools)
        pools[names.latent] = _write(
            pools[names.latent], place.latent, blocks, rows, self.sharding.latent_format
        )
        if self.has_indexer and chooses:
            pools, choices = self._choose(x, q_latent, angles, blocks, pools, place, names)
        queries = split_blocks(self._queries(q_latent, angles), blocks)
        pool, own = pools[names.latent], split_blocks(rows, blocks)
        if self.is_sparse:
            outs = [
                self._attend_chosen(*each, pool, place.latent)
                for each in zip(queries, blocks, choices, strict=True)
            ]
        else:
            outs = [
                self._attend_all(*each, pool, place.latent)
                for each in zip(queries, own, blocks, strict=True)
            ]
        return self._project(jnp.concatenate(outs).astype(x.dtype)), pools, choices

    def _latent_rows(self, x: Array, angles: Angles) -> Float[Array, "T 1 W"]:
        """What is cached of each token: the normalised latent, and the rotated key."""
        latent, key = jnp.split(matmul(x, self.kv_a[...])[:, None], (self.latent,), axis=-1)
        return jnp.concatenate([self.kv_a_norm(latent), rotate(key, angles)], axis=-1)

    def _queries(self, q_latent: Array, angles: Angles) -> Float[Array, "T h W"]:
        """Queries of this rank's heads, in the space of cached rows."""
        plain, turned = jnp.split(matmul(q_latent, self.q_b[...]), (self.nope,), axis=-1)
        absorbed = _by_head(plain, self.k_b[...])
        return jnp.concatenate([absorbed, rotate(turned, angles)], axis=-1)

    def _choose(
        self,
        x: Array,
        q_latent: Array,
        angles: Angles,
        blocks: tuple[Block, ...],
        pools: Pools,
        place: Place,
        names: CacheNames,
    ) -> tuple[Pools, tuple[Choice, ...]]:
        """Write the indexer's keys, then choose for each block."""
        key_blocks = tuple(b.whole() for b in blocks) if names.has_whole_keys else blocks
        keys = self.indexer.keys(x, angles)
        stored = self.sharding.index_format
        pool = _write(pools[names.indexer], place.indexer, key_blocks, keys, stored)
        q, weights = self.indexer.queries(x, q_latent, angles)
        scale, top_k = q.shape[-1] ** -0.5, self.indexer.top_k
        asked = zip(
            split_blocks(q, blocks), split_blocks(weights, blocks), key_blocks, blocks, strict=True
        )
        choices = tuple(
            choose(Query(q, w, scale, top_k, stored), pool, place.indexer, keys, tokens, self.form)
            for q, w, keys, tokens in asked
        )
        return {**pools, names.indexer: pool}, choices

    def _attend_all(
        self, q: Array, rows: Array, block: Block, pool: Array, layer: Array
    ) -> Float[Array, "T h R"]:
        own = block.take_own(rows)
        return decode_attention(
            q,
            own,
            own[..., : self.latent],
            pool,
            layer,
            block,
            scale=self.scale,
            comm_backend=self.sharding.comm_backend,
            form=self.sharding.form,
        )

    def _attend_chosen(
        self, q: Array, block: Block, choice: Choice, pool: Array, layer: Array
    ) -> Float[Array, "T h R"]:
        if block.sharding.ranks > 1:
            q = lax.all_gather(q, DCP, axis=1, tiled=True)
        out, lse = attend_chosen(
            q,
            pool,
            layer,
            block,
            choice,
            value_width=self.latent,
            scale=self.scale,
            form=self.form,
            row_format=self.sharding.latent_format,
        )
        return merge_heads(out, lse, block, self.sharding.comm_backend)

    def _project(self, latents: Float[Array, "T h R"]) -> Float[Array, "T E"]:
        """What the heads found, as values, through the output projection; whole on every rank."""
        values = _by_head(latents, self.v_b[...])
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        projected = matmul(values.reshape(values.shape[0], -1), rows)
        return sum_ranks(projected, scattered=self.sharding.form.scattered_sums)


def _by_head(x: Float[Array, "T h A"], weight: Float[Array, "h A B"]) -> Float[Array, "T h B"]:
    """Each head's rows times its own matrix, in x's type."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("tha,hab->thb", x, weight, precision=precision)


def _write(
    pool: Array, layer: Array, blocks: tuple[Block, ...], rows: Array, row_format: RowFormat
) -> Array:
    """The pool of a part with the rows of all blocks in one layer."""
    for block, own in zip(blocks, split_blocks(rows, blocks), strict=True):
        pool = write_block(pool, layer, block, block.take_own(own), row_format)
    return pool


def latent_angles(positions: Shaped[Array, " T"], config: GlmConfig) -> Angles:
    """Rotary angles of the rotated columns, of attention and indexer alike."""
    return rope_angles(positions, yarn_frequencies(config), yarn_scale(config))
