"""Checkpoint tensors to placed parameters: which tensor fills which, in which order of heads."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dcpjax.config import ModelConfig, Progress
from dcpjax.mesh import HeadLayout, partition
from dcpjax.models.checkpoint import Checkpoint
from dcpjax.models.llama import Llama, Sharding

Arrange = Callable[[np.ndarray, ModelConfig, HeadLayout], np.ndarray]


def _as_stored(tensor: np.ndarray, config: ModelConfig, heads: HeadLayout) -> np.ndarray:
    return tensor


def _transposed(tensor: np.ndarray, config: ModelConfig, heads: HeadLayout) -> np.ndarray:
    return tensor.T


def _take_heads(by_head: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Heads [heads, ...] in the order of ``source``, zeros where it is negative."""
    zero = np.zeros_like(by_head[:1])
    return np.concatenate([by_head, zero])[np.where(source < 0, len(by_head), source)]


def _query_heads(tensor: np.ndarray, config: ModelConfig, heads: HeadLayout) -> np.ndarray:
    """[H · D, E] to [E, placed heads, D]; a bias [H · D] to [placed heads, D]."""
    by_head = tensor.reshape(config.num_heads, config.head_dim, *tensor.shape[1:])
    placed = _take_heads(by_head, heads.q_head_source)
    return placed if tensor.ndim == 1 else placed.transpose(2, 0, 1)


def _kv_heads(tensor: np.ndarray, config: ModelConfig, heads: HeadLayout) -> np.ndarray:
    by_head = tensor.reshape(config.num_kv_heads, config.head_dim, *tensor.shape[1:])
    placed = by_head[heads.kv_head_source]
    return placed if tensor.ndim == 1 else placed.transpose(2, 0, 1)


def _output_heads(tensor: np.ndarray, config: ModelConfig, heads: HeadLayout) -> np.ndarray:
    """[E, H · D] to [placed heads, D, E]."""
    by_head = tensor.T.reshape(config.num_heads, config.head_dim, -1)
    return _take_heads(by_head, heads.q_head_source)


_TOP: dict[tuple[str, ...], tuple[str, Arrange]] = {
    ("embedding", "weight"): ("model.embed_tokens.weight", _as_stored),
    ("norm", "weight"): ("model.norm.weight", _as_stored),
    ("head", "weight"): ("lm_head.weight", _as_stored),
}
_LAYER: dict[tuple[str, ...], tuple[str, Arrange]] = {
    ("attention_norm", "weight"): ("input_layernorm.weight", _as_stored),
    ("attention", "q"): ("self_attn.q_proj.weight", _query_heads),
    ("attention", "k"): ("self_attn.k_proj.weight", _kv_heads),
    ("attention", "v"): ("self_attn.v_proj.weight", _kv_heads),
    ("attention", "q_bias"): ("self_attn.q_proj.bias", _query_heads),
    ("attention", "k_bias"): ("self_attn.k_proj.bias", _kv_heads),
    ("attention", "v_bias"): ("self_attn.v_proj.bias", _kv_heads),
    ("attention", "q_norm", "weight"): ("self_attn.q_norm.weight", _as_stored),
    ("attention", "k_norm", "weight"): ("self_attn.k_norm.weight", _as_stored),
    ("attention", "o"): ("self_attn.o_proj.weight", _output_heads),
    ("mlp_norm", "weight"): ("post_attention_layernorm.weight", _as_stored),
    ("mlp", "gate"): ("mlp.gate_proj.weight", _transposed),
    ("mlp", "up"): ("mlp.up_proj.weight", _transposed),
    ("mlp", "down"): ("mlp.down_proj.weight", _transposed),
}


def _source(path: tuple[Any, ...]) -> tuple[str, Arrange]:
    """Name and arrangement of the tensor that fills the parameter at ``path``."""
    if path[0] != "layers":
        return _TOP[path]
    name, arrange = _LAYER[path[2:]]
    return f"model.layers.{path[1]}.{name}", arrange


@dataclass(frozen=True)
class PlacedModel:
    """A model's structure, and its placed parameters as a flat tuple, cheap to pass on."""

    graph: nnx.GraphDef[Llama]
    tree: jax.tree_util.PyTreeDef
    parameters: tuple[Array, ...]
    partitions: tuple[PartitionSpec, ...]

    def merge(self, parameters: tuple[Array, ...]) -> Llama:
        """The module over these parameters, for example one rank's shares inside ``shard_map``."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, parameters))


def place_model(
    checkpoint: Checkpoint,
    layout: Sharding,
    mesh: Mesh,
    dtype: DTypeLike,
    progress: Progress | None = None,
) -> PlacedModel:
    """Read every tensor once, arrange and pad it, and put each rank's share on its device."""
    config = checkpoint.config
    model = nnx.eval_shape(lambda: Llama(config, layout, dtype))
    graph, state = nnx.split(model)
    entries = nnx.to_flat_state(state)
    filled = []
    for count, (path, parameter) in enumerate(entries, start=1):
        name, arrange = _source(path)
        tensor = _pad(arrange(checkpoint.read(name), config, layout.heads), parameter.shape)
        place = NamedSharding(mesh, partition(*parameter.get_metadata("axes")))
        array = jax.device_put(np.ascontiguousarray(tensor, dtype=dtype), place)
        filled.append((path, parameter.replace(array)))
        if progress is not None:
            progress("load", count, len(entries))
    leaves, tree = jax.tree.flatten(nnx.from_flat_state(filled))
    return PlacedModel(graph, tree, tuple(leaves), tuple(leaf.sharding.spec for leaf in leaves))


def _pad(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros at the end of each axis, up to ``shape``."""
    if tensor.shape == shape:
        return tensor
    return np.pad(
        tensor, [(0, full - have) for have, full in zip(tensor.shape, shape, strict=True)]
    )


def random_weights(checkpoint: Checkpoint, seed: int) -> Checkpoint:
    """The checkpoint with random tensors, the same for a name and seed on every mesh."""

    def read(name: str) -> np.ndarray:
        shape = checkpoint.shapes[name]
        if name.endswith("norm.weight"):
            return np.ones(shape, np.float32)
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    return replace(checkpoint, read=read, dtype="float32")
