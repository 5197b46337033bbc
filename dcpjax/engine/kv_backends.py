"""Which transfer backend a ``kv_connector`` means. The libraries are imported when one is used."""

from dcpjax.config import KVTransferConfig
from dcpjax.transfer.backend import InProcessBackend, InProcessFabric, TransferBackend

PROCESS_FABRIC = InProcessFabric()
"""Of the InProcessConnector: its reach is the process, and so is the life of this."""


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
