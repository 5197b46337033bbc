"""The named tensors of a checkpoint: which there must be, and those a source has.

Names and orientation ([out, in]) are those of Hugging Face; other sources translate to them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from dcpjax.config import GlmConfig, LlamaConfig, ModelConfig
from dcpjax.errors import CheckpointError
from dcpjax.models.glm_tensors import DRAFT_COPIES, draft_tensors, glm_layer_tensors

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MAX_NAMES_SHOWN = 8

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of one source.

    ``read(name)`` returns one of them as it is stored (quantised ones as float32), memory-mapped
    where the file allows it; it may be called from several threads. ``dtype`` is the stored type of
    the matrices: "float32", "bfloat16" or "float16".
    """

    shapes: Shapes
    read: Callable[[str], np.ndarray]
    dtype: str


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, in the order of computation."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: vocabulary}
    for layer in range(config.num_layers):
        shapes |= _in_layer(layer, _layer_tensors(config, layer))
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = vocabulary
    if has_draft_layer(config):
        draft = draft_tensors(config) | glm_layer_tensors(config, config.num_layers)
        shapes |= _in_layer(config.num_layers, draft)
    return shapes


def has_draft_layer(config: ModelConfig) -> TypeGuard[GlmConfig]:
    """Whether there is a layer ``num_layers`` that drafts."""
    return isinstance(config, GlmConfig) and config.num_draft_layers > 0


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _in_layer(layer: int, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {layer_prefix(layer) + name: shape for name, shape in shapes.items()}


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if isinstance(config, GlmConfig):
        return glm_layer_tensors(config, layer)
    return _llama_layer_tensors(config)


def _llama_layer_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
    }
    if config.has_qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if config.has_qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    return shapes | {
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }


def check_tensors(found: Shapes, config: ModelConfig) -> None:
    """Compare the tensors of a source with those that the model needs.

    Raises:
        CheckpointError: some are missing, of another shape, or not understood; all three lists are
            in the one error, each with its number and its first names.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not _is_harmless(name, config)]
    wrong = [
        f"{name} {tuple(found[name])} instead of {shape}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    problems = {"missing": missing, "unknown": unknown, "wrong_shape": wrong}
    if any(problems.values()):
        raise CheckpointError(
            f"the checkpoint has exactly the tensors of {config.architecture}",
            **{name: _shown(names) for name, names in problems.items() if names},
        )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Buffers that follow from the config, and second copies of embeddings and head."""
    if name == HEAD:
        return config.tie_word_embeddings
    prefix = layer_prefix(config.num_layers)
    is_copy = name in [prefix + copy for copy in DRAFT_COPIES]
    return (is_copy and has_draft_layer(config)) or name.endswith("rotary_emb.inv_freq")


def _shown(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"{len(names)}: {', '.join(names[:MAX_NAMES_SHOWN])}{rest}"
