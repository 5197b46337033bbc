"""Multi-head latent attention (MLA) as seen by one rank inside ``shard_map``.

What is cached of a token is one row that all heads read: a latent, and a rotated key. There are two
ways to attend to it. Up-projections may be *absorbed*: queries are turned into the latent's space,
attend there, and what they found is projected to values afterwards. Or the latents are *expanded*
to keys and values of each head, which takes fewer products for many queries: prompts, if the step's
blocks say so. With an indexer, a query attends to chosen tokens alone, so only blocks whose queries
may see all that is before them are expanded.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.block import split_blocks
from dcpjax.attention.chosen import Choice, attend_chosen, choose
from dcpjax.attention.decode import (
    decode_attention,
    gather_heads,
    gather_weights,
    merge_heads,
    read_block,
)
from dcpjax.attention.expanded import UpProjections, expanded_attention
from dcpjax.attention.indexer import Query, choose_everything
from dcpjax.attention.views import (
    AnyBlock,
    Prior,
    Stored,
    View,
    gather_rows,
    view_blocks,
    write_blocks,
)
from dcpjax.cache.parts import INDEXER, LATENT
from dcpjax.cache.pool import Pools
from dcpjax.config import GlmConfig
from dcpjax.models.indexer import LATENT_EPS, Indexer
from dcpjax.models.layers import RMSNorm, matmul, parameter, sum_ranks
from dcpjax.models.rope import Angles, rope_angles, rotate, yarn_frequencies, yarn_scale
from dcpjax.models.sharding import Sharding

Priors = dict[str, Prior]
"""Copies of a layer's prior tokens, by cache part."""


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


class LatentAttention(nnx.Module):
    """MLA over all tokens, or over those that the indexer chooses."""

    def __init__(
        self, config: GlmConfig, sharding: Sharding, dtype: DTypeLike, *, has_indexer: bool
    ) -> None:
        width, latent = config.hidden_size, config.kv_lora_rank
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        heads = sharding.heads.groups * sharding.heads.group_heads
        self.q_a = parameter((width, config.q_lora_rank), ("embed", None), dtype)
        self.q_a_norm = RMSNorm(config.q_lora_rank, LATENT_EPS, dtype)
        self.q_b = parameter(
            (config.q_lora_rank, heads, nope + rope), (None, "q_heads", "head_dim"), dtype
        )
        self.kv_a = parameter((width, latent + rope), ("embed", None), dtype)
        self.kv_a_norm = RMSNorm(latent, LATENT_EPS, dtype)
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
        self.latents, self.keys = stored_parts(config, sharding)

    def __call__(
        self,
        x: Float[Array, "T E"],
        angles: Angles,
        blocks: tuple[AnyBlock, ...],
        pools: Pools,
        place: Place,
        choices: tuple[Choice, ...],
        names: CacheNames,
        chooses: bool = True,
        priors: Priors | None = None,
    ) -> tuple[Float[Array, "T E"], Pools, tuple[Choice, ...]]:
        """Project, write everything into the pools, choose, then attend.

        Args:
            choices: of the last layer before that chose; returned if this one does not.
            chooses: whether this one does, if it has an indexer.
            priors: copies of the layer's prior tokens for blocks that need them, by part.
        """
        q_latent = self.q_a_norm(matmul(x, self.q_a[...]))
        rows, priors = self._latent_rows(x, angles), priors or {}
        at = place.latent
        pools, views = _write(pools, names.latent, at, blocks, rows, priors, self.latents)
        if self.has_indexer and chooses:
            keys, at = self.indexer.keys(x, angles), place.indexer
            stored_as = tuple(b.whole() for b in blocks) if names.has_whole_keys else blocks
            pools, found = _write(pools, names.indexer, at, stored_as, keys, priors, self.keys)
            choices = self._choose((x, q_latent, *angles), blocks, found, views)
        queries, own = (split_blocks(y, blocks) for y in (self._queries(q_latent, angles), rows))
        chosen = choices if self.is_sparse else (None,) * len(blocks)
        values = list(map(self._attend, queries, views, own, chosen))
        return self._project(jnp.concatenate(values)), pools, choices

    def _latent_rows(self, x: Array, angles: Angles) -> Float[Array, "T 1 W"]:
        """What is cached of each token: the normalised latent, and the rotated key."""
        latent, key = jnp.split(matmul(x, self.kv_a[...])[:, None], (self.latent,), axis=-1)
        return jnp.concatenate([self.kv_a_norm(latent), rotate(key, angles)], axis=-1)

    def _queries(self, q_latent: Array, angles: Angles) -> Float[Array, "T h D"]:
        """Queries of this rank's heads: plain columns, then rotated ones."""
        plain, turned = jnp.split(matmul(q_latent, self.q_b[...]), (self.nope,), axis=-1)
        return jnp.concatenate([plain, rotate(turned, angles)], axis=-1)

    def _choose(
        self,
        asking: tuple[Array, ...],
        blocks: tuple[AnyBlock, ...],
        keys: tuple[View, ...],
        tokens: tuple[View, ...],
    ) -> tuple[Choice, ...]:
        """Choose for each block: of the tokens in ``tokens``, by their keys in ``keys``.

        Args:
            asking: states, latent queries, cosines and sines of all tokens.
        """

        def choose_one(
            x: Array, q_latent: Array, cos: Array, sin: Array, keys: View, tokens: View
        ) -> Choice:
            top_k = self.indexer.top_k
            if tokens.block.is_expanded:
                return choose_everything(tokens.block, top_k)
            q, weights = self.indexer.queries(x, q_latent, (cos, sin))
            query = Query(q, weights, q.shape[-1] ** -0.5, top_k, self.keys.row_format)
            choice = choose(query, keys.pool, keys.layer, keys.block, tokens.block, self.form)
            return jax.tree.map(keys.from_owner, choice)

        return tuple(map(choose_one, *(split_blocks(x, blocks) for x in asking), keys, tokens))

    def _attend(
        self, q: Array, view: View, rows: Array, choice: Choice | None
    ) -> Float[Array, "T h Dv"]:
        """What this rank's heads find in one block, as values.

        Args:
            choice: of the tokens; None where all count.
        """
        if view.block.is_expanded:
            return self._attend_expanded(q, view, rows).astype(q.dtype)
        plain, turned = jnp.split(q, (self.nope,), axis=-1)
        absorbed = jnp.concatenate([_by_head(plain, self.k_b[...]), turned], axis=-1)
        if choice is None:
            found = self._attend_all(absorbed, view, rows)
        else:
            found = self._attend_chosen(absorbed, view, choice)
        return _by_head(found.astype(q.dtype), self.v_b[...])

    def _attend_expanded(self, q: Array, view: View, rows: Array) -> Float[Array, "T h Dv"]:
        """To all tokens, each with a key and a value for every head.

        As in the absorbed form, dense attention has a block's own rows from registers, and sparse
        attention as they are stored.
        """
        block, row_format = view.block, self.latents.row_format
        if self.is_sparse:
            own = read_block(view.pool, view.layer, block, q.dtype, row_format)
        else:
            own = block.take_own(rows)
        out, lse = expanded_attention(
            gather_heads(q, block),
            own,
            view.pool,
            view.layer,
            block,
            UpProjections(*gather_weights((self.k_b[...], self.v_b[...]), block)),
            scale=self.scale,
            row_format=row_format,
        )
        return merge_heads(out, lse, block, self.sharding.comm_backend)

    def _attend_all(self, q: Array, view: View, rows: Array) -> Float[Array, "T h R"]:
        own = view.block.take_own(rows)
        out = decode_attention(
            q,
            own,
            own[..., : self.latent],
            view.pool,
            view.layer,
            view.block,
            scale=self.scale,
            comm_backend=self.sharding.comm_backend,
            form=self.sharding.form,
        )
        return view.from_owner(out)

    def _attend_chosen(self, q: Array, view: View, choice: Choice) -> Float[Array, "T h R"]:
        out, lse = attend_chosen(
            gather_heads(q, view.block),
            view.pool,
            view.layer,
            view.block,
            choice,
            value_width=self.latent,
            scale=self.scale,
            form=self.form,
            row_format=self.latents.row_format,
        )
        return view.from_owner(merge_heads(out, lse, view.block, self.sharding.comm_backend))

    def _project(self, values: Float[Array, "T h Dv"]) -> Float[Array, "T E"]:
        """What the heads found, through the output projection; whole on every rank."""
        rows = self.o[...].reshape(-1, self.o.shape[-1])
        projected = matmul(values.reshape(values.shape[0], -1), rows)
        return sum_ranks(projected, scattered=self.sharding.form.scattered_sums)


def _by_head(x: Float[Array, "T h A"], weight: Float[Array, "h A B"]) -> Float[Array, "T h B"]:
    """Each head's rows times its own matrix, in x's type."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("tha,hab->thb", x, weight, precision=precision)


def _write(
    pools: Pools,
    part: str,
    layer: Array,
    blocks: tuple[AnyBlock, ...],
    rows: Array,
    priors: Priors,
    stored: Stored,
) -> tuple[Pools, tuple[View, ...]]:
    """The pools with a part's rows of all blocks in one layer, and what their queries read."""
    gathered, prior = gather_rows(blocks, rows), priors.get(part, ())
    pool = write_blocks(pools[part], layer, blocks, gathered, prior, stored)
    views = view_blocks(pool, layer, blocks, gathered, prior, stored)
    return {**pools, part: pool}, views


def stored_parts(config: GlmConfig, sharding: Sharding) -> tuple[Stored, Stored]:
    """The parts of a model's cache, as layers know them: latents and indexer keys."""
    num_choosing = 0 if config.indexer is None else len(config.indexer.full_layers)
    return (
        Stored(config.num_layers, sharding.latent_format),
        Stored(num_choosing, sharding.index_format),
    )


def latent_angles(positions: Shaped[Array, " T"], config: GlmConfig) -> Angles:
    """Rotary angles of the rotated columns, of attention and indexer alike."""
    return rope_angles(positions, yarn_frequencies(config), yarn_scale(config))
