"""Which tensors of a Llama-family checkpoint fill which parameter of :class:`Llama`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dcpjax.config import LlamaConfig
from dcpjax.models.sharding import Sharding
from dcpjax.models.sources import Arrange, Source, as_stored, side_by_side, take_heads, transposed


def qkv_head_source(layout: Sharding) -> np.ndarray:
    """For each placed head of the joint projection: which of all heads [q | k | v], −1 for zeros.

    Share after share: its query heads, its group's key heads, its group's value heads.
    """
    heads = layout.heads
    queries = heads.q_head_source.reshape(layout.q_shares, layout.share_q_heads)
    by_group = heads.kv_head_source.reshape(heads.groups, heads.group_kv_heads)
    kv_heads = np.repeat(by_group, layout.q_shares // heads.groups, axis=0)
    keys = heads.num_heads + kv_heads
    return np.concatenate([queries, keys, keys + heads.num_kv_heads], axis=1).reshape(-1)


def _projections(
    tensors: Sequence[np.ndarray], config: LlamaConfig, layout: Sharding
) -> np.ndarray:
    """Queries, keys, values [heads · D, E] to [E, placed heads, D]; biases to [placed heads, D]."""
    joint = np.concatenate(tensors)
    by_head = joint.reshape(-1, config.head_dim, *joint.shape[1:])
    placed = take_heads(by_head, qkv_head_source(layout))
    return placed if joint.ndim == 1 else placed.transpose(2, 0, 1)


def _output_heads(
    tensors: Sequence[np.ndarray], config: LlamaConfig, layout: Sharding
) -> np.ndarray:
    """[E, H · D] to [placed heads, D, E]."""
    (tensor,) = tensors
    by_head = tensor.T.reshape(config.num_heads, config.head_dim, -1)
    return take_heads(by_head, layout.heads.q_head_source)


_TOP: dict[tuple[str, ...], str] = {
    ("embedding", "weight"): "model.embed_tokens.weight",
    ("norm", "weight"): "model.norm.weight",
    ("head", "weight"): "lm_head.weight",
}


def _layer_parameters(
    config: LlamaConfig, layout: Sharding
) -> dict[tuple[str, ...], tuple[tuple[str, ...], Arrange]]:
    """Of each parameter of a layer: the tensors, and how they become it."""
    projections = partial(_projections, config=config, layout=layout)
    return {
        ("attention_norm", "weight"): (("input_layernorm.weight",), as_stored),
        ("attention", "qkv"): (
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
            projections,
        ),
        ("attention", "qkv_bias"): (
            ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
            projections,
        ),
        ("attention", "q_norm", "weight"): (("self_attn.q_norm.weight",), as_stored),
        ("attention", "k_norm", "weight"): (("self_attn.k_norm.weight",), as_stored),
        ("attention", "o"): (
            ("self_attn.o_proj.weight",),
            partial(_output_heads, config=config, layout=layout),
        ),
        ("mlp_norm", "weight"): (("post_attention_layernorm.weight",), as_stored),
        ("mlp", "gate_up"): (("mlp.gate_proj.weight", "mlp.up_proj.weight"), side_by_side),
        ("mlp", "down"): (("mlp.down_proj.weight",), transposed),
    }


def llama_source(path: tuple[Any, ...], config: LlamaConfig, layout: Sharding) -> Source:
    """What fills the parameter at ``path`` of a :class:`Llama`."""
    if path[0] not in ("layers", "stack"):
        return Source(((_TOP[path],),), as_stored)
    is_stacked = path[0] == "stack"
    layers = range(config.num_layers) if is_stacked else (path[1],)
    names, arrange = _layer_parameters(config, layout)[path[1:] if is_stacked else path[2:]]
    by_layer = (tuple(f"model.layers.{layer}.{name}" for name in names) for layer in layers)
    return Source(tuple(by_layer), arrange, (config.num_layers,) if is_stacked else ())
