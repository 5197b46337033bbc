"""What is refused before a transfer library is loaded."""

import socket
from dataclasses import replace

import pytest

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_backends import check_fabric
from dcpjax.errors import ConfigError
from dcpjax.models.checkpoint import open_checkpoint
from tests.engine.serving import engine_of
from tests.golden.tiny import write_tiny_model


@pytest.mark.parametrize("environ", [{}, {"FI_EFA_ENABLE_SHM_TRANSFER": "1"}])
def test_shared_memory_of_libfabric_is_refused(environ):
    fabric = KVTransferConfig("kv_producer", "NeuronNixlConnector", backends=("LIBFABRIC",))
    with pytest.raises(ConfigError, match="FI_EFA_ENABLE_SHM_TRANSFER=0"):
        check_fabric(fabric, environ)
    check_fabric(fabric, {"FI_EFA_ENABLE_SHM_TRANSFER": "0"})
    check_fabric(KVTransferConfig("kv_producer"), environ)


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_a_port_that_is_taken_is_refused_before_anything_is_compiled(role, tmp_path):
    checkpoint = open_checkpoint(str(write_tiny_model(tmp_path, "gqa")))
    untouched = replace(checkpoint, read=lambda name: pytest.fail(f"{name} is read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        transfer = {"kv_role": role, "kv_connector": "InProcessConnector", "kv_port": port}
        with pytest.raises(ConfigError, match="can listen at its address") as caught:
            engine_of(untouched, kv_transfer_config=transfer)
    assert caught.value.values["port"] == port
