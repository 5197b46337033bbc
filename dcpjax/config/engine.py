"""All settings of one engine.

Every field of :class:`EngineConfig` is also an option of ``dcpjax serve`` and a keyword of
:class:`dcpjax.LLM`; its help text and spellings stand in the field's metadata, once.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from dcpjax.config.attention import AttentionConfig
from dcpjax.config.checks import COUNT, FILLED, SEED, check_types
from dcpjax.config.distributed import DistributedConfig
from dcpjax.config.pcp_rules import check_pcp, check_without_pcp
from dcpjax.config.process_rules import check_processes
from dcpjax.config.speculative import SpeculativeConfig
from dcpjax.config.transfer import KVTransferConfig
from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination

DTypeName = Literal["auto", "float32", "bfloat16"]
CommBackend = Literal["ag_rs", "a2a"]
PrefillGather = Literal["auto", "none", "q", "kv"]
PrefillKV = Literal["auto", "replicated", "sharded", "layer_split"]
Residency = Literal["replicated", "sharded", "layer_split"]
LoadFormat = Literal["auto", "dummy"]
IndexKV = Literal["sharded", "replicated"]
Device = Literal["auto", "cpu", "gpu", "neuron"]
KVDTypeName = Literal[
    "auto", "float32", "bfloat16", "fp8", "float8_e4m3fn", "float8_e4m3", "fp8_ds_mla"
]
StepFormName = Literal["auto", "dynamic", "static", "unrolled"]

_OTHER_NUMBERS = ("seed", "node_rank", "master_port")
"""Integers that may be 0, or whose rule stands elsewhere."""

_OBJECTS = {
    "kv_transfer_config": KVTransferConfig,
    "speculative_config": SpeculativeConfig,
    "attention_config": AttentionConfig,
}
"""Settings that are objects with settings of their own."""


def _option(default: Any, help: str, *flags: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, "flags": flags, **extra})


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. Construction validates everything that needs no model."""

    model: str = field(metadata={"help": "folder, .gguf file or known name", "argument": True})
    dtype: DTypeName = _option(
        "auto", "type of weights and activations; auto: float32 on CPU, the checkpoint's elsewhere"
    )
    kv_cache_dtype: KVDTypeName = _option(
        "auto",
        "type of cached keys and values; auto: as --dtype, fp8: float8_e4m3fn (Trn2: float8_e4m3), "
        "fp8_ds_mla: latents and indexer keys in 8 bits with scales",
    )
    tensor_parallel_size: int = _option(
        1, "ranks that share the weights, DCP ranks included", "-tp"
    )
    decode_context_parallel_size: int = _option(
        1,
        "ranks that share the tokens of each sequence; divides the tensor parallel size. With PCP: "
        "1, the PCP size, or that times the tensor parallel size",
        "-dcp",
    )
    prefill_context_parallel_size: int = _option(
        1, "ranks that share the computation of a prompt, each with all weights", "-pcp"
    )
    prefill_kv: PrefillKV = _option(
        "auto",
        "what PCP ranks keep: all of the cache, their share of the tokens (DCP over PCP ranks), or "
        "their layers; auto: sharded with DCP, else replicated",
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
        "auto",
        "none: each rank computes all tokens of a chunk; q: tokens split, queries gathered; kv: "
        "tokens split, the cache gathered (PCP with a sharded cache); auto: kv there, else none",
    )
    index_kv: IndexKV = _option(
        "sharded",
        "keys of a sparse model's indexer; replicated: whole on every DCP rank, for one exchange "
        "less in each layer that chooses",
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
        None,
        "how KV is handed to or taken from other engines, as JSON: '{\"kv_role\": …}'. "
        '"pipelined_sends": true offers a prompt when its computation begins',
    )
    speculative_config: SpeculativeConfig | None = _option(
        None,
        "verify several proposed tokens per step, as JSON: "
        '\'{"method": "ngram", "num_speculative_tokens": 3}\' proposes what followed before',
    )
    attention_config: AttentionConfig | None = _option(
        None,
        "how attention is computed, as JSON: '{\"sparse_mla_force_mqa\": true}' reads latents as "
        "they are in prompts too, instead of keys and values made from them",
    )
    apply_prefill_dcp: bool = _option(
        False, "order the ranks as a prefill engine with DCP on Neuron does: DCP is the slow axis"
    )
    nnodes: int = _option(
        1, "processes of this engine; each runs this command with a node rank of its own"
    )
    node_rank: int = _option(0, "which process this is; 0 schedules and serves, the others follow")
    master_addr: str = _option("127.0.0.1", "address of process 0, where the others find it")
    master_port: int = _option(29501, "port of process 0 for the others")

    def __post_init__(self) -> None:
        check_types(self)
        for item in dataclasses.fields(self):
            if item.type in (int, int | None) and item.name not in _OTHER_NUMBERS:
                COUNT.check(self, item.name)
        SEED.check(self, "seed")
        FILLED.check(self, "model")
        self._check_context_parallelism()
        self._check_step_size()
        self._check_prefill_order()
        self._check_processes()

    def _check_context_parallelism(self) -> None:
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if self.prefill_context_parallel_size > 1:
            check_pcp(self)
        elif tp % dcp:
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
        for name, value in (("dcp_comm_backend", "a2a"), ("prefill_gather", "q")):
            if getattr(self, name) == value and dcp == 1:
                raise UnsupportedCombination(
                    f"{name}={value!r} exchanges between DCP ranks, so it needs "
                    "decode_context_parallel_size > 1",
                    decode_context_parallel_size=dcp,
                )
        if self.prefill_context_parallel_size == 1:
            check_without_pcp(self)

    def _check_prefill_order(self) -> None:
        transfer = self.kv_transfer_config
        if self.apply_prefill_dcp and (transfer is None or transfer.kv_role != "kv_producer"):
            raise UnsupportedCombination(
                "apply_prefill_dcp orders the ranks for prefill alone, so it needs a "
                "kv_transfer_config with kv_role='kv_producer'",
                kv_role=None if transfer is None else transfer.kv_role,
            )

    def _check_processes(self) -> None:
        """What several processes cannot do yet, and ranks that do not come out even."""
        self.distributed.local_ranks(self.num_ranks)
        if not self.distributed.is_alone:
            check_processes(self)

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
    def distributed(self) -> DistributedConfig:
        """The processes of this engine."""
        names = (item.name for item in dataclasses.fields(DistributedConfig))
        return DistributedConfig(**{name: getattr(self, name) for name in names})

    @property
    def interleave(self) -> int:
        """I: consecutive tokens that stay on one DCP rank."""
        if self.cp_kv_cache_interleave_size is not None:
            return self.cp_kv_cache_interleave_size
        is_transferred = self.kv_transfer_config is not None
        return self.block_size if is_transferred and self.decode_context_parallel_size > 1 else 1

    @property
    def drafts_with_model(self) -> bool:
        """Whether the model's own draft layer is used."""
        return self.speculative_config is not None and self.speculative_config.method == "mtp"

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine, a device each."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    @property
    def weight_dcp(self) -> int:
        """DCP ranks among those that share the weights; the others are PCP ranks."""
        pcp = self.prefill_context_parallel_size
        return max(1, self.decode_context_parallel_size // pcp)

    @property
    def head_groups(self) -> int:
        """G: ranks of the mesh axis "tp", each of which holds its own heads."""
        return self.tensor_parallel_size // self.weight_dcp

    @property
    def page_ranks(self) -> int:
        """Ranks of a head group that have pages of their own: other tokens or layers, or copies."""
        return self.weight_dcp * self.prefill_context_parallel_size

    @property
    def residency(self) -> Residency | None:
        """What PCP ranks keep of a sequence; None without PCP."""
        if self.prefill_context_parallel_size == 1:
            return None
        if self.prefill_kv != "auto":
            return self.prefill_kv
        return "sharded" if self.decode_context_parallel_size > 1 else "replicated"

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
        for name, kind in _OBJECTS.items():
            value = settings.get(name)
            if isinstance(value, Mapping):
                settings[name] = kind.from_settings(cast(Mapping[str, Any], value))
        return cls(model=model, **settings)
