"""What is refused before a transfer library is loaded."""

import pytest

from dcpjax.config import KVTransferConfig
from dcpjax.engine.kv_backends import check_fabric
from dcpjax.errors import ConfigError


@pytest.mark.parametrize("environ", [{}, {"FI_EFA_ENABLE_SHM_TRANSFER": "1"}])
def test_shared_memory_of_libfabric_is_refused(environ):
    fabric = KVTransferConfig("kv_producer", "NeuronNixlConnector", backends=("LIBFABRIC",))
    with pytest.raises(ConfigError, match="FI_EFA_ENABLE_SHM_TRANSFER=0"):
        check_fabric(fabric, environ)
    check_fabric(fabric, {"FI_EFA_ENABLE_SHM_TRANSFER": "0"})
    check_fabric(KVTransferConfig("kv_producer"), environ)
