"""Values of a config.json, checked one by one, and which keys may stand in it at all.

A key of config.json is read, must have the one value that changes nothing, or is known to be
harmless; any other key is refused, since it may change what the model computes.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcpjax.config import has_type
from dcpjax.errors import CheckpointError

Values = Mapping[str, Any]
STORED_TYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class KeyRules:
    """Which keys may stand in a JSON object.

    Attributes:
        read: the reader looks at them.
        fixed: they have one of these values, none of which changes anything.
        harmless: they never change what the model computes.
    """

    read: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    harmless: frozenset[str] = frozenset()

    def __or__(self, more: "KeyRules") -> "KeyRules":
        return KeyRules(
            self.read | more.read, {**self.fixed, **more.fixed}, self.harmless | more.harmless
        )

    def refused(self, values: Values) -> dict[str, Any]:
        """What of ``values`` breaks the rules."""
        return {key: value for key, value in values.items() if not self._allow(key, value)}

    def _allow(self, key: str, value: Any) -> bool:
        if key in self.fixed:
            return value in self.fixed[key]
        return key in self.read or key in self.harmless


DECODER_KEYS = KeyRules(
    read=frozenset(
        "architectures vocab_size hidden_size intermediate_size num_hidden_layers "
        "num_attention_heads num_key_value_heads max_position_embeddings rms_norm_eps rope_theta "
        "rope_scaling rope_parameters eos_token_id bos_token_id dtype torch_dtype".split()
    ),
    fixed={
        "hidden_act": ("silu",),
        "mlp_bias": (False, None),
        "tie_word_embeddings": (True, False, None),
        "partial_rotary_factor": (1, None),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "pruned_heads": ({}, None),
    },
    harmless=frozenset(
        "_name_or_path _attn_implementation_autoset attention_dropout attn_implementation "
        "chunk_size_feed_forward finetuning_task id2label initializer_range is_decoder label2id "
        "max_length max_sequence_length output_attentions output_hidden_states pad_token_id prefix "
        "pretraining_tp problem_type return_dict sep_token_id task_specific_params tf_legacy_loss "
        "tie_encoder_decoder tokenizer_class torchscript transformers.js_config "
        "transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 "
        "use_cache".split()
    ),
)
"""Of every decoder; the families add their own."""


def refuse(settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError for settings that are not understood, where there are any."""
    if settings:
        raise CheckpointError("config.json has settings that are not understood", settings=settings)


def has_only(kinds: Any, allowed: str) -> bool:
    """Whether ``kinds`` is None or a list of ``allowed`` alone."""
    return kinds is None or (isinstance(kinds, list) and set(map(str, kinds)) <= {allowed})


def number(values: Values, key: str, default: float | None = None) -> float:
    """A finite number; ``default`` where it is left out or null.

    Raises:
        CheckpointError: it is something else, or needed and not there.
    """
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{key} in config.json is a number", **{key: value})
    if not abs(value) <= sys.float_info.max:  # nor is NaN
        raise CheckpointError(f"{key} in config.json is a finite number", **{key: value})
    return float(value)


def integer(values: Values, key: str, default: int | None = None) -> int:
    """As :func:`number`, and integral."""
    value = number(values, key, default)
    if value != int(value):
        raise CheckpointError(f"{key} in config.json is an integer", **{key: value})
    return int(value)


def boolean(values: Values, key: str, default: bool | None = None) -> bool:
    """As :func:`number`, true or false."""
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} in config.json is true or false", **{key: value})
    return value


def token_ids(values: Values, key: str) -> tuple[int, ...]:
    """One token id or several, none where it is left out."""
    ids = values.get(key)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(has_type(token, int) and token >= 0 for token in ids):
        raise CheckpointError(f"{key} is a token id or a list of token ids", **{key: ids})
    return tuple(ids)


def rope_settings(values: Values) -> Values:
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


def rope_kind(rope: Values, known: Mapping[str, frozenset[str]]) -> str:
    """The type of rope settings; ``known`` has the further keys of each type."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = known.get(kind) if isinstance(kind, str) else None
    if keys is None or set(rope) - keys - {"rope_type", "type", "rope_theta"}:
        words = {name: sorted(more) for name, more in known.items()}
        raise CheckpointError("rope settings are of a known type", rope=rope, known=words)
    return kind


def rope_theta(values: Values) -> float:
    rope = rope_settings(values)
    return number(rope if "rope_theta" in rope else values, "rope_theta", 10000.0)


def named_dtype(values: Values) -> str:
    """The stored type. That of a quantised model is bfloat16: in it is what was not converted."""
    default = "bfloat16" if values.get("quantization_config") else "float32"
    name = values.get("dtype") or values.get("torch_dtype") or default
    if name not in STORED_TYPES:
        raise CheckpointError(f"dtype in config.json is one of {STORED_TYPES}", dtype=name)
    return name
