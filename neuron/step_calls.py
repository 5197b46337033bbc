"""The engine's steps, and the drafts behind them, in every shape that the engine compiles."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dcpjax.cache.parts import DRAFT_PARTS
from dcpjax.engine.draft_step import make_draft_step
from dcpjax.engine.step import FROM_HOST, SAMPLED, StepShape, make_step
from dcpjax.errors import ConfigError
from dcpjax.mesh import WORLD
from neuron.calls import Call, pool_names
from neuron.deployment import Deployment
from neuron.program import IndexRange, ProgramKind

MAX_STEP_INPUTS = 1 << 25
"""Integers that the host sends to a step. A million tokens in pages of one for 32 sequences are as
many; beyond them bounding each one, as the lint does, takes gigabytes."""


def step_calls(deployment: Deployment, *, all_buckets: bool) -> list[Call]:
    """Steps, and behind each that the engine runs its drafts, if the model makes them."""
    shapes = _step_shapes(deployment)
    limits = _Limits.of([shape for kind, shape in shapes if kind != "segment"])
    drafted = [(kind, shape) for kind, shape in shapes if kind != "segment"]
    if not all_buckets:
        largest: dict[ProgramKind, StepShape] = dict(shapes)  # they ascend
        shapes, drafted = list(largest.items()), drafted[-1:]
    steps = [_step_call(deployment, kind, shape, limits) for kind, shape in shapes]
    if not deployment.config.drafts_with_model:
        return steps
    return [*steps, *(_draft_call(deployment, shape, limits) for _, shape in drafted)]


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

    def num_previous(self, shape: StepShape) -> int:
        """Tokens that a step finds on the devices."""
        return self.rows * max(self.decode_width, shape.decode_width)


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
    drafts = deployment.config.drafts_with_model
    step = make_step(
        model,
        shape,
        blueprint.token_sharding(deployment.pools),
        deployment.mesh,
        vocab_size=blueprint.model.vocab_size,
        max_rows=limits.rows,
        max_outputs=max(limits.outputs, shape.num_outputs),
        yields_hidden=drafts,
    )
    pools = deployment.pool_arrays
    inputs = _common_inputs(deployment, shape, limits)
    outputs = ("tokens", "logits", "hidden") if drafts else ("tokens", "logits")
    return Call(
        f"{kind}_{_title(deployment, shape)}",
        kind,
        deployment.config.tensor_parallel_size,
        step,
        (model.parameters, pools, *inputs.values()),
        (*model.names, *pool_names(pools), *inputs),
        (*pool_names(pools), *outputs),
        _common_ranges(deployment, shape, limits),
    )


def _draft_call(deployment: Deployment, shape: StepShape, limits: _Limits) -> Call:
    """The drafts behind a step of this shape."""
    model, blueprint = deployment.model, deployment.blueprint
    speculation = deployment.config.speculative_config
    assert speculation is not None, "an engine that drafts has such settings"
    function = make_draft_step(
        model,
        shape,
        blueprint.token_sharding(deployment.pools),
        deployment.mesh,
        speculation=speculation,
        vocab_size=blueprint.model.vocab_size,
        max_rows=limits.rows,
    )
    pools = {name: pool for name, pool in deployment.pool_arrays.items() if name in DRAFT_PARTS}
    common, whole = _common_inputs(deployment, shape, limits), PartitionSpec()
    hidden = (shape.num_tokens, blueprint.model.hidden_size)
    inputs = {
        "packed": common["packed"],
        "previous": common["previous"],
        "hidden": deployment.array(hidden, blueprint.dtype, whole),
        "sampled": deployment.array((limits.outputs,), jnp.int32, whole),
        "seeds": deployment.array((shape.rows, 2), jnp.uint32, whole),
        "counters": deployment.array((shape.rows,), jnp.int32, whole),
        "rank_ids": common["rank_ids"],
    }
    ids = IndexRange(0, limits.outputs, 0, blueprint.model.vocab_size - 1)
    return Call(
        f"draft_{_title(deployment, shape)}",
        "draft",
        deployment.config.tensor_parallel_size,
        function,
        (model.parameters, pools, *inputs.values()),
        (*model.names, *pool_names(pools), *inputs),
        (*pool_names(pools), "drafts"),
        {**_common_ranges(deployment, shape, limits), "sampled": (ids,)},
    )


def _title(deployment: Deployment, shape: StepShape) -> str:
    return f"{shape.blocks}_{shape.table_width * deployment.config.virtual_page_size}"


def _common_inputs(
    deployment: Deployment, shape: StepShape, limits: _Limits
) -> dict[str, jax.ShapeDtypeStruct]:
    """What a step and the drafts behind it are both given."""
    whole, ranks = PartitionSpec(), deployment.config.tensor_parallel_size
    return {
        "packed": deployment.array((shape.packed_size,), jnp.int32, whole),
        "previous": deployment.array((limits.num_previous(shape),), jnp.int32, whole),
        "rank_ids": deployment.array((ranks,), jnp.uint32, PartitionSpec(WORLD)),
    }


def _common_ranges(
    deployment: Deployment, shape: StepShape, limits: _Limits
) -> dict[str, tuple[IndexRange, ...]]:
    last_id = deployment.blueprint.model.vocab_size - 1
    return {
        "packed": tuple(_packed_ranges(deployment, shape, limits.rows)),
        "previous": (IndexRange(0, limits.num_previous(shape), 0, last_id),),
        "rank_ids": (IndexRange(0, 1, 0, deployment.config.tensor_parallel_size - 1),),
    }


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
