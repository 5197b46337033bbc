"""A pool's pages in the host's memory, for devices whose memory other machines cannot reach.

JAX names no address of a Neuron device's memory, so its pages pass through the host: those of a
finished prompt are copied out before they are offered, and those that arrived are copied in before
the request runs. A page has the same id on both sides, so plans, addresses and leases are those of
the pool. The memory is reserved as a whole; the host provides what is touched.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcpjax.cache.page_moves import gather_pages, scatter_pages
from dcpjax.cache.pool import POOL_SPEC, PoolShape
from dcpjax.engine.kv_parts import rank_memory
from dcpjax.mesh import PAGE_RANKS, axes_size, own_devices
from dcpjax.transfer.memory import RankMemory

MOVED_PAGES = 16
"""Pages that one program moves; longer lists take several calls."""


class PoolMirror:
    """The host's copy of the pages of this process's ranks. The engine's thread copies, others read
    and write pages that they were given."""

    def __init__(self, pool: PoolShape, mesh: Mesh) -> None:
        self._shape, self._mesh = pool, mesh
        self._devices = list(own_devices(mesh).values())
        self._spec = NamedSharding(mesh, POOL_SPEC)
        self._whole = NamedSharding(mesh, PartitionSpec())
        array = pool.array_shape(axes_size(mesh, PAGE_RANKS))
        self._share = self._spec.shard_shape(array)
        self._moved = (axes_size(mesh, PAGE_RANKS) * MOVED_PAGES, *array[1:])
        self._ranks = [np.empty(self._share, pool.storage_dtype) for _ in self._devices]
        self._gather, self._scatter = self._compile(array)

    def _compile(self, array: tuple[int, ...]) -> tuple[Callable, Callable]:
        dtype = self._shape.storage_dtype
        pool = jax.ShapeDtypeStruct(array, dtype, sharding=self._spec)
        ids = jax.ShapeDtypeStruct((MOVED_PAGES,), jnp.int32, sharding=self._whole)
        pages = jax.ShapeDtypeStruct(self._moved, dtype, sharding=self._spec)
        gather = jax.jit(gather_pages(self._mesh)).lower(pool, ids)
        scatter = jax.jit(scatter_pages(self._mesh), donate_argnums=0).lower(pool, ids, pages)
        return gather.compile(), scatter.compile()

    @property
    def memory(self) -> tuple[RankMemory, ...]:
        """Where the pages of this process's ranks lie, in the order of ranks."""
        return tuple(rank_memory(self._shape, rank, rank.ctypes.data) for rank in self._ranks)

    def copy_out(self, pool: Array, page_ids: Sequence[int]) -> None:
        """Copy pages of the pool to the host, on all processes. Returns when they are there."""
        for ids in _batches(page_ids, self._shape.scratch_page):
            pages = self._gather(pool, ids)
            by_device = {shard.device: shard.data for shard in pages.addressable_shards}
            for device, rank in zip(self._devices, self._ranks, strict=True):
                rank[ids] = np.asarray(by_device[device])

    def copy_in(self, pool: Array, page_ids: Sequence[int]) -> Array:
        """The pool, which is donated, with pages as the host has them."""
        for ids in _batches(page_ids, self._shape.scratch_page):
            pieces = [
                jax.device_put(rank[ids], device)
                for device, rank in zip(self._devices, self._ranks, strict=True)
            ]
            pages = jax.make_array_from_single_device_arrays(self._moved, self._spec, pieces)
            pool = self._scatter(pool, ids, pages)
        return pool


def _batches(page_ids: Sequence[int], scratch_page: int) -> list[np.ndarray]:
    """The ids, MOVED_PAGES at a time; the scratch page fills the last batch."""
    ids = np.asarray(page_ids, np.int32)
    filled = np.pad(ids, (0, -ids.size % MOVED_PAGES), constant_values=scratch_page)
    return list(filled.reshape(-1, MOVED_PAGES))
