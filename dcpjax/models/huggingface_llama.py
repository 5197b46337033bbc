"""The config.json of the Llama family (Llama 2/3, SmolLM2, Qwen2, Qwen3) as a LlamaConfig."""

from collections.abc import Mapping

from dcpjax.config import LlamaConfig, RopeScaling
from dcpjax.errors import CheckpointError
from dcpjax.models.config_values import (
    DECODER_KEYS,
    KeyRules,
    Values,
    has_only,
    integer,
    number,
    refuse,
    rope_kind,
    rope_settings,
    rope_theta,
)

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_KEYS = DECODER_KEYS | KeyRules(
    read=frozenset({"head_dim", "use_sliding_window", "sliding_window", "layer_types"}),
    fixed={
        "model_type": ("llama", "qwen2", "qwen3"),
        "attention_bias": (False, None),  # Llama's and Qwen3's switch; Qwen2 always has biases
        "rope_interleaved": (False, None),
        "use_mrope": (False, None),
        "is_llama_config": (True,),
        "quantization_config": (None,),
    },
    harmless=frozenset({"max_window_layers"}),
)
_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        }
    ),
}


def read_llama(values: Values) -> LlamaConfig:
    """The model that ``values`` describe, without its special tokens.

    Raises:
        CheckpointError: there is something not understood.
    """
    architecture = values["architectures"][0]
    _check_keys(values, architecture)
    heads = integer(values, "num_attention_heads")
    hidden = integer(values, "hidden_size")
    # Where it is left out, Llama has a key head per query head and Qwen a fixed number.
    kv_default = heads if architecture == "LlamaForCausalLM" else None
    return LlamaConfig(
        architecture=architecture,
        vocab_size=integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(values, "intermediate_size"),
        num_layers=integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=integer(values, "num_key_value_heads", kv_default),
        head_dim=_head_dim(values, architecture, hidden, heads),
        max_position_embeddings=integer(values, "max_position_embeddings"),
        rms_norm_eps=number(values, "rms_norm_eps"),
        rope_theta=rope_theta(values),
        rope_scaling=_rope_scaling(values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        has_qkv_bias=architecture == "Qwen2ForCausalLM",
        has_qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _check_keys(values: Values, architecture: str) -> None:
    refused = _KEYS.refused(values)
    if not has_only(values.get("layer_types"), "full_attention"):
        refused["layer_types"] = values["layer_types"]
    if _has_sliding_window(values, architecture):
        refused["sliding_window"] = values["sliding_window"]
    refuse(refused)


def _has_sliding_window(values: Values, architecture: str) -> bool:
    """Qwen names a window and switches it off; other models that name one use it."""
    if architecture.startswith("Qwen"):
        return bool(values.get("use_sliding_window")) and bool(values.get("sliding_window"))
    return bool(values.get("sliding_window"))


def _head_dim(values: Values, architecture: str, hidden: int, heads: int) -> int:
    if values.get("head_dim") is not None:
        return integer(values, "head_dim")
    if architecture == "Qwen3ForCausalLM":  # its default is a constant, not a quotient
        return 128
    if heads < 1 or hidden % heads:
        raise CheckpointError(
            "num_attention_heads divides hidden_size where head_dim is not given",
            hidden_size=hidden,
            num_attention_heads=heads,
        )
    return hidden // heads


def _rope_scaling(values: Values) -> RopeScaling | None:
    rope = rope_settings(values)
    kind = rope_kind(rope, _ROPE_KEYS)
    if kind == "linear":
        return RopeScaling("linear", number(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            number(rope, "factor"),
            number(rope, "low_freq_factor"),
            number(rope, "high_freq_factor"),
            integer(rope, "original_max_position_embeddings"),
        )
    return None
