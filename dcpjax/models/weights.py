"""Checkpoint tensors to placed parameters: which tensor fills which, in which order of heads."""

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dcpjax.config import ModelConfig, Progress
from dcpjax.mesh import partition
from dcpjax.models.checkpoint import Checkpoint
from dcpjax.models.llama import Llama, Sharding

Arrange = Callable[[Sequence[np.ndarray], ModelConfig, Sharding], np.ndarray]


def _as_stored(tensors: Sequence[np.ndarray], config: ModelConfig, layout: Sharding) -> np.ndarray:
    (tensor,) = tensors
    return tensor


def _transposed(tensors: Sequence[np.ndarray], config: ModelConfig, layout: Sharding) -> np.ndarray:
    (tensor,) = tensors
    return tensor.T


def _side_by_side(
    tensors: Sequence[np.ndarray], config: ModelConfig, layout: Sharding
) -> np.ndarray:
    """Several [N, E] to [E, several, N]."""
    return np.stack(tensors).transpose(2, 0, 1)


def _take_heads(by_head: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Heads [heads, ...] in the order of ``source``, zeros where it is negative."""
    zero = np.zeros_like(by_head[:1])
    return np.concatenate([by_head, zero])[np.where(source < 0, len(by_head), source)]


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
    tensors: Sequence[np.ndarray], config: ModelConfig, layout: Sharding
) -> np.ndarray:
    """Queries, keys, values [heads · D, E] to [E, placed heads, D]; biases to [placed heads, D]."""
    joint = np.concatenate(tensors)
    by_head = joint.reshape(-1, config.head_dim, *joint.shape[1:])
    placed = _take_heads(by_head, qkv_head_source(layout))
    return placed if joint.ndim == 1 else placed.transpose(2, 0, 1)


def _output_heads(
    tensors: Sequence[np.ndarray], config: ModelConfig, layout: Sharding
) -> np.ndarray:
    """[E, H · D] to [placed heads, D, E]."""
    (tensor,) = tensors
    by_head = tensor.T.reshape(config.num_heads, config.head_dim, -1)
    return _take_heads(by_head, layout.heads.q_head_source)


_TOP: dict[tuple[str, ...], tuple[tuple[str, ...], Arrange]] = {
    ("embedding", "weight"): (("model.embed_tokens.weight",), _as_stored),
    ("norm", "weight"): (("model.norm.weight",), _as_stored),
    ("head", "weight"): (("lm_head.weight",), _as_stored),
}
_LAYER: dict[tuple[str, ...], tuple[tuple[str, ...], Arrange]] = {
    ("attention_norm", "weight"): (("input_layernorm.weight",), _as_stored),
    ("attention", "qkv"): (
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        _projections,
    ),
    ("attention", "qkv_bias"): (
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        _projections,
    ),
    ("attention", "q_norm", "weight"): (("self_attn.q_norm.weight",), _as_stored),
    ("attention", "k_norm", "weight"): (("self_attn.k_norm.weight",), _as_stored),
    ("attention", "o"): (("self_attn.o_proj.weight",), _output_heads),
    ("mlp_norm", "weight"): (("post_attention_layernorm.weight",), _as_stored),
    ("mlp", "gate_up"): (("mlp.gate_proj.weight", "mlp.up_proj.weight"), _side_by_side),
    ("mlp", "down"): (("mlp.down_proj.weight",), _transposed),
}


@dataclass(frozen=True)
class _Source:
    """What fills a parameter: the tensors of the model or of one layer, or of each layer."""

    names: tuple[tuple[str, ...], ...]
    arrange: Arrange
    is_stacked: bool = False

    def read(self, checkpoint: Checkpoint, layout: Sharding) -> np.ndarray:
        """The parameter without padding."""
        arranged = [
            self.arrange([checkpoint.read(name) for name in names], checkpoint.config, layout)
            for names in self.names
        ]
        return np.stack(arranged) if self.is_stacked else arranged[0]


def _source(path: tuple[Any, ...], num_layers: int) -> _Source:
    """What fills the parameter at ``path``."""
    if path[0] not in ("layers", "stack"):
        names, arrange = _TOP[path]
        return _Source((names,), arrange)
    is_stacked = path[0] == "stack"
    layers = range(num_layers) if is_stacked else (path[1],)
    names, arrange = _LAYER[path[1:] if is_stacked else path[2:]]
    by_layer = (tuple(f"model.layers.{layer}.{name}" for name in names) for layer in layers)
    return _Source(tuple(by_layer), arrange, is_stacked)


@dataclass(frozen=True)
class PlacedModel:
    """A model's structure, and its placed parameters as a flat tuple, cheap to pass on.

    ``parameters`` are arrays, or ``jax.ShapeDtypeStruct``s of an outline.
    """

    graph: nnx.GraphDef[Llama]
    tree: jax.tree_util.PyTreeDef
    parameters: tuple[Any, ...]
    partitions: tuple[PartitionSpec, ...]

    @property
    def names(self) -> list[str]:
        """Of the parameters: the path of modules, joined by dots."""
        state = jax.tree.unflatten(self.tree, self.parameters)
        return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]

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
    """Read every tensor once, arrange and pad it, and put each rank's share on its device.

    Two at a time: most of it is copying, which other threads need not wait for.
    """
    graph, entries = _outline(checkpoint.config, layout, dtype)

    def place(entry: tuple[tuple[Any, ...], Any]) -> Array:
        path, parameter = entry
        tensor = _source(path, checkpoint.config.num_layers).read(checkpoint, layout)
        tensor = _pad(tensor, parameter.shape)
        target = NamedSharding(mesh, partition(*parameter.get_metadata("axes")))
        return jax.device_put(np.ascontiguousarray(tensor, dtype=dtype), target)

    filled = []
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as executor:
        placed = zip(entries, executor.map(place, entries), strict=True)
        for count, ((path, parameter), array) in enumerate(placed, start=1):
            filled.append((path, parameter.replace(array)))
            if progress is not None:
                progress("load", count, len(entries))
    return _placed(graph, filled)


def outline_model(
    config: ModelConfig, layout: Sharding, mesh: Mesh | AbstractMesh, dtype: DTypeLike
) -> PlacedModel:
    """The model with ``jax.ShapeDtypeStruct``s for parameters: what a program is lowered from."""
    graph, entries = _outline(config, layout, dtype)

    def shape_of(parameter: Any) -> jax.ShapeDtypeStruct:
        target = NamedSharding(mesh, partition(*parameter.get_metadata("axes")))
        return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=target)

    return _placed(graph, [(path, one.replace(shape_of(one))) for path, one in entries])


def _outline(
    config: ModelConfig, layout: Sharding, dtype: DTypeLike
) -> tuple[nnx.GraphDef[Llama], list[tuple[tuple[Any, ...], Any]]]:
    """The model's structure, and its parameters' paths and shapes."""
    model = nnx.eval_shape(lambda: Llama(config, layout, dtype))
    graph, state = nnx.split(model)
    return graph, list(nnx.to_flat_state(state))


def _placed(graph: nnx.GraphDef[Llama], filled: list[tuple[tuple[Any, ...], Any]]) -> PlacedModel:
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
