"""The engine's compiled steps as programs of one rank.

They are the functions that :class:`dcpjax.engine.runner.Runner` compiles, in the same shapes, for
arrays that do not exist: neither the ranks' devices nor weights are needed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dcpjax.cache.page_moves import gather_pages, scatter_pages
from dcpjax.cache.pool import POOL_SPEC, PoolShape
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.step import StepShape, make_step
from dcpjax.mesh import ALL_RANKS, DCP, TP
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.models.weights import PlacedModel, outline_model
from neuron.errors import TargetError
from neuron.hlo import dtype_name
from neuron.lowering import abstract_mesh, lower
from neuron.program import IndexRange, Program, ProgramKind, TensorSpec
from neuron.targets import Target

HBM_SHARE = 0.85
"""Part of a core's memory that weights and pool may take; the rest is for activations."""
MOVED_PAGES = 16
"""Pages that one page program moves; longer lists take several calls."""


@dataclass(frozen=True)
class Deployment:
    """One engine on one kind of chip.

    Args:
        config: its settings; ``device`` is "neuron".
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
        tp, dcp = self.config.head_groups, self.config.decode_context_parallel_size
        return abstract_mesh(
            {DCP: dcp, TP: tp} if self.config.apply_prefill_dcp else {TP: tp, DCP: dcp}
        )

    @cached_property
    def model(self) -> PlacedModel:
        """The model's parameters as shapes on the mesh."""
        blueprint = self.blueprint
        return outline_model(blueprint.model, blueprint.sharding, self.mesh, blueprint.dtype)

    @cached_property
    def pool(self) -> PoolShape:
        """As many pages as were asked for, or as fit beside the weights."""
        if self.config.num_pages is not None:
            return self.blueprint.pool_shape(self.config.num_pages)
        one = self.blueprint.pool_shape(1)
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
        return replace(one, num_pages=min(pages, self.config.max_num_seqs * per_sequence))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of one rank's weights."""
        shapes = [
            (p.sharding.shard_shape(p.shape), p.dtype.itemsize) for p in self.model.parameters
        ]
        return sum(int(np.prod(shape)) * size for shape, size in shapes)

    def array(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, spec))

    @property
    def pool_array(self) -> jax.ShapeDtypeStruct:
        shape = self.pool.array_shape(self.config.decode_context_parallel_size)
        return self.array(shape, self.pool.storage_dtype, POOL_SPEC)


def build_programs(deployment: Deployment, *, all_buckets: bool = True) -> list[Program]:
    """Every program that the engine runs there.

    Args:
        all_buckets: every shape that the engine compiles; else the largest of each kind.
    """
    shapes = _step_shapes(deployment)
    if not all_buckets:
        largest = {kind: (kind, shape) for kind, shape in shapes}  # they ascend
        shapes = list(largest.values())
    steps = [_step_program(deployment, kind, shape) for kind, shape in shapes]
    return [*steps, *_page_programs(deployment)]


def _step_shapes(deployment: Deployment) -> list[tuple[ProgramKind, StepShape]]:
    blueprint, config = deployment.blueprint, deployment.config
    shapes = blueprint.step_shapes
    most = max(shapes.decode_rows)
    found: list[tuple[ProgramKind, StepShape]] = []
    for width in blueprint.table_widths:
        found += [("decode", StepShape(rows, 0, 0, width)) for rows in shapes.decode_rows]
        segment = StepShape(0, config.max_num_seqs, deployment.draft_tokens, width)
        found.append(("segment", segment))
        found += [("prefill", StepShape(most, *block, width)) for block in shapes.prefill]
    return found


def _step_program(deployment: Deployment, kind: ProgramKind, shape: StepShape) -> Program:
    model, blueprint = deployment.model, deployment.blueprint
    vocab_size, ranks = blueprint.model.vocab_size, deployment.config.tensor_parallel_size
    max_rows = max(shape.rows, *(s.rows for _, s in _step_shapes(deployment)))
    step = make_step(
        model,
        shape,
        blueprint.token_sharding(deployment.pool),
        deployment.mesh,
        vocab_size=vocab_size,
        max_rows=max_rows,
    )
    whole = PartitionSpec()
    inputs = {
        "pool": deployment.pool_array,
        "packed": deployment.array((shape.packed_size,), jnp.int32, whole),
        "previous": deployment.array((max_rows,), jnp.int32, whole),
        "rank_ids": deployment.array((ranks,), jnp.uint32, PartitionSpec(ALL_RANKS)),
    }
    ranges = {
        "packed": tuple(_packed_ranges(deployment, shape, max_rows)),
        "previous": (IndexRange(0, max_rows, 0, vocab_size - 1),),
        "rank_ids": (IndexRange(0, 1, 0, ranks - 1),),
    }
    tokens = shape.table_width * deployment.config.virtual_page_size
    return _program(
        f"{kind}_{shape.decode_rows}x1+{shape.prefill_rows}x{shape.prefill_width}_{tokens}",
        kind,
        ranks,
        step,
        (model.parameters, *inputs.values()),
        [*model.names, *inputs],
        ("pool", "tokens", "logits"),
        ranges,
    )


def _packed_ranges(deployment: Deployment, shape: StepShape, max_rows: int) -> Iterator[IndexRange]:
    """What the engine puts into a step's packed input, field by field."""
    longest = shape.table_width * deployment.config.virtual_page_size
    bounds = {
        "token_ids": (0, deployment.blueprint.model.vocab_size - 1),
        "sources": (-1, max_rows - 1),
        "page_tables": (0, deployment.pool.scratch_page),
        "prior_lengths": (0, longest - 1),
        "num_tokens": (0, max(1, shape.prefill_width)),
    }
    start = 0
    for name, field in shape.fields().items():
        stop = start + int(np.prod(field))
        yield IndexRange(start, stop, *bounds[name])
        start = stop


def _page_programs(deployment: Deployment) -> list[Program]:
    """Whole pages out of the pool and into it, for transfers by the host's memory."""
    pool, mesh = deployment.pool_array, deployment.mesh
    ranks = deployment.config.tensor_parallel_size
    ids = deployment.array((MOVED_PAGES,), jnp.int32, PartitionSpec())
    dcp = deployment.config.decode_context_parallel_size
    pages = deployment.array((dcp * MOVED_PAGES, *pool.shape[1:]), pool.dtype, POOL_SPEC)
    ranges = {"ids": (IndexRange(0, MOVED_PAGES, 0, deployment.pool.scratch_page),)}
    return [
        _program(
            f"page_gather_{MOVED_PAGES}",
            "page_gather",
            ranks,
            gather_pages(mesh),
            (pool, ids),
            ["pool", "ids"],
            ("pages",),
            ranges,
        ),
        _program(
            f"page_scatter_{MOVED_PAGES}",
            "page_scatter",
            ranks,
            scatter_pages(mesh),
            (pool, ids, pages),
            ["pool", "ids", "pages"],
            ("pool",),
            ranges,
        ),
    ]


def _program(
    name: str,
    kind: ProgramKind,
    num_ranks: int,
    function: Any,
    arguments: Sequence[Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
    ranges: dict[str, tuple[IndexRange, ...]],
) -> Program:
    """Lower one function. An output has the memory of the input of the same name."""
    aliases = {
        output: input_names.index(name)
        for output, name in enumerate(output_names)
        if name in input_names
    }
    module = lower(function, arguments, name=name, aliases=aliases)
    shapes = module.host_program_shape
    return Program(
        name,
        kind,
        num_ranks,
        module,
        _specs(input_names, shapes.parameters, ranges),
        _specs(output_names, shapes.result.tuple_shapes, {}),
    )


def _specs(
    names: Sequence[str], shapes: Sequence[Any], ranges: dict[str, tuple[IndexRange, ...]]
) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, tuple(shape.dimensions), dtype_name(shape), ranges.get(name, ()))
        for name, shape in zip(names, shapes, strict=True)
    )
