"""Attention of one segment on one rank, without collectives.

The segment's queries see the sequence's earlier tokens that this rank holds, read from its pages,
and the segment's own tokens that this rank owns, taken from registers. The result is partial:
merged over the ranks it is exact. Decode is a segment of one token, verification of several,
prefill a chunk.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer, Shaped

from dcpjax.cache import formats
from dcpjax.layout import active_mask, local_filled

READ_TOKENS = {False: 256, True: 512}
"""Prior tokens read at a time, for few queries and for many (a prompt chunk).

Measured on CPU, where what is read should stay in cache: one query with 9 heads takes 56 us for 256
tokens and 127 us for 512; 512 queries take 37 ms for 4096 tokens in steps of 256 and 33 ms in steps
of 512.
"""
MANY_QUERIES = 32


class _Running(NamedTuple):
    """Online softmax: highest score, sum of exponentials, weighted values, so far."""

    highest: Float[Array, "K Q"]
    total: Float[Array, "K Q"]
    values: Float[Array, "K Q Dv"]


def segment_attention(
    q: Float[Array, "T H D"],
    pages: Shaped[Array, "pages K P W"] | Shaped[Array, "pages L K P W"],
    page_table: Integer[Array, " M"],
    prior_length: Integer[Array, ""] | int,
    k: Float[Array, "S K D"],
    v: Float[Array, "S K Dv"],
    positions: Integer[Array, " S"],
    rank: Integer[Array, ""] | int,
    *,
    ranks: int,
    interleave: int,
    scale: float,
    layer: int | Array | None = None,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """Partial attention of T consecutive queries, the first at position ``prior_length``.

    Args:
        q: queries at positions prior_length + [0, T).
        pages: this rank's pages of one layer, or of all layers with ``layer`` given. Their width is
            D + Dv (keys and values packed), or D (values are the first Dv columns of the keys).
        page_table: local page id of each virtual page; past the end of the sequence any valid ids.
        prior_length: tokens of the whole sequence that lie in pages before this segment.
        k, v: the segment's own tokens that this rank computed; those of other owners are masked.
        positions: global position of each of them.
        rank: this rank among the ``ranks`` that share the sequence's tokens.

    Returns:
        out, lse (natural log), both float32; (0, −inf) for a query that sees nothing here.
    """
    kv_heads, page_size = pages.shape[-3], pages.shape[-2]
    queries = _group_queries(q, kv_heads)
    prior_length = jnp.asarray(prior_length)
    query_positions = prior_length + jnp.arange(q.shape[0], dtype=prior_length.dtype)
    running = _attend_current(
        queries,
        k,
        v,
        positions,
        query_positions,
        rank,
        ranks=ranks,
        interleave=interleave,
        scale=scale,
    )
    held = local_filled(prior_length, rank, ranks=ranks, interleave=interleave)
    read_tokens = READ_TOKENS[q.shape[0] > MANY_QUERIES]
    chunk_pages = max(1, min(read_tokens // page_size, page_table.shape[0]))
    running = _attend_prior(
        running,
        queries,
        pages,
        page_table,
        held,
        chunk_pages,
        layer=layer,
        scale=scale,
        value_width=v.shape[-1],
    )
    return _finish(running, q.shape[0])


def _group_queries(q: Array, kv_heads: int) -> Float[Array, "K Q D"]:
    """Queries by KV head: row r · T + t is the head's r-th query head at token t."""
    tokens, heads, width = q.shape
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, width).transpose(1, 2, 0, 3)
    return grouped.reshape(kv_heads, heads // kv_heads * tokens, width)


def _attend_current(
    queries: Array,
    k: Array,
    v: Array,
    positions: Array,
    query_positions: Array,
    rank: Array | int,
    *,
    ranks: int,
    interleave: int,
    scale: float,
) -> _Running:
    """Attention to the segment's own tokens: those that this rank owns, causally."""
    own = active_mask(positions, rank, ranks=ranks, interleave=interleave)
    visible = own[None, :] & (positions[None, :] <= query_positions[:, None])
    visible = jnp.tile(visible, (queries.shape[1] // query_positions.shape[0], 1))[None]
    scores = jnp.where(visible, scale * _product("kqd,skd->kqs", queries, k), -jnp.inf)
    highest = jnp.max(scores, axis=-1)
    exps = jnp.exp(scores - _finite(highest)[..., None])
    own_v = jnp.where(own[:, None, None], v, jnp.zeros((), v.dtype))  # 0 · NaN would be NaN
    return _Running(highest, jnp.sum(exps, axis=-1), _product("kqs,skd->kqd", exps, own_v))


def _attend_prior(
    running: _Running,
    queries: Array,
    pages: Array,
    page_table: Array,
    held: Array,
    chunk_pages: int,
    *,
    layer: int | Array | None,
    scale: float,
    value_width: int,
) -> _Running:
    """Go on over the ``held`` tokens in pages, a few pages at a time; the trip count is dynamic."""
    chunk = chunk_pages * pages.shape[-2]
    padding = -page_table.shape[0] % chunk_pages
    page_table = jnp.pad(page_table, (0, padding), mode="edge")

    def read_chunk(index: Array, running: _Running) -> _Running:
        ids = lax.dynamic_slice(page_table, (index * chunk_pages,), (chunk_pages,))
        keys, values = _read_pages(pages, ids, layer, queries.shape[-1], value_width)
        visible = index.astype(held.dtype) * chunk + jnp.arange(chunk, dtype=held.dtype) < held
        dtype = queries.dtype
        rows = formats.decode(keys, dtype), formats.decode(values, dtype)
        return _attend_rows(running, queries, *rows, visible, scale)

    trips = (held + chunk - 1) // chunk
    return lax.fori_loop(0, trips.astype(jnp.int32), read_chunk, running)


def _attend_rows(
    running: _Running,
    queries: Array,
    keys: Float[Array, "K S D"],
    values: Float[Array, "K S Dv"],
    visible: Array,
    scale: float,
) -> _Running:
    """One step of the online softmax. Rows that are not visible may hold anything, NaN included."""
    scores = scale * _product("kqd,ksd->kqs", queries, keys)
    scores = jnp.where(visible[None, None, :], scores, -jnp.inf)
    values = jnp.where(visible[None, :, None], values, jnp.zeros((), values.dtype))
    highest = jnp.maximum(running.highest, jnp.max(scores, axis=-1))
    exps = jnp.exp(scores - _finite(highest)[..., None])
    keep = jnp.exp(running.highest - _finite(highest))
    return _Running(
        highest,
        running.total * keep + jnp.sum(exps, axis=-1),
        running.values * keep[..., None] + _product("kqs,ksd->kqd", exps, values),
    )


def _product(equation: str, a: Array, b: Array) -> Float[Array, "..."]:
    """Product in the type of ``b``, accumulated in float32.

    The scale of attention is applied to its result: in bfloat16 it would be rounded, which changes
    the temperature of the softmax.
    """
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(
        equation, a.astype(b.dtype), b, precision=precision, preferred_element_type=jnp.float32
    )


def _read_pages(
    pages: Array, ids: Array, layer: int | Array | None, key_width: int, value_width: int
) -> tuple[Shaped[Array, "K S D"], Shaped[Array, "K S Dv"]]:
    """Stored keys and values of some pages in order.

    Two gathers: one whose result is cut in two costs XLA:CPU half as much time again.
    """
    keys = _gather_columns(pages, ids, layer, 0, key_width)
    if pages.shape[-1] == key_width:  # values are the first columns of the keys
        return keys, keys[..., :value_width]
    return keys, _gather_columns(pages, ids, layer, key_width, value_width)


def _gather_columns(
    pages: Array, ids: Array, layer: int | Array | None, first: int, width: int
) -> Shaped[Array, "K S C"]:
    """Columns [first, first + width) of some pages, heads first, straight from the pool."""
    kv_heads, page_size = pages.shape[-3:-1]
    starts = [ids] if layer is None else [ids, jnp.broadcast_to(_as(layer, ids), ids.shape)]
    starts.append(jnp.full_like(ids, first))
    leading = tuple(range(len(starts) - 1))
    rows = lax.gather(
        pages,
        jnp.stack(starts, axis=-1),
        lax.GatherDimensionNumbers(
            offset_dims=(0, 2, 3),
            collapsed_slice_dims=leading,
            start_index_map=(*leading, pages.ndim - 1),
        ),
        slice_sizes=(*(1,) * len(leading), kv_heads, page_size, width),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return rows.reshape(kv_heads, ids.shape[0] * page_size, width)


def _as(value: int | Array, like: Array) -> Array:
    return jnp.asarray(value, like.dtype)


def _finite(highest: Array) -> Array:
    """The highest score, 0 where nothing was seen: −inf − −inf would be NaN."""
    return jnp.where(highest > -jnp.inf, highest, 0.0)


def _finish(running: _Running, tokens: int) -> tuple[Array, Array]:
    """Running sums as out [T, H, Dv] and lse [T, H]."""
    seen = running.total > 0
    out = running.values / jnp.where(seen, running.total, 1.0)[..., None]
    lse = jnp.where(seen, _finite(running.highest) + jnp.log(running.total), -jnp.inf)
    kv_heads, rows, width = out.shape
    out = out.reshape(kv_heads, rows // tokens, tokens, width).transpose(2, 0, 1, 3)
    lse = lse.reshape(kv_heads, rows // tokens, tokens).transpose(2, 0, 1)
    return out.reshape(tokens, -1, width), lse.reshape(tokens, -1)
