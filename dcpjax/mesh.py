"""Devices as a mesh, and which mesh axis splits which logical axis. Knows nothing about models.

An engine that prefills and decodes uses :func:`decode_mesh`: rank = tp index · DCP + dcp index.
A producer that splits prompts the Neuron way uses :func:`prefill_mesh`, where DCP is the slow axis.
With prefill context parallelism there are several such sets of ranks, :func:`pcp_mesh`, each with
all weights. All meshes have the same three axes, whatever their sizes.
"""

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dcpjax.errors import MeshError
from dcpjax.layout.heads import HeadLayout as HeadLayout

PCP = "pcp"
TP = "tp"
DCP = "dcp"
ALL_RANKS = (TP, DCP)
"""Of the ranks that share the weights."""
WORLD = (PCP, *ALL_RANKS)
PAGE_RANKS = (DCP, PCP)
"""Of the ranks that have pages of their own: other tokens, other layers or copies."""

MOST_VIRTUAL_DEVICES = 1024

LOGICAL_AXES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": ALL_RANKS,
    "ffn": ALL_RANKS,
    "experts": WORLD,
    "q_heads": ALL_RANKS,
    "group_q_heads": TP,  # prefill_gather="q" keeps the attention weights whole on each DCP rank
    "kv_heads": TP,
    "pages": PAGE_RANKS,
    "embed": None,
    "head_dim": None,
}
"""Which mesh axes split a logical axis of a parameter or of the pool (None: replicated)."""


def partition(*logical_axes: str | None) -> PartitionSpec:
    """The partition of an array whose axes have these logical names (None: replicated)."""
    return PartitionSpec(*(LOGICAL_AXES[axis] if axis else None for axis in logical_axes))


def sharding(mesh: Mesh, *logical_axes: str | None) -> NamedSharding:
    """As :func:`partition`, on a mesh."""
    return NamedSharding(mesh, partition(*logical_axes))


def axes_size(mesh: Mesh, axes: Sequence[str]) -> int:
    """Ranks along some axes of a mesh."""
    return math.prod(mesh.shape[axis] for axis in axes)


def own_devices(mesh: Mesh) -> dict[int, jax.Device]:
    """The devices of this process, by rank."""
    process = jax.process_index()
    return {
        rank: device
        for rank, device in enumerate(mesh.devices.flat)
        if device.process_index == process
    }


def place(values: np.ndarray, target: NamedSharding) -> jax.Array:
    """Put host values on the devices; on those of other processes, which have the same, they do."""
    if target.is_fully_addressable:
        return jax.device_put(values, target)
    return jax.make_array_from_callback(values.shape, target, lambda index: values[index])


def replicate(array: jax.Array, target: NamedSharding) -> jax.Array:
    """An array of one device on all of them; other processes do that with their own, equal one."""
    if target.is_fully_addressable:
        return jax.device_put(array, target)
    copies = [jax.device_put(array, device) for device in target.addressable_devices]
    return jax.make_array_from_single_device_arrays(array.shape, target, copies)


def find_devices(
    count: int, platform: str | None = None, *, num_processes: int = 1
) -> list[jax.Device]:
    """The first ``count`` devices, as many of each process as of the others. On CPU, virtual
    devices are made when none is in use yet.

    Raises:
        MeshError: there are fewer devices, or none of the platform.
    """
    share = count // num_processes
    if platform in (None, "cpu"):
        _request_cpu_devices(share)
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise MeshError(
            "JAX finds devices of the platform: its plugin is installed, and JAX_PLATFORMS, where "
            "it is set, names it",
            platform=platform,
            why=str(error),
        ) from error
    if num_processes > 1:
        by_process = [[d for d in devices if d.process_index == p] for p in range(num_processes)]
        devices = [device for local in by_process for device in local[:share]]
    if len(devices) < count:
        raise MeshError(
            "tensor_parallel_size times prefill_context_parallel_size is at most the number of "
            "devices"
            + (
                "; on CPU set XLA_FLAGS=--xla_force_host_platform_device_count before JAX starts"
                if devices[0].platform == "cpu"
                else ""
            ),
            ranks=count,
            num_devices=len(devices),
            platform=devices[0].platform,
        )
    return devices[:count]


def _request_cpu_devices(count: int) -> None:
    """Ask for virtual CPU devices; JAX refuses once a backend is up, and then there is no need."""
    if count > MOST_VIRTUAL_DEVICES:  # they take minutes to be made, and memory
        raise MeshError(
            "there are not so many ranks in one process", ranks=count, most=MOST_VIRTUAL_DEVICES
        )
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    num_devices = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if is_set or num_devices >= count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # devices exist already: find_devices says whether they are enough


def decode_mesh(devices: Sequence[jax.Device], dcp: int) -> Mesh:
    """Mesh of all ``devices``; consecutive ranks share the tokens of a sequence."""
    return _mesh(devices, mesh_axes(len(devices), dcp))


def prefill_mesh(devices: Sequence[jax.Device], dcp: int) -> Mesh:
    """Mesh of all ``devices``: ranks that are far apart share tokens (producers)."""
    return _mesh(devices, mesh_axes(len(devices), dcp, prefill_order=True))


def pcp_mesh(devices: Sequence[jax.Device], pcp: int, dcp: int) -> Mesh:
    """``pcp`` times a mesh in the decode order: rank = PCP rank · tensor parallel size + its rank.

    Args:
        dcp: DCP ranks among those that share the weights, 1 or all of them.

    Raises:
        MeshError: the sizes do not multiply out.
    """
    if len(devices) % pcp:
        raise MeshError(
            "the number of ranks is a multiple of prefill_context_parallel_size",
            ranks=len(devices),
            prefill_context_parallel_size=pcp,
        )
    return _mesh(devices, mesh_axes(len(devices) // pcp, dcp, pcp=pcp))


def mesh_axes(ranks: int, dcp: int, *, pcp: int = 1, prefill_order: bool = False) -> dict[str, int]:
    """Axes of a mesh with their sizes, the slow one first; ``ranks`` are those of the weights."""
    groups = _num_groups(ranks, dcp)
    fast = {DCP: dcp, TP: groups} if prefill_order else {TP: groups, DCP: dcp}
    return {PCP: pcp, **fast}


def _num_groups(ranks: int, dcp: int) -> int:
    if dcp < 1 or ranks % dcp:
        raise MeshError(
            "the number of ranks is a multiple of decode_context_parallel_size",
            ranks=ranks,
            decode_context_parallel_size=dcp,
        )
    return ranks // dcp


def _mesh(devices: Sequence[jax.Device], shape: dict[str, int]) -> Mesh:
    grid = np.asarray(devices).reshape(tuple(shape.values()))
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def padded(width: int, ranks: int) -> int:
    """The least multiple of ``ranks`` from ``width`` on; the rest is zeros, which is exact."""
    return math.ceil(width / ranks) * ranks
