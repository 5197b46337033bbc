"""Attention of one rank by NKI kernels, with the arguments and results of ``dcpjax.attention``."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Integer, Shaped

from neuron.nki.check import check_fits, check_one_tile, check_segment
from neuron.nki.load import launch
from neuron.nki.operands import Operands, Pool, flatten_pool, segment_operands, segment_result


def decode_attention(
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
    lnc: int = 1,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """As ``dcpjax.attention.segment.segments_attention``, its reference, for few queries.

    Args:
        page_tables: every entry is a page of the pool: all of them are read, whatever the length.
        lnc: physical cores per logical one, the runtime's NEURON_LOGICAL_NC_CONFIG.

    Raises:
        NkiShapeError: shapes or types that the kernel is not made for.
        NkiMissingError: the nki package is not there.
    """
    pool = flatten_pool(pages)
    check_segment(pool, q[0], k[0], v[0], page_tables.shape[1], ranks)
    check_one_tile(q.shape[1] * q.shape[2] // pool.kv_heads)
    of_segment = partial(
        segment_operands, pool, _layer(layer), rank, ranks=ranks, interleave=interleave
    )
    operands = Operands(*jax.vmap(of_segment)(q, page_tables, prior_lengths, k, v, positions))
    kernel = launch("decode", "decode_kernel", lnc)
    out, lse = kernel(
        operands.queries,
        pool.rows,
        *operands[1:],
        _value_column(pool, q.shape[-1]),
        scale,
        lnc,
    )
    return jax.vmap(lambda out, lse: segment_result(out, lse, q.shape[1]))(out, lse)


def context_attention(
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
    lnc: int = 1,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """As ``dcpjax.attention.segment_attention``, its reference, for a prompt chunk.

    Arguments beyond the reference's and errors as those of :func:`decode_attention`.
    """
    pool = flatten_pool(pages)
    check_segment(pool, q, k, v, page_table.shape[0], ranks)
    check_fits(q.shape[0] * q.shape[1] // pool.kv_heads, q, v.shape[-1])
    operands = segment_operands(
        pool,
        _layer(layer),
        rank,
        q,
        page_table,
        jnp.asarray(prior_length),
        k,
        v,
        positions,
        ranks=ranks,
        interleave=interleave,
    )
    kernel = launch("context", "context_kernel", lnc)
    out, lse = kernel(
        operands.queries,
        pool.rows,
        *operands[1:],
        _value_column(pool, q.shape[-1]),
        scale,
        lnc,
    )
    return segment_result(out, lse, q.shape[0])


def _layer(layer: int | Array | None) -> int | Array:
    """A pool without an axis of layers is one of one layer."""
    return 0 if layer is None else layer


def _value_column(pool: Pool, key_width: int) -> int:
    """Where values begin in a row of the pool: behind the key, or at its start (MLA)."""
    return 0 if pool.rows.shape[-1] == key_width else key_width
