"""Pages of a pool as arrays of their own, and back: how a cache leaves a device that no other
machine can read."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from dcpjax.cache.pool import POOL_SPEC

MoveFunction = Callable[..., Array]


def gather_pages(mesh: Mesh | AbstractMesh) -> MoveFunction:
    """(pool, ids [n]) to the pages [ranks · n, layers, heads, page_size, width], rank after rank.

    Page ids are the same on every rank; a list shorter than ``n`` is filled with the scratch page.
    """

    def on_rank(pool: Array, ids: Array) -> Array:
        return jnp.take(pool, ids, axis=0, mode="clip")

    return _on_ranks(on_rank, mesh, (POOL_SPEC, PartitionSpec()))


def scatter_pages(mesh: Mesh | AbstractMesh) -> MoveFunction:
    """(pool, ids [n], pages as :func:`gather_pages` returns them) to the pool, which is donated.

    One page after the other, each at its place: a scatter of whole pages would be one more form of
    the pool that the compiler has to keep in place.
    """

    def on_rank(pool: Array, ids: Array, pages: Array) -> Array:
        last = pool.shape[0] - 1
        for place in range(pages.shape[0]):
            page = lax.clamp(0, ids[place], last)
            pool = lax.dynamic_update_slice_in_dim(pool, pages[place : place + 1], page, 0)
        return pool

    return _on_ranks(on_rank, mesh, (POOL_SPEC, PartitionSpec(), POOL_SPEC))


def _on_ranks(function: MoveFunction, mesh: Mesh | AbstractMesh, specs: tuple) -> MoveFunction:
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=POOL_SPEC)
