"""Attention with the queries of a head group gathered over the DCP ranks: decode, prompts, drafts.

Every DCP rank computes keys and values of all tokens, and queries of its own heads. Three
collectives with ``ag_rs`` (queries, lse, outputs), two with ``a2a``; none without DCP.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from dcpjax.attention.block import Block
from dcpjax.attention.merge import MERGES, merge_summed
from dcpjax.attention.segment import (
    MANY_QUERIES,
    segment_attention,
    segments_attention,
    static_segments_attention,
)
from dcpjax.cache.rows import PLAIN, RowFormat, read_rows, write_rows
from dcpjax.form import DYNAMIC, StepForm
from dcpjax.mesh import DCP


def decode_attention(
    q: Float[Array, "T h D"],
    own_k: Float[Array, "B S k D"],
    own_v: Float[Array, "B S k Dv"],
    pool: Shaped[Array, "pages L k P W"],
    layer: int | Array,
    block: Block,
    *,
    scale: float,
    comm_backend: str,
    form: StepForm = DYNAMIC,
    heads_gathered: bool = False,
) -> Float[Array, "T hd Dv"]:
    """Attend, and give each DCP rank the merged outputs of its share of the heads (float32).

    Args:
        q: queries of this rank's heads, or of the whole group's with ``heads_gathered``.
        own_k, own_v: keys and values of the tokens that this rank keeps, see ``Block.own``.
        pool: with the prior tokens; whether the block's own are already in does not matter.
    """
    if not heads_gathered:
        q = gather_heads(q, block)
    out, lse = attend_block(q, own_k, own_v, pool, layer, block, scale=scale, form=form)
    return merge_heads(out, lse, block, comm_backend)


def gather_heads(q: Float[Array, "T h D"], block: Block) -> Float[Array, "T H D"]:
    """The queries of all heads that the ranks which share the block's tokens have among them."""
    if block.sharding.ranks == 1 or lax.axis_size(DCP) == 1:
        return q
    return lax.all_gather(q, DCP, axis=1, tiled=True)


def gather_weights(
    weights: tuple[Float[Array, "h ..."], ...], block: Block
) -> tuple[Float[Array, "H ..."], ...]:
    """Weights of the heads whose queries :func:`gather_heads` gathers. One message."""
    if block.sharding.ranks == 1 or lax.axis_size(DCP) == 1:
        return weights
    flat = jnp.concatenate([one.reshape(one.shape[0], -1) for one in weights], axis=1)
    stops = list(accumulate(one[0].size for one in weights))
    parts = jnp.split(lax.all_gather(flat, DCP, tiled=True), stops[:-1], axis=1)
    shapes = (one.shape[1:] for one in weights)
    return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True))


def merge_heads(
    out: Float[Array, "T H Dv"], lse: Float[Array, "T H"], block: Block, comm_backend: str
) -> Float[Array, "T h Dv"]:
    """Partial results of the group's heads, merged over the ranks that share the block's tokens.

    Each DCP rank gets its share of the heads. PCP ranks among them have the same heads, and get the
    same.
    """
    axes = block.sharding.axes
    if block.sharding.ranks == 1:
        return out
    if axes == (DCP,):
        return MERGES[comm_backend](out, lse, DCP, scatter=1)
    return merge_summed(out, lse, axes, scattered=DCP, scatter=1)


def write_block(
    pool: Array,
    layer: int | Array,
    block: Block,
    own: Shaped[Array, "B S k W"],
    row_format: RowFormat = PLAIN,
) -> Array:
    """The pool with the rows of the block's own tokens in one layer."""
    pages, offsets = block.write_slots()
    rows = own.reshape(pages.shape[0], *own.shape[2:])
    return write_rows(pool, layer, pages, offsets, rows, row_format)


def read_block(
    pool: Array,
    layer: int | Array,
    block: Block,
    dtype: DTypeLike,
    row_format: RowFormat = PLAIN,
) -> Float[Array, "B S k W"]:
    """What :func:`write_block` has written, as values of ``dtype``.

    Of tokens that are not kept here, anything.
    """
    pages, offsets = block.write_slots()
    rows = read_rows(pool, layer, pages, offsets, dtype, row_format)
    return rows.reshape(*block.own.shape, *rows.shape[1:])


def attend_block(
    q: Float[Array, "T H D"],
    own_k: Float[Array, "B S k D"],
    own_v: Float[Array, "B S k Dv"],
    pool: Array,
    layer: int | Array,
    block: Block,
    *,
    scale: float,
    form: StepForm = DYNAMIC,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """Partial attention of all segments of a block to what this rank holds.

    With reads of dynamic length, prompt chunks go one after the other, each of which is work enough
    for a loop of its own; segments of a few tokens share one, so that unused rows cost nothing.
    """
    is_real = (block.own < block.num_tokens[:, None])[..., None, None]
    own_v = jnp.where(is_real, own_v, jnp.zeros((), own_v.dtype))  # 0 · NaN of padding is NaN
    queries = q.reshape(block.rows, block.width, *q.shape[1:])
    segments = (queries, block.page_tables, block.prior_lengths, own_k, own_v, block.own_positions)

    def attend(attention: Callable, segments: tuple[Array, ...]) -> tuple[Array, Array]:
        queries, *rest = segments
        return attention(
            queries,
            pool,
            *rest,
            block.rank,
            ranks=block.sharding.ranks,
            interleave=block.sharding.interleave,
            scale=scale,
            layer=layer,
        )

    if form.is_static:
        out, lse = attend(partial(static_segments_attention, form=form), segments)
    elif block.rows == 1:
        out, lse = attend(segment_attention, jax.tree.map(lambda x: x[0], segments))
    elif block.width <= MANY_QUERIES:
        out, lse = attend(segments_attention, segments)
    else:
        out, lse = lax.map(partial(attend, segment_attention), segments)
    return out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])
