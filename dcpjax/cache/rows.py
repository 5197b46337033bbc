"""Rows of a pool: one token's values of one layer, all heads of a rank.

Rows are written one by one, and read one by one or as whole pages. A write followed by reads of
the same layer leaves the pool in place, which the engine's audit proves for every step.

How a row lies in its page is the pool's :class:`RowFormat`. Without one, rows are plain: values one
after the other, of the type that the pool's own type stands for; see ``cache/scaled_rows.py``
for the others.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Integer, Shaped

from dcpjax.cache import formats


@runtime_checkable
class RowFormat(Protocol):
    """How the rows of a page are stored. A page of one layer and head has S × C stored values."""

    @property
    def field_bytes(self) -> tuple[int, ...]:
        """Bytes of each field of a row, where a page has one field of all its rows after the other;
        empty where the bytes of a row lie together."""
        ...

    def page_extent(self, page_size: int, width: int) -> tuple[int, int]:
        """S and C of a page with ``page_size`` rows of ``width`` values."""
        ...

    def storage_dtype(self, values: jnp.dtype, *, native: bool) -> jnp.dtype:
        """The type of a pool; ``values`` and ``native`` as :func:`formats.storage_dtype` has them.

        Raises:
            ConfigError: the format does not hold such values.
        """
        ...

    def write(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, rows: Array
    ) -> Array:
        """See :func:`write_rows`."""
        ...

    def read(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, dtype: DTypeLike
    ) -> Array:
        """See :func:`read_rows`."""
        ...

    def read_pages(
        self, pool: Array, layer: int | Array, page_ids: Array, dtype: DTypeLike
    ) -> Array:
        """See :func:`read_pages`."""
        ...


@dataclass(frozen=True)
class PlainRows:
    """Values one after the other."""

    @property
    def field_bytes(self) -> tuple[int, ...]:
        return ()

    def page_extent(self, page_size: int, width: int) -> tuple[int, int]:
        return page_size, width

    def storage_dtype(self, values: jnp.dtype, *, native: bool) -> jnp.dtype:
        return formats.storage_dtype(values, native=native)

    def write(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, rows: Array
    ) -> Array:
        return store_rows(pool, layer, pages, offsets, formats.encode(rows, pool.dtype))

    def read(
        self, pool: Array, layer: int | Array, pages: Array, offsets: Array, dtype: DTypeLike
    ) -> Array:
        return formats.decode(stored_rows(pool, layer, pages, offsets), dtype)

    def read_pages(
        self, pool: Array, layer: int | Array, page_ids: Array, dtype: DTypeLike
    ) -> Array:
        stored = stored_pages(pool, layer, page_ids, 0, pool.shape[-1])
        return formats.decode(heads_first(stored), dtype)


PLAIN = PlainRows()


def write_rows(
    pool: Shaped[Array, "pages L h S C"],
    layer: int | Array,
    pages: Integer[Array, " T"],
    offsets: Integer[Array, " T"],
    rows: Float[Array, "T h W"],
    row_format: RowFormat = PLAIN,
) -> Shaped[Array, "pages L h S C"]:
    """The pool with the tokens' rows at (page, layer, offset); local page ids."""
    return row_format.write(pool, layer, pages, offsets, rows)


def read_rows(
    pool: Shaped[Array, "pages L h S C"],
    layer: int | Array,
    pages: Integer[Array, " R"],
    offsets: Integer[Array, " R"],
    dtype: DTypeLike,
    row_format: RowFormat = PLAIN,
) -> Float[Array, "R h W"]:
    """Rows from anywhere in the pool, as values of ``dtype``."""
    return row_format.read(pool, layer, pages, offsets, dtype)


def read_pages(
    pool: Shaped[Array, "pages L h S C"],
    layer: int | Array,
    page_ids: Integer[Array, " n"],
    dtype: DTypeLike,
    row_format: RowFormat = PLAIN,
) -> Float[Array, "h nP W"]:
    """All rows of some pages in order, heads first, as values of ``dtype``."""
    return row_format.read_pages(pool, layer, page_ids, dtype)


def store_rows(
    pool: Array,
    layer: int | Array,
    pages: Array,
    offsets: Array,
    stored: Shaped[Array, "T h C"],
) -> Array:
    """The pool with stored rows, for formats in which a row is a row of the page."""
    return pool.at[pages, layer, :, offsets].set(stored, mode="promise_in_bounds")


def stored_rows(
    pool: Array, layer: int | Array, pages: Array, offsets: Array
) -> Shaped[Array, "R h C"]:
    """What :func:`store_rows` has stored."""
    return pool.at[pages, layer, :, offsets].get(mode="promise_in_bounds")


def stored_pages(
    pool: Array, layer: int | Array, page_ids: Array, first: int, count: int
) -> Shaped[Array, "h n S count"]:
    """Columns [first, first + count) of some pages of a layer, straight from the pool."""
    heads, slots = pool.shape[2:4]
    layers, columns = jnp.full_like(page_ids, layer), jnp.full_like(page_ids, first)
    return lax.gather(
        pool,
        jnp.stack([page_ids, layers, columns], axis=-1),
        lax.GatherDimensionNumbers(
            offset_dims=(0, 2, 3), collapsed_slice_dims=(0, 1), start_index_map=(0, 1, 4)
        ),
        slice_sizes=(1, 1, heads, slots, count),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def heads_first(pages: Shaped[Array, "h n P C"]) -> Shaped[Array, "h nP C"]:
    """The rows of pages in one list for each head."""
    heads, num_pages, page_size, columns = pages.shape
    return pages.reshape(heads, num_pages * page_size, columns)
