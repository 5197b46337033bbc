"""Rows of a pool: one token's values of one layer, all heads of a rank.

Rows are written one by one, and read one by one or as whole pages. A write followed by reads of
the same layer leaves the pool in place, which the engine's audit proves for every step.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from dcpjax.cache import formats


def write_rows(
    pool: Shaped[Array, "pages L h P W"],
    layer: int | Array,
    pages: Integer[Array, " T"],
    offsets: Integer[Array, " T"],
    rows: Float[Array, "T h W"],
) -> Shaped[Array, "pages L h P W"]:
    """The pool with the tokens' rows at (page, layer, offset); local page ids."""
    stored = formats.encode(rows, pool.dtype)
    return pool.at[pages, layer, :, offsets].set(stored, mode="promise_in_bounds")


def read_rows(
    pool: Shaped[Array, "pages L h P W"],
    layer: int | Array,
    pages: Integer[Array, " R"],
    offsets: Integer[Array, " R"],
    dtype: DTypeLike,
) -> Float[Array, "R h W"]:
    """Rows from anywhere in the pool, as values of ``dtype``."""
    stored = pool.at[pages, layer, :, offsets].get(mode="promise_in_bounds")
    return formats.decode(stored, dtype)


def read_pages(
    pool: Shaped[Array, "pages L h P W"],
    layer: int | Array,
    page_ids: Integer[Array, " n"],
    dtype: DTypeLike,
) -> Float[Array, "h nP W"]:
    """All rows of some pages in order, heads first, as values of ``dtype``."""
    layers = jnp.full_like(page_ids, layer)
    _, _, heads, page_size, width = pool.shape
    stored = lax.gather(
        pool,
        jnp.stack([page_ids, layers], axis=-1),
        lax.GatherDimensionNumbers(
            offset_dims=(0, 2, 3), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)
        ),
        slice_sizes=(1, 1, heads, page_size, width),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return formats.decode(stored.reshape(heads, -1, width), dtype)
