"""One engine on one kind of chip: the mesh, the parameters and the pool that its programs are for.

All of it are shapes; neither devices nor weights are needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dcpjax.cache.pool import POOL_SPEC, PoolShapes
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.mesh import mesh_axes
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.models.weights import PlacedModel, outline_model
from neuron.errors import TargetError
from neuron.lowering import abstract_mesh
from neuron.targets import Target

HBM_SHARE = 0.85
"""Part of a core's memory that weights and pool may take; the rest is for activations."""


@dataclass(frozen=True)
class Deployment:
    """One engine on one kind of chip.

    Args:
        config: its settings, whatever its ``device``.
        draft_tokens: tokens of a multi-token segment (verification of speculated ones).

    Raises:
        DcpjaxError: settings that do not fit the model or Neuron.
    """

    config: EngineConfig
    target: Target
    lnc: int = 2
    draft_tokens: int = 4

    def __post_init__(self) -> None:
        ranks, cores = self.config.tensor_parallel_size, self.target.instance_cores(self.lnc)
        if ranks > cores:
            raise TargetError(
                f"an engine's ranks are cores of one {self.target.name} instance",
                tensor_parallel_size=ranks,
                cores=cores,
                lnc=self.lnc,
            )

    @cached_property
    def blueprint(self) -> Blueprint:
        checkpoint = open_checkpoint(self.config.model, weights=False)
        fp8 = self.target.fp8[0]
        return Blueprint(self.config, checkpoint.config, "neuron", checkpoint.dtype, fp8)

    @cached_property
    def mesh(self) -> AbstractMesh:
        config = self.config
        return abstract_mesh(
            mesh_axes(
                config.tensor_parallel_size,
                config.decode_context_parallel_size,
                prefill_order=config.apply_prefill_dcp,
            )
        )

    @cached_property
    def model(self) -> PlacedModel:
        """The model's parameters as shapes on the mesh."""
        blueprint = self.blueprint
        self._refuse_hopeless()
        return outline_model(blueprint.model, blueprint.sharding, self.mesh, blueprint.dtype)

    def _refuse_hopeless(self) -> None:
        """Raise where the largest matrices alone are more than a core's memory, whatever the rest.
        Sizes beyond an array's would have no outline."""
        model, limit = self.blueprint.model, self.target.hbm_bytes_per_core(self.lnc)
        rows = 3 * model.num_layers * model.intermediate_size + model.vocab_size
        weights = rows * model.hidden_size * self.blueprint.dtype.itemsize
        if weights // self.config.tensor_parallel_size > limit:
            raise TargetError(
                "a core holds its weights: more ranks share them",
                weight_bytes=weights,
                tensor_parallel_size=self.config.tensor_parallel_size,
                hbm_bytes=limit,
            )

    @cached_property
    def pools(self) -> PoolShapes:
        """As many pages as were asked for, or as fit beside the weights."""
        if self.config.num_pages is not None:
            return self.blueprint.pool_shapes(self.config.num_pages)
        one = self.blueprint.pool_shapes(1)
        free = int(HBM_SHARE * self.target.hbm_bytes_per_core(self.lnc)) - self.weight_bytes
        pages = free // one.page_bytes(self.config.head_groups) - 1
        per_sequence = max(self.blueprint.table_widths)
        if pages < per_sequence:
            raise TargetError(
                "a core holds its weights and the pages of one sequence of max_model_len",
                weight_bytes=self.weight_bytes,
                free_pages=max(pages, 0),
                pages_needed=per_sequence,
                hbm_bytes=self.target.hbm_bytes_per_core(self.lnc),
            )
        return one.with_pages(min(pages, self.config.max_num_seqs * per_sequence))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of one rank's weights."""
        return sum(
            math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
            for one in self.model.parameters
        )

    def array(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, spec))

    @property
    def pool_arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """One for each part of the cache."""
        ranks = self.config.decode_context_parallel_size
        return {
            name: self.array(pool.array_shape(ranks), pool.storage_dtype, POOL_SPEC)
            for name, pool in self.pools.by_part.items()
        }
