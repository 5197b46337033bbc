"""Frozen settings and their validation. Knows nothing about arrays or devices.

Every field of :class:`EngineConfig` is also an option of ``dcpjax serve`` and a keyword of
:class:`dcpjax.LLM`; its help text and spellings stand in the field's metadata, once.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args, get_origin

from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` while an engine loads and compiles."""

DTypeName = Literal["auto", "float32", "bfloat16"]
CommBackend = Literal["ag_rs", "a2a"]
PrefillGather = Literal["none", "q"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "gpu", "neuron"]
KVDTypeName = Literal["auto", "float32", "bfloat16", "fp8", "float8_e4m3fn", "float8_e4m3"]
StepFormName = Literal["auto", "dynamic", "static", "unrolled"]
KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
KVConnector = Literal[
    "NixlConnector", "NeuronNixlConnector", "MooncakeConnector", "InProcessConnector"
]
LoadFailurePolicy = Literal["fail", "recompute"]


def has_type(value: Any, annotation: Any) -> bool:
    """Whether a value is what a field's annotation says. No bool is a number, an int is a float.

    Args:
        annotation: a class, a Literal of strings, a union, or a tuple type.
    """
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is types.UnionType:
        return any(has_type(value, part) for part in parts)
    if kind is tuple:
        items = cast(tuple[Any, ...], value) if isinstance(value, tuple) else None
        if items is None:
            return False
        wanted = parts[:1] * len(items) if parts[-1] is Ellipsis else parts
        return len(items) == len(wanted) and all(map(has_type, items, wanted))
    if isinstance(value, bool):
        return annotation is bool
    return isinstance(value, int | float if annotation is float else annotation)


def check_types(settings: Any) -> None:
    """Raise ConfigError for the first field of a dataclass whose value has another type."""
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if not has_type(value, item.type):
            rule = f"{item.name} is {type_words(item.type)}"
            raise ConfigError(rule, **{item.name: value})


def type_words(annotation: Any) -> str:
    """What :func:`has_type` asks for, as the end of a sentence."""
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"of type {name}"


@dataclass(frozen=True)
class _Rule:
    """What holds for the value of a setting, and the same in words."""

    holds: Callable[[Any], bool]
    words: str

    def check(self, settings: Any, *names: str) -> None:
        for name in names:
            value = getattr(settings, name)
            if value is not None and not self.holds(value):
                raise ConfigError(f"{name} is {self.words}", **{name: value})


_COUNT = _Rule(lambda value: value >= 1, "at least 1")
_SEED = _Rule(lambda value: 0 <= value < 2**63, "in [0, 2**63)")
_FILLED = _Rule(bool, "not empty")
_PORT = _Rule(lambda value: 0 <= value <= 65535, "in [0, 65535], 0 for any free one")
_POSITIVE = _Rule(lambda value: 0 < value < math.inf, "a finite number above 0")  # NaN is not


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. ``kind`` is "linear" or "llama3"."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ConfigError(
                "the rope scaling factor is a finite number of at least 1", factor=self.factor
            )
        _POSITIVE.check(self, "low_freq_factor", "high_freq_factor")
        _COUNT.check(self, "original_max_position")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "low_freq_factor is below high_freq_factor",
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder of the Llama family (Llama 2/3, SmolLM2, Qwen2, Qwen3)."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        _COUNT.check(self, "vocab_size", "hidden_size", "intermediate_size", "num_layers")
        _COUNT.check(self, "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")
        _POSITIVE.check(self, "rms_norm_eps", "rope_theta")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "the number of query heads is a multiple of the number of KV heads",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
            )
        if self.head_dim % 2:
            raise ConfigError("rotary embedding needs an even head size", head_dim=self.head_dim)


def _option(default: Any, help: str, *flags: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, "flags": flags, **extra})


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
        advertised_ip: address that other engines use, default ``kv_ip``.
        backends: NIXL plugins, e.g. UCX, or LIBFABRIC for EFA.
        kv_lease_duration: for how long pages are kept for an engine that does not ask again.
        kv_lease_extension: what each of its heartbeats adds at least, counted from then.
        transfer_timeout: a transfer that takes longer has failed.
    """

    kv_role: KVRole
    kv_connector: KVConnector = "NixlConnector"
    engine_id: str | None = None
    kv_load_failure_policy: LoadFailurePolicy = "fail"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 0
    advertised_ip: str | None = None
    backends: tuple[str, ...] = ("UCX",)
    kv_lease_duration: float = 30.0
    kv_lease_extension: float = 20.0
    heartbeat_interval: float = 5.0
    transfer_timeout: float = 60.0

    def __post_init__(self) -> None:
        check_types(self)
        _FILLED.check(self, "engine_id", "kv_ip", "advertised_ip", "backends")
        _POSITIVE.check(self, "kv_lease_duration", "kv_lease_extension", "heartbeat_interval")
        _POSITIVE.check(self, "transfer_timeout")
        _PORT.check(self, "kv_port")
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
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(set(named) - known):
            raise ConfigError(
                f"unknown KV transfer setting{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
                known=sorted(known),
            )
        if "kv_role" not in named:
            raise ConfigError(f"kv_transfer_config needs a kv_role: {type_words(KVRole)}")
        if isinstance(named.get("backends"), list):
            named["backends"] = tuple(named["backends"])
        return cls(**named)


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. Construction validates everything that needs no model."""

    model: str = field(metadata={"help": "folder, .gguf file or known name", "argument": True})
    dtype: DTypeName = _option(
        "auto", "type of weights and activations; auto: float32 on CPU, the checkpoint's elsewhere"
    )
    kv_cache_dtype: KVDTypeName = _option(
        "auto",
        "type of cached keys and values; auto: as --dtype, fp8: float8_e4m3fn (Trn2: float8_e4m3)",
    )
    tensor_parallel_size: int = _option(
        1, "ranks that share the weights, DCP ranks included", "-tp"
    )
    decode_context_parallel_size: int = _option(
        1, "ranks that share the tokens of each sequence; divides the tensor parallel size", "-dcp"
    )
    prefill_context_parallel_size: int = _option(
        1, "ranks that share the prompt's tokens; only 1 is there yet", "-pcp"
    )
    cp_kv_cache_interleave_size: int | None = _option(
        None,
        "consecutive tokens that stay on one DCP rank; divides the block size. Default: 1, and the "
        "block size where KV is transferred",
    )
    dcp_comm_backend: CommBackend = _option(
        "ag_rs", "exchange of partial attention: all-gather + reduce-scatter, or all-to-all"
    )
    prefill_gather: PrefillGather = _option(
        "none", "none: each rank computes all tokens of a chunk; q: tokens split, queries gathered"
    )
    block_size: int = _option(16, "tokens of one page of one rank")
    max_model_len: int | None = _option(None, "longest sequence; default: what the model allows")
    max_num_seqs: int = _option(16, "sequences computed at the same time")
    max_num_batched_tokens: int = _option(512, "prompt tokens computed in one step")
    num_pages: int | None = _option(
        None, "pages of the KV pool of each rank; default: by free memory"
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV of prompts with a common beginning")
    load_format: LoadFormat = _option("auto", "auto: read the checkpoint; dummy: random weights")
    skip_tokenizer_init: bool = _option(False, "token ids in, token ids out")
    device: Device = _option("auto", "where to run")
    step_form: StepFormName = _option(
        "auto",
        "how steps are compiled; static: as Neuron needs it, layers in a loop; unrolled: static "
        "without loops; dynamic: for CPUs and GPUs",
    )
    seed: int = _option(0, "seed of sampling without a seed of its own, and of dummy weights")
    kv_transfer_config: KVTransferConfig | None = _option(
        None, "how KV is handed to or taken from other engines, as JSON: '{\"kv_role\": …}'"
    )
    apply_prefill_dcp: bool = _option(
        False, "order the ranks as a prefill engine with DCP on Neuron does: DCP is the slow axis"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for item in dataclasses.fields(self):
            if item.type in (int, int | None) and item.name != "seed":
                _COUNT.check(self, item.name)
        _SEED.check(self, "seed")
        _FILLED.check(self, "model")
        self._check_context_parallelism()
        self._check_step_size()
        self._check_prefill_order()

    def _check_context_parallelism(self) -> None:
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if tp % dcp:
            raise MeshError(
                "tensor_parallel_size is a multiple of decode_context_parallel_size",
                tensor_parallel_size=tp,
                decode_context_parallel_size=dcp,
            )
        if self.block_size % self.interleave:
            raise ConfigError(
                "cp_kv_cache_interleave_size divides block_size",
                cp_kv_cache_interleave_size=self.interleave,
                block_size=self.block_size,
            )
        if self.dcp_comm_backend == "a2a" and dcp == 1:
            raise UnsupportedCombination(
                "dcp_comm_backend='a2a' exchanges between DCP ranks, so it needs "
                "decode_context_parallel_size > 1",
                decode_context_parallel_size=dcp,
            )
        if self.prefill_gather == "q" and dcp == 1:
            raise UnsupportedCombination(
                "prefill_gather='q' gathers over DCP ranks, so it needs "
                "decode_context_parallel_size > 1",
                decode_context_parallel_size=dcp,
            )
        if self.prefill_context_parallel_size != 1:
            raise UnsupportedCombination(
                "this version has no prefill context parallelism",
                prefill_context_parallel_size=self.prefill_context_parallel_size,
            )

    def _check_prefill_order(self) -> None:
        transfer = self.kv_transfer_config
        if self.apply_prefill_dcp and (transfer is None or transfer.kv_role != "kv_producer"):
            raise UnsupportedCombination(
                "apply_prefill_dcp orders the ranks for prefill alone, so it needs a "
                "kv_transfer_config with kv_role='kv_producer'",
                kv_role=None if transfer is None else transfer.kv_role,
            )

    def _check_step_size(self) -> None:
        stripe = self.decode_context_parallel_size * self.interleave
        if stripe > self.max_num_batched_tokens:
            raise ConfigError(
                "max_num_batched_tokens is at least decode_context_parallel_size times "
                "cp_kv_cache_interleave_size, the least that gives every rank as many tokens",
                max_num_batched_tokens=self.max_num_batched_tokens,
                decode_context_parallel_size=self.decode_context_parallel_size,
                cp_kv_cache_interleave_size=self.interleave,
            )

    @property
    def interleave(self) -> int:
        """I: consecutive tokens that stay on one DCP rank."""
        if self.cp_kv_cache_interleave_size is not None:
            return self.cp_kv_cache_interleave_size
        is_transferred = self.kv_transfer_config is not None
        return self.block_size if is_transferred and self.decode_context_parallel_size > 1 else 1

    @property
    def head_groups(self) -> int:
        """G: ranks of the mesh axis "tp", each of which holds its own heads."""
        return self.tensor_parallel_size // self.decode_context_parallel_size

    @property
    def virtual_page_size(self) -> int:
        """Tokens of a sequence that one page id stands for, over all DCP ranks."""
        return self.block_size * self.decode_context_parallel_size

    @classmethod
    def from_settings(cls, model: str, settings: dict[str, Any]) -> "EngineConfig":
        """Build from keyword settings; a name that is not a setting is refused.

        ``additional_config`` is an object with settings that other systems do not have as options
        of their own; here they are settings like all others.
        """
        settings = dict(settings)
        settings.update(settings.pop("additional_config", None) or {})
        known = {item.name for item in dataclasses.fields(cls)} - {"model"}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
                known=sorted(known),
            )
        transfer = settings.get("kv_transfer_config")
        if isinstance(transfer, Mapping):
            transfer = KVTransferConfig.from_settings(cast(Mapping[str, Any], transfer))
            settings["kv_transfer_config"] = transfer
        return cls(model=model, **settings)


def broken_neuron_rules(
    config: EngineConfig, model: ModelConfig, *, transfers_kv: bool = False
) -> list[MeshError]:
    """The rules of decode context parallelism on AWS Neuron that these settings break.

    Neuron keeps one copy of a KV head on each rank, shares its tokens among the ranks of that head
    and splits its query heads over them; our own meshes need none of this. Without DCP no rule
    applies. Two further rules hold for every engine and are refused earlier, see
    :class:`EngineConfig`: dcp divides tp, and the interleave divides the block size.

    Args:
        transfers_kv: the engine sends its cache to another engine or receives it.
    """
    tp, dcp = config.tensor_parallel_size, config.decode_context_parallel_size
    interleave, page = config.interleave, config.block_size
    kv_heads, heads = model.num_kv_heads, model.num_heads
    rules: list[tuple[bool, str, dict[str, int]]] = [
        (tp > kv_heads, "tp is larger than kv_heads", {"tp": tp, "kv_heads": kv_heads}),
        (
            dcp <= tp // kv_heads,
            "dcp is at most tp // kv_heads",
            {"dcp": dcp, "tp": tp, "kv_heads": kv_heads},
        ),
        (
            heads // kv_heads % dcp == 0,
            "q_heads // kv_heads is a multiple of dcp",
            {"q_heads": heads, "kv_heads": kv_heads, "dcp": dcp},
        ),
        (
            interleave == page or not transfers_kv,
            "an engine that transfers its cache has an interleave of the block size",
            {"interleave": interleave, "block_size": page},
        ),
    ]
    return [MeshError(rule, **values) for holds, rule, values in rules if not holds and dcp > 1]
