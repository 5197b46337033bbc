"""Checkpoints to placed parameters: every tensor read once, each rank's share on its device."""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dcpjax.config import GlmConfig, ModelConfig, Progress
from dcpjax.mesh import partition
from dcpjax.mesh import place as place_values
from dcpjax.models.checkpoint import Checkpoint
from dcpjax.models.glm import Glm
from dcpjax.models.glm_weights import glm_source
from dcpjax.models.llama import Llama
from dcpjax.models.llama_weights import llama_source
from dcpjax.models.sharding import Sharding
from dcpjax.models.sources import Source

Decoder = Llama | Glm


@dataclass(frozen=True)
class PlacedModel:
    """A model's structure, and its placed parameters as a flat tuple, cheap to pass on.

    ``parameters`` are arrays, or ``jax.ShapeDtypeStruct``s of an outline.
    """

    graph: nnx.GraphDef[Decoder]
    tree: jax.tree_util.PyTreeDef
    parameters: tuple[Any, ...]
    partitions: tuple[PartitionSpec, ...]

    @property
    def names(self) -> list[str]:
        """Of the parameters: the path of modules, joined by dots."""
        state = jax.tree.unflatten(self.tree, self.parameters)
        return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]

    def merge(self, parameters: tuple[Array, ...]) -> Decoder:
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
        tensor = _source(path, checkpoint.config, layout).read(checkpoint, parameter.dtype)
        tensor = _pad(tensor, parameter.shape)
        target = NamedSharding(mesh, partition(*parameter.get_metadata("axes")))
        return place_values(np.ascontiguousarray(tensor), target)

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
) -> tuple[nnx.GraphDef[Decoder], list[tuple[tuple[Any, ...], Any]]]:
    """The model's structure, and its parameters' paths and shapes."""
    model = nnx.eval_shape(lambda: _decoder(config, layout, dtype))
    graph, state = nnx.split(model)
    return graph, list(nnx.to_flat_state(state))


def _decoder(config: ModelConfig, layout: Sharding, dtype: DTypeLike) -> Decoder:
    """The model that a config describes, with zeros for parameters."""
    if isinstance(config, GlmConfig):
        return Glm(config, layout, dtype)
    return Llama(config, layout, dtype)


def _source(path: tuple[Any, ...], config: ModelConfig, layout: Sharding) -> Source:
    """What fills the parameter at ``path``."""
    if isinstance(config, GlmConfig):
        return glm_source(path, config, layout)
    return llama_source(path, config, layout)


def _placed(graph: nnx.GraphDef[Decoder], filled: list[tuple[tuple[Any, ...], Any]]) -> PlacedModel:
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
        if name.endswith(("k_norm.bias", "e_score_correction_bias")):
            return np.zeros(shape, np.float32)
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    return replace(checkpoint, read=read, dtype="float32")
