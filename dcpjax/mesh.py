"""Devices as a mesh, and which mesh axis splits which logical axis. Knows nothing about models.

An engine that prefills and decodes uses :func:`decode_mesh`: rank = tp index · DCP + dcp index.
A producer that splits prompts the Neuron way uses :func:`prefill_mesh`, where DCP is the slow axis.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dcpjax.errors import LayoutError, MeshError
from dcpjax.layout import head_group, heads_per_rank

TP = "tp"
DCP = "dcp"
ALL_RANKS = (TP, DCP)

LOGICAL_AXES: dict[str, str | tuple[str, ...] | None] = {
    "vocab": ALL_RANKS,
    "ffn": ALL_RANKS,
    "experts": ALL_RANKS,
    "q_heads": ALL_RANKS,
    "group_q_heads": TP,  # prefill_gather="q" keeps the attention weights whole on each DCP rank
    "kv_heads": TP,
    "pages": DCP,
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


def find_devices(count: int, platform: str | None = None) -> list[jax.Device]:
    """The first ``count`` devices. On CPU, virtual devices are made when none is in use yet.

    Raises:
        MeshError: there are fewer devices, or none of the platform.
    """
    if platform in (None, "cpu"):
        _request_cpu_devices(count)
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise MeshError(
            "JAX finds devices of the platform: its plugin is installed, and JAX_PLATFORMS, where "
            "it is set, names it",
            platform=platform,
            why=str(error),
        ) from error
    if len(devices) < count:
        raise MeshError(
            "the tensor parallel size is at most the number of devices"
            + (
                "; on CPU set XLA_FLAGS=--xla_force_host_platform_device_count before JAX starts"
                if devices[0].platform == "cpu"
                else ""
            ),
            tensor_parallel_size=count,
            num_devices=len(devices),
            platform=devices[0].platform,
        )
    return devices[:count]


def _request_cpu_devices(count: int) -> None:
    """Ask for virtual CPU devices; JAX refuses once a backend is up, and then there is no need."""
    is_set = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    num_devices = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if is_set or num_devices >= count:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # devices exist already: find_devices says whether they are enough


def decode_mesh(devices: Sequence[jax.Device], dcp: int) -> Mesh:
    """Mesh ("tp", "dcp") of all ``devices``; consecutive ranks share the tokens of a sequence."""
    return _mesh(devices, mesh_axes(len(devices), dcp, prefill_order=False))


def prefill_mesh(devices: Sequence[jax.Device], dcp: int) -> Mesh:
    """Mesh ("dcp", "tp") of all ``devices``: ranks that are far apart share tokens (producers)."""
    return _mesh(devices, mesh_axes(len(devices), dcp, prefill_order=True))


def mesh_axes(ranks: int, dcp: int, *, prefill_order: bool) -> dict[str, int]:
    """Axes of :func:`prefill_mesh` or :func:`decode_mesh` with their sizes, the slow one first."""
    groups = _num_groups(ranks, dcp)
    return {DCP: dcp, TP: groups} if prefill_order else {TP: groups, DCP: dcp}


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


@dataclass(frozen=True)
class HeadLayout:
    """Where query and KV heads go on a mesh of ``groups`` × ``dcp`` ranks.

    A group holds whole KV heads, or with more groups than heads a copy of one (see
    :func:`dcpjax.layout.head_group`); its query heads are split over its DCP ranks. Where that
    does not come out even, each KV head gets zero query heads at its end, which is exact: their
    output meets zero rows of the output projection.

    Raises:
        MeshError: neither of KV heads and groups divides the other, a count below 1, or query heads
            that are no multiple of the KV heads.
    """

    num_heads: int
    num_kv_heads: int
    groups: int
    dcp: int

    def __post_init__(self) -> None:
        try:
            heads_per_rank(self.groups * self.dcp, self.dcp, self.num_kv_heads)
        except LayoutError as error:  # here it is a setting that is wrong
            raise MeshError(error.rule, **error.values) from error
        if self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise MeshError(
                "the number of query heads is a multiple of the number of KV heads",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
            )

    @property
    def copies(self) -> int:
        """Groups that hold the same KV head."""
        return max(1, self.groups // self.num_kv_heads)

    @property
    def group_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.groups)

    @cached_property
    def queries_per_kv_head(self) -> int:
        """Query heads per KV head held by a group, zeros included."""
        share = math.ceil(self.num_heads // self.num_kv_heads / self.copies)
        while share * self.group_kv_heads % self.dcp:
            share += 1
        return share

    @property
    def group_heads(self) -> int:
        """Query heads of a group, zeros included."""
        return self.group_kv_heads * self.queries_per_kv_head

    @cached_property
    def kv_head_source(self) -> np.ndarray:
        """For each placed KV head [groups · group_kv_heads]: the model's."""
        ranks = self.groups * self.dcp
        groups = [head_group(ranks, self.dcp, self.num_kv_heads, g) for g in range(self.groups)]
        return np.concatenate([np.arange(start, stop) for start, stop in groups])

    @cached_property
    def q_head_source(self) -> np.ndarray:
        """For each placed query head [groups · group_heads]: the model's, −1 for zeros."""
        real = self.num_heads // self.num_kv_heads
        place = np.arange(self.copies * self.queries_per_kv_head)
        of_kv_head = np.where(place < real, place, -1)
        rows = []
        for index, kv_head in enumerate(self.kv_head_source):
            copy = index % self.copies if self.copies > 1 else 0
            start = copy * self.queries_per_kv_head
            share = of_kv_head[start : start + self.queries_per_kv_head]
            rows.append(np.where(share >= 0, kv_head * real + share, -1))
        return np.concatenate(rows)
