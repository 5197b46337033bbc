"""Plans to arrays to dispatched steps. Owns the parameters and the pools.

Every shape is compiled and audited in warm-up and run through its compiled form afterwards, so
nothing can be compiled later.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dcpjax.attention.block import TokenSharding
from dcpjax.cache.pool import Pools, PoolShapes, allocate_pools
from dcpjax.config import Progress, SpeculativeConfig
from dcpjax.engine.audit import StepAudit, audit_step
from dcpjax.engine.collectives import check_collectives
from dcpjax.engine.consensus import key_of
from dcpjax.engine.device_drafting import DeviceDrafter
from dcpjax.engine.device_tokens import DeviceTokens, DraftSeeds
from dcpjax.engine.dispatched import Dispatched, Executed
from dcpjax.engine.kv_parts import Regions, rank_memory
from dcpjax.engine.link_messages import RunStep
from dcpjax.engine.orders import StepOrder, from_message, to_message
from dcpjax.engine.packing import all_shapes, pack, positions_of, rows_of, smallest_fitting
from dcpjax.engine.page_tables import PageTables
from dcpjax.engine.plan import StepPlan, StepShapes
from dcpjax.engine.pool_mirror import PoolMirror
from dcpjax.engine.processes import OneProcess, Processes
from dcpjax.engine.sampler import CountsReset, SampledTokens, Sampler, SamplingForm
from dcpjax.engine.step import StepResult, StepShape, fetch_logits, gather_logits, make_step
from dcpjax.engine.telling import told
from dcpjax.engine.verification import Verifier
from dcpjax.engine.workers import map_in_threads
from dcpjax.errors import AuditError
from dcpjax.form import DYNAMIC, StepForm
from dcpjax.mesh import WORLD, own_devices, place
from dcpjax.models.weights import PlacedModel
from dcpjax.transfer.memory import RankMemory


class Runner:
    """Executes step plans on one mesh."""

    def __init__(
        self,
        model: PlacedModel,
        mesh: Mesh,
        pool_shapes: PoolShapes,
        sharding: TokenSharding,
        shapes: StepShapes,
        *,
        table_widths: Sequence[int],
        vocab_size: int,
        max_num_seqs: int,
        seed: int,
        form: StepForm = DYNAMIC,
        mirrors_pool: bool = False,
        speculation: SpeculativeConfig | None = None,
        drafter: DeviceDrafter | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._processes = processes or OneProcess()
        self._model, self._mesh, self._sharding = model, mesh, sharding
        self._vocab_size, self._form = vocab_size, form
        self._shapes = all_shapes(shapes, table_widths, checks_prefixes=sharding.layer_ranks > 1)
        self._max_rows = max(shape.rows for shape in self._shapes)
        self._max_outputs = max(shape.num_outputs for shape in self._shapes)
        self._replicated = jax.sharding.NamedSharding(mesh, PartitionSpec())
        self._pools = allocate_pools(pool_shapes, mesh)
        self._pool_shapes = pool_shapes
        self._page_tokens = sharding.ranks * sharding.page_size
        width = max(shapes.decode_widths)
        self._tokens = DeviceTokens(self._max_rows, width, self._replicated, drafter)
        self._yields_hidden = drafter is not None
        self._rank_ids = place(
            np.arange(mesh.size, dtype=np.uint32),
            jax.sharding.NamedSharding(mesh, PartitionSpec(WORLD)),
        )
        self._steps: dict[StepShape, Callable] = {}
        self._sampler = Sampler(
            jax.devices("cpu")[0] if form.samples_on_host else mesh.local_devices[0],
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            max_rows=self._max_outputs,
            seed=seed,
            width=width,
        )
        self._gather = {
            rows: gather_logits(mesh, vocab_size, self._sampler.bucket(rows))
            for rows in {shape.num_outputs for shape in self._shapes}
        }
        self._verifier = speculation and Verifier(speculation, self._sampler.seed_words)
        self._tables = PageTables(max_num_seqs, max(table_widths), pool_shapes.scratch_page)
        mirrored = pool_shapes.by_part if mirrors_pool else {}
        self._mirrors = {name: PoolMirror(shape, mesh) for name, shape in mirrored.items()}
        self.audits: tuple[StepAudit, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def pools(self) -> Pools:
        return self._pools

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pools on the device that has most of them."""
        by_device: Counter[jax.Device] = Counter()
        for shard in self._shards():
            by_device[shard.device] += shard.data.nbytes
        return max(by_device.values())

    def _shards(self) -> list[Any]:
        """Each device's share of each pool."""
        pools = jax.tree.leaves(self._pools)
        return [shard for pool in pools for shard in pool.addressable_shards]

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """Those whose devices are of this process."""
        return tuple(own_devices(self._mesh))

    @property
    def memory(self) -> Regions:
        """Where other engines find the pages of :attr:`own_ranks`, by part: in the pool, of which
        the audit proves that it stays there, or in the host's copy."""
        if self._mirrors:
            return {name: mirror.memory for name, mirror in self._mirrors.items()}
        return {name: self._pool_memory(name) for name in self._pools}

    def _pool_memory(self, part: str) -> tuple[RankMemory, ...]:
        shape, pool = self._pool_shapes.by_part[part], self._pools[part]
        shares = {shard.device: shard.data for shard in pool.addressable_shards}
        return tuple(
            rank_memory(
                shape,
                shares[device],
                shares[device].unsafe_buffer_pointer(),
                0 if device.platform == "cpu" else device.local_hardware_id or 0,
            )
            for device in own_devices(self._mesh).values()
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, each counted once however often it is replicated.

        Copies of KV heads among the projections are parameters of their own.
        """
        return sum(parameter.nbytes for parameter in self._model.parameters)

    @property
    def shape_names(self) -> list[str]:
        return [str(shape) for shape in self._shapes]

    def publish(self, page_ids: Sequence[int], drafted: Array | None) -> None:
        """Let other engines find pages as they are when nothing writes into them any more.

        Args:
            page_ids: to be copied where other engines read the host's copy.
            drafted: of the last step that was waited for: drafting writes into pages behind it.
        """
        jax.block_until_ready(drafted)
        for name, mirror in self._mirrors.items():
            mirror.copy_out(self._pools[name], page_ids)

    def copy_in(self, page_ids: Sequence[int]) -> None:
        """Take over pages that other engines have written, where they write the host's copy."""
        for name, mirror in self._mirrors.items():
            self._pools = {**self._pools, name: mirror.copy_in(self._pools[name], page_ids)}

    def close(self) -> None:
        """Free the pools. Idempotent."""
        for pool in self._pools.values():
            if not pool.is_deleted():
                pool.delete()

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape and every form of sampling, audit the steps and run them once.

        ``progress`` hears of each of these when it begins, from several threads.
        """
        programs, shapes = [*self._shapes, *self._sampler.programs], self._shapes
        compile_one = told(progress, "compile", programs, self._compile_program)
        audit = told(progress, "audit", shapes, self._audit)
        run_once = told(progress, "run for the first time", shapes, self._run_once)
        threads = min(2, os.cpu_count() or 1)
        found = map_in_threads(compile_one, programs, threads)
        compiled = dict(zip(programs, found, strict=True))
        self._steps = {shape: compiled[shape] for shape in shapes}
        if self._form.is_audited:
            self.audits = tuple(map_in_threads(audit, shapes, threads))
        self._sampler.install({form: compiled[form] for form in self._sampler.programs})
        self._processes.agree("run the same collectives in the same order", self._collectives)
        for shape in shapes:
            run_once(shape)

    def _compile_program(self, program: StepShape | SamplingForm) -> Callable:
        is_step = isinstance(program, StepShape)
        return self._compile(program) if is_step else self._sampler.compile(program)

    def _collectives(self) -> int:
        """A number that stands for the collectives of all steps.

        Raises:
            AuditError: one of them depends on a value of its step.
        """
        steps: dict[StepShape, Any] = dict(self._steps)
        found = [check_collectives(step.as_text(), str(shape)) for shape, step in steps.items()]
        return key_of(repr(found).encode())

    def _compile(self, shape: StepShape) -> Callable:
        step = make_step(
            self._model,
            shape,
            self._sharding,
            self._mesh,
            vocab_size=self._vocab_size,
            max_rows=self._max_rows,
            max_outputs=self._max_outputs,
            yields_hidden=self._yields_hidden,
        )
        packed = jax.ShapeDtypeStruct((shape.packed_size,), jnp.int32, sharding=self._replicated)
        return self.compile_step(step, self._arguments(packed), str(shape))

    def compile_step(self, step: Callable, arguments: tuple, name: str) -> Callable:
        """What runs a step: the function compiled for such arguments, the pools donated."""
        return jax.jit(step, donate_argnums=1).lower(*arguments).compile()

    def _audit(self, shape: StepShape) -> StepAudit:
        shares = [pool.sharding.shard_shape(pool.shape) for pool in jax.tree.leaves(self._pools)]
        return audit_step(self._steps[shape], str(shape), pool_shapes=shares)

    def _run_once(self, shape: StepShape) -> None:
        """Run a step with nothing to do, on to sampled tokens; see that the pools stay in place.

        The first run of a program takes longer than the next ones.
        """
        before = self._addresses()
        order = self._order(shape, StepPlan())
        nobody = self._sampler.order(shape.num_outputs, {})
        self.execute(dataclasses.replace(order, sampling=nobody))
        jax.block_until_ready(self._tokens.array)
        if (after := self._addresses()) != before:
            raise AuditError(
                "a step moved the KV pools", step=str(shape), before=before, after=after
            )

    def _addresses(self) -> list[int]:
        """Where the pools lie; nothing where the devices do not say it."""
        shards = self._shards() if self._form.is_audited else ()
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    def dispatch(self, plan: StepPlan) -> Dispatched:
        """Start a step. Returns at once; the next plan may build on its tokens."""
        shape = smallest_fitting(self._shapes, plan, self._page_tokens)
        order = self._order(shape, plan)
        self._processes.announce(lambda: to_message(order, self._shapes))
        drafts = self._tokens.read_drafts()
        run = self._processes.run(lambda: self.execute(order))
        tokens = SampledTokens(run.ids, positions_of(plan, shape), run.details)
        return Dispatched(plan, tokens, run.ends, run.drafted, self._verifier, drafts, run.prefixes)

    def order_of(self, message: RunStep) -> StepOrder:
        """A follower: what the leader's :meth:`dispatch` has announced."""
        return from_message(message, self._shapes, self._sampler.blank_inputs)

    def _order(self, shape: StepShape, plan: StepPlan) -> StepOrder:
        """All that the host says about a step."""
        for request in plan.started:
            self._tables.start(request)
        resets = (CountsReset.of(request) for request in plan.started)
        requests = {row: s.request for row, s in rows_of(plan, shape) if s.samples}
        sampling = positions_of(plan, shape)
        is_greedy = all(position.request.params.is_greedy for position in sampling.values())
        return StepOrder(
            shape=shape,
            packed=self._pack(shape, plan),
            resets=tuple(reset for reset in resets if reset is not None),
            outputs=tuple(sampling),
            sampling=None if is_greedy else self._sampler.order(shape.num_outputs, sampling),
            seeds=DraftSeeds.of(shape, requests, self._sampler.seed_words),
            rows={request.request_id: row for row, request in requests.items()},
        )

    def execute(self, order: StepOrder) -> Executed:
        """Dispatch a step, and leave on the devices what the next one needs. Returns at once."""
        for reset in order.resets:
            self._sampler.reset(reset)
        result = self._dispatch_forward(order.shape, order.packed)
        ids, details = result.tokens, None
        if order.sampling is not None:
            ids, details = self._sampler.sample(self._whole_logits(result.logits), order.sampling)
        self._pools = self._tokens.keep(
            order.shape, order.packed, result, ids, order.rows, order.seeds
        )
        drafted = self._tokens.array if self._yields_hidden else None
        return Executed(order.outputs, ids, details, result.tokens, drafted, result.prefixes)

    def _dispatch_forward(self, shape: StepShape, packed: np.ndarray) -> StepResult:
        result = StepResult(*self._steps[shape](*self._arguments(packed)))
        self._pools = result.pools
        return result

    def _arguments(self, packed: Any) -> tuple[Any, ...]:
        """Of a step, see ``make_step``."""
        previous = self._tokens.array
        return self._model.parameters, self._pools, packed, previous, self._rank_ids

    def _whole_logits(self, logits: Array) -> Array | np.ndarray:
        """All logits, on this process's first device or where they are sampled."""
        if self._form.samples_on_host:
            return fetch_logits(logits, self._vocab_size, self._sampler.bucket(logits.shape[0]))
        return self._gather[logits.shape[0]](logits).addressable_shards[0].data

    def _pack(self, shape: StepShape, plan: StepPlan) -> np.ndarray:
        scratch_page = self._pool_shapes.scratch_page
        return pack(plan, shape, self._tables, scratch_page, self._tokens.rows)
