"""The pages of one engine on its devices.

A pool is one array ``[pages, layers, heads, page_size, width]``, keys and values packed along the
width. The page axis is split over the ranks that share tokens, the head axis over the head groups.
Every step takes it donated and returns it. The last page of each rank's share is its scratch page.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Integer, Shaped

from dcpjax.cache import formats, widths
from dcpjax.mesh import DCP, partition, sharding

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

    @property
    def storage_dtype(self) -> jnp.dtype:
        return formats.storage_dtype(self.dtype, native=self.is_native)

    @property
    def scratch_page(self) -> int:
        """Local id of the page that takes what nobody owns."""
        return self.num_pages

    def array_shape(self, ranks: int) -> tuple[int, int, int, int, int]:
        """Of the array over ``ranks`` ranks that share tokens."""
        pages = ranks * (self.num_pages + 1)
        return (pages, self.num_layers, self.num_heads, self.page_size, self.width)

    def page_bytes(self, head_groups: int) -> int:
        """Bytes of one page of one rank."""
        heads = self.num_heads // head_groups
        token_bytes = self.width * self.dtype.itemsize
        return widths.page_bytes(self.num_layers, heads, self.page_size, token_bytes)

    def rank_bytes(self, head_groups: int) -> int:
        """Bytes of one rank's share of the pool, scratch page included."""
        return widths.pool_bytes(self.num_pages, self.page_bytes(head_groups))


def allocate_pool(shape: PoolShape, mesh: Mesh) -> Array:
    """A pool of zeros on the devices of the mesh."""
    make = partial(jnp.zeros, shape.array_shape(mesh.shape[DCP]), shape.storage_dtype)
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
    rows = formats.encode(jnp.concatenate([keys, values], axis=-1), pool.dtype)
    return pool.at[pages, layer, :, offsets].set(rows, mode="promise_in_bounds")
