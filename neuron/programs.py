"""The engine's compiled steps as programs of one rank.

They are the functions that :class:`dcpjax.engine.runner.Runner` compiles, in the same shapes, for
arrays that do not exist: neither the ranks' devices nor weights are needed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from dcpjax.cache.page_moves import gather_pages, scatter_pages
from dcpjax.cache.pool import POOL_SPEC, PoolShape
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.pool_mirror import MOVED_PAGES
from dcpjax.engine.step import FROM_HOST, StepShape, make_step
from dcpjax.errors import ConfigError
from dcpjax.mesh import ALL_RANKS, mesh_axes
from dcpjax.models.checkpoint import open_checkpoint
from dcpjax.models.weights import PlacedModel, outline_model
from neuron.errors import TargetError
from neuron.hlo import dtype_name
from neuron.lowering import abstract_mesh, lower
from neuron.program import IndexRange, Program, ProgramKind, TensorSpec
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
        return sum(
            math.prod(one.sharding.shard_shape(one.shape)) * one.dtype.itemsize
            for one in self.model.parameters
        )

    def array(self, shape: Sequence[int], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(self.mesh, spec))

    @property
    def pool_array(self) -> jax.ShapeDtypeStruct:
        shape = self.pool.array_shape(self.config.decode_context_parallel_size)
        return self.array(shape, self.pool.storage_dtype, POOL_SPEC)


@dataclass(frozen=True)
class Call:
    """A function of the engine and what it is called with, before it is lowered.

    Attributes:
        arguments: pytrees of jax.ShapeDtypeStruct over the deployment's mesh.
        input_names, output_names: of the flat inputs and outputs. An output has the memory of the
            input of the same name.
        ranges: bounds of integer inputs, by name.
    """

    name: str
    kind: ProgramKind
    num_ranks: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    ranges: Mapping[str, tuple[IndexRange, ...]]

    @property
    def aliases(self) -> dict[int, int]:
        """{output: input} that share memory."""
        return {
            output: self.input_names.index(name)
            for output, name in enumerate(self.output_names)
            if name in self.input_names
        }

    def lower(self) -> Program:
        """The program of one rank."""
        module = lower(self.function, self.arguments, name=self.name, aliases=self.aliases)
        shapes = module.host_program_shape
        inputs = zip(self.input_names, shapes.parameters, strict=True)
        results = shapes.result.tuple_shapes or [shapes.result]
        outputs = zip(self.output_names, results, strict=True)
        return Program(
            self.name,
            self.kind,
            self.num_ranks,
            module,
            tuple(_spec(name, shape, self.ranges.get(name, ())) for name, shape in inputs),
            tuple(_spec(name, shape) for name, shape in outputs),
        )


def _spec(name: str, shape: Any, ranges: tuple[IndexRange, ...] = ()) -> TensorSpec:
    return TensorSpec(name, tuple(shape.dimensions), dtype_name(shape), ranges)


def build_programs(deployment: Deployment, *, all_buckets: bool = True) -> list[Program]:
    """Every program that the engine runs there, lowered; arguments as for :func:`find_calls`."""
    return [call.lower() for call in find_calls(deployment, all_buckets=all_buckets)]


def find_calls(deployment: Deployment, *, all_buckets: bool = True) -> list[Call]:
    """Every function that the engine compiles there, with its arguments.

    Args:
        all_buckets: every shape that the engine compiles; else the largest of each kind.
    """
    shapes = _step_shapes(deployment)
    max_rows = max(shape.rows for _, shape in shapes)
    if not all_buckets:
        largest: dict[ProgramKind, StepShape] = dict(shapes)  # they ascend
        shapes = list(largest.items())
    steps = [_step_call(deployment, kind, shape, max_rows) for kind, shape in shapes]
    return [*steps, *_page_calls(deployment)]


def _step_shapes(deployment: Deployment) -> list[tuple[ProgramKind, StepShape]]:
    blueprint, config = deployment.blueprint, deployment.config
    if not 1 <= deployment.draft_tokens <= blueprint.max_model_len:
        raise ConfigError(
            "a segment has at least one token, and at most those of the longest sequence",
            draft_tokens=deployment.draft_tokens,
            max_model_len=blueprint.max_model_len,
        )
    shapes = blueprint.step_shapes
    most = max(shapes.decode_rows)
    found: list[tuple[ProgramKind, StepShape]] = []
    for width in blueprint.table_widths:
        for rows in shapes.decode_rows:
            found.append(("decode", StepShape(rows, 0, 0, width)))
        segment = StepShape(0, config.max_num_seqs, deployment.draft_tokens, width)
        found.append(("segment", segment))
        for rows, tokens in shapes.prefill:
            found.append(("prefill", StepShape(most, rows, tokens, width)))
    return found


def _step_call(deployment: Deployment, kind: ProgramKind, shape: StepShape, max_rows: int) -> Call:
    model, blueprint = deployment.model, deployment.blueprint
    vocab_size, ranks = blueprint.model.vocab_size, deployment.config.tensor_parallel_size
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
    tokens = shape.table_width * deployment.config.virtual_page_size
    return Call(
        f"{kind}_{shape.decode_rows}x1+{shape.prefill_rows}x{shape.prefill_width}_{tokens}",
        kind,
        ranks,
        step,
        (model.parameters, *inputs.values()),
        (*model.names, *inputs),
        ("pool", "tokens", "logits"),
        {
            "packed": tuple(_packed_ranges(deployment, shape, max_rows)),
            "previous": (IndexRange(0, max_rows, 0, vocab_size - 1),),
            "rank_ids": (IndexRange(0, 1, 0, ranks - 1),),
        },
    )


def _packed_ranges(deployment: Deployment, shape: StepShape, max_rows: int) -> Iterator[IndexRange]:
    """What the engine puts into a step's packed input, field by field."""
    longest = shape.table_width * deployment.config.virtual_page_size
    bounds = {
        "token_ids": (0, deployment.blueprint.model.vocab_size - 1),
        "sources": (FROM_HOST, max_rows - 1),
        "page_tables": (0, deployment.pool.scratch_page),
        "prior_lengths": (0, longest - 1),
        "num_tokens": (0, max(1, shape.prefill_width)),
    }
    start = 0
    for name, field in shape.fields().items():
        stop = start + math.prod(field)
        if stop > start:
            yield IndexRange(start, stop, *bounds[name])
        start = stop


def _page_calls(deployment: Deployment) -> list[Call]:
    """Whole pages out of the pool and into it, for transfers by the host's memory."""
    pool, mesh = deployment.pool_array, deployment.mesh
    ids = deployment.array((MOVED_PAGES,), jnp.int32, PartitionSpec())
    dcp = deployment.config.decode_context_parallel_size
    pages = deployment.array((dcp * MOVED_PAGES, *pool.shape[1:]), pool.dtype, POOL_SPEC)
    ranges = {"ids": (IndexRange(0, MOVED_PAGES, 0, deployment.pool.scratch_page),)}

    def call(kind: ProgramKind, function: Any, inputs: dict[str, Any], output: str) -> Call:
        ranks, names = deployment.config.tensor_parallel_size, tuple(inputs)
        name, arguments = f"{kind}_{MOVED_PAGES}", tuple(inputs.values())
        return Call(name, kind, ranks, function, arguments, names, (output,), ranges)

    taken = {"pool": pool, "ids": ids}
    return [
        call("page_gather", gather_pages(mesh), taken, "pages"),
        call("page_scatter", scatter_pages(mesh), {**taken, "pages": pages}, "pool"),
    ]
