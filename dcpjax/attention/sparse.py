"""Attention to chosen tokens alone, on one rank, without collectives.

What is read does not grow with the sequence: at most ``top_k`` rows for each query.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from dcpjax.attention.block import Block
from dcpjax.attention.indexer import ChosenPlaces
from dcpjax.attention.ragged import for_each_read, row_of, set_row
from dcpjax.attention.softmax import Running, attend, finish, nothing_seen
from dcpjax.cache.rows import PLAIN, RowFormat, read_rows

READ_TOKENS = 512
"""Rows read at a time."""


def sparse_attention(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "pages L 1 S C"],
    layer: int | Array,
    block: Block,
    choice: ChosenPlaces,
    *,
    value_width: int,
    scale: float,
    row_format: RowFormat = PLAIN,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """Partial attention of all queries of a block to what is chosen of this rank's tokens.

    Args:
        pool: with the block's own tokens; values are the first ``value_width`` columns of a row.

    Returns:
        out, lse (natural log), float32; (0, −inf) for a query that sees nothing here.
    """
    num_queries, num_heads = q.shape[:2]
    indices = choice.indices.reshape(num_queries, -1)
    counts = choice.counts.reshape(num_queries)
    chunk = min(READ_TOKENS, indices.shape[1])
    indices = jnp.pad(indices, ((0, 0), (0, -indices.shape[1] % chunk)))
    page_size = block.sharding.page_size

    def read(query: Array, number: Array, running: Running) -> Running:
        first = number * chunk
        places = row_of(indices, query)
        places = jnp.asarray(places[first + jnp.arange(chunk, dtype=jnp.int32)])
        pages = row_of(block.page_tables, query // block.width)[places // page_size]
        rows = read_rows(pool, layer, pages, places % page_size, q.dtype, row_format)
        rows = rows.swapaxes(0, 1)
        is_chosen = first + jnp.arange(chunk, dtype=jnp.int32) < row_of(counts, query)
        rows = jnp.where(is_chosen[None, :, None], rows, jnp.zeros((), rows.dtype))
        after = attend(
            _one(running, query),
            row_of(q, query)[None],
            rows,
            rows[..., :value_width],
            scale,
            is_chosen[None, None, :],
        )
        return set_row(running, query, Running(*(part[0] for part in after)))

    start = nothing_seen((num_queries, num_heads), value_width)
    trips = (counts + chunk - 1) // chunk
    return finish(for_each_read(trips, read, start))


def _one(running: Running, query: Array) -> Running:
    """One query's state, with its heads as the rows of one KV head."""
    return Running(*(part[None] for part in row_of(running, query)))
