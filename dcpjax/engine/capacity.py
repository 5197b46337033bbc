"""How many pages an engine gets. Asked once the weights are in place."""

from pathlib import Path

import psutil
from jax.sharding import Mesh

from dcpjax.cache.pool import PoolShapes
from dcpjax.cache.widths import affordable_pages, default_pages
from dcpjax.config import EngineConfig
from dcpjax.errors import ConfigError

CPU_SHARE = 0.3
"""Part of the free host memory that pools may take unless told otherwise."""
DEVICE_SHARE = 0.85
"""Part of an accelerator's free memory that a pool may take; activations need the rest."""
_CGROUP = Path("/sys/fs/cgroup")


def choose_num_pages(
    shapes: PoolShapes, config: EngineConfig, max_model_len: int, mesh: Mesh
) -> PoolShapes:
    """The shapes with their number of pages: as set, else as needed and as memory allows.

    Raises:
        ConfigError: that many pages, or not even one, do not fit into the free memory.
    """
    page_bytes = shapes.page_bytes(config.head_groups)
    free = _free_bytes_per_rank(mesh)
    if config.num_pages is not None:
        wanted = config.num_pages
        affordable = affordable_pages(free, page_bytes)
    else:
        per_sequence = -(-max_model_len // config.virtual_page_size)
        affordable = default_pages(free, page_bytes, _share(mesh))
        wanted = min(config.max_num_seqs * per_sequence, max(1, affordable))
    if wanted > affordable:
        raise ConfigError(
            "the pages of a rank fit into its free memory",
            num_pages=wanted,
            page_bytes=page_bytes,
            free_bytes=free,
        )
    return shapes.with_pages(wanted)


def _is_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _share(mesh: Mesh) -> float:
    return CPU_SHARE if _is_cpu(mesh) else DEVICE_SHARE


def _free_bytes_per_rank(mesh: Mesh) -> int:
    """Free memory of a device; virtual CPU devices share the host's."""
    statistics = None if _is_cpu(mesh) else mesh.local_devices[0].memory_stats()
    if statistics is None:  # some backends do not tell
        free = min(psutil.virtual_memory().available, _free_in_cgroup())
        return int(free) // len(mesh.local_devices)
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def _free_in_cgroup() -> float:
    """What a container's limit leaves; infinite without one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - used
