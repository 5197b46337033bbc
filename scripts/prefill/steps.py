"""The engine's step of one prompt chunk: compiled without weights, or run over random rows.

The step has no decode rows. An engine always has some beside a prompt, which cost little when they
are not used and have exchanges of their own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcpjax.cache.pool import PoolShapes
from dcpjax.config import EngineConfig
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.step import FROM_HOST, StepShape
from dcpjax.mesh import WORLD, pcp_mesh
from dcpjax.models.checkpoint import Checkpoint
from dcpjax.models.weights import place_model
from scripts.prefill.outline import Outline

RESIDENCIES = ("replicated", "sharded", "layer_split")
PLAIN = "plain"
"""The residency of an engine without PCP."""


def pcp_settings(residency: str, ranks: int) -> dict[str, Any]:
    """Engine settings of a residency on so many PCP ranks."""
    if ranks == 1:
        return {}
    dcp = {"decode_context_parallel_size": ranks} if residency == "sharded" else {}
    return {"prefill_context_parallel_size": ranks, "prefill_kv": residency, **dcp}


@dataclass(frozen=True)
class PromptStep:
    """One chunk of a prompt on one mesh.

    Attributes:
        chunk: tokens that are computed.
        context: tokens that the page table has room for, the chunk included.
    """

    outline: Outline
    chunk: int
    context: int

    @property
    def blueprint(self) -> Blueprint:
        return self.outline.blueprint

    @property
    def config(self) -> EngineConfig:
        return self.outline.config

    @property
    def pools(self) -> PoolShapes:
        return self.outline.pools

    @property
    def ranks(self) -> int:
        """N, the PCP ranks."""
        return self.config.prefill_context_parallel_size

    @cached_property
    def shape(self) -> StepShape:
        """With the least page table that the engine has for the context."""
        page = self.config.virtual_page_size
        widths = (w for w in self.blueprint.table_widths if w * page >= self.context)
        is_split = self.config.residency == "layer_split"
        return StepShape(0, 1, self.chunk, min(widths), checks_prefixes=is_split)

    @property
    def copied_tokens(self) -> int:
        """Tokens that a page table stands for: so many rows has a copy of a layer."""
        return self.shape.table_width * self.config.virtual_page_size

    def compile(self) -> Any:
        return self.outline.lower(self.shape).compile()


def prompt_step(
    checkpoint: Checkpoint,
    residency: str,
    devices: Sequence[jax.Device],
    *,
    chunk: int,
    context: int,
    block_size: int = 16,
) -> PromptStep:
    """The step of a full chunk on all ``devices``, with pools for one sequence of ``context``."""
    config = EngineConfig.from_settings(
        str(checkpoint.path),
        {
            "block_size": block_size,
            "max_num_seqs": 1,
            "max_num_batched_tokens": chunk,
            "max_model_len": context,
            **pcp_settings(residency, len(devices)),
        },
    )
    blueprint = Blueprint(config, checkpoint.config, "cpu", checkpoint.dtype)
    mesh = pcp_mesh(devices, len(devices), config.weight_dcp)
    num_pages = -(-context // config.virtual_page_size)
    return PromptStep(Outline(blueprint, mesh, num_pages), chunk, context)


class RunningStep:
    """A compiled step with weights, and pools whose rows are random."""

    def __init__(self, outline: Outline, shape: StepShape, checkpoint: Checkpoint) -> None:
        mesh, blueprint = outline.mesh, outline.blueprint
        assert isinstance(mesh, Mesh), "a step runs on devices"
        model = place_model(checkpoint, blueprint.sharding, mesh, blueprint.dtype)
        self.compiled = outline.lower(shape, model).compile()
        self._outline, self._shape, self._parameters = outline, shape, model.parameters
        key = jax.random.key(0)
        self._pools = {
            name: jax.device_put(jax.random.normal(key, one.shape, one.dtype), one.sharding)
            for name, one in outline.pool_arrays.items()
        }
        whole = NamedSharding(mesh, PartitionSpec())
        self._previous = jax.device_put(np.zeros(shape.rows, np.int32), whole)
        ranks = NamedSharding(mesh, PartitionSpec(WORLD))
        self._rank_ids = jax.device_put(np.arange(mesh.size, dtype=np.uint32), ranks)

    def seconds(self, prior: int) -> float:
        """One run of full rows, each behind ``prior`` tokens."""
        packed = self._packed(prior)
        start = time.perf_counter()
        result = self.compiled(
            self._parameters, self._pools, packed, self._previous, self._rank_ids
        )
        self._pools = result[0]
        jax.block_until_ready(result)
        return time.perf_counter() - start

    def _packed(self, prior: int) -> np.ndarray:
        shape, outline, random = self._shape, self._outline, np.random.default_rng(0)
        packed = np.zeros(shape.packed_size, np.int32)
        views = shape.views(packed)
        ids = random.integers(outline.blueprint.model.vocab_size, size=shape.num_tokens)
        views["token_ids"][:], views["sources"][:] = ids, FROM_HOST
        views["page_tables"][:] = random.permutation(outline.num_pages)[: shape.table_width]
        views["prior_lengths"][:] = prior
        views["num_tokens"][: shape.decode_rows] = shape.decode_width
        views["num_tokens"][shape.decode_rows :] = shape.prefill_width
        return packed
