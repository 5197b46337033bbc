"""The devices of an engine: which they are, as what mesh, and what they have."""

import os

import jax
from jax.sharding import Mesh

from dcpjax.config import EngineConfig
from dcpjax.config.neuron_settings import check_process
from dcpjax.mesh import decode_mesh, find_devices, pcp_mesh, prefill_mesh


def find_mesh(config: EngineConfig) -> Mesh:
    """The first devices that there are, as many as the settings ask for.

    Raises:
        MeshError: there are fewer.
        ConfigError: the environment of this process is not what Neuron needs.
    """
    platform = None if config.device == "auto" else config.device
    devices = find_devices(config.num_ranks, platform, num_processes=config.nnodes)
    if devices[0].platform == "neuron":
        check_process(os.environ)
    if config.apply_prefill_dcp:
        return prefill_mesh(devices, config.decode_context_parallel_size)
    if config.residency is not None:
        return pcp_mesh(devices, config.prefill_context_parallel_size, config.weight_dcp)
    return decode_mesh(devices, config.decode_context_parallel_size)


def fp8_of(device: jax.Device) -> str:
    """The 8-bit type that the device has. Trn2 (``NC_v3``) has the one with infinities."""
    is_trn2 = device.platform == "neuron" and device.device_kind.startswith("NC_v3")
    return "float8_e4m3" if is_trn2 else "float8_e4m3fn"
