"""The lightning indexer: which tokens a query attends to.

Every query scores all tokens before it, ``Σ_h w_h · relu(scale · q_h · k)``, and the ``top_k`` with
the highest scores are chosen, the lowest position first among equals. The choice is exact over all
ranks, whether the keys of the indexer are on every rank or each rank has those of its own tokens:
the union of each rank's own best would be another one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.block import Block, TokenSharding
from dcpjax.attention.ragged import Reads, row_of, set_row
from dcpjax.cache.rows import PLAIN, RowFormat, read_pages
from dcpjax.layout import active_mask, global_position, local_filled, local_index

READ_TOKENS = 1024
"""Keys read and scored at a time."""
FEW_QUERIES = 16
"""Up to so many queries, all heads are scored in one product; the result of more would be large."""


class ChosenPlaces(NamedTuple):
    """What each query of a block attends to, of the tokens that this rank has.

    ``indices`` [B, T, k] are places in the rank's own tokens of the sequence, in falling order of
    their scores; the first ``counts`` [B, T] are chosen.
    """

    indices: Integer[Array, "B T k"]
    counts: Integer[Array, "B T"]


@dataclass(frozen=True)
class Query:
    """What a block's tokens ask the indexer.

    Attributes:
        q: [tokens, heads, D], rotated.
        weights: [tokens, heads] float32, of each head's part of the score.
        scale: of the products, before the negative ones are cut off.
        row_format: of the pool of keys.
    """

    q: Float[Array, "T H D"]
    weights: Float[Array, "T H"]
    scale: float
    top_k: int
    row_format: RowFormat = PLAIN


def choose_tokens(
    query: Query,
    pool: Shaped[Array, "pages L 1 S C"],
    layer: int | Array,
    keys: Block,
    tokens: Block,
) -> ChosenPlaces:
    """Choose for all queries of a block.

    Args:
        pool: the indexer's keys, those of the block's own tokens included.
        keys: the block as ``pool`` is sharded: like the tokens, or whole on every rank.
        tokens: the block as the tokens to attend to are sharded.
    """
    best = _best_here(query, pool, layer, keys)
    if keys.sharding.ranks > 1:
        return _counted_over_ranks(best, keys, query.top_k)
    choice = ChosenPlaces(best.indices, _num_finite(best.scores))
    return _owned(choice, tokens) if tokens.sharding.ranks > 1 else choice


def choose_everything(block: Block, top_k: int) -> ChosenPlaces:
    """What :func:`choose_tokens` chooses, in another order, where no more than ``top_k`` tokens can
    be seen: no key is read."""
    sharding = block.sharding
    num_best = min(top_k, block.page_tables.shape[1] * sharding.page_size)
    indices = lax.broadcasted_iota(jnp.int32, (block.rows, block.width, num_best), 2)
    seen = local_filled(
        block.positions.reshape(block.rows, block.width) + 1,
        block.rank,
        ranks=sharding.ranks,
        interleave=sharding.interleave,
    )
    return ChosenPlaces(indices, jnp.minimum(seen.astype(jnp.int32), num_best))


class _Best(NamedTuple):
    """The highest scores of each query so far, falling, and where the tokens are."""

    scores: Float[Array, "B T k"]
    indices: Integer[Array, "B T k"]


def _best_here(query: Query, pool: Array, layer: int | Array, block: Block) -> _Best:
    """The best of the tokens whose keys this rank has, read page by page."""
    sharding, rows = block.sharding, (block.rows, block.width)
    reads = Reads.of(block.page_tables, sharding.page_size, READ_TOKENS)
    num_best = min(query.top_k, block.page_tables.shape[1] * sharding.page_size)
    q = query.q.reshape(*rows, *query.q.shape[1:])
    weights = query.weights.reshape(*rows, -1)
    held = local_filled(
        block.prior_lengths + block.num_tokens,
        block.rank,
        ranks=sharding.ranks,
        interleave=sharding.interleave,
    ).astype(jnp.int32)
    nothing = _Best(jnp.full((*rows, num_best), -jnp.inf), jnp.zeros((*rows, num_best), jnp.int32))

    def read(row: Array, number: Array, best: _Best) -> _Best:
        ids, first = reads.pages_of(row_of(block.page_tables, row), number)
        found = read_pages(pool, layer, ids, q.dtype, query.row_format)[0]
        places = first + jnp.arange(reads.tokens, dtype=jnp.int32)
        scores = index_scores(row_of(q, row), row_of(weights, row), found, query.scale)
        visible = _visible(places, row_of(block.prior_lengths, row), block)
        visible &= (places < row_of(held, row))[None, :]
        scores = jnp.where(visible & ~jnp.isnan(scores), scores, -jnp.inf)
        return set_row(best, row, _merged(row_of(best, row), scores, places))

    return reads.run(held, read, nothing)


def index_scores(
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    keys: Float[Array, "S D"],
    scale: float,
) -> Float[Array, "T S"]:
    """``Σ_h w_h · relu(scale · q_h · k)`` in float32."""

    def product(equation: str, queries: Array) -> Array:
        return jnp.einsum(
            equation,
            queries,
            keys,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    if q.shape[0] <= FEW_QUERIES:
        positive = jax.nn.relu(scale * product("thd,sd->ths", q))
        return jnp.einsum("th,ths->ts", weights, positive, precision=lax.Precision.HIGHEST)

    def add(head: Array, total: Array) -> Array:
        one = lax.dynamic_index_in_dim(q, head, 1, keepdims=False)
        weight = lax.dynamic_slice_in_dim(weights, head, 1, axis=1)
        return total + weight * jax.nn.relu(scale * product("td,sd->ts", one))

    return lax.fori_loop(0, q.shape[1], add, jnp.zeros((q.shape[0], keys.shape[0])))


def _visible(places: Array, prior_length: Array, block: Block) -> Array:
    """[T, S]: whether the token at a place is not after the query."""
    sharding = block.sharding
    positions = global_position(
        places.astype(jnp.uint32),
        block.rank,
        ranks=sharding.ranks,
        interleave=sharding.interleave,
    )
    queries = prior_length + jnp.arange(block.width, dtype=prior_length.dtype)
    return positions[None, :] <= queries[:, None]


def _merged(best: _Best, scores: Float[Array, "T S"], places: Integer[Array, " S"]) -> _Best:
    """The best with those of later places: among equals top_k takes what stands first."""
    num_queries, num_best = best.scores.shape
    all_scores = jnp.concatenate([best.scores, scores], axis=1)
    places = jnp.broadcast_to(places, (num_queries, places.shape[0]))
    all_places = jnp.concatenate([best.indices, places], axis=1)
    highest, chosen = lax.top_k(all_scores, num_best)
    return _Best(highest, jnp.take_along_axis(all_places, chosen, axis=1))


def _num_finite(scores: Array) -> Integer[Array, "B T"]:
    return jnp.sum((scores > -jnp.inf).astype(jnp.int32), axis=-1, dtype=jnp.int32)


def _counted_over_ranks(best: _Best, block: Block, top_k: int) -> ChosenPlaces:
    """How many of this rank's best are among the best of all ranks: the first so many.

    One all-gather of scores and positions.
    """
    positions = _positions(best.indices, block.rank, block.sharding)
    packed = jnp.stack([best.scores, lax.bitcast_convert_type(positions, jnp.float32)])
    gathered = lax.all_gather(packed, block.sharding.axes, axis=3, tiled=True)
    scores, others = gathered[0], lax.bitcast_convert_type(gathered[1], jnp.int32)
    if scores.shape[-1] <= top_k:
        return ChosenPlaces(best.indices, _num_finite(best.scores))
    least = lax.top_k(scores, top_k)[0][..., -1:]
    wanted = top_k - jnp.sum((scores > least).astype(jnp.int32), axis=-1, dtype=jnp.int32)
    # Equal scores: the lowest positions. There are at least as many as are wanted.
    equal = jnp.where(scores == least, -others, jnp.iinfo(jnp.int32).min)
    lowest = -lax.top_k(equal, top_k)[0]
    last = jnp.take_along_axis(lowest, wanted[..., None] - 1, axis=-1)
    is_chosen = (best.scores > least) | ((best.scores == least) & (positions <= last))
    is_chosen &= best.scores > -jnp.inf
    return ChosenPlaces(
        best.indices, jnp.sum(is_chosen.astype(jnp.int32), axis=-1, dtype=jnp.int32)
    )


def _positions(indices: Array, rank: Array, sharding: TokenSharding) -> Integer[Array, "..."]:
    """Global positions of a rank's tokens, int32."""
    positions = global_position(
        indices.astype(jnp.uint32), rank, ranks=sharding.ranks, interleave=sharding.interleave
    )
    return positions.astype(jnp.int32)


def _owned(choice: ChosenPlaces, block: Block) -> ChosenPlaces:
    """Of chosen positions those of this rank, in front, as places in its own tokens."""
    sharding = block.sharding
    positions = choice.indices.astype(jnp.uint32)
    number = lax.broadcasted_iota(jnp.int32, positions.shape, 2)
    is_here = (number < choice.counts[..., None]) & active_mask(
        positions, block.rank, ranks=sharding.ranks, interleave=sharding.interleave
    )
    places = local_index(positions, ranks=sharding.ranks, interleave=sharding.interleave)
    before = jnp.cumsum(is_here.astype(jnp.int32), axis=-1, dtype=jnp.int32)
    target = jnp.where(is_here, before - 1, positions.shape[-1])  # behind the end: dropped

    def pack(places: Array, target: Array) -> Array:
        return jnp.zeros_like(places).at[target].set(places, mode="drop")

    packed = jax.vmap(jax.vmap(pack))(places.astype(jnp.int32), target)
    return ChosenPlaces(packed, before[..., -1])
