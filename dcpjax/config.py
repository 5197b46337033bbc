"""Frozen settings and their validation. Knows nothing about arrays or devices.

Every field of :class:`EngineConfig` is also an option of ``dcpjax serve`` and a keyword of
:class:`dcpjax.LLM`; its help text and spellings stand in the field's metadata, once.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args, get_origin

from dcpjax.errors import ConfigError, MeshError, UnsupportedCombination

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)`` while an engine loads and compiles."""

DTypeName = Literal["auto", "float32", "bfloat16"]
CommBackend = Literal["ag_rs", "a2a"]
PrefillGather = Literal["none", "q"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "gpu"]


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
    prefill_context_parallel_size: int = _option(
        1, "ranks that share the prompt's tokens; only 1 is there yet", "-pcp"
    )
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
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not has_type(value, item.type):
                rule = f"{item.name} is {type_words(item.type)}"
                raise ConfigError(rule, **{item.name: value})
            if item.type in (int, int | None) and item.name != "seed":
                _COUNT.check(self, item.name)
        _SEED.check(self, "seed")
        _FILLED.check(self, "model")
        self._check_context_parallelism()
        self._check_step_size()

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

    def _check_step_size(self) -> None:
        stripe = self.decode_context_parallel_size * self.cp_kv_cache_interleave_size
        if stripe > self.max_num_batched_tokens:
            raise ConfigError(
                "max_num_batched_tokens is at least decode_context_parallel_size times "
                "cp_kv_cache_interleave_size, the least that gives every rank as many tokens",
                max_num_batched_tokens=self.max_num_batched_tokens,
                decode_context_parallel_size=self.decode_context_parallel_size,
                cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
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
