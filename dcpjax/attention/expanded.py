"""Attention to keys and values of each head that are made from latents (MLA), on one rank.

The counterpart of queries in the latents' space (``absorbed``), for many queries: with latents of R
columns, keys of D and values of Dv, making them costs ``R · (D + Dv)`` products for each head and
token once, and then each pair of a query and a token ``D + Dv`` instead of ``2 R``, rotated columns
aside. Knows nothing of collectives.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from dcpjax.attention.block import Block
from dcpjax.attention.current import attend_own
from dcpjax.attention.ragged import Reads, row_of, set_row
from dcpjax.attention.softmax import Running, attend, finish
from dcpjax.cache.rows import PLAIN, RowFormat, read_pages
from dcpjax.layout import active_mask, local_filled

READ_TOKENS = 512
"""Prior tokens read and expanded at a time: keys and values of so many are held at once."""


class UpProjections(NamedTuple):
    """What makes a latent the keys and values of H heads: the halves of ``kv_b_proj``."""

    keys: Float[Array, "H Dn R"]
    values: Float[Array, "H R Dv"]

    def expand(
        self, rows: Float[Array, "n W"]
    ) -> tuple[Float[Array, "H n D"], Float[Array, "H n Dv"]]:
        """Keys and values of cached rows: a latent, and a rotated key that all heads share."""
        latents, rotated = jnp.split(rows, (self.keys.shape[-1],), axis=-1)
        precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
        keys = jnp.einsum("nr,hdr->hnd", latents, self.keys, precision=precision)
        values = jnp.einsum("nr,hrd->hnd", latents, self.values, precision=precision)
        shared = jnp.broadcast_to(rotated[None], (keys.shape[0], *rotated.shape))
        return jnp.concatenate([keys, shared], axis=-1), values


def expanded_attention(
    q: Float[Array, "T H D"],
    own: Float[Array, "B S 1 W"],
    pool: Shaped[Array, "pages L 1 S_ C"],
    layer: int | Array,
    block: Block,
    up: UpProjections,
    *,
    scale: float,
    row_format: RowFormat = PLAIN,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """Partial attention of all segments of a block to what this rank holds of their tokens.

    Args:
        q: a head's plain columns, then its rotated ones.
        own: rows of the tokens ``block.own``; those that this rank does not keep may be anything.
        pool: with the prior tokens.
        up: of the heads that ``q`` has.

    Returns:
        out, lse (natural log), float32; (0, −inf) for a query that sees nothing here.
    """
    by_row = q.reshape(block.rows, block.width, *q.shape[1:])
    begin = _attend_own_rows(by_row, own[:, :, 0], block, up, scale)
    prior = _Prior(pool, layer, block, up, scale, row_format)
    running = prior.attend(by_row.swapaxes(1, 2), begin)
    out, lse = (part.swapaxes(1, 2) for part in jax.vmap(finish)(running))
    return out.reshape(-1, *out.shape[2:]), lse.reshape(-1, lse.shape[-1])


def _attend_own_rows(
    q: Float[Array, "B T H D"],
    own: Float[Array, "B S W"],
    block: Block,
    up: UpProjections,
    scale: float,
) -> Running:
    """Each segment's queries to those of its own tokens that this rank keeps."""
    layout = _layout(block)
    is_kept = block.own < block.num_tokens[:, None]
    is_kept &= active_mask(block.own_positions, block.rank, **layout)
    own = jnp.where(is_kept[..., None], own, jnp.zeros((), own.dtype))

    def begin(q: Array, rows: Array, prior_length: Array, positions: Array) -> Running:
        keys, values = (part.swapaxes(0, 1) for part in up.expand(rows))
        segment = (q, keys, values, prior_length, positions, block.rank)
        return attend_own(*segment, scale=scale, **layout)

    return jax.vmap(begin)(q, own, block.prior_lengths, block.own_positions)


@dataclass(frozen=True)
class _Prior:
    """The tokens before each segment that this rank holds: where they lie, and what to make."""

    pool: Array
    layer: int | Array
    block: Block
    up: UpProjections
    scale: float
    row_format: RowFormat

    def attend(self, queries: Float[Array, "B H T D"], begin: Running) -> Running:
        """All segments' queries to them, a read at a time."""
        block = self.block
        reads = Reads.of(block.page_tables, block.sharding.page_size, READ_TOKENS)
        held = local_filled(block.prior_lengths, block.rank, **_layout(block)).astype(jnp.int32)

        def read(row: Array, number: Array, running: Running) -> Running:
            ids, first = reads.pages_of(row_of(block.page_tables, row), number)
            rows = read_pages(self.pool, self.layer, ids, queries.dtype, self.row_format)[0]
            is_prior = first + jnp.arange(reads.tokens, dtype=jnp.int32) < row_of(held, row)
            rows = jnp.where(is_prior[:, None], rows, rows[:1])  # others may be NaN, the first none
            one = (row_of(running, row), row_of(queries, row), *self.up.expand(rows), self.scale)
            return set_row(running, row, attend(*one, counted=is_prior[None, None, :]))

        return reads.run(held, read, begin)


def _layout(block: Block) -> dict[str, int]:
    return {"ranks": block.sharding.ranks, "interleave": block.sharding.interleave}
