"""The named tensors of a Llama-family checkpoint: which there must be, and those a source has.

Names and orientation ([out, in]) are those of Hugging Face; other sources translate to them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dcpjax.config import LlamaConfig, ModelConfig
from dcpjax.errors import CheckpointError

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
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    assert isinstance(config, LlamaConfig)
    layer = _layer_tensors(config)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_tensors(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
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
    """Buffers that follow from the config, and a second copy of tied embeddings."""
    is_second_copy = name == HEAD and config.tie_word_embeddings
    return is_second_copy or name.endswith("rotary_emb.inv_freq")


def _shown(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    rest = f" and {more} more" if more > 0 else ""
    return f"{len(names)}: {', '.join(names[:MAX_NAMES_SHOWN])}{rest}"
