"""An engine's programs, lowered from shapes alone: no weights, and if need be no devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from dcpjax.cache.parts import DRAFT_PARTS
from dcpjax.cache.pool import POOL_SPEC, PoolShapes
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.draft_step import make_draft_step
from dcpjax.engine.packing import all_shapes
from dcpjax.engine.step import StepShape, make_step
from dcpjax.mesh import PAGE_RANKS, WORLD, axes_size, mesh_axes
from dcpjax.models.weights import PlacedModel, outline_model


def abstract_mesh(config: EngineConfig) -> AbstractMesh:
    """The mesh of an engine's ranks, without devices."""
    axes = mesh_axes(
        config.tensor_parallel_size, config.weight_dcp, pcp=config.prefill_context_parallel_size
    )
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


@dataclass(frozen=True)
class Outline:
    """An engine as shapes on a mesh; ``num_pages`` of each rank's pool."""

    blueprint: Blueprint
    mesh: Mesh | AbstractMesh
    num_pages: int

    @property
    def config(self) -> EngineConfig:
        return self.blueprint.config

    @cached_property
    def shapes(self) -> list[StepShape]:
        """Of all steps that the engine compiles."""
        return all_shapes(self.blueprint.step_shapes, self.blueprint.table_widths)

    @cached_property
    def model(self) -> PlacedModel:
        blueprint = self.blueprint
        return outline_model(blueprint.model, blueprint.sharding, self.mesh, blueprint.dtype)

    @cached_property
    def pools(self) -> PoolShapes:
        return self.blueprint.pool_shapes(self.num_pages)

    @property
    def pool_arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The pools over all ranks."""
        page_ranks = axes_size(self.mesh, PAGE_RANKS)  # pyright: ignore[reportArgumentType]
        return {
            name: self._array(pool.array_shape(page_ranks), pool.storage_dtype, POOL_SPEC)
            for name, pool in self.pools.by_part.items()
        }

    @property
    def weight_bytes(self) -> int:
        """Of one rank."""
        return sum(
            math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
            for one in self.model.parameters
        )

    def lower(self, shape: StepShape, model: PlacedModel | None = None) -> Any:
        """A step, its pools donated, as the engine compiles it."""
        model = model or self.model
        step = make_step(
            model,
            shape,
            self.blueprint.token_sharding(self.pools),
            self.mesh,
            vocab_size=self.blueprint.model.vocab_size,
            max_rows=shape.rows,
            max_outputs=shape.num_outputs,
            yields_hidden=self.config.drafts_with_model,
        )
        inputs = self._inputs(shape)
        arguments = (model.parameters, self.pool_arrays, *inputs[:2], inputs[-1])
        return _lower(step, arguments)

    def lower_drafts(self, shape: StepShape) -> Any:
        """What drafts behind a step."""
        speculation = self.config.speculative_config
        assert speculation is not None, "an engine that drafts has such settings"
        drafts = make_draft_step(
            self.model,
            shape,
            self.blueprint.token_sharding(self.pools),
            self.mesh,
            speculation=speculation,
            vocab_size=self.blueprint.model.vocab_size,
            max_rows=shape.rows,
        )
        pools = {name: one for name, one in self.pool_arrays.items() if name in DRAFT_PARTS}
        arguments = (self.model.parameters, pools, *self._inputs(shape))
        return _lower(drafts, arguments)

    def _inputs(self, shape: StepShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of drafts; a step has the first two and the last one."""
        speculation, whole = self.config.speculative_config, PartitionSpec()
        width = max(shape.decode_width, speculation.width if speculation else 1)
        hidden = (shape.num_tokens, self.blueprint.model.hidden_size)
        return (
            self._array((shape.packed_size,), jnp.int32, whole),
            self._array((shape.rows * width,), jnp.int32, whole),
            self._array(hidden, self.blueprint.dtype, whole),
            self._array((shape.num_outputs,), jnp.int32, whole),
            self._array((shape.rows, 2), jnp.uint32, whole),
            self._array((shape.rows,), jnp.int32, whole),
            self._array((self.mesh.size,), jnp.uint32, PartitionSpec(WORLD)),
        )

    def _array(self, shape: tuple[int, ...], dtype: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))


def _lower(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """With the pools donated; a mesh without devices does not say for what platform."""
    traced = jax.jit(function, donate_argnums=1).trace(*arguments)
    return traced.lower(lowering_platforms=("cpu",))
