"""How many pages an engine gets."""

import dataclasses
import os

from jax.sharding import Mesh

from dcpjax.cache.pool import PoolShape
from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError

CPU_SHARE = 0.3
"""Part of the free host memory that pools may take; weights and compilers need the rest."""
DEVICE_SHARE = 0.85
"""Part of an accelerator's free memory that a pool may take; the rest is for activations."""


def choose_num_pages(
    shape: PoolShape, config: EngineConfig, max_model_len: int, mesh: Mesh
) -> PoolShape:
    """The shape with its number of pages: as set, else as needed and as memory allows.

    Raises:
        ConfigError: not even one page fits.
    """
    if config.num_pages is not None:
        return dataclasses.replace(shape, num_pages=config.num_pages)
    per_sequence = -(-max_model_len // config.virtual_page_size)
    needed = config.max_num_seqs * per_sequence
    page_bytes = shape.page_bytes(config.head_groups)
    affordable = _free_bytes_per_rank(mesh) // page_bytes - 1  # one is the scratch page
    if affordable < 1:
        raise ConfigError(
            "the free memory of a device holds at least one page of the KV pool",
            page_bytes=page_bytes,
            free_bytes=_free_bytes_per_rank(mesh),
        )
    return dataclasses.replace(shape, num_pages=min(needed, affordable))


def _free_bytes_per_rank(mesh: Mesh) -> int:
    device = mesh.devices.flat[0]
    if device.platform == "cpu":  # all ranks share the host's memory
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(free * CPU_SHARE) // mesh.size
    statistics = device.memory_stats()
    free = statistics["bytes_limit"] - statistics["bytes_in_use"]
    return int(free * DEVICE_SHARE)
