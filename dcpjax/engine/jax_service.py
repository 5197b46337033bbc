"""JAX's own service, through which the processes of an engine find each other's devices."""

import os

import jax

from dcpjax.config import DistributedConfig
from dcpjax.engine.relay import Relay
from dcpjax.errors import ConfigError

_PREEMPTION = "jax_enable_preemption_service"
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_PROXY = "no_grpc_proxy"


class JaxService:
    """One process's part: the leader's has the service itself."""

    def __init__(self, config: DistributedConfig) -> None:
        self._config = config
        self._relay: Relay | None = None
        self.is_entered = False

    def enter(self, coordinator: str) -> None:
        """Take part; returns when all processes do.

        A follower goes through a relay: JAX would end it without a word to the user when the leader
        is gone.

        Raises:
            ConfigError: JAX was used before in this process.
        """
        config, address = self._config, coordinator
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of CPUs alone
        if _PREEMPTION in jax.config.values:
            jax.config.update(_PREEMPTION, False)  # it would keep SIGTERM from ending this process
        if not config.is_leader:
            host, _, port = coordinator.rpartition(":")
            self._relay = Relay(host.strip("[]"), int(port))
            address = self._relay.address
            _reach_without_proxy(address)
        try:
            jax.distributed.initialize(
                address,
                config.nnodes,
                config.node_rank,
                cluster_detection_method="deactivate",
                coordinator_bind_address=coordinator if config.is_leader else None,
            )
        except RuntimeError as error:
            raise ConfigError(
                "JAX can start several processes: nothing of it was used before in this one",
                coordinator=coordinator,
                why=str(error)[:500],
            ) from error
        self.is_entered = True

    def leave(self) -> None:
        """End it; returns when all processes do."""
        jax.distributed.shutdown()
        self.is_entered = False
        if self._relay is not None:
            self._relay.close()


def _reach_without_proxy(address: str) -> None:
    """A proxy of this environment would be asked for the relay too."""
    if not any(name in os.environ for name in _PROXIES):
        return
    host = address.rpartition(":")[0]
    names = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    os.environ[_NO_PROXY] = f"{names},{host}" if names else host
