"""GGUF files: metadata to LlamaConfig, stored tensors to Hugging Face's names, order and types.

Architectures llama, qwen2 and qwen3. Keys of the architecture that are not understood are refused,
since they may change what the model computes; ``general.*`` describes the file and ``tokenizer.*``
belongs to the tokenizer.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from dcpjax.config import LlamaConfig, RopeScaling, has_type
from dcpjax.errors import CheckpointError
from dcpjax.gguf_file import GgufFile, GgufTensor, read_gguf, token_id
from dcpjax.models.rope_factors import scaling_from_factors
from dcpjax.models.tensors import EMBEDDING, FINAL_NORM, HEAD, StoredTensors

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
PLAIN_TYPES: Mapping[Kind, np.dtype] = {
    Kind.F32: np.dtype(np.float32),
    Kind.F16: np.dtype(np.float16),
    Kind.BF16: np.dtype(ml_dtypes.bfloat16),
}
QUANTISED_TYPES = frozenset({Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K})
ROPE_FACTORS = "rope_freqs.weight"

_GLOBAL_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

_READ = frozenset(
    "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length "
    "attention.value_length rope.freq_base rope.dimension_count rope.scaling.type "
    "rope.scaling.factor vocab_size".split()
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.finetuned": (True, False),  # says how it came about, not what it computes
}
_GENERAL_FIXED: Mapping[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "split.count": (0, 1),
}
_HARMLESS_SPACES = ("general.", "tokenizer.", "quantize.", "split.")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_config(path: Path) -> tuple[LlamaConfig, str]:
    """The model's config, and the stored type of its matrices (quantised: "float32").

    Raises:
        CheckpointError: the file is broken or has something not understood.
    """
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture is one of {', '.join(ARCHITECTURES)}", architecture=name
        )
    _check_keys(file.metadata, name)
    keys = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    heads = _integer(keys, "attention.head_count")
    head_dim = _head_dim(keys, heads)
    theta = _number(keys, "rope.freq_base", 10000.0)
    config = LlamaConfig(
        architecture=ARCHITECTURES[name],
        vocab_size=_vocab_size(file, keys),
        hidden_size=_integer(keys, "embedding_length"),
        intermediate_size=_integer(keys, "feed_forward_length"),
        num_layers=_integer(keys, "block_count"),
        num_heads=heads,
        num_kv_heads=_integer(keys, "attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=_integer(keys, "context_length"),
        rms_norm_eps=_number(keys, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, keys, head_dim, theta),
        tie_word_embeddings="output.weight" not in file.tensors,
        has_qkv_bias=name == "qwen2",
        has_qk_norm=name == "qwen3",
        eos_token_ids=_eos_token_ids(file.metadata),
        bos_token_id=token_id(file.metadata, "bos_token_id"),
    )
    return config, _stored_dtype(file)


def open_tensors(path: Path, config: LlamaConfig) -> StoredTensors:
    """The tensors of the file under Hugging Face's names; those not known keep their own.

    Raises:
        CheckpointError: the file is broken or stores a type that is not understood.
    """
    file = read_gguf(path)
    _check_types(file)
    tensors = {
        _hugging_face_name(name): tensor
        for name, tensor in file.tensors.items()
        if name != ROPE_FACTORS  # part of the config
    }
    interleaved_heads = _interleaved_heads(config)

    def read(name: str) -> np.ndarray:
        values = _read_values(path, tensors[name])
        heads = interleaved_heads.get(name.rpartition(".layers.")[2].partition(".")[2])
        return values if heads is None else _halves_from_pairs(values, heads)

    return StoredTensors(
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=read,
        dtype=_stored_dtype(file),
    )


def _check_keys(metadata: Mapping[str, Any], architecture: str) -> None:
    own = f"{architecture}."
    refused: dict[str, Any] = {}
    for key, value in metadata.items():
        allowed = _GENERAL_FIXED.get(key, _FIXED.get(key.removeprefix(own)))
        is_known = key.removeprefix(own) in _READ or key.startswith(_HARMLESS_SPACES)
        if (value not in allowed) if allowed is not None else not is_known:
            refused[key] = value
    if refused:
        raise CheckpointError(
            "the GGUF file has settings that are not understood", settings=refused
        )


def _number(keys: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = keys.get(key, default)
    if not has_type(value, float):
        raise CheckpointError("the setting of the GGUF file is a number", key=key, value=value)
    return float(value)


def _integer(keys: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = keys.get(key, default)
    if not has_type(value, int):
        raise CheckpointError("the setting of the GGUF file is an integer", key=key, value=value)
    return value


def _head_dim(keys: Mapping[str, Any], heads: int) -> int:
    hidden = _integer(keys, "embedding_length")
    head_dim = _integer(keys, "attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(keys, key, head_dim) != head_dim:
            raise CheckpointError(
                "keys, values and rotary embedding have the same width",
                key=key,
                value=keys[key],
                head_dim=head_dim,
            )
    return head_dim


def _vocab_size(file: GgufFile, keys: Mapping[str, Any]) -> int:
    embedding = file.tensors.get("token_embd.weight")
    return _integer(keys, "vocab_size", embedding.shape[0] if embedding else None)


def _rope_scaling(
    file: GgufFile, keys: Mapping[str, Any], head_dim: int, theta: float
) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise CheckpointError("rope.scaling.type is none or linear", kind=kind)
    factors = file.tensors.get(ROPE_FACTORS)
    if kind == "linear":
        if factors is not None:
            raise CheckpointError(f"{ROPE_FACTORS} is not combined with linear rope scaling")
        return RopeScaling("linear", _number(keys, "rope.scaling.factor"))
    if factors is None:
        return None
    if factors.shape != (head_dim // 2,) or factors.kind != Kind.F32:
        raise CheckpointError(
            f"{ROPE_FACTORS} has a float32 for each rotated pair",
            shape=factors.shape,
            kind=factors.kind.name,
            head_dim=head_dim,
        )
    return scaling_from_factors(_read_values(file.path, factors), head_dim, theta)


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [token_id(metadata, key) for key in _EOS_KEYS]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _check_types(file: GgufFile) -> None:
    refused = sorted(
        {tensor.kind.name for tensor in file.tensors.values()}
        - {kind.name for kind in {*PLAIN_TYPES, *QUANTISED_TYPES}}
    )
    if refused:
        known = sorted(kind.name for kind in {*PLAIN_TYPES, *QUANTISED_TYPES})
        raise CheckpointError(f"tensors are stored as {', '.join(known)}", found=refused)


def _stored_dtype(file: GgufFile) -> str:
    """The type of the matrices where they have one plain type; norms are always float32."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    kind = kinds.pop() if len(kinds) == 1 else Kind.F32
    return PLAIN_TYPES[kind].name if kind in PLAIN_TYPES else "float32"


def _hugging_face_name(name: str) -> str:
    layer = _LAYER_NAME.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    return _GLOBAL_NAMES.get(name, name)


def _interleaved_heads(config: LlamaConfig) -> Mapping[str, int]:
    """Matrices whose rows a "llama" file stores in another order, and their number of heads."""
    if config.architecture != ARCHITECTURES["llama"]:
        return {}
    return {
        "self_attn.q_proj.weight": config.num_heads,
        "self_attn.k_proj.weight": config.num_kv_heads,
    }


def _halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of interleaved rotary embedding, per head of D rows::

    stored  0 D/2 1 D/2+1 ... D/2-1 D-1      (rotated partners side by side)
    result  0 1 ... D/2-1 | D/2 ... D-1      (first halves, second halves)
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _read_values(path: Path, tensor: GgufTensor) -> np.ndarray:
    plain = PLAIN_TYPES.get(tensor.kind)
    if plain is not None:
        return np.asarray(np.memmap(path, plain, "r", tensor.offset, tensor.shape))
    row_bytes = tensor.num_bytes // math.prod(tensor.shape[:-1])
    blocks = np.memmap(path, np.uint8, "r", tensor.offset, (*tensor.shape[:-1], row_bytes))
    return dequantize(np.asarray(blocks), tensor.kind)
