"""Frozen settings and their validation. Knows nothing about arrays or devices.

Every field of :class:`EngineConfig` is also an option of ``dcpjax serve`` and a keyword of
:class:`dcpjax.LLM`; its help text and spellings stand in the field's metadata, once.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination

DTypeName = Literal["auto", "float32", "bfloat16"]
CommBackend = Literal["ag_rs", "a2a"]
PrefillGather = Literal["none", "q"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "gpu"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. ``kind`` is "linear" or "llama3"."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError("the rope scaling factor is at least 1", factor=self.factor)


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
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 1", **{name: getattr(self, name)})
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "the number of query heads is a multiple of the number of KV heads",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
            )
        if self.head_dim % 2:
            raise ConfigError("rotary embedding needs an even head size", head_dim=self.head_dim)


def _option(default: Any, help: str, *flags: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, "flags": flags, **extra})


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. Construction validates everything that needs no model."""

    model: str = field(metadata={"help": "folder, .gguf file or known name", "argument": True})
    dtype: DTypeName = _option(
        "auto", "type of weights and activations; auto: float32 on CPU, the checkpoint's elsewhere"
    )
    kv_cache_dtype: DTypeName = _option("auto", "type of cached keys and values; auto: as --dtype")
    tensor_parallel_size: int = _option(
        1, "ranks that share the weights, DCP ranks included", "-tp"
    )
    decode_context_parallel_size: int = _option(
        1, "ranks that share the tokens of each sequence; divides the tensor parallel size", "-dcp"
    )
    prefill_context_parallel_size: int = _option(1, "ranks that share the prompt's tokens", "-pcp")
    cp_kv_cache_interleave_size: int = _option(
        1, "consecutive tokens that stay on one DCP rank; divides the block size"
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
    seed: int = _option(0, "seed of sampling without a seed of its own, and of dummy weights")

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        self._check_context_parallelism()

    def _check_choices(self) -> None:
        choices = {
            "dtype": DTypeName,
            "kv_cache_dtype": DTypeName,
            "dcp_comm_backend": CommBackend,
            "prefill_gather": PrefillGather,
            "load_format": LoadFormat,
            "device": Device,
        }
        for name, literal in choices.items():
            value, allowed = getattr(self, name), get_args(literal)
            if value not in allowed:
                raise ConfigError(f"{name} is one of {', '.join(allowed)}", **{name: value})

    def _check_counts(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type in (int, "int", int | None) and item.name != "seed" and value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ConfigError(f"{item.name} is an integer of at least 1", value=value)

    def _check_context_parallelism(self) -> None:
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        if tp % dcp:
            raise MeshError(
                "tensor_parallel_size is a multiple of decode_context_parallel_size",
                tensor_parallel_size=tp,
                decode_context_parallel_size=dcp,
            )
        if self.block_size % self.cp_kv_cache_interleave_size:
            raise ConfigError(
                "cp_kv_cache_interleave_size divides block_size",
                cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
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
        """Build from keyword settings; a name that is not a setting is refused."""
        known = {item.name for item in dataclasses.fields(cls)} - {"model"}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
                known=sorted(known),
            )
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
    interleave, page = config.cp_kv_cache_interleave_size, config.block_size
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
