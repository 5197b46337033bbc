"""Attention to chosen tokens in a number of reads that is known at compile time.

All pages of the tables are read, and a mask says which tokens count: see ``StepForm``. The dynamic
form reads chosen rows alone, see :mod:`dcpjax.attention.sparse`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from dcpjax.attention.block import Block
from dcpjax.attention.ragged import Reads
from dcpjax.attention.softmax import Running, attend, finish, nothing_seen
from dcpjax.attention.sparse import READ_TOKENS
from dcpjax.attention.static_indexer import ChosenMask
from dcpjax.cache.rows import PLAIN, RowFormat, read_pages
from dcpjax.form import StepForm, repeat
from dcpjax.layout import local_filled


def masked_attention(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "pages L 1 S C"],
    layer: int | Array,
    block: Block,
    choice: ChosenMask,
    *,
    value_width: int,
    scale: float,
    form: StepForm,
    row_format: RowFormat = PLAIN,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """As :func:`dcpjax.attention.sparse.sparse_attention`, all rows of the block together."""
    sharding, num_heads = block.sharding, q.shape[1]
    reads = Reads.of(block.page_tables, sharding.page_size, form.read_tokens or READ_TOKENS)
    num_reads = reads.num_reads(block.page_tables)
    missing = num_reads * reads.tokens - choice.mask.shape[2]
    mask = jnp.pad(choice.mask, ((0, 0), (0, 0), (0, missing)))
    queries = q.reshape(block.rows, 1, block.width * num_heads, -1)  # all heads read one row
    ends = block.prior_lengths + block.num_tokens
    held = local_filled(ends, block.rank, ranks=sharding.ranks, interleave=sharding.interleave)

    def read_row(
        number: Array, running: Running, queries: Array, mask: Array, table: Array, held: Array
    ) -> Running:
        ids, first = reads.pages_of(table, number)
        keys = read_pages(pool, layer, ids, q.dtype, row_format)
        is_token = first + jnp.arange(reads.tokens, dtype=jnp.int32) < held.astype(jnp.int32)
        values = keys[..., :value_width]
        values = jnp.where(is_token[None, :, None], values, jnp.zeros((), values.dtype))  # 0 · NaN
        chosen = lax.dynamic_slice_in_dim(mask, first, reads.tokens, axis=1)
        visible = jnp.repeat(chosen, num_heads, axis=0)[None]
        return attend(running, queries, keys, values, scale, visible)

    def read(number: int | Array, running: Running) -> Running:
        number = jnp.asarray(number, jnp.int32)
        rows = (running, queries, mask, block.page_tables, held)
        return jax.vmap(partial(read_row, number))(*rows)

    one = nothing_seen((1, queries.shape[2]), value_width)
    start = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (block.rows, *x.shape)), one)
    out, lse = jax.vmap(finish)(repeat(form, num_reads, read, start))
    return out.reshape(-1, num_heads, value_width), lse.reshape(-1, num_heads)
