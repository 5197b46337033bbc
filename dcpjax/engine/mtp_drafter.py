"""Drafts of a model's own draft layer (MTP), computed behind each step without the host."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcpjax.attention.block import TokenSharding
from dcpjax.cache.parts import DRAFT_PARTS
from dcpjax.cache.pool import Pools
from dcpjax.config import SpeculativeConfig
from dcpjax.engine.audit import StepAudit, audit_step
from dcpjax.engine.device_drafting import DraftInputs
from dcpjax.engine.draft_step import make_draft_step
from dcpjax.engine.request import NO_DRAFTS, Drafts, Request
from dcpjax.engine.step import StepShape
from dcpjax.mesh import WORLD, place
from dcpjax.models.weights import PlacedModel


class MtpDrafter:
    """A :class:`dcpjax.engine.device_drafting.DeviceDrafter`.

    Its layer's cache is in pools of its own, which have the page ids of the others. A page that the
    prefix cache gives to a request may have been drafted behind by another one: its last row then
    knows the other's next token. That makes a draft worse, no token wrong.
    """

    def __init__(
        self,
        model: PlacedModel,
        mesh: Mesh,
        sharding: TokenSharding,
        speculation: SpeculativeConfig,
        *,
        vocab_size: int,
        is_audited: bool,
    ) -> None:
        self._model, self._mesh, self._sharding = model, mesh, sharding
        self._speculation, self._vocab_size = speculation, vocab_size
        self._is_audited = is_audited
        self._rank_ids = place(
            np.arange(mesh.size, dtype=np.uint32), NamedSharding(mesh, PartitionSpec(WORLD))
        )
        self._programs: dict[StepShape, Callable] = {}
        self._rows: Mapping[str, int] = {}
        self.audits: list[StepAudit] = []

    def propose(self, request: Request, at_most: int) -> Drafts:
        """What was drafted behind the last step, for requests that it has sampled for."""
        if request.request_id not in self._rows:
            return NO_DRAFTS
        return Drafts(min(at_most, self._speculation.num_speculative_tokens))

    def follow(self, step: DraftInputs, pools: Pools) -> tuple[Array, Pools]:
        """See :class:`dcpjax.engine.device_drafting.DeviceDrafter`."""
        drafting = {name: pool for name, pool in pools.items() if name in DRAFT_PARTS}
        arguments = (
            self._model.parameters,
            drafting,
            step.packed,
            step.previous,
            step.hidden,
            step.sampled,
            step.seeds,
            step.counters,
            self._rank_ids,
        )
        program = self._programs.get(step.shape)
        if program is None:
            program = self._programs[step.shape] = self._compile(step, arguments)
        drafting, previous = program(*arguments)
        self._rows = step.rows
        return previous, {**pools, **drafting}

    def _compile(self, step: DraftInputs, arguments: tuple) -> Callable:
        """The program of one shape; only in warm-up is one missing."""
        function = make_draft_step(
            self._model,
            step.shape,
            self._sharding,
            self._mesh,
            speculation=self._speculation,
            vocab_size=self._vocab_size,
            max_rows=step.previous.size // self._speculation.width,
        )
        program = jax.jit(function, donate_argnums=1).lower(*arguments).compile()
        if self._is_audited:
            pools = jax.tree.leaves(arguments[1])
            shares = [pool.sharding.shard_shape(pool.shape) for pool in pools]
            self.audits.append(audit_step(program, f"drafts {step.shape}", pool_shapes=shares))
        return program
