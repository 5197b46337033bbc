"""The indexer's choice in operations whose sizes are known at compile time: see ``StepForm``.

It is the choice of :mod:`dcpjax.attention.indexer`, as a mask over this rank's places instead of a
list of them. All scores are there at once; the lowest of the chosen ones is found by bisection,
which needs comparisons and sums of floats alone: no sort, no top-k, no integer reduction.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float32, Shaped, UInt32

from dcpjax.attention.block import Block
from dcpjax.attention.indexer import READ_TOKENS, Query, index_scores
from dcpjax.attention.ragged import Reads
from dcpjax.cache.rows import read_pages
from dcpjax.errors import ConfigError
from dcpjax.form import StepForm, repeat
from dcpjax.layout import global_position

MAX_TOKENS = 2**24
"""Positions and counts are float32, which is exact so far."""
_SIGN, _EXPONENT = np.uint32(1 << 31), np.uint32(0xFF << 23)
_LEAST = float(np.finfo(np.float32).tiny)
"""Smaller scores count as 0: whether a device tells them from 0 depends on the instruction."""


class ChosenMask(NamedTuple):
    """Which of the S places of this rank in each row's page table each query attends to."""

    mask: Bool[Array, "B T S"]


class Lowest(NamedTuple):
    """What is chosen: higher scores, and of this score those up to this position."""

    scores: Float32[Array, "B T"]
    positions: Float32[Array, "B T"]


def choose_mask(
    query: Query,
    pool: Shaped[Array, "pages L 1 S C"],
    layer: int | Array,
    keys: Block,
    tokens: Block,
    form: StepForm,
) -> ChosenMask:
    """As :func:`dcpjax.attention.indexer.choose_tokens`.

    One all-gather of all scores where the keys are spread over ranks; else none.

    Raises:
        ConfigError: more tokens than float32 counts exactly.
    """
    scores = _scores(query, pool, layer, keys, form)
    gathered = scores
    if keys.sharding.ranks > 1:
        gathered = lax.all_gather(scores, keys.sharding.axes, axis=2, tiled=True)
    lowest = lowest_chosen(gathered, _positions(keys, gathered.shape[2]), query.top_k, form)
    if keys.sharding.ranks != tokens.sharding.ranks:
        scores = _own_places(scores, tokens)
    positions = _positions_here(tokens, jnp.arange(scores.shape[2], dtype=jnp.uint32))
    score, last = lowest.scores[..., None], lowest.positions[..., None]
    is_first = positions.astype(jnp.float32)[None, None, :] <= last
    mask = (scores > score) | ((scores == score) & is_first)
    return ChosenMask(mask & (scores > -jnp.inf))


def _scores(
    query: Query, pool: Array, layer: int | Array, block: Block, form: StepForm
) -> Float32[Array, "B T S"]:
    """Of all tokens whose keys this rank has, −inf where a query does not see them."""
    rows = (block.rows, block.width)
    reads = Reads.of(block.page_tables, block.sharding.page_size, form.read_tokens or READ_TOKENS)
    queries = query.q.reshape(*rows, *query.q.shape[1:])
    weights = query.weights.reshape(*rows, -1)

    def read_row(
        number: Array, q: Array, weights: Array, table: Array, prior: Array, length: Array
    ) -> Array:
        ids, first = reads.pages_of(table, number)
        found = read_pages(pool, layer, ids, q.dtype, query.row_format)[0]
        places = first + jnp.arange(reads.tokens, dtype=jnp.int32)
        scores = index_scores(q, weights, found, query.scale)
        visible = _visible(places, prior, length, block)
        scores = jnp.where(jnp.abs(scores) < _LEAST, 0.0, scores)
        return jnp.where(visible & ~jnp.isnan(scores), scores, -jnp.inf)

    def read(number: int | Array, scores: Array) -> Array:
        number = jnp.asarray(number, jnp.int32)
        segments = (queries, weights, block.page_tables, block.prior_lengths, block.num_tokens)
        part = jax.vmap(partial(read_row, number))(*segments)
        return lax.dynamic_update_slice_in_dim(scores, part, number * reads.tokens, axis=2)

    num_reads = reads.num_reads(block.page_tables)
    nothing = jnp.full((*rows, num_reads * reads.tokens), -jnp.inf)
    scores = repeat(form, num_reads, read, nothing)
    return scores[:, :, : block.page_tables.shape[1] * block.sharding.page_size]


def _visible(
    places: Array, prior_length: Array, num_tokens: Array, block: Block
) -> Bool[Array, "T S"]:
    """Whether the token at a place is one, and not after the query."""
    positions = _positions_here(block, places.astype(jnp.uint32))
    queries = prior_length + jnp.arange(block.width, dtype=prior_length.dtype)
    is_token = positions < prior_length + num_tokens
    return (positions[None, :] <= queries[:, None]) & is_token[None, :]


def _positions_here(block: Block, places: UInt32[Array, " S"]) -> UInt32[Array, " S"]:
    """Global positions of this rank's places."""
    sharding = block.sharding
    return global_position(places, block.rank, ranks=sharding.ranks, interleave=sharding.interleave)


def _positions(block: Block, num_places: int) -> Float32[Array, " S"]:
    """Global positions of the places of all ranks, rank after rank."""
    ranks, interleave = block.sharding.ranks, block.sharding.interleave
    places = jnp.arange(num_places, dtype=jnp.uint32)
    each = np.uint32(num_places // ranks)
    positions = global_position(places % each, places // each, ranks=ranks, interleave=interleave)
    return positions.astype(jnp.float32)


def _own_places(scores: Float32[Array, "B T N"], block: Block) -> Float32[Array, "B T S"]:
    """Of values for all positions those of this rank's places."""
    ranks, interleave = block.sharding.ranks, block.sharding.interleave
    by_rank = scores.reshape(*scores.shape[:2], -1, ranks, interleave)
    rank = jnp.minimum(block.rank, jnp.asarray(ranks - 1, block.rank.dtype))  # see take_tokens
    own = lax.dynamic_index_in_dim(by_rank, rank, axis=3, keepdims=False)
    return own.reshape(*scores.shape[:2], -1)


def lowest_chosen(
    scores: Float32[Array, "B T S"], positions: Float32[Array, " S"], top_k: int, form: StepForm
) -> Lowest:
    """The last that is among the ``top_k`` highest; −inf where fewer are any.

    Args:
        scores: neither NaN nor subnormal; −inf is none.
        positions: distinct integers in [0, S), of which the lowest is first among equal scores.
    """
    num_places = scores.shape[2]
    if num_places >= MAX_TOKENS:
        raise ConfigError(
            "the static form chooses among fewer tokens than float32 counts exactly",
            num_tokens=num_places,
            max_tokens=MAX_TOKENS,
        )
    if num_places <= top_k:
        lowest = jnp.full(scores.shape[:2], -jnp.inf)
        return Lowest(lowest, jnp.zeros_like(lowest))
    lowest = _kth_highest(scores, top_k, form)
    wanted = top_k - _count(scores > lowest[..., None])
    is_equal = scores == lowest[..., None]
    return Lowest(lowest, _nth_position(is_equal, positions, wanted, form))


def _kth_highest(values: Float32[Array, "B T S"], k: int, form: StepForm) -> Float32[Array, "B T"]:
    """The highest value that at least k are not below, bit by bit from the first one."""

    def add_bit(_: int | Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        order, bit = state
        higher = order | bit
        is_reached = _count(values >= _float_at(higher)[..., None]) >= k
        return jnp.where(is_reached, higher, order), bit >> np.uint32(1)

    start = jnp.zeros(values.shape[:2], jnp.uint32)
    order, _ = repeat(form, 32, add_bit, (start, jnp.full_like(start, _SIGN)))
    found = _float_at(order)
    return jnp.where(jnp.isnan(found), -jnp.inf, found)  # before −inf there is NaN alone


def _float_at(order: UInt32[Array, "B T"]) -> Float32[Array, "B T"]:
    """The float32 at this place of their order, in which NaNs are first and last; 0 for all that
    are subnormal."""
    is_positive = (order & _SIGN) > np.uint32(0)
    bits = jnp.where(is_positive, order ^ _SIGN, ~order)
    is_normal = (bits & _EXPONENT) > np.uint32(0)
    return jnp.where(is_normal, lax.bitcast_convert_type(bits, jnp.float32), 0.0)


def _nth_position(
    is_any: Bool[Array, "B T S"],
    positions: Float32[Array, " S"],
    number: Float32[Array, "B T"],
    form: StepForm,
) -> Float32[Array, "B T"]:
    """The position of the n-th, counted from 1: before it are fewer than n, and so are before all
    lower ones."""

    def add_step(_: int | Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        last, step = state
        higher = last + step
        before = is_any & (positions[None, None, :] < higher[..., None])
        return jnp.where(_count(before) < number, higher, last), step / 2

    rounds = is_any.shape[2].bit_length()
    start = jnp.zeros_like(number)
    last, _ = repeat(form, rounds, add_step, (start, jnp.full_like(start, 2.0 ** (rounds - 1))))
    return last


def _count(is_any: Bool[Array, "B T S"]) -> Float32[Array, "B T"]:
    return jnp.sum(is_any.astype(jnp.float32), axis=-1)
