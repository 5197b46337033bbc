"""Arguments of ``dcpjax.attention.segment_attention`` as the kernels take them, and back.

Everything about ranks is settled here, by the functions of ``dcpjax.layout``: a kernel sees rows of
a pool and, for each key, the first query position that sees it. One comparison is the whole mask:
a prior token that this rank holds is seen from position 0 on, a current token that it owns from its
own position on, and all others never.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, Integer, Shaped

from dcpjax.layout import active_mask, local_filled
from neuron.nki.tiling import NEVER


class Operands(NamedTuple):
    """One segment. Query rows are (query of the KV head, token), token fastest."""

    queries: Shaped[Array, "K D R"]
    rows: Int32[Array, "K prior 1"]
    current: Shaped[Array, "K S W"]
    prior_from: Float[Array, "1 prior"]
    current_from: Float[Array, "1 S"]
    positions: Float[Array, "R 1"]


class Pool(NamedTuple):
    """All rows of a pool, and how they are counted."""

    rows: Shaped[Array, "rows W"]
    layers: int
    kv_heads: int
    page_size: int


def flatten_pool(pages: Shaped[Array, "..."]) -> Pool:
    """Pages [pages, K, P, W] or [pages, L, K, P, W] as rows: the same bytes, nothing is copied."""
    layers = pages.shape[1] if pages.ndim == 5 else 1
    kv_heads, page_size, width = pages.shape[-3:]
    return Pool(pages.reshape(-1, width), layers, kv_heads, page_size)


def segment_operands(
    pool: Pool,
    layer: int | Array,
    rank: Integer[Array, ""] | int,
    q: Float[Array, "T H D"],
    page_table: Integer[Array, " M"],
    prior_length: Integer[Array, ""],
    k: Float[Array, "S K D"],
    v: Float[Array, "S K Dv"],
    positions: Integer[Array, " S"],
    *,
    ranks: int,
    interleave: int,
) -> Operands:
    """The operands of one segment; arguments as ``segment_attention`` has them.

    What segments of a batch share comes first, so the rest can be mapped over.
    """
    tokens, heads, width = q.shape
    group = heads // pool.kv_heads
    queries = q.reshape(tokens, pool.kv_heads, group, width).transpose(1, 3, 2, 0)
    query_positions = prior_length + jnp.arange(tokens, dtype=prior_length.dtype)
    own = active_mask(positions, rank, ranks=ranks, interleave=interleave)
    held = local_filled(prior_length, rank, ranks=ranks, interleave=interleave)
    prior = jnp.arange(page_table.shape[0] * pool.page_size, dtype=jnp.uint32)
    return Operands(
        queries.reshape(pool.kv_heads, width, group * tokens),
        _pool_rows(pool, layer, page_table),
        jnp.concatenate([k, v], axis=-1).transpose(1, 0, 2),
        jnp.where(prior < held.astype(jnp.uint32), 0.0, NEVER)[None, :],
        jnp.where(own, positions.astype(jnp.float32), NEVER)[None, :],
        jnp.tile(query_positions.astype(jnp.float32), group)[:, None],
    )


def segment_result(
    out: Float[Array, "K R Dv"], lse: Float[Array, "K R 1"], tokens: int
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """A kernel's results in the order of the segment's queries."""
    kv_heads, num_rows, width = out.shape
    group = num_rows // tokens
    out = out.reshape(kv_heads, group, tokens, width).transpose(2, 0, 1, 3)
    lse = lse.reshape(kv_heads, group, tokens).transpose(2, 0, 1)
    return out.reshape(tokens, kv_heads * group, width), lse.reshape(tokens, kv_heads * group)


def _pool_rows(
    pool: Pool, layer: int | Array, page_table: Integer[Array, " M"]
) -> Int32[Array, "K prior 1"]:
    """The pool's row of each prior token and KV head. Unsigned: plain products and sums."""
    page = page_table.astype(jnp.uint32)[None, :] * jnp.uint32(pool.layers)
    page = page + jnp.asarray(layer, jnp.uint32)
    heads = jnp.arange(pool.kv_heads, dtype=jnp.uint32)[:, None]
    first = (page * jnp.uint32(pool.kv_heads) + heads) * jnp.uint32(pool.page_size)
    offsets = jnp.arange(pool.page_size, dtype=jnp.uint32)
    rows = first[:, :, None] + offsets[None, None, :]
    return rows.reshape(pool.kv_heads, -1, 1).astype(jnp.int32)
