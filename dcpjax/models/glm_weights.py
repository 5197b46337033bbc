"""Which tensors of a GLM-5 or DeepSeek-V3 checkpoint fill which parameter of :class:`Glm`.

Rotary columns are put in half-split order, whatever the checkpoint has: a rotation then turns
column i with column i + half, and as queries and keys are reordered alike, no score changes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dcpjax.config import GlmConfig
from dcpjax.models.sharding import Sharding
from dcpjax.models.sources import Arrange, Source, as_stored, side_by_side, take_heads, transposed
from dcpjax.models.tensors import EMBEDDING, FINAL_NORM, HEAD, layer_prefix

_Arrangement = tuple[tuple[str, ...], Arrange]
_Path = tuple[Any, ...]

_TOP: dict[_Path, str] = {
    ("embedding", "weight"): EMBEDDING,
    ("norm", "weight"): FINAL_NORM,
    ("head", "weight"): HEAD,
}
_DRAFT: dict[_Path, _Arrangement] = {
    ("embedding_norm", "weight"): (("enorm.weight",), as_stored),
    ("hidden_norm", "weight"): (("hnorm.weight",), as_stored),
    ("projection",): (("eh_proj.weight",), transposed),
    ("norm", "weight"): (("shared_head.norm.weight",), as_stored),
}
_GATE_UP: _Arrangement = (("gate_proj.weight", "up_proj.weight"), side_by_side)
_DOWN: _Arrangement = (("down_proj.weight",), transposed)


def glm_source(path: _Path, config: GlmConfig, layout: Sharding) -> Source:
    """What fills the parameter at ``path`` of a :class:`Glm`."""
    if path[0] == "layers":
        return _layer_source(path[2:], path[1], config, layout)
    if path[:2] == ("draft", "layer"):
        return _layer_source(path[2:], config.num_layers, config, layout)
    if path[0] == "draft":
        return _source(_DRAFT[path[1:]], layer_prefix(config.num_layers))
    return _source(((_TOP[path],), as_stored), "")


def _layer_source(path: _Path, layer: int, config: GlmConfig, layout: Sharding) -> Source:
    prefix = layer_prefix(layer)
    if path[0] == "indexer":
        return _source(_indexer_parameters(config)[path[1:]], f"{prefix}self_attn.indexer.")
    if path[0] == "mlp":
        return _mlp_source(path[1:], layer, config)
    if path[0] == "attention":
        arrangement = _attention_parameters(config, layout)[path[1:]]
        return _source(arrangement, f"{prefix}self_attn.")
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return _source(((f"{norms[path[0]]}.weight",), as_stored), prefix)


def _source(arrangement: _Arrangement, prefix: str) -> Source:
    names, arrange = arrangement
    return Source((tuple(prefix + name for name in names),), arrange)


def _mlp_source(path: _Path, layer: int, config: GlmConfig) -> Source:
    """Of a dense MLP, of the router and the shared expert, or of all routed experts in a stack."""
    prefix = f"{layer_prefix(layer)}mlp."
    if path[0] == "router":
        name = {"weight": "gate.weight", "bias": "gate.e_score_correction_bias"}[path[1]]
        return _source(((name,), as_stored), prefix)
    arrangement = {"gate_up": _GATE_UP, "down": _DOWN}[path[-1]]
    if path[0] == "shared":
        return _source(arrangement, f"{prefix}shared_experts.")
    if config.experts is None or not config.has_experts(layer):
        return _source(arrangement, prefix)
    count = config.experts.num_experts
    experts = [_source(arrangement, f"{prefix}experts.{expert}.") for expert in range(count)]
    return Source(tuple(expert.names[0] for expert in experts), arrangement[1], (count,))


def _attention_parameters(config: GlmConfig, layout: Sharding) -> dict[_Path, _Arrangement]:
    """Of each parameter of the attention: the tensors, and how they become it."""
    by_head = partial(_by_head, config=config, layout=layout)
    rope = _rope_order(config.qk_rope_head_dim, config.is_rope_interleaved)
    query_order = _after(config.qk_nope_head_dim, rope)
    latent_order = _after(config.kv_lora_rank, rope)
    nope = config.qk_nope_head_dim
    return {
        ("q_a",): (("q_a_proj.weight",), transposed),
        ("q_a_norm", "weight"): (("q_a_layernorm.weight",), as_stored),
        ("q_b",): (
            ("q_b_proj.weight",),
            lambda tensors: by_head(tensors)[:, query_order].transpose(2, 0, 1),
        ),
        ("kv_a",): (("kv_a_proj_with_mqa.weight",), lambda tensors: tensors[0][latent_order].T),
        ("kv_a_norm", "weight"): (("kv_a_layernorm.weight",), as_stored),
        ("k_b",): (("kv_b_proj.weight",), lambda tensors: by_head(tensors)[:, :nope]),
        ("v_b",): (
            ("kv_b_proj.weight",),
            lambda tensors: by_head(tensors)[:, nope:].transpose(0, 2, 1),
        ),
        ("o",): (("o_proj.weight",), lambda tensors: by_head([tensors[0].T])),
    }


def _by_head(tensors: Sequence[np.ndarray], config: GlmConfig, layout: Sharding) -> np.ndarray:
    """[H · N, E] to [placed heads, N, E]."""
    (tensor,) = tensors
    by_head = tensor.reshape(config.num_heads, -1, tensor.shape[-1])
    return take_heads(by_head, layout.heads.q_head_source)


def _indexer_parameters(config: GlmConfig) -> dict[_Path, _Arrangement]:
    """Of each parameter of an indexer: the tensors, and how they become it."""
    indexer = config.indexer
    assert indexer is not None
    rope = _rope_order(config.qk_rope_head_dim, indexer.is_rope_interleaved)
    order = np.concatenate([rope, np.arange(len(rope), indexer.head_dim)])

    def ordered(tensors: Sequence[np.ndarray]) -> np.ndarray:
        return tensors[0][order]

    def ordered_heads(tensors: Sequence[np.ndarray]) -> np.ndarray:
        by_head = tensors[0].reshape(indexer.num_heads, indexer.head_dim, -1)
        return by_head[:, order].transpose(2, 0, 1)

    return {
        ("q_b",): (("wq_b.weight",), ordered_heads),
        ("k",): (("wk.weight",), lambda tensors: ordered(tensors).T),
        ("k_norm", "weight"): (("k_norm.weight",), ordered),
        ("k_norm", "bias"): (("k_norm.bias",), ordered),
        ("weights",): (("weights_proj.weight",), transposed),
    }


def _rope_order(width: int, is_interleaved: bool) -> np.ndarray:
    """The stored rotary columns in half-split order: neighbours 0 1 2 3 as 0 2 1 3."""
    columns = np.arange(width)
    return np.concatenate([columns[0::2], columns[1::2]]) if is_interleaved else columns


def _after(width: int, order: np.ndarray) -> np.ndarray:
    """``order`` of columns that come after ``width`` others."""
    return np.concatenate([np.arange(width), width + order])
