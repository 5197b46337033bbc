"""The pages of one engine on its devices: one pool for each part of the model's cache.

A pool is one array ``[pages, layers, heads, page_size, width]``, keys and values packed along the
width; rows of other formats take other columns, see ``cache/rows.py``. The page axis is split over
the ranks that have pages of their own, the head axis over the head groups. Every step takes it
donated and returns it. The last page of each rank's share is its scratch page.
A page id names one page in the pool of every part.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Integer, Shaped

from dcpjax.cache import widths
from dcpjax.cache.parts import CachePart
from dcpjax.cache.rows import PLAIN, RowFormat, write_rows
from dcpjax.mesh import PAGE_RANKS, axes_size, partition, sharding

POOL_AXES = ("pages", None, "kv_heads", None, None)
POOL_SPEC = partition(*POOL_AXES)


@dataclass(frozen=True)
class PoolShape:
    """Extent of a pool over all ranks. ``num_pages`` counts usable pages of one rank."""

    num_pages: int
    num_layers: int
    num_heads: int  # of the placed array: copies included
    page_size: int
    width: int
    dtype: jnp.dtype  # of the values
    is_native: bool = False  # stored as this type
    row_format: RowFormat = PLAIN

    @property
    def storage_dtype(self) -> jnp.dtype:
        return self.row_format.storage_dtype(self.dtype, native=self.is_native)

    @property
    def page_extent(self) -> tuple[int, int]:
        """Stored values of a page of one layer and head: rows and columns."""
        return self.row_format.page_extent(self.page_size, self.width)

    @property
    def scratch_page(self) -> int:
        """Local id of the page that takes what nobody owns."""
        return self.num_pages

    def array_shape(self, ranks: int) -> tuple[int, int, int, int, int]:
        """Of the array over ``ranks`` ranks with pages of their own."""
        pages = ranks * (self.num_pages + 1)
        return (pages, self.num_layers, self.num_heads, *self.page_extent)

    def page_bytes(self, head_groups: int) -> int:
        """Bytes of one page of one rank."""
        heads = self.num_heads // head_groups
        stored = math.prod(self.page_extent) * self.storage_dtype.itemsize
        return widths.page_bytes(self.num_layers, heads, self.page_size, stored // self.page_size)

    def rank_bytes(self, head_groups: int) -> int:
        """Bytes of one rank's share of the pool, scratch page included."""
        return widths.pool_bytes(self.num_pages, self.page_bytes(head_groups))


Pools = dict[str, Array]
"""The pools of one engine, by the name of the part."""


@dataclass(frozen=True)
class PoolShapes:
    """The pools of all parts, by name. They have the same page ids."""

    by_part: Mapping[str, PoolShape]

    @property
    def num_pages(self) -> int:
        """Usable pages of one rank."""
        return next(iter(self.by_part.values())).num_pages

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    def page_bytes(self, head_groups: int) -> int:
        """Bytes of one page of one rank, of all parts together."""
        return sum(shape.page_bytes(head_groups) for shape in self.by_part.values())

    def rank_bytes(self, head_groups: int) -> int:
        """Bytes of one rank's shares of all pools, scratch pages included."""
        return sum(shape.rank_bytes(head_groups) for shape in self.by_part.values())

    def with_pages(self, num_pages: int) -> "PoolShapes":
        resized = {
            name: replace(shape, num_pages=num_pages) for name, shape in self.by_part.items()
        }
        return PoolShapes(resized)


def part_shape(
    part: CachePart,
    *,
    num_pages: int,
    num_heads: int,
    page_size: int,
    ranks: int,
    layer_ranks: int = 1,
    **stored: Any,
) -> PoolShape:
    """The pool of one part.

    Args:
        page_size: tokens of a page that is one of ``ranks`` ranks' share of a virtual page.
        layer_ranks: ranks that split the layers; all have room for as many as the first.
        stored: how values are stored, see :class:`PoolShape`.
    """
    return PoolShape(
        num_pages=num_pages,
        num_layers=len(part.layers) if part.is_replicated else -(-len(part.layers) // layer_ranks),
        num_heads=num_heads,
        page_size=page_size * ranks if part.is_replicated else page_size,
        width=part.width,
        **stored,
    )


def allocate_pools(shapes: PoolShapes, mesh: Mesh) -> Pools:
    """Pools of zeros on the devices of the mesh."""
    return {name: allocate_pool(shape, mesh) for name, shape in shapes.by_part.items()}


def allocate_pool(shape: PoolShape, mesh: Mesh) -> Array:
    """A pool of zeros on the devices of the mesh."""
    make = partial(jnp.zeros, shape.array_shape(axes_size(mesh, PAGE_RANKS)), shape.storage_dtype)
    return jax.jit(make, out_shardings=sharding(mesh, *POOL_AXES))()


def write_tokens(
    pool: Shaped[Array, "pages L h P W"],
    layer: int | Array,
    pages: Integer[Array, " T"],
    offsets: Integer[Array, " T"],
    keys: Float[Array, "T h D"],
    values: Float[Array, "T h Dv"],
) -> Shaped[Array, "pages L h P W"]:
    """The pool with the tokens' keys and values at (page, layer, offset); local page ids."""
    return write_rows(pool, layer, pages, offsets, jnp.concatenate([keys, values], axis=-1))
