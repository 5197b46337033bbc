"""The config.json of a Hugging Face folder as a ModelConfig.

A key of config.json is read, must have the one value that changes nothing, or is known to be
harmless; any other key is refused, since it may change what the model computes.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcpjax.config import LlamaConfig, ModelConfig, RopeScaling, has_type
from dcpjax.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
STORED_TYPES = ("float32", "bfloat16", "float16")

_READ = frozenset(
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling "
    "rope_parameters eos_token_id bos_token_id dtype torch_dtype "
    "use_sliding_window sliding_window".split()
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "model_type": ("llama", "qwen2", "qwen3"),
    "attention_bias": (False, None),  # Llama's and Qwen3's switch; Qwen2 always has biases
    "mlp_bias": (False, None),
    "tie_word_embeddings": (True, False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_llama_config": (True,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
_HARMLESS = frozenset(
    "_name_or_path _attn_implementation_autoset attention_dropout attn_implementation "
    "chunk_size_feed_forward finetuning_task id2label initializer_range is_decoder label2id "
    "max_length max_sequence_length max_window_layers output_attentions output_hidden_states "
    "pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id "
    "task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torchscript "
    "transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version "
    "use_bfloat16 use_cache".split()
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


def read_config(source: Path) -> tuple[ModelConfig, str]:
    """The model's config, and the stored type that config.json names.

    Args:
        source: a folder with a config.json, or such a file alone.

    Raises:
        CheckpointError: config.json is missing, broken, or has something not understood.
    """
    folder = source.parent if source.is_file() else source
    path = source if source.is_file() else folder / "config.json"
    values = _read_json(path)
    architecture = _architecture(values)
    _check_keys(values, architecture)
    generation = folder / "generation_config.json"
    more = _read_json(generation) if source.is_dir() and generation.is_file() else {}
    heads = _integer(values, "num_attention_heads")
    hidden = _integer(values, "hidden_size")
    # Where it is left out, Llama has a key head per query head and Qwen a fixed number.
    kv_default = heads if architecture == "LlamaForCausalLM" else None
    config = LlamaConfig(
        architecture=architecture,
        vocab_size=_integer(values, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_layers=_integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(values, "num_key_value_heads", kv_default),
        head_dim=_head_dim(values, architecture, hidden, heads),
        max_position_embeddings=_integer(values, "max_position_embeddings"),
        rms_norm_eps=_number(values, "rms_norm_eps"),
        rope_theta=_rope_theta(values),
        rope_scaling=_rope_scaling(values),
        tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        has_qkv_bias=architecture == "Qwen2ForCausalLM",
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=tuple(
            dict.fromkeys(_token_ids(values, "eos_token_id") + _token_ids(more, "eos_token_id"))
        ),
        bos_token_id=next(iter(_token_ids(values, "bos_token_id")), None),
    )
    return config, _named_dtype(values)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError("the file cannot be read", path=str(path)) from error
    except ValueError as error:  # broken JSON or broken UTF-8
        raise CheckpointError("the file is valid JSON", path=str(path), found=str(error)) from error
    if not isinstance(values, dict):
        raise CheckpointError("the file is a JSON object", path=str(path), found=type(values))
    return values


def _architecture(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"architectures in config.json is one of {', '.join(ARCHITECTURES)}",
            architectures=names,
        )
    return names[0]


def _check_keys(values: Mapping[str, Any], architecture: str) -> None:
    refused: dict[str, Any] = {}
    for key, value in values.items():
        if key in _FIXED:
            if value not in _FIXED[key]:
                refused[key] = value
        elif key == "layer_types":
            if value is not None and not _has_full_attention_only(value):
                refused[key] = value
        elif key not in _READ | _HARMLESS:
            refused[key] = value
    if _has_sliding_window(values, architecture):
        refused["sliding_window"] = values["sliding_window"]
    if refused:
        raise CheckpointError("config.json has settings that are not understood", settings=refused)


def _has_full_attention_only(layer_types: Any) -> bool:
    return isinstance(layer_types, list) and set(map(str, layer_types)) <= {"full_attention"}


def _has_sliding_window(values: Mapping[str, Any], architecture: str) -> bool:
    """Qwen names a window and switches it off; other models that name one use it."""
    if architecture.startswith("Qwen"):
        return bool(values.get("use_sliding_window")) and bool(values.get("sliding_window"))
    return bool(values.get("sliding_window"))


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{key} in config.json is a number", **{key: value})
    if not abs(value) <= sys.float_info.max:  # nor is NaN
        raise CheckpointError(f"{key} in config.json is a finite number", **{key: value})
    return float(value)


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _number(values, key, default)
    if value != int(value):
        raise CheckpointError(f"{key} in config.json is an integer", **{key: value})
    return int(value)


def _head_dim(values: Mapping[str, Any], architecture: str, hidden: int, heads: int) -> int:
    if values.get("head_dim") is not None:
        return _integer(values, "head_dim")
    if architecture == "Qwen3ForCausalLM":  # its default is a constant, not a quotient
        return 128
    if heads < 1 or hidden % heads:
        raise CheckpointError(
            "num_attention_heads divides hidden_size where head_dim is not given",
            hidden_size=hidden,
            num_attention_heads=heads,
        )
    return hidden // heads


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the older key ``rope_scaling`` or the newer ``rope_parameters`` says."""
    older, newer = values.get("rope_scaling"), values.get("rope_parameters")
    if older and newer and older != newer:
        raise CheckpointError(
            "rope_scaling and rope_parameters say the same",
            rope_scaling=older,
            rope_parameters=newer,
        )
    rope = newer or older or {}
    if not isinstance(rope, dict):
        raise CheckpointError("rope settings are a JSON object", found=rope)
    return rope


def _rope_theta(values: Mapping[str, Any]) -> float:
    rope = _rope(values)
    return _number(rope if "rope_theta" in rope else values, "rope_theta", 10000.0)


def _rope_scaling(values: Mapping[str, Any]) -> RopeScaling | None:
    rope = _rope(values)
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = _ROPE_KEYS.get(kind) if isinstance(kind, str) else None
    if known is None or set(rope) - known - {"rope_type", "type", "rope_theta"}:
        raise CheckpointError("rope settings are of type default, linear or llama3", rope=rope)
    if kind == "linear":
        return RopeScaling("linear", _number(rope, "factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            _number(rope, "factor"),
            _number(rope, "low_freq_factor"),
            _number(rope, "high_freq_factor"),
            _integer(rope, "original_max_position_embeddings"),
        )
    return None


def _token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    ids = values.get(key)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(has_type(token, int) and token >= 0 for token in ids):
        raise CheckpointError(f"{key} is a token id or a list of token ids", **{key: ids})
    return tuple(ids)


def _named_dtype(values: Mapping[str, Any]) -> str:
    name = values.get("dtype") or values.get("torch_dtype") or "float32"
    if name not in STORED_TYPES:
        raise CheckpointError(f"dtype in config.json is one of {STORED_TYPES}", dtype=name)
    return name
