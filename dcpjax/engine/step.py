"""One compiled step: packed host integers in, pools and tokens out.

All that the host says about a step travels in one int32 array per call, because many small
transfers to many devices cost more than they carry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Integer

from dcpjax.attention.block import TokenSharding, make_block
from dcpjax.cache.pool import POOL_SPEC, Pools
from dcpjax.layout import decode_dcp_rank
from dcpjax.mesh import ALL_RANKS
from dcpjax.models.weights import PlacedModel

_NO_ID = float(2**24)  # above every token id
FROM_HOST = -1
"""Source of a token id that the host knows; else the row of the previous step's tokens."""


@dataclass(frozen=True)
class StepShape:
    """The static shape of a step: a block of single tokens and a block of prompt chunks."""

    decode_rows: int
    prefill_rows: int
    prefill_width: int
    table_width: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def num_tokens(self) -> int:
        return self.decode_rows + self.prefill_rows * self.prefill_width

    def __str__(self) -> str:
        blocks = f"{self.decode_rows}x1+{self.prefill_rows}x{self.prefill_width}"
        return f"{blocks} of {self.table_width} pages"

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array in the packed input, in order; decode rows come first."""
        return {
            "token_ids": (self.num_tokens,),
            "sources": (self.decode_rows,),
            "page_tables": (self.rows, self.table_width),
            "prior_lengths": (self.rows,),
            "num_tokens": (self.rows,),
        }

    @property
    def packed_size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.fields().values())

    def views(self, packed: Any) -> dict[str, Any]:
        """The arrays inside a packed one, NumPy views or traced slices."""
        views, start = {}, 0
        for name, shape in self.fields().items():
            stop = start + int(np.prod(shape))
            views[name] = packed[start:stop].reshape(shape)
            start = stop
        return views


STEP_OUTPUTS = (POOL_SPEC, PartitionSpec(), PartitionSpec(None, ALL_RANKS))
"""How the members of a StepResult lie on the mesh; the first holds for every pool."""


class StepResult(NamedTuple):
    """What a step leaves on the devices."""

    pools: Pools
    tokens: Integer[Array, " max_rows"]  # the most likely next token of each row, replicated
    logits: Float[Array, "rows V"]  # split over the vocabulary, padding included


def make_step(
    model: PlacedModel,
    shape: StepShape,
    sharding: TokenSharding,
    mesh: Mesh | AbstractMesh,
    *,
    vocab_size: int,
    max_rows: int,
) -> Callable[..., tuple[Pools, Array, Array]]:
    """The step of one shape: (parameters, pools, packed, previous, rank ids) to a StepResult."""

    def on_rank(parameters, pools, packed, previous, rank_ids):
        decoder = model.merge(parameters)
        inputs = shape.views(packed)
        rank = rank_ids[0]
        blocks = _blocks(shape, inputs, decode_dcp_rank(rank, sharding.ranks), sharding)
        tokens = _token_ids(shape, inputs, previous)
        hidden, pools = decoder.hidden_states(tokens, blocks, pools, rank.astype(jnp.int32))
        last = jnp.take(hidden, _last_tokens(shape, inputs), axis=0, mode="clip")
        logits = decoder.logits(last)
        best = _most_likely(logits, rank.astype(jnp.int32), vocab_size)
        return pools, jnp.pad(best, (0, max_rows - shape.rows)), logits

    whole = PartitionSpec()
    return jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(model.partitions, POOL_SPEC, whole, whole, PartitionSpec(ALL_RANKS)),
        out_specs=STEP_OUTPUTS,
        check_vma=False,  # an all-gather makes values equal on all ranks, which JAX cannot tell
    )


def _blocks(shape: StepShape, inputs: dict[str, Array], rank: Array, sharding: TokenSharding):
    """The decode and the prompt block; lengths as uint32: division without sign handling."""
    parts = ((1, 0, shape.decode_rows), (shape.prefill_width, shape.decode_rows, shape.rows))
    return tuple(
        make_block(
            width,
            inputs["page_tables"][start:stop],
            inputs["prior_lengths"][start:stop].astype(jnp.uint32),
            inputs["num_tokens"][start:stop].astype(jnp.uint32),
            rank,
            sharding,
        )
        for width, start, stop in parts
        if stop > start
    )


def _token_ids(shape: StepShape, inputs: dict[str, Array], previous: Array) -> Array:
    """Token ids of all blocks; a decode token may still be on the device."""
    ids, sources = inputs["token_ids"], inputs["sources"]
    pending = jnp.take(previous, jnp.maximum(sources, 0), axis=0, mode="clip")
    decode = jnp.where(sources == FROM_HOST, ids[: shape.decode_rows], pending)
    return jnp.concatenate([decode, ids[shape.decode_rows :]])


def _last_tokens(shape: StepShape, inputs: dict[str, Array]) -> Array:
    """Index of each row's last real token among all tokens."""
    decode = jnp.arange(shape.decode_rows, dtype=jnp.int32)
    counts = inputs["num_tokens"][shape.decode_rows :]
    starts = shape.decode_rows + shape.prefill_width * jnp.arange(
        shape.prefill_rows, dtype=jnp.int32
    )
    return jnp.concatenate([decode, starts + jnp.maximum(counts - 1, 0)])


def _most_likely(logits: Float[Array, "R v"], rank: Array, vocab_size: int) -> Integer[Array, " R"]:
    """Argmax over the whole vocabulary from each rank's share, ties to the lowest id.

    As :mod:`dcpjax.sampling` has it: NaN counts as −inf, a row without a finite logit yields 0.
    Ids are float32 on the way, which is exact below 2**24: an argmax is a reduction of pairs, and a
    minimum over ranks one of integers, neither of which Neuron has.
    """
    share = logits.shape[-1]
    ids = (rank * share + jnp.arange(share, dtype=jnp.int32)).astype(jnp.float32)
    is_token = (ids < vocab_size)[None, :] & ~jnp.isnan(logits)
    logits = jnp.where(is_token, logits, -jnp.inf)
    best = jnp.max(logits, axis=-1)
    first = jnp.min(jnp.where(logits == best[:, None], ids[None, :], _NO_ID), axis=-1)
    if lax.axis_size(ALL_RANKS) > 1:
        bests, firsts = lax.all_gather(jnp.stack([best, first]), ALL_RANKS, axis=1)
        best = jnp.max(bests, axis=0)
        first = jnp.min(jnp.where(bests == best[None, :], firsts, _NO_ID), axis=0)
    return first.astype(jnp.int32)


def gather_logits(mesh: Mesh, vocab_size: int, rows: int) -> Callable[[Array], Array]:
    """Jitted: logits split over the vocabulary to [rows, vocab_size] on every device.

    Padding of the vocabulary is cut off, missing rows are zeros.
    """
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())

    def gather(logits: Array) -> Array:
        return jnp.pad(logits[:, :vocab_size], ((0, rows - logits.shape[0]), (0, 0)))

    return jax.jit(gather, out_shardings=whole)


def fetch_logits(logits: Array, vocab_size: int, rows: int) -> np.ndarray:
    """As :func:`gather_logits`, by the host and without a program."""
    whole = np.asarray(logits)[:, :vocab_size]
    return np.pad(whole, ((0, rows - len(whole)), (0, 0)))
