"""The engine's compiled steps as programs of one rank.

They are the functions that :class:`dcpjax.engine.runner.Runner` compiles, in the same shapes, for
arrays that do not exist: neither the ranks' devices nor weights are needed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dcpjax.cache.page_moves import gather_pages, scatter_pages
from dcpjax.cache.parts import KV
from dcpjax.cache.pool import POOL_SPEC
from dcpjax.engine.pool_mirror import MOVED_PAGES
from dcpjax.engine.step import FROM_HOST, SAMPLED, StepShape, make_step
from dcpjax.errors import ConfigError
from dcpjax.mesh import ALL_RANKS
from neuron.deployment import Deployment as Deployment
from neuron.hlo import dtype_name
from neuron.lowering import lower
from neuron.program import IndexRange, Program, ProgramKind, TensorSpec

_POOL = "pool"

MAX_STEP_INPUTS = 1 << 25
"""Integers that the host sends to a step. A million tokens in pages of one for 32 sequences are as
many; beyond them bounding each one, as the lint does, takes gigabytes."""


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
    limits = _Limits.of([shape for kind, shape in shapes if kind != "segment"])
    if not all_buckets:
        largest: dict[ProgramKind, StepShape] = dict(shapes)  # they ascend
        shapes = list(largest.items())
    steps = [_step_call(deployment, kind, shape, limits) for kind, shape in shapes]
    return [*steps, *_page_calls(deployment)]


@dataclass(frozen=True)
class _Limits:
    """What the shapes of an engine have in common: the most rows, outputs and decode tokens."""

    rows: int
    outputs: int
    decode_width: int

    @classmethod
    def of(cls, shapes: Sequence[StepShape]) -> "_Limits":
        return cls(
            max(shape.rows for shape in shapes),
            max(shape.num_outputs for shape in shapes),
            max(shape.decode_width for shape in shapes),
        )


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
            for tokens in shapes.decode_widths:
                found.append(("decode", StepShape(rows, 0, 0, width, tokens)))
        segment = StepShape(config.max_num_seqs, 0, 0, width, deployment.draft_tokens)
        found.append(("segment", segment))
        widest = max(shapes.decode_widths)
        for rows, tokens in shapes.prefill:
            found.append(("prefill", StepShape(most, rows, tokens, width, widest)))
    return found


def _step_call(
    deployment: Deployment, kind: ProgramKind, shape: StepShape, limits: _Limits
) -> Call:
    if shape.packed_size > MAX_STEP_INPUTS:
        raise ConfigError(
            "page tables and tokens of a step are at most so many integers: take fewer sequences "
            "or a shorter context",
            max_step_inputs=MAX_STEP_INPUTS,
            step_inputs=shape.packed_size,
            max_num_seqs=deployment.config.max_num_seqs,
            pages_per_sequence=shape.table_width,
        )
    model, blueprint = deployment.model, deployment.blueprint
    vocab_size, ranks = blueprint.model.vocab_size, deployment.config.tensor_parallel_size
    step = make_step(
        model,
        shape,
        blueprint.token_sharding(deployment.pools),
        deployment.mesh,
        vocab_size=vocab_size,
        max_rows=limits.rows,
        max_outputs=max(limits.outputs, shape.num_outputs),
    )
    num_previous = limits.rows * max(limits.decode_width, shape.decode_width)
    whole = PartitionSpec()
    pools = deployment.pool_arrays
    inputs = {
        "packed": deployment.array((shape.packed_size,), jnp.int32, whole),
        "previous": deployment.array((num_previous,), jnp.int32, whole),
        "rank_ids": deployment.array((ranks,), jnp.uint32, PartitionSpec(ALL_RANKS)),
    }
    tokens = shape.table_width * deployment.config.virtual_page_size
    return Call(
        f"{kind}_{shape.blocks}_{tokens}",
        kind,
        ranks,
        step,
        (model.parameters, pools, *inputs.values()),
        (*model.names, *pool_names(pools), *inputs),
        (*pool_names(pools), "tokens", "logits"),
        {
            "packed": tuple(_packed_ranges(deployment, shape, limits.rows)),
            "previous": (IndexRange(0, num_previous, 0, vocab_size - 1),),
            "rank_ids": (IndexRange(0, 1, 0, ranks - 1),),
        },
    )


def _packed_ranges(deployment: Deployment, shape: StepShape, max_rows: int) -> Iterator[IndexRange]:
    """What the engine puts into a step's packed input, field by field."""
    longest = shape.table_width * deployment.config.virtual_page_size
    bounds = {
        "token_ids": (0, deployment.blueprint.model.vocab_size - 1),
        "sources": (FROM_HOST, max_rows - 1),
        "following": (SAMPLED, deployment.blueprint.model.vocab_size - 1),
        "page_tables": (0, deployment.pools.scratch_page),
        "prior_lengths": (0, longest - 1),
        "num_tokens": (0, max(shape.decode_width, shape.prefill_width)),
    }
    start = 0
    for name, field in shape.fields().items():
        stop = start + math.prod(field)
        if stop > start:
            yield IndexRange(start, stop, *bounds[name])
        start = stop


def pool_names(parts: Iterable[str]) -> list[str]:
    """What the pools of a cache's parts are called among a program's inputs and outputs."""
    return [_POOL if part == KV else f"{_POOL}_{part}" for part in parts]


def _page_calls(deployment: Deployment) -> list[Call]:
    """Whole pages out of each pool and into it, for transfers by the host's memory."""
    pools = deployment.pool_arrays
    named = zip(pool_names(pools), pools.values(), strict=True)
    return [call for name, pool in named for call in _page_calls_of(deployment, name, pool)]


def _page_calls_of(deployment: Deployment, name: str, pool: jax.ShapeDtypeStruct) -> list[Call]:
    mesh = deployment.mesh
    ids = deployment.array((MOVED_PAGES,), jnp.int32, PartitionSpec())
    dcp = deployment.config.decode_context_parallel_size
    pages = deployment.array((dcp * MOVED_PAGES, *pool.shape[1:]), pool.dtype, POOL_SPEC)
    suffix = name.removeprefix(_POOL)
    ranges = {"ids": (IndexRange(0, MOVED_PAGES, 0, deployment.pools.scratch_page),)}

    def call(kind: ProgramKind, function: Any, inputs: dict[str, Any], output: str) -> Call:
        ranks, names = deployment.config.tensor_parallel_size, tuple(inputs)
        title, arguments = f"{kind}{suffix}_{MOVED_PAGES}", tuple(inputs.values())
        return Call(title, kind, ranks, function, arguments, names, (output,), ranges)

    taken = {name: pool, "ids": ids}
    return [
        call("page_gather", gather_pages(mesh), taken, "pages"),
        call("page_scatter", scatter_pages(mesh), {**taken, "pages": pages}, name),
    ]
