"""An MLP of experts, of which each token uses a few, as seen by one rank inside ``shard_map``.

The experts are split over all ranks, whole ones; every rank computes what its own experts add for
all tokens, those of other PCP ranks gathered before. One sum over the ranks makes the result whole,
the shared expert's included.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Float32, Integer

from dcpjax.config import GlmConfig
from dcpjax.config.glm import ExpertsConfig
from dcpjax.errors import ConfigError, MeshError
from dcpjax.form import repeat
from dcpjax.mesh import ALL_RANKS, PCP, padded
from dcpjax.models.layers import MLP, gated_mlp, parameter, sum_ranks
from dcpjax.models.router import Router, Routes
from dcpjax.models.sharding import Sharding

LEAST_TILE, LARGEST_TILE = 2, 64
"""Rows of a tile. On CPU two rows cost as much as one, or less."""


class Experts(nnx.Module):
    """The routed experts' weighted sum, and the shared expert.

    The dynamic form computes each expert for the tokens that chose it, and reads no other one's
    weights. The static form computes all of this rank's experts for all tokens.

    Raises:
        ConfigError: the model has no experts.
        MeshError: the ranks do not divide the experts.
    """

    def __init__(self, config: GlmConfig, sharding: Sharding, dtype: DTypeLike) -> None:
        experts, width = config.experts, config.hidden_size
        if experts is None:
            raise ConfigError("the model has experts", architecture=config.architecture)
        self.share = rank_experts(experts.num_experts, sharding.ranks * sharding.pcp)
        self.router = Router(experts, width)
        self.gate_up = parameter(
            (experts.num_experts, width, 2, experts.width), ("experts", "embed", None, None), dtype
        )
        self.down = parameter(
            (experts.num_experts, experts.width, width), ("experts", None, "embed"), dtype
        )
        self.has_shared = experts.num_shared > 0
        if self.has_shared:
            inner = padded(experts.num_shared * experts.width, sharding.ranks)
            self.shared = MLP(width, inner, dtype, sharding.form)
        self.config, self.form = experts, sharding.form

    def __call__(
        self,
        x: Float[Array, "T E"],
        rank: Integer[Array, ""],
        is_real: Bool[Array, " T"] | None = None,
        num_own: int = 0,
    ) -> Float[Array, "T E"]:
        """The layer's output, whole on every rank of the weights.

        Args:
            rank: this one among the ranks that share the weights.
            is_real: whether a row is a token; what others come to is of no meaning, and they cost
                no expert in the dynamic form.
            num_own: so many rows, the last ones, are of this PCP rank alone.
        """
        if self.form.is_static:
            out = self._all_experts(x, rank)
        elif lax.axis_size(PCP) == 1:
            out = self._chosen(x, rank, is_real)
        else:
            out = self._of_all_pcp_ranks(x, rank, is_real, num_own)
        if self.has_shared:
            out = out + self.shared.summand(x).astype(jnp.float32)
        return sum_ranks(out.astype(x.dtype), scattered=self.form.scattered_sums)

    def _of_all_pcp_ranks(
        self, x: Array, rank: Array, is_real: Array | None, num_own: int
    ) -> Float32[Array, "T E"]:
        """As :meth:`_chosen`, summed over the PCP ranks, each of which has other experts."""
        place = lax.axis_index(PCP) * lax.axis_size(ALL_RANKS) + rank
        if num_own == 0:
            return lax.psum(self._chosen(x, place, is_real), PCP)
        num_common = x.shape[0] - num_own
        if is_real is None:
            is_real = jnp.ones(x.shape[0], jnp.bool_)

        def gather(rows: Array) -> Array:
            own = lax.all_gather(rows[num_common:], PCP, tiled=True)
            return jnp.concatenate([rows[:num_common], own])

        found = self._chosen(gather(x), place, gather(is_real))
        common = lax.psum(found[:num_common], PCP)
        return jnp.concatenate([common, lax.psum_scatter(found[num_common:], PCP, tiled=True)])

    def _chosen(self, x: Array, rank: Array, is_real: Array | None) -> Float32[Array, "T E"]:
        """What this rank's experts add, tile by tile of the tokens that chose them."""
        tile = tile_rows(x.shape[0], self.config)
        work = _Work.of(self.router.choose(x), is_real, rank, self.share, tile)
        gate_up, down = self.gate_up[...], self.down[...]

        def add(index: Array, out: Array) -> Array:
            expert, tokens, weights, is_here = work.tile(index, tile)
            rows = x.at[tokens].get(mode="promise_in_bounds")
            found = gated_mlp(rows, _expert(gate_up, expert), _expert(down, expert))
            found = weights[:, None] * found.astype(jnp.float32)
            found = jnp.where(is_here[:, None], found, 0.0)
            return out.at[tokens].add(found, mode="promise_in_bounds")

        return lax.fori_loop(0, work.num_tiles, add, jnp.zeros(x.shape, jnp.float32))

    def _all_experts(self, x: Array, rank: Array) -> Float32[Array, "T E"]:
        """What this rank's experts add, all of them computed for all tokens."""
        first = rank.astype(jnp.int32) * self.share
        weights = lax.dynamic_slice_in_dim(self.router.spread(x), first, self.share, axis=1)
        gate_up, down = self.gate_up[...], self.down[...]

        def add(index: int | Array, out: Array) -> Array:
            found = gated_mlp(x, _expert(gate_up, index), _expert(down, index))
            weight = lax.dynamic_index_in_dim(weights, index, axis=1)
            # An expert that a token did not choose may overflow on it, and 0 · inf is NaN.
            return out + jnp.where(weight > 0, weight * found.astype(jnp.float32), 0.0)

        return repeat(self.form, self.share, add, jnp.zeros(x.shape, jnp.float32))


def rank_experts(num_experts: int, ranks: int) -> int:
    """Experts of one rank.

    Raises:
        MeshError: the ranks do not divide the experts.
    """
    if num_experts % ranks:
        raise MeshError(
            "the number of ranks divides the number of experts",
            num_experts=num_experts,
            ranks=ranks,
        )
    return num_experts // ranks


def tile_rows(num_tokens: int, config: ExpertsConfig) -> int:
    """Rows computed at a time: a power of two, about twice what an expert gets on average.

    With fewer, an expert's weights would be read again and again; with more, most would be padding.
    """
    average = num_tokens * config.num_per_token / config.num_experts
    wanted = 2 ** math.ceil(math.log2(max(2 * average, 1)))
    return min(max(wanted, LEAST_TILE), LARGEST_TILE)


def _expert(weights: Array, index: int | Array) -> Array:
    return lax.dynamic_index_in_dim(weights, index, keepdims=False)


class _Work(NamedTuple):
    """The pairs of tokens and this rank's experts, by expert, and their tiles.

    Expert e has ``counts[e]`` pairs from ``firsts[e]`` on, and the tiles before ``stops[e]`` that
    are not of an expert before it. Behind the pairs there is room for one tile more.
    """

    tokens: Integer[Array, " N"]
    weights: Float32[Array, " N"]
    firsts: Integer[Array, " n"]
    counts: Integer[Array, " n"]
    stops: Integer[Array, " n"]

    @classmethod
    def of(
        cls, routes: Routes, is_real: Array | None, rank: Array, num_experts: int, tile: int
    ) -> "_Work":
        """The work of a rank that has ``num_experts`` experts."""
        local = routes.experts - rank.astype(routes.experts.dtype) * num_experts
        is_here = (local >= 0) & (local < num_experts)
        if is_real is not None:
            is_here &= is_real[:, None]
        keys = jnp.where(is_here, local, num_experts).reshape(-1)
        tokens = lax.broadcasted_iota(jnp.int32, local.shape, 0).reshape(-1)
        _, tokens, weights = lax.sort((keys, tokens, routes.weights.reshape(-1)), num_keys=1)
        counts = jnp.zeros(num_experts + 1, jnp.int32).at[keys].add(1, mode="promise_in_bounds")
        counts = counts[:-1]
        tiles = (counts + tile - 1) // tile
        return cls(
            jnp.pad(tokens, (0, tile)),
            jnp.pad(weights, (0, tile)),
            jnp.cumsum(counts, dtype=jnp.int32) - counts,
            counts,
            jnp.cumsum(tiles, dtype=jnp.int32),
        )

    @property
    def num_tiles(self) -> Integer[Array, ""]:
        return self.stops[-1]

    def tile(self, index: Array, rows: int) -> tuple[Array, Array, Array, Array]:
        """A tile's expert, tokens, their weights, and which of them are the expert's."""
        expert = jnp.sum((index >= self.stops).astype(jnp.int32), dtype=jnp.int32)
        count, first = self.counts[expert], self.firsts[expert]
        tiles_left = self.stops[expert] - index
        begin = ((count + rows - 1) // rows - tiles_left) * rows
        tokens = lax.dynamic_slice(self.tokens, (first + begin,), (rows,))
        weights = lax.dynamic_slice(self.weights, (first + begin,), (rows,))
        is_here = jnp.arange(rows, dtype=jnp.int32) < count - begin
        return expert, tokens, weights, is_here
