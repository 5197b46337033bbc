"""What the kernels are made for; everything else is refused before it is compiled."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from dcpjax.cache import formats
from neuron.nki.errors import NkiShapeError
from neuron.nki.operands import Pool
from neuron.nki.tiling import MOVING_COLUMNS, NEVER, PARTITIONS, fits


def check_segment(pool: Pool, q: Array, k: Array, v: Array, table_width: int, ranks: int) -> None:
    """One segment's shapes and types; q is [T, H, D], k and v are [S, K, ·].

    Raises:
        NkiShapeError: with the rule and the values.
    """
    tokens, heads, key_width = q.shape
    value_width, width = v.shape[-1], pool.rows.shape[-1]
    last = table_width * pool.page_size * ranks + tokens
    _require(
        heads % pool.kv_heads == 0,
        "KV heads divide query heads",
        heads=heads,
        kv_heads=pool.kv_heads,
    )
    _require(
        width in (key_width, key_width + value_width),
        "a pool's row is a key, or a key and a value",
        row=width,
        key=key_width,
        value=value_width,
    )
    _require(
        value_width <= MOVING_COLUMNS, "values fit into a PSUM bank of float32", value=value_width
    )
    _require(last < NEVER, "positions are exact in float32", last_position=last, bound=NEVER)
    _require(
        pool.rows.shape[0] < 2**31, "rows of the pool are counted in int32", rows=pool.rows.shape[0]
    )
    _require(
        q.dtype == k.dtype == v.dtype and pool.rows.dtype == formats.storage_dtype(q.dtype),
        "queries, keys, values and pool are of one type",
        q=q.dtype.name,
        k=k.dtype.name,
        v=v.dtype.name,
        pool=pool.rows.dtype.name,
    )


def check_one_tile(num_rows: int) -> None:
    """Decode: tokens × queries per KV head are one tile.

    Raises:
        NkiShapeError: more rows than a tile has.
    """
    _require(
        num_rows <= PARTITIONS,
        "tokens × queries per KV head fit into a tile: use context_attention",
        rows=num_rows,
        partitions=PARTITIONS,
    )


def check_fits(num_rows: int, q: Array, value_width: int) -> None:
    """Context: the running softmax of all rows stays in SBUF.

    Raises:
        NkiShapeError: too many rows; a shorter chunk has fewer.
    """
    item_bytes = jnp.dtype(q.dtype).itemsize
    _require(
        fits(num_rows, q.shape[-1], value_width, item_bytes),
        "the state of all query rows fits into SBUF: shorten the chunk",
        rows=num_rows,
        key_width=q.shape[-1],
        value_width=value_width,
    )


def _require(holds: bool, rule: str, **values: Any) -> None:
    if not holds:
        raise NkiShapeError(rule, **values)
