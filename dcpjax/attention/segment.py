"""Attention of one segment on one rank, without collectives.

The segment's queries see the sequence's earlier tokens that this rank holds, read from its pages,
and the segment's own tokens that this rank owns, taken from registers. The result is partial:
merged over the ranks it is exact. Decode is a segment of one token, verification of several,
prefill a chunk.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer, Shaped

from dcpjax.attention.current import attend_own, flatten_heads, group_queries
from dcpjax.attention.softmax import Running, attend, finish
from dcpjax.cache import formats
from dcpjax.form import StepForm, repeat
from dcpjax.layout import local_filled

READ_TOKENS = {False: 256, True: 512}
"""Prior tokens read at a time, for few queries and for many (a prompt chunk).

Measured on CPU, where what is read should stay in cache: one query with 9 heads takes 56 us for 256
tokens and 127 us for 512; 512 queries take 37 ms for 4096 tokens in steps of 256 and 33 ms in steps
of 512.
"""
MANY_QUERIES = 32


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
            Where S · ranks = T they are exactly this rank's own, in order of position.
        positions: global position of each of them.
        rank: this rank among the ``ranks`` that share the sequence's tokens.
        scale: positive.

    Returns:
        out, lse (natural log), both float32; (0, −inf) for a query that sees nothing here.
    """
    begin = _begin(q, prior_length, k, v, positions, rank, ranks, interleave, scale)
    prior = _Prior(pages, layer, q.shape[0], page_table.shape[0], q.shape[-1], v.shape[-1], scale)
    read = lax.fori_loop(
        0,
        begin.trips(prior),
        lambda index, segment: prior.read_chunk(index, segment, page_table),
        begin,
    )
    return _finish(read.running, q.shape[0])


def segments_attention(
    q: Float[Array, "B T H D"],
    pages: Shaped[Array, "pages K P W"] | Shaped[Array, "pages L K P W"],
    page_tables: Integer[Array, "B M"],
    prior_lengths: Integer[Array, " B"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K Dv"],
    positions: Integer[Array, "B S"],
    rank: Integer[Array, ""] | int,
    *,
    ranks: int,
    interleave: int,
    scale: float,
    layer: int | Array | None = None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """As :func:`segment_attention` for several segments, of which each reads just its own pages.

    One loop over the reads of all rows, row by row: an unused row costs nothing. Nested loops would
    make XLA copy the pool on JAX 0.9, and a batch of equal reads would read as far as the longest.
    """
    rows = (q, prior_lengths, k, v, positions)
    begin = _begin_rows(rows, rank, ranks, interleave, scale)
    tokens, width = q.shape[1], page_tables.shape[1]
    prior = _Prior(pages, layer, tokens, width, q.shape[-1], v.shape[-1], scale)
    trips = jax.vmap(lambda segment: segment.trips(prior))(begin)
    numbers = jnp.arange(trips.shape[0])
    is_up_to = numbers[:, None] >= numbers[None, :]
    stops = jnp.sum(jnp.where(is_up_to, trips[None, :], 0), axis=1, dtype=jnp.int32)

    def read(index: Array, running: Running) -> Running:
        row = jnp.sum((index >= stops).astype(jnp.int32), dtype=jnp.int32)
        segment = _row(begin._replace(running=running), row)
        first = _row(stops, row) - _row(trips, row)
        after = prior.read_chunk(index - first, segment, _row(page_tables, row))
        return jax.tree.map(
            lambda all_rows, one: lax.dynamic_update_index_in_dim(all_rows, one, row, 0),
            running,
            after.running,
        )

    running = lax.fori_loop(0, stops[-1], read, begin.running)
    return jax.vmap(lambda one: _finish(one, tokens))(running)


def static_segments_attention(
    q: Float[Array, "B T H D"],
    pages: Shaped[Array, "pages K P W"] | Shaped[Array, "pages L K P W"],
    page_tables: Integer[Array, "B M"],
    prior_lengths: Integer[Array, " B"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K Dv"],
    positions: Integer[Array, "B S"],
    rank: Integer[Array, ""] | int,
    *,
    ranks: int,
    interleave: int,
    scale: float,
    layer: int | Array | None = None,
    form: StepForm,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """As :func:`segments_attention`, in a number of reads that is known at compile time.

    Every row reads all pages of its table, all rows together: the table is as wide as the longest
    sequence of the batch needs.
    """
    rows = (q, prior_lengths, k, v, positions)
    begin = _begin_rows(rows, rank, ranks, interleave, scale)
    tokens, width = q.shape[1], page_tables.shape[1]
    prior = _Prior(pages, layer, tokens, width, q.shape[-1], v.shape[-1], scale, form.read_tokens)

    def read(index: Any, segments: _Segment) -> _Segment:
        read_one = partial(prior.read_chunk, jnp.asarray(index, jnp.int32))
        return jax.vmap(read_one)(segments, page_tables)

    num_reads = -(-width // prior.chunk_pages)
    read_all = repeat(form, num_reads, read, begin)
    return jax.vmap(lambda one: _finish(one, tokens))(read_all.running)


def _row(rows: Any, row: Array) -> Any:
    """One row of all arrays."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, 0, keepdims=False), rows)


class _Segment(NamedTuple):
    """A segment under way: its queries, the prior tokens that lie here, the running softmax."""

    queries: Float[Array, "K Q D"]
    held: Integer[Array, ""]
    running: Running

    def trips(self, prior: "_Prior") -> Integer[Array, ""]:
        """Reads until all prior tokens are seen."""
        chunk = prior.chunk_tokens
        return ((self.held + chunk - 1) // chunk).astype(jnp.int32)


def _begin(
    q: Array,
    prior_length: Array | int,
    k: Array,
    v: Array,
    positions: Array,
    rank: Array | int,
    ranks: int,
    interleave: int,
    scale: float,
) -> _Segment:
    """Attention to the segment's own tokens, before anything is read from pages."""
    prior_length, layout = jnp.asarray(prior_length), {"ranks": ranks, "interleave": interleave}
    running = attend_own(q, k, v, prior_length, positions, rank, scale=scale, **layout)
    held = local_filled(prior_length, rank, **layout)
    return _Segment(flatten_heads(group_queries(q, k.shape[1])), held, running)


def _begin_rows(
    rows: tuple[Array, ...],
    rank: Array | int,
    ranks: int,
    interleave: int,
    scale: float,
) -> _Segment:
    """As :func:`_begin` for each row of (q, prior_length, k, v, positions)."""

    def begin(q: Array, length: Array, k: Array, v: Array, positions: Array) -> _Segment:
        return _begin(q, length, k, v, positions, rank, ranks, interleave, scale)

    return jax.vmap(begin)(*rows)


@dataclass(frozen=True)
class _Prior:
    """How prior tokens are read: from which pages, and how many pages at a time."""

    pages: Array
    layer: int | Array | None
    num_queries: int
    table_width: int
    key_width: int
    value_width: int
    scale: float
    read_tokens: int | None = None

    @property
    def chunk_pages(self) -> int:
        tokens = self.read_tokens or READ_TOKENS[self.num_queries > MANY_QUERIES]
        return max(1, min(tokens // self.pages.shape[-2], self.table_width))

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_pages * self.pages.shape[-2]

    def read_chunk(self, index: Array, segment: _Segment, table: Array) -> _Segment:
        """The segment after one read; beyond its end nothing is visible."""
        table = jnp.pad(table, (0, -table.shape[0] % self.chunk_pages), mode="edge")
        ids = lax.dynamic_slice(table, (index * self.chunk_pages,), (self.chunk_pages,))
        keys, values = _read_pages(self.pages, ids, self.layer, self.key_width, self.value_width)
        first = index.astype(segment.held.dtype) * self.chunk_tokens
        offsets = jnp.arange(self.chunk_tokens, dtype=segment.held.dtype)
        dtype = segment.queries.dtype
        running = _attend_rows(
            segment.running,
            segment.queries,
            formats.decode(keys, dtype),
            formats.decode(values, dtype),
            first + offsets < segment.held,
            self.scale,
        )
        return segment._replace(running=running)


def _attend_rows(
    running: Running,
    queries: Array,
    keys: Float[Array, "K S D"],
    values: Float[Array, "K S Dv"],
    visible: Array,
    scale: float,
) -> Running:
    """Attend to rows read. Those not visible may hold anything, NaN included; the first is visible.

    For many queries the keys are mended instead of the scores: a pass over fewer numbers.
    """
    values = jnp.where(visible[None, :, None], values, jnp.zeros((), values.dtype))
    if queries.shape[1] <= MANY_QUERIES:
        return attend(running, queries, keys, values, scale, visible[None, None, :])
    keys = jnp.where(visible[None, :, None], keys, keys[:, :1])
    return attend(running, queries, keys, values, scale, counted=visible[None, None, :])


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


def _finish(running: Running, tokens: int) -> tuple[Array, Array]:
    """The segment's out [T, H, Dv] and lse [T, H]."""
    out, lse = finish(running)
    kv_heads, rows, width = out.shape
    out = out.reshape(kv_heads, rows // tokens, tokens, width).transpose(2, 0, 1, 3)
    lse = lse.reshape(kv_heads, rows // tokens, tokens).transpose(2, 0, 1)
    return out.reshape(tokens, -1, width), lse.reshape(tokens, -1)
