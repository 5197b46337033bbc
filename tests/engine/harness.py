"""One compiled step driven by hand, without a scheduler. Shows logits, and what is stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dcpjax.attention.block import TokenSharding
from dcpjax.cache.parts import KV, cache_parts
from dcpjax.cache.pool import POOL_AXES, PoolShape, part_shape
from dcpjax.engine.step import FROM_HOST, SAMPLED, StepResult, StepShape, make_step
from dcpjax.form import FORMS
from dcpjax.mesh import ALL_RANKS, DCP, HeadLayout, decode_mesh, sharding
from dcpjax.models.checkpoint import Checkpoint
from dcpjax.models.sharding import Sharding
from dcpjax.models.weights import place_model


@dataclass(frozen=True)
class Layout:
    """Mesh axes (tp, dcp), and how tokens are spread over the ranks."""

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    page_size: int = 8
    exchange: str = "ag_rs"
    prefill_gather: str = "none"
    form: str = "dynamic"
    index: str = "sharded"

    @property
    def settings(self) -> dict[str, Any]:
        """The same as engine settings."""
        return {
            "tensor_parallel_size": self.tp * self.dcp,
            "decode_context_parallel_size": self.dcp,
            "cp_kv_cache_interleave_size": self.interleave,
            "block_size": self.page_size,
            "dcp_comm_backend": self.exchange,
            "prefill_gather": self.prefill_gather,
            "step_form": self.form,
        }


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence to compute next: ``start`` of them are in the pages already."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class StepHarness:
    """A model, a pool of NaN and one step shape.

    Where the shape expands latents, prompts beyond its context have the same shape without.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: Layout,
        shape: StepShape,
        *,
        num_pages: int,
        dtype: Any = jnp.float32,
        kv_dtype: Any = None,
    ) -> None:
        config = checkpoint.config
        self.shape, self.vocab_size = shape, config.vocab_size
        self.mesh = decode_mesh(jax.devices()[: layout.tp * layout.dcp], layout.dcp)
        heads = HeadLayout(config.num_heads, config.num_kv_heads, layout.tp, layout.dcp)
        self.sharding = Sharding(
            heads,
            layout.exchange,
            layout.prefill_gather,
            FORMS[layout.form],
            layout.index == "replicated",
        )
        self.model = place_model(checkpoint, self.sharding, self.mesh, dtype)
        self.pool_shapes = {
            part.name: part_shape(
                part,
                num_pages=num_pages,
                num_heads=heads.groups * heads.group_kv_heads,
                page_size=layout.page_size,
                ranks=layout.dcp,
                dtype=jnp.dtype(kv_dtype or dtype),
                is_native=FORMS[layout.form].native_pools,
            )
            for part in cache_parts(config, has_whole_index=layout.index == "replicated")
        }
        self.pool_shape = next(iter(self.pool_shapes.values()))
        self._tokens = TokenSharding(layout.dcp, layout.interleave, layout.page_size, num_pages)
        self.step = self._make_step(shape)
        self.pools = self._pools_of_nan()
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        previous = np.zeros(shape.rows * shape.decode_width, np.int32)
        self._previous = jax.device_put(previous, self._whole)
        self._rank_ids = jax.device_put(
            np.arange(self.mesh.size, dtype=np.uint32),
            NamedSharding(self.mesh, PartitionSpec(ALL_RANKS)),
        )
        self.compiled = self.compile(self.step)

    def _make_step(self, shape: StepShape) -> Any:
        return make_step(
            self.model,
            shape,
            self._tokens,
            self.mesh,
            vocab_size=self.vocab_size,
            max_rows=shape.rows,
            max_outputs=shape.num_outputs,
        )

    @cached_property
    def _compiled_beyond(self) -> Any:
        return self.compile(self._make_step(replace(self.shape, expanded_context=0)))

    def compile(self, step: Any, *, donate: bool = True) -> Any:
        """``step``, this harness's own or a changed one, as the engine compiles it."""
        packed = jax.ShapeDtypeStruct((self.shape.packed_size,), jnp.int32, sharding=self._whole)
        jitted = jax.jit(step, donate_argnums=1 if donate else ())
        return jitted.lower(
            self.model.parameters, self.pools, packed, self._previous, self._rank_ids
        ).compile()

    @property
    def pool(self) -> jax.Array:
        """The pool of a model that has one part alone."""
        return self.pools[KV]

    def load(self, checkpoint: Checkpoint) -> None:
        """Begin anew with float32 weights of a model of the same shape; the step takes them."""
        self.model = place_model(checkpoint, self.sharding, self.mesh, jnp.float32)
        self.pools = self._pools_of_nan()

    def _pools_of_nan(self) -> dict[str, jax.Array]:
        dcp = self.mesh.shape[DCP]
        return {name: self._pool_of_nan(pool, dcp) for name, pool in self.pool_shapes.items()}

    def _pool_of_nan(self, shape: PoolShape, dcp: int) -> jax.Array:
        stored = shape.storage_dtype
        nan = np.full((), -1).astype(stored) if stored.kind == "u" else np.float32(np.nan)
        values = np.full(shape.array_shape(dcp), nan, stored)
        return jax.device_put(values, sharding(self.mesh, *POOL_AXES))

    def run(self, decode: Sequence[Piece] = (), prefill: Sequence[Piece] = ()) -> np.ndarray:
        """Logits [pieces, vocabulary] after each piece's last token."""
        return self.run_step(decode, prefill)[0]

    def run_step(
        self, decode: Sequence[Piece] = (), prefill: Sequence[Piece] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """As ``run``, and the tokens that the step itself chose."""
        packed = self._pack(decode, prefill)
        arguments = (self.model.parameters, self.pools, packed, self._previous, self._rank_ids)
        longest = max((piece.start + len(piece.tokens) for piece in prefill), default=0)
        is_beyond = self.shape.is_expanded and longest > self.shape.expanded_context
        step = self._compiled_beyond if is_beyond else self.compiled
        result = StepResult(*step(*arguments))
        self.pools = result.pools
        shape = self.shape
        outputs = [
            shape.first_output(row) + len(piece.tokens) - 1 for row, piece in enumerate(decode)
        ]
        outputs += [shape.first_output(shape.decode_rows + row) for row in range(len(prefill))]
        logits = np.asarray(result.logits)[outputs, : self.vocab_size]
        return logits, np.asarray(result.tokens)[outputs]

    def _pack(self, decode: Sequence[Piece], prefill: Sequence[Piece]) -> np.ndarray:
        shape = self.shape
        packed = np.zeros(shape.packed_size, np.int32)
        views = shape.views(packed)
        views["page_tables"][:] = self.pool_shape.scratch_page
        views["sources"][:] = FROM_HOST
        views["following"][:] = SAMPLED
        rows = [*enumerate(decode), *enumerate(prefill, start=shape.decode_rows)]
        for row, piece in rows:
            views["page_tables"][row, : len(piece.pages)] = piece.pages
            views["prior_lengths"][row] = piece.start
            views["num_tokens"][row] = len(piece.tokens)
            start = shape.first_token(row)
            views["token_ids"][start : start + len(piece.tokens)] = piece.tokens
        return packed
