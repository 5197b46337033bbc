"""Where a layer's new rows are written, and what the queries of each block read.

Most blocks read the pool that they have written to. Two cannot, because this rank's share of it
lacks what they need: the prompts of PCP ranks read a copy of the layer, gathered from the shares of
all ranks (``sharded``) or sent by the rank that has the layer (``layer_split``); decode rows of a
split layer are computed by the rank that has it, and the others take its results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Integer, Shaped

from dcpjax.attention.block import Block, TokenSharding, make_block, split_blocks
from dcpjax.attention.decode import write_block
from dcpjax.attention.paired import PairedBlock
from dcpjax.cache.rows import PLAIN, RowFormat
from dcpjax.layout import layer_owner, layer_range
from dcpjax.mesh import PCP

AnyBlock = Block | PairedBlock
Prior = tuple[Array, ...]
"""Of each block whose queries read a copy: the copy, without the tokens of this step."""


@dataclass(frozen=True)
class Stored:
    """A part of the cache as its layers know it: how many they are over all ranks, and its rows."""

    num_layers: int
    row_format: RowFormat = PLAIN


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["pool", "layer", "block", "is_mine"],
    meta_fields=[],
)
@dataclass(frozen=True)
class View:
    """What the queries of one block read: a layer of a pool, or of a copy made for this step.

    ``is_mine``: whether this rank has the layer, where the other ranks take its results.
    """

    pool: Array
    layer: Integer[Array, ""]
    block: Block
    is_mine: Bool[Array, ""] | None = None

    def from_owner(self, found: Array) -> Array:
        """What was found, on every rank what the rank that has the layer has found."""
        if self.is_mine is None:
            return found
        return lax.psum(jnp.where(self.is_mine, found, jnp.zeros((), found.dtype)), PCP)


def gather_rows(blocks: Sequence[AnyBlock], rows: Shaped[Array, "T ..."]) -> tuple[Array, ...]:
    """Per block, the new rows of all its tokens, those that other ranks compute included."""
    return tuple(
        block.gather_chunks(own) if isinstance(block, PairedBlock) else own
        for block, own in zip(blocks, split_blocks(rows, blocks), strict=True)
    )


def write_blocks(
    pool: Array,
    layer: Integer[Array, ""],
    blocks: Sequence[AnyBlock],
    rows: Sequence[Array],
    prior: Prior,
    stored: Stored,
) -> Array:
    """The pool with the rows of :func:`gather_rows` that this rank keeps."""
    layer = _once_read(layer, prior, _segments(blocks[0]).page_tables)
    for block, new in zip(blocks, rows, strict=True):
        home = _home(_segments(block), layer, stored.num_layers)
        own = home.block.take_own(new)
        pool = write_block(pool, home.layer, home.block, own, stored.row_format)
    return pool


def view_blocks(
    pool: Array,
    layer: Integer[Array, ""],
    blocks: Sequence[AnyBlock],
    rows: Sequence[Array],
    prior: Prior,
    stored: Stored,
) -> tuple[View, ...]:
    """What the queries of each block read, once :func:`write_blocks` has written."""
    copies = iter(prior)

    def view(block: AnyBlock, new: Array) -> View:
        if isinstance(block, Block):
            home = _home(block, layer, stored.num_layers)
            return View(pool, home.layer, home.block, home.is_mine)
        if _is_in_place(block.segments.sharding):
            return View(pool, layer, block.chunks)
        return _complete(next(copies), block, new, stored.row_format)

    return tuple(view(block, new) for block, new in zip(blocks, rows, strict=True))


def gather_prior(
    pool: Array,
    layer: Integer[Array, ""],
    blocks: Sequence[AnyBlock],
    stored: Stored,
    after: Prior = (),
) -> Prior:
    """The copies of a layer's prior tokens that the blocks' queries need, one collective each.

    They depend on nothing that the layer before computes after its own writes, so they can be under
    way meanwhile. A copy has pages [n, 1, h, S, C] in the order of positions, those of segment b
    from b · n / B on, and a scratch page at its end.

    Args:
        after: copies that are made before. What one needs of the other, no compiler makes one
            message of: the copies of two layers would both wait for the later one.
    """
    layer = _once_read(layer, after, _segments(blocks[0]).page_tables)
    return tuple(
        _copy(pool, layer, block, stored)
        for block in blocks
        if isinstance(block, PairedBlock) and not _is_in_place(block.segments.sharding)
    )


def copied_pages(segments: Block) -> int:
    """Pages of a copy, its scratch page excluded."""
    return segments.page_tables.size * segments.sharding.ranks


def _once_read(
    layer: Integer[Array, ""], prior: Prior, page_tables: Integer[Array, "B M"]
) -> Integer[Array, ""]:
    """The number of a layer, known only when its copies have been made.

    A write that could begin while the pool is still read makes XLA copy the pool. The scratch page
    of a copy is 0, but a compiler, which knows of no page id that it is not negative, must read it.
    """
    for copy in prior:
        scratch = jnp.minimum(page_tables[0, 0], 0) + (copy.shape[0] - 1)
        layer = layer + copy[scratch, 0, 0, 0, 0].astype(layer.dtype)
    return layer


def _copy(pool: Array, layer: Integer[Array, ""], block: PairedBlock, stored: Stored) -> Array:
    segments = block.segments
    home = _home(segments, layer, stored.num_layers)
    ids = segments.page_tables.reshape(-1)
    mine = pool.at[ids, home.layer].get(mode="promise_in_bounds")
    if home.is_mine is None:
        pages = _in_order(lax.all_gather(mine, segments.sharding.axes), segments.sharding)
    else:
        pages = lax.psum(jnp.where(home.is_mine, mine, jnp.zeros((), mine.dtype)), PCP)
        pages = _committed(pages, block, layer_owner(layer, stored.num_layers, block.ranks))
    return _with_scratch_page(pages[:, None], pool)


def _with_scratch_page(
    pages: Shaped[Array, "n 1 h S C"], pool: Shaped[Array, "pages L h S C"]
) -> Shaped[Array, "m 1 h S C"]:
    """Pages and one of zeros; two where else the audit could not tell the copy from the pool."""
    is_like_pool = pool.shape[:2] == (pages.shape[0] + 1, 1)
    return jnp.pad(pages, ((0, 1 + is_like_pool), *((0, 0),) * 4))


def _committed(
    pages: Shaped[Array, "n h S C"], block: PairedBlock, sender: Integer[Array, ""]
) -> Shaped[Array, "n h S C"]:
    """What another rank has sent, where this one has the same tokens before the segment."""
    if block.agrees is None:
        return pages
    agrees = lax.dynamic_index_in_dim(block.agrees, sender, 0, keepdims=False)
    by_page = jnp.repeat(agrees, block.segments.page_tables.shape[1])
    return jnp.where(by_page[:, None, None, None], pages, jnp.zeros((), pages.dtype))


def _in_order(
    by_rank: Shaped[Array, "N n h S C"], sharding: TokenSharding
) -> Shaped[Array, "Nn h S C"]:
    """Pages of all ranks as pages of consecutive tokens, N for each virtual page."""
    ranks, num_pages, heads, rows, columns = by_rank.shape
    cycles = sharding.page_size // sharding.interleave
    split = by_rank.reshape(ranks, num_pages, heads, cycles, rows // cycles, columns)
    tokens = split.transpose(1, 2, 3, 0, 4, 5)  # cycle by cycle, the ranks in turn
    pages = tokens.reshape(num_pages, heads, ranks, rows, columns)
    return pages.swapaxes(1, 2).reshape(-1, heads, rows, columns)


def _complete(copy: Array, block: PairedBlock, rows: Array, row_format: RowFormat) -> View:
    """A copy with the new rows, and this rank's chunks as they find it there."""
    segments, num_pages = block.segments, copied_pages(block.segments)
    sharding = TokenSharding(1, 1, segments.sharding.page_size, num_pages)
    tables = jnp.arange(num_pages, dtype=segments.page_tables.dtype).reshape(segments.rows, -1)
    whole = make_block(
        segments.width,
        tables,
        segments.prior_lengths,
        segments.num_tokens,
        jnp.zeros_like(segments.rank),
        sharding,
    )
    first = jnp.zeros((), jnp.int32)
    copy = write_block(copy, first, whole, whole.take_own(rows), row_format)
    chunks = replace(block.chunks, page_tables=jnp.repeat(tables, 2, axis=0), sharding=sharding)
    return View(copy, first, chunks)


@dataclass(frozen=True)
class _Home:
    """Where this rank has a layer: its place in the pool, and the block as this rank keeps it."""

    layer: Integer[Array, ""]
    block: Block
    is_mine: Bool[Array, ""] | None = None


def _home(block: Block, layer: Integer[Array, ""], num_layers: int) -> _Home:
    """Of another rank's layer, a block without tokens: nothing is read, and written to scratch."""
    ranks, rank = block.sharding.layer_ranks, block.layer_rank
    if rank is None:
        return _Home(layer, block)
    start, stop = layer_range(num_layers, ranks, rank.astype(layer.dtype))
    is_mine = (start <= layer) & (layer < stop)
    place = jnp.clip(layer - start, 0, math.ceil(num_layers / ranks) - 1)
    nothing = jnp.zeros((), block.num_tokens.dtype)
    kept = replace(
        block,
        prior_lengths=jnp.where(is_mine, block.prior_lengths, nothing),
        num_tokens=jnp.where(is_mine, block.num_tokens, nothing),
    )
    return _Home(place, kept, is_mine)


def _segments(block: AnyBlock) -> Block:
    return block.segments if isinstance(block, PairedBlock) else block


def _is_in_place(sharding: TokenSharding) -> bool:
    """Whether this rank has all tokens of all layers."""
    return sharding.ranks == 1 and sharding.layer_ranks == 1
