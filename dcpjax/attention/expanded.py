"""Attention to keys and values of each head that are made from latents (MLA), on one rank.

The counterpart of queries in the latents' space (``absorbed``), for many queries: with latents of R
columns, keys of D and values of Dv, making them costs ``R · (D + Dv)`` products for each head and
token once, and then each pair of a query and a token ``D + Dv`` instead of ``2 R``, rotated columns
aside. Knows nothing of collectives.
"""

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
    sharding, num_heads = block.sharding, q.shape[1]
    layout = {"ranks": sharding.ranks, "interleave": sharding.interleave}
    queries = q.reshape(block.rows, block.width, num_heads, -1)
    reads = Reads.of(block.page_tables, sharding.page_size, READ_TOKENS)
    held = local_filled(block.prior_lengths, block.rank, **layout).astype(jnp.int32)
    is_kept = block.own < block.num_tokens[:, None]
    is_kept &= active_mask(block.own_positions, block.rank, **layout)
    own = jnp.where(is_kept[..., None], own[:, :, 0], jnp.zeros((), own.dtype))

    def begin(q: Array, rows: Array, prior_length: Array, positions: Array) -> Running:
        keys, values = (part.swapaxes(0, 1) for part in up.expand(rows))
        segment = (q, keys, values, prior_length, positions, block.rank)
        return attend_own(*segment, scale=scale, **layout)

    by_head = queries.swapaxes(1, 2)

    def read(row: Array, number: Array, running: Running) -> Running:
        ids, first = reads.pages_of(row_of(block.page_tables, row), number)
        rows = read_pages(pool, layer, ids, q.dtype, row_format)[0]
        is_prior = first + jnp.arange(reads.tokens, dtype=jnp.int32) < row_of(held, row)
        rows = jnp.where(is_prior[:, None], rows, rows[:1])  # NaN may be behind; the first is prior
        keys, values = up.expand(rows)
        one = (row_of(running, row), row_of(by_head, row), keys, values, scale)
        return set_row(running, row, attend(*one, counted=is_prior[None, None, :]))

    running = jax.vmap(begin)(queries, own, block.prior_lengths, block.own_positions)
    out, lse = jax.vmap(finish)(reads.run(held, read, running))
    return (
        out.swapaxes(1, 2).reshape(-1, num_heads, out.shape[-1]),
        lse.swapaxes(1, 2).reshape(-1, num_heads),
    )
