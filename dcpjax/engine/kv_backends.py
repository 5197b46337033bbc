"""Which transfer backend a ``kv_connector`` means. The libraries are imported when one is used."""

import os
from collections.abc import Mapping

from dcpjax.config import EngineConfig, KVTransferConfig, ModelConfig, broken_neuron_rules
from dcpjax.config.neuron_settings import require, shared_memory
from dcpjax.transfer.backend import InProcessBackend, InProcessFabric, TransferBackend
from dcpjax.transfer.side_channel import check_free

PROCESS_FABRIC = InProcessFabric()
"""Of the InProcessConnector: its reach is the process, and so is the life of this."""


def prepare_backend(
    config: EngineConfig, model: ModelConfig, engine_id: str, platform: str
) -> TransferBackend | None:
    """The backend of an engine that transfers KV. Before anything is loaded: it may be refused.

    Raises:
        MeshError: the connector is Neuron's and the settings break its rules.
        ConfigError: the environment makes the library's transfers wrong, or the address of the side
            channel is taken.
        TransferError: the library is not installed or does not start.
    """
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    if transfer.kv_connector == "NeuronNixlConnector":
        for error in broken_neuron_rules(config, model, transfers_kv=True):
            raise error
    check_fabric(transfer, os.environ)
    if transfer.is_producer and config.distributed.is_leader:
        check_free(transfer.kv_ip, transfer.kv_port)
    return make_backend(transfer, engine_id, platform)


def check_fabric(config: KVTransferConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where libfabric would take a way that gives wrong KV.

    ``python -m neuron.environment --transfer`` shows all else that EFA and Neuron want.
    """
    if "LIBFABRIC" in config.backends:
        require([shared_memory(environ)])


def make_backend(config: KVTransferConfig, engine_id: str, platform: str) -> TransferBackend:
    """The backend of one engine.

    Args:
        platform: of the devices that hold the cache, as JAX names it.

    Raises:
        TransferError: its library is not installed or does not start.
    """
    match config.kv_connector:
        case "InProcessConnector":
            return InProcessBackend(PROCESS_FABRIC, engine_id)
        case "MooncakeConnector":
            from dcpjax.transfer.mooncake import MooncakeBackend

            return MooncakeBackend(host=config.host)
        case "NixlConnector" | "NeuronNixlConnector":
            from dcpjax.transfer.nixl import NixlBackend

            memory = "DRAM" if platform == "cpu" else "VRAM"
            return NixlBackend(mem_type=memory, plugins=config.backends)
