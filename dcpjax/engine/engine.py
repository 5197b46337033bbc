"""The engine: one thread, one step of look-ahead, token ids in and token ids out.

With speculation it looks at what a step has accepted before it plans the next one.
"""

import contextlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax

from dcpjax.cache.pool import PoolShapes
from dcpjax.cache.prefix import PagePool
from dcpjax.config import EngineConfig, Progress
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.capacity import choose_num_pages
from dcpjax.engine.compilations import COMPILATIONS, keep_compiled_programs
from dcpjax.engine.device_drafting import DeviceDrafter
from dcpjax.engine.devices import find_mesh, fp8_of
from dcpjax.engine.dispatched import Dispatched
from dcpjax.engine.drafting import Drafter, NgramDrafter
from dcpjax.engine.follower import follow
from dcpjax.engine.handoff import Handoff, new_engine_id, with_offers
from dcpjax.engine.kv_backends import prepare_backend
from dcpjax.engine.kv_opening import memory_platform, open_local_kv
from dcpjax.engine.link_messages import Publish
from dcpjax.engine.mtp_drafter import MtpDrafter
from dcpjax.engine.plan import Drain
from dcpjax.engine.processes import SeveralProcesses, join_processes
from dcpjax.engine.prompt_split import PromptSplit
from dcpjax.engine.remote_kv import KVLoad
from dcpjax.engine.request import Request, TokenOutput
from dcpjax.engine.request_checks import check_tokens, refuse_transfer
from dcpjax.engine.runner import Runner
from dcpjax.engine.sampler import check_biases
from dcpjax.engine.scheduler import Scheduler
from dcpjax.errors import EngineDeadError, RequestError
from dcpjax.layout import KVPlacement
from dcpjax.mesh import PCP
from dcpjax.models.checkpoint import Checkpoint, fingerprint
from dcpjax.models.weights import PlacedModel, place_model, random_weights
from dcpjax.transfer.backend import TransferBackend


class Engine:
    """A model, its KV pool and the requests that it works on.

    Construction loads the weights and compiles every shape; ``progress(what, done, total)`` hears
    of it. ``scheduler`` and ``runner`` are its two halves, host and devices.
    """

    runner_type: type[Runner] = Runner

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, *, progress: Progress | None = None
    ) -> None:
        self.config, self.model_config = config, checkpoint.config
        if config.load_format == "dummy":
            checkpoint = random_weights(checkpoint, config.seed)
        keep_compiled_programs()
        self._processes = join_processes(config, checkpoint, progress)
        with ExitStack() as opened:  # closed again where something of the rest is refused
            opened.push(lambda kind, error, trace: self._processes.fail(error) if error else None)
            self._processes.run(self._find_mesh)
            device = self._mesh.devices.flat[0]
            self.blueprint = Blueprint(
                config, self.model_config, device.platform, checkpoint.dtype, fp8_of(device)
            )
            self.max_model_len = self.blueprint.max_model_len
            transfer = config.kv_transfer_config
            engine_id = new_engine_id(None if transfer is None else transfer.engine_id)
            platform = memory_platform(self.blueprint)
            backend = prepare_backend(config, self.model_config, engine_id, platform)
            if backend is not None:
                opened.callback(backend.close)
            self._processes.run(lambda: self._build(checkpoint, progress))
            opened.callback(self.runner.close)
            if backend is not None:
                opened.callback(backend.close)  # before the pool, which it has registered
            self._backend = backend
            self._handoff = self._make_handoff(engine_id, backend, checkpoint)
            if self._handoff is not None:
                opened.callback(self._handoff.close)
            self._processes.settle()
            opened.pop_all()
        self._in_flight: Dispatched | None = None
        self._drafted: jax.Array | None = None  # of the last step that was waited for
        self._num_steps = 0
        self._is_blocked = False
        self._is_dead = False

    def _find_mesh(self) -> None:
        self._mesh = find_mesh(self.config)

    def _build(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        """Everything that computes: weights, pool, scheduler and compiled steps."""
        config = self.config
        with COMPILATIONS.expected():
            model = self._place_model(checkpoint, progress)
            self.pool_shapes = self._choose_pools()  # takes what the weights have left
            drafter, device_drafter = self._make_drafters(model)
            self._pages = PagePool(self.pool_shapes.num_pages, config.virtual_page_size)
            self.scheduler = Scheduler(
                self._pages,
                max_num_seqs=config.max_num_seqs,
                max_model_len=self.max_model_len,
                shapes=self.blueprint.step_shapes,
                enable_prefix_caching=config.enable_prefix_caching,
                drafter=drafter,
            )
            self.runner = self._make_runner(model, device_drafter)
            self.runner.warm_up(progress)
        self._prompt_split = self._make_prompt_split()
        self._unexpected_before = COMPILATIONS.unexpected
        self._wake: Callable[[], None] = lambda: None

    def _choose_pools(self) -> PoolShapes:
        shapes = self.blueprint.pool_shapes(num_pages=1)
        shapes = choose_num_pages(shapes, self.config, self.max_model_len, self._mesh)
        return shapes.with_pages(self._processes.least(shapes.num_pages))

    def _place_model(self, checkpoint: Checkpoint, progress: Progress | None) -> PlacedModel:
        sharding, dtype = self.blueprint.sharding, self.blueprint.dtype
        return place_model(checkpoint, sharding, self._mesh, dtype, progress)

    def _make_runner(self, model: PlacedModel, drafter: DeviceDrafter | None) -> Runner:
        return self.runner_type(
            model,
            self._mesh,
            self.pool_shapes,
            self.blueprint.token_sharding(self.pool_shapes),
            self.blueprint.step_shapes,
            table_widths=self.blueprint.table_widths,
            vocab_size=self.model_config.vocab_size,
            max_num_seqs=self.config.max_num_seqs,
            seed=self.config.seed,
            form=self.blueprint.form,
            mirrors_pool=self.blueprint.mirrors_pool,
            speculation=self.config.speculative_config,
            drafter=drafter,
            processes=self._processes,
        )

    def _make_prompt_split(self) -> PromptSplit | None:
        residency, blueprint = self.config.residency, self.blueprint
        if residency is None:
            return None
        ranks = self.config.prefill_context_parallel_size
        return PromptSplit(ranks, residency, blueprint.copy_bytes)

    def _make_drafters(self, model: PlacedModel) -> tuple[Drafter | None, DeviceDrafter | None]:
        """Who proposes tokens to the scheduler, and who of them computes on the devices."""
        speculation = self.config.speculative_config
        if speculation is None:
            return None, None
        if speculation.method == "ngram":
            return NgramDrafter(speculation), None
        drafter = MtpDrafter(
            model,
            self._mesh,
            self.blueprint.token_sharding(self.pool_shapes),
            speculation,
            vocab_size=self.model_config.vocab_size,
            is_audited=self.blueprint.form.is_audited,
        )
        return drafter, drafter

    @property
    def placements(self) -> dict[str, KVPlacement]:
        """Which rank holds which layers, heads and tokens of the cache, by part."""
        return self.blueprint.placements

    def _make_handoff(
        self, engine_id: str, backend: TransferBackend | None, checkpoint: Checkpoint
    ) -> Handoff | None:
        """The leader's; all processes register their memory."""
        config = self.config.kv_transfer_config
        if config is None or backend is None:
            return None
        local = open_local_kv(
            self.blueprint,
            self.runner,
            self.pool_shapes,
            backend,
            self._processes,
            engine_id=engine_id,
            weights=fingerprint(checkpoint),
        )
        if local is None:
            return None
        return Handoff(
            local,
            config,
            wake=lambda: self._wake(),
            land=self._land,
            check_alive=self._processes.check,
        )

    def _land(self, load: KVLoad) -> None:
        """Pages arrived: let the devices have them before the request runs."""
        first = load.first_token // self.config.virtual_page_size
        self.runner.copy_in(load.page_ids[first:])

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def is_blocked(self) -> bool:
        """Whether :meth:`step` has nothing to do until the KV of a request arrives or is given up.

        The function given to :meth:`on_wake` is called then.
        """
        return self._is_blocked

    @property
    def num_offers(self) -> int:
        """Prompts whose KV other engines may still take."""
        return 0 if self._handoff is None else self._handoff.num_offers

    def on_wake(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when a blocked engine has something to do, or one
        without work has failed."""
        self._wake = wake
        self._processes.on_failure(wake)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it names tokens that the model does not have, too many of them, or an
                id that is in use.
            ContextLengthError: it does not fit.
            EngineDeadError: the engine was closed, or interrupted in a step.
        """
        self._check_alive()
        if self._handoff is None:
            refuse_transfer(request.kv_transfer_params)
            self._queue(request)
            return
        self._handoff.accept(request)
        try:
            self._queue(request)
        except RequestError:
            self._handoff.refuse(request)
            raise
        self._handoff.expect(request)

    def _queue(self, request: Request) -> None:
        check_tokens(request, self.model_config.vocab_size)
        check_biases(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request at any moment; its ABORT output comes with the next step."""
        self.scheduler.abort(request_id)

    def step(self) -> list[TokenOutput]:
        """Dispatch the next step, then wait for the one before and commit its tokens.

        With speculation in the other order, so that the device rests while the next step is
        planned: its drafts follow from the tokens.
        """
        self._check_alive()
        self._is_dead = True  # until the end: a step that was interrupted cannot be gone on from
        if self._handoff is not None:
            self._handoff.apply(self.scheduler.remote)
        accepted = self.drain() if self.scheduler.drafting.is_on else []
        plan = self.scheduler.schedule()
        following = None
        if plan is not None and not isinstance(plan, Drain):
            following = self.runner.dispatch(plan)
            self._num_steps += 1
            if self._prompt_split is not None:
                self._prompt_split.count(plan.prefill)
        self._is_blocked = plan is None and self._in_flight is None
        outputs = [*accepted, *self.drain()]
        self._in_flight = following
        self._is_dead = False
        return outputs

    def _check_alive(self) -> None:
        if self._is_dead:
            raise EngineDeadError("a step was interrupted or the engine is closed; open a new one")
        self._processes.check()

    def drain(self) -> list[TokenOutput]:
        """Wait for the step in flight, if any, and commit its tokens."""
        dispatched, self._in_flight = self._in_flight, None
        if dispatched is None:
            outputs = self.scheduler.take_ended()
        else:
            tokens = self._processes.run(dispatched.wait)
            self._processes.confirm(dispatched.tokens.witness)
            for found in dispatched.disagreements():
                self.scheduler.recompute(found.request.request_id, found.num_agreed, found.text)
            outputs = self.scheduler.commit(dispatched.plan, *tokens)
            self._drafted = dispatched.drafted
        # Only now: a load writes at once into its pages, which a step that was in flight when they
        # were given to it may still have written for the request that had them before.
        return with_offers(outputs, self._serve_kv())

    def _serve_kv(self) -> dict[str, dict[str, Any]]:
        """Let the handoff begin what the scheduler wants; the offers of new exports, by request."""
        events = self.scheduler.remote.take_events()
        if events.loads or events.exports or events.early_exports or events.progress:
            self._publish([page for export in events.exports for page in export.page_ids])
        return {} if self._handoff is None else self._handoff.serve(events)

    def _publish(self, page_ids: list[int]) -> None:
        """Let other engines read and write pages. Their steps have been confirmed, so the devices
        of no process write into them any more, but for drafts behind the last of these steps."""
        self._processes.announce(lambda: Publish(page_ids))
        self._processes.run(lambda: self.runner.publish(page_ids, self._drafted))
        self._processes.meet()

    def follow(self) -> None:
        """Do what the leader says, in its order, until it closes the engine.

        Raises:
            EngineDeadError: a process of the engine is gone or failed.
        """
        assert isinstance(self._processes, SeveralProcesses), "an engine of one process leads"
        try:
            follow(self.runner, self._processes)
        except BaseException as error:  # also when it is interrupted: the others have to know
            self._processes.fail(error)
            raise
        finally:  # the leader confirms to nobody any more that pages are held
            if self._backend is not None:
                self._backend.close()
        self.runner.close()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their pages."""
        self._pages.reset()

    def stats(self) -> dict[str, Any]:
        """Gauges, counters since the start, and what the memory of the arrays says."""
        stats, audits = self.scheduler.stats(), self.runner.audits
        drafting = self.scheduler.drafting
        return {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "num_preemptions": stats.num_preemptions,
            "num_recomputations": stats.num_recomputations,
            "kv_cache_usage": stats.page_usage,
            "kv_page_fragmentation": self._pages.fragmentation,
            "num_pages": self.pool_shapes.num_pages,
            "block_size": self.config.block_size,
            "prefix_cache_queries": stats.num_prefix_queries,
            "prefix_cache_hits": stats.num_prefix_hits,
            "prompt_tokens": stats.num_prompt_tokens,
            "generation_tokens": stats.num_generation_tokens,
            "steps": self._num_steps,
            "compilations_after_warmup": COMPILATIONS.unexpected - self._unexpected_before,
            "compiled_shapes": self.runner.shape_names,
            "kv_bytes_per_rank": self.runner.pool_bytes,
            "kv_tokens_capacity": self.pool_shapes.num_pages * self.config.virtual_page_size,
            "acceptance_length": drafting.counts.mean_length,
            "speculation": drafting.counts.as_stats() if drafting.is_on else None,
            "kv_transfer": None if self._handoff is None else self._handoff.stats(),
            "mesh": {
                axis: ranks for axis, ranks in self._mesh.shape.items() if axis != PCP or ranks > 1
            },
            "decode_context_parallel_size": self.config.decode_context_parallel_size,
            "pcp": None if self._prompt_split is None else self._prompt_split.stats(),
            "num_processes": self.config.nnodes,
            "cp_kv_cache_interleave_size": self.config.interleave,
            "audit": {
                "steps": len(audits),
                "temporary_bytes": max((audit.temporary_bytes for audit in audits), default=0),
            },
        }

    def check_integrity(self) -> None:
        """Assert that pages and slots belong to running requests and nobody else."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Wait for the step in flight and free the pool. Idempotent."""
        self._is_dead = True
        dispatched, self._in_flight = self._in_flight, None
        with contextlib.suppress(EngineDeadError):  # another process: whoever steps hears of it
            if dispatched is not None:
                self._processes.run(dispatched.wait)
        if self._handoff is not None:
            self._handoff.close()  # nothing outside touches the pools afterwards, on any process
        self._processes.close()
        with contextlib.suppress(EngineDeadError):
            self._processes.run(self.runner.close)
