"""The shape of a model."""

import math
from dataclasses import dataclass
from typing import Literal

from dcpjax.config.checks import COUNT, POSITIVE
from dcpjax.errors import ConfigError


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
        POSITIVE.check(self, "low_freq_factor", "high_freq_factor")
        COUNT.check(self, "original_max_position")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "low_freq_factor is below high_freq_factor",
                low_freq_factor=self.low_freq_factor,
                high_freq_factor=self.high_freq_factor,
            )


@dataclass(frozen=True)
class LlamaConfig:
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
        COUNT.check(self, "vocab_size", "hidden_size", "intermediate_size", "num_layers")
        COUNT.check(self, "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")
        POSITIVE.check(self, "rms_norm_eps", "rope_theta")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "the number of query heads is a multiple of the number of KV heads",
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
            )
        if self.head_dim % 2:
            raise ConfigError("rotary embedding needs an even head size", head_dim=self.head_dim)
