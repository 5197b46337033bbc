"""How many pages an engine gets. Asked once the weights are in place."""

from pathlib import Path

import psutil
from jax.sharding import Mesh

from dcpjax.cache.pool import PoolShapes
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
        affordable = free // page_bytes - 1  # one is the scratch page
    else:
        per_sequence = -(-max_model_len // config.virtual_page_size)
        affordable = _rounded(int(free * _share(mesh)) // page_bytes - 1)
        wanted = min(config.max_num_seqs * per_sequence, max(1, affordable))
    if wanted > affordable:
        raise ConfigError(
            "the pages of a rank fit into its free memory",
            num_pages=wanted,
            page_bytes=page_bytes,
            free_bytes=free,
        )
    return shapes.with_pages(wanted)


def _rounded(num_pages: int) -> int:
    """Down to three significant bits, so that a start with a little less free memory compiles no
    new programs: the shape of the pool is part of what they are kept under."""
    step = 1 << max(num_pages.bit_length() - 3, 0)
    return num_pages // step * step if num_pages > 0 else num_pages


def _is_cpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _share(mesh: Mesh) -> float:
    return CPU_SHARE if _is_cpu(mesh) else DEVICE_SHARE


def _free_bytes_per_rank(mesh: Mesh) -> int:
    """Free memory of a device; virtual CPU devices share the host's."""
    statistics = None if _is_cpu(mesh) else mesh.devices.flat[0].memory_stats()
    if statistics is None:  # some backends do not tell
        free = min(psutil.virtual_memory().available, _free_in_cgroup())
        return int(free) // mesh.size
    return statistics["bytes_limit"] - statistics["bytes_in_use"]


def _free_in_cgroup() -> float:
    """What a container's limit leaves; infinite without one."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - used
