"""How an engine hands KV to other engines or takes it from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from dcpjax.config.checks import FILLED, PORT, POSITIVE, check_names, check_types, type_words
from dcpjax.errors import ConfigError

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVConnector = Literal[
    "NixlConnector", "NeuronNixlConnector", "MooncakeConnector", "InProcessConnector"
]
KVBufferDevice = Literal["auto", "cpu", "cuda"]
LoadFailurePolicy = Literal["fail", "recompute"]

_ALL_ADDRESSES = ("0.0.0.0", "::")


@dataclass(frozen=True)
class KVTransferConfig:
    """How an engine hands KV to other engines or takes it from them.

    The names are those of vLLM's ``--kv-transfer-config``; what it puts into
    ``kv_connector_extra_config`` are plain fields here, all times in seconds.

    Attributes:
        kv_role: kv_producer computes prompts for others, kv_consumer goes on with them.
        engine_id: how the identity of this process begins; the rest is new for each start.
        kv_load_failure_policy: what happens to a request whose KV cannot be loaded.
        kv_ip, kv_port: where the side channel listens; port 0 is any free one.
        kv_buffer_device: memory that other engines read and write: cuda, the devices' own (whatever
            they are); cpu, the host's, through which pages are copied; auto, cpu in the static
            form (Neuron), whose steps are not proven to leave the pool in place.
        advertised_ip: address that other engines use, default ``kv_ip``.
        backends: NIXL plugins, e.g. UCX, or LIBFABRIC for EFA.
        kv_lease_duration: for how long pages are kept for an engine that does not ask again.
        kv_lease_extension: what each of its heartbeats adds at least, counted from then.
        kv_wait_timeout: a request that has waited for room for longer gives its KV up.
        transfer_timeout: a transfer that takes longer has failed.
        pipelined_sends: a producer offers a prompt when it begins to compute it, to whom asks for
            that, and its finished chunks move while it computes the next ones.
    """

    kv_role: KVRole
    kv_connector: KVConnector = "NixlConnector"
    engine_id: str | None = None
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    kv_buffer_device: KVBufferDevice = "auto"
    advertised_ip: str | None = None
    backends: tuple[str, ...] = ("UCX",)
    kv_lease_duration: float = 30.0
    kv_lease_extension: float = 20.0
    heartbeat_interval: float = 5.0
    kv_wait_timeout: float = 300.0
    transfer_timeout: float = 60.0
    pipelined_sends: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        FILLED.check(self, "engine_id", "kv_ip", "advertised_ip", "backends")
        POSITIVE.check(self, "kv_lease_duration", "kv_lease_extension", "heartbeat_interval")
        POSITIVE.check(self, "kv_wait_timeout", "transfer_timeout")
        PORT.check(self, "kv_port")
        if self.host in _ALL_ADDRESSES:
            raise ConfigError(
                "other engines need an address to find this one: set advertised_ip where kv_ip is "
                "all of a host's",
                kv_ip=self.kv_ip,
                advertised_ip=self.advertised_ip,
            )
        if self.heartbeat_interval >= self.kv_lease_extension:
            raise ConfigError(
                "heartbeat_interval is below kv_lease_extension",
                heartbeat_interval=self.heartbeat_interval,
                kv_lease_extension=self.kv_lease_extension,
            )

    @property
    def is_producer(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def is_read(self) -> bool:
        """Whether consumers read the memory of producers; else producers write into theirs."""
        return self.kv_connector in ("NixlConnector", "NeuronNixlConnector")

    @property
    def host(self) -> str:
        """Where other engines find this one."""
        return self.advertised_ip or self.kv_ip

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "KVTransferConfig":
        """Build from a JSON object; a name that is not a setting is refused."""
        named = dict(settings)
        extra: object = named.pop("kv_connector_extra_config", None) or {}
        if not isinstance(extra, Mapping):
            raise ConfigError("kv_connector_extra_config is an object", value=extra)
        named.update(cast(Mapping[str, Any], extra))
        check_names(cls, named, "KV transfer")
        if "kv_role" not in named:
            raise ConfigError(f"kv_transfer_config needs a kv_role: {type_words(KVRole)}")
        if isinstance(named.get("backends"), list):
            named["backends"] = tuple(named["backends"])
        return cls(**named)
