"""One compiled step: packed host integers in, pools and tokens out.

All that the host says about a step travels in one int32 array per call, because many small
transfers to many devices cost more than they carry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Integer

from dcpjax.attention.block import Block, TokenSharding, make_block
from dcpjax.attention.paired import PairedBlock, pair_block
from dcpjax.attention.views import AnyBlock, gather_rows
from dcpjax.cache.pool import POOL_SPEC, Pools
from dcpjax.layout import decode_dcp_rank
from dcpjax.mesh import ALL_RANKS, DCP, PAGE_RANKS, PCP, WORLD
from dcpjax.models.weights import PlacedModel

_NO_ID = float(2**24)  # above every token id
FROM_HOST = -1
"""Source of tokens that the host knows; else the row among those that the devices have."""
SAMPLED = -1
"""Instead of the token behind a prompt chunk: the step itself chooses it."""


@dataclass(frozen=True)
class StepShape:
    """The static shape of a step: a block of decode segments and a block of prompt chunks.

    A decode segment is the last token of a sequence and ``decode_width − 1`` drafts. The step has
    an output for each of its tokens, and one for each prompt chunk, behind its last token. With
    ``checks_prefixes`` the ranks compare what is before each chunk. ``expanded_context``: prompts
    are computed from expanded latents, for sequences of at most so many tokens; 0: from latents as
    they are.
    """

    decode_rows: int
    prefill_rows: int
    prefill_width: int
    table_width: int
    decode_width: int = 1
    checks_prefixes: bool = False
    expanded_context: int = 0

    @property
    def is_expanded(self) -> bool:
        return self.expanded_context > 0

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prefill_rows

    @property
    def num_decode_tokens(self) -> int:
        return self.decode_rows * self.decode_width

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.prefill_rows * self.prefill_width

    @property
    def num_outputs(self) -> int:
        return self.num_decode_tokens + self.prefill_rows

    def first_token(self, row: int) -> int:
        """Index of a row's first token among all tokens."""
        if row < self.decode_rows:
            return row * self.decode_width
        return self.num_decode_tokens + (row - self.decode_rows) * self.prefill_width

    def first_output(self, row: int) -> int:
        """Index of a row's first output among all outputs."""
        if row < self.decode_rows:
            return row * self.decode_width
        return self.num_decode_tokens + row - self.decode_rows

    @property
    def blocks(self) -> str:
        """Rows and width of both blocks as a word."""
        decode = f"{self.decode_rows}x{self.decode_width}"
        return f"{decode}+{self.prefill_rows}x{self.prefill_width}"

    def __str__(self) -> str:
        prompts = ", latents expanded" if self.is_expanded else ""
        return f"{self.blocks} of {self.table_width} pages{prompts}"

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array in the packed input, in order; decode rows come first."""
        digests = {"prefix_digests": (self.prefill_rows,)} if self.checks_prefixes else {}
        return {
            "token_ids": (self.num_tokens,),
            "sources": (self.decode_rows,),
            "page_tables": (self.rows, self.table_width),
            "prior_lengths": (self.rows,),
            "num_tokens": (self.rows,),
            "following": (self.prefill_rows,),
            **digests,
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
    """What a step leaves on the devices; ``hidden`` of all tokens where a drafter needs it.

    ``prefixes``: the number of tokens before each chunk and their digest, as every rank has them,
    where the ranks compare.
    """

    pools: Pools
    tokens: Integer[Array, " max_outputs"]  # the most likely token of each output, replicated
    logits: Float[Array, "outputs V"]  # split over the vocabulary, padding included
    hidden: Float[Array, "T E"] | None = None  # before the last norm, replicated
    prefixes: Integer[Array, "ranks B 2"] | None = None


def make_step(
    model: PlacedModel,
    shape: StepShape,
    sharding: TokenSharding,
    mesh: Mesh | AbstractMesh,
    *,
    vocab_size: int,
    max_rows: int,
    max_outputs: int,
    yields_hidden: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """The step of one shape: (parameters, pools, packed, previous, rank ids) to a StepResult.

    ``previous`` [max_rows · W] has, row by row, the last token of a sequence and its drafts, for
    those whose source is such a row; W is at least the decode width. Without drafts that is what
    the step before has sampled.
    """

    def on_rank(parameters, pools, packed, previous, rank_ids):
        decoder = model.merge(parameters)
        inputs = shape.views(packed)
        place = RankPlace.of(rank_ids[0], sharding)
        blocks = make_blocks(shape, inputs, place.tokens, sharding, place.pcp)
        tokens = token_ids(shape, inputs, previous.reshape(max_rows, -1))
        prefixes = gather_prefixes(inputs, shape)
        blocks, tokens = split_prompts(shape, blocks, tokens, place.pcp, prefixes)
        rank = place.weights.astype(jnp.int32)
        hidden, pools = decoder.hidden_states(tokens, blocks, pools, rank)
        logits = decoder.logits(_output_states(shape, inputs, blocks, hidden))
        best = most_likely(logits, rank, vocab_size)
        best = jnp.pad(best, (0, max_outputs - shape.num_outputs))
        every = jnp.concatenate(gather_rows(blocks, hidden)) if yields_hidden else None
        return pools, best, logits, every, prefixes

    whole = PartitionSpec()
    return jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(model.partitions, POOL_SPEC, whole, whole, PartitionSpec(WORLD)),
        out_specs=(*STEP_OUTPUTS, whole, whole),
        check_vma=False,  # an all-gather makes values equal on all ranks, which JAX cannot tell
    )


class RankPlace(NamedTuple):
    """A rank's place among those that share the weights, the tokens of prompts, and pages."""

    weights: Integer[Array, ""]
    pcp: Integer[Array, ""]
    tokens: Integer[Array, ""]

    @classmethod
    def of(cls, rank: Integer[Array, ""], sharding: TokenSharding) -> "RankPlace":
        """Of a rank of the mesh, inside ``shard_map``: see ``mesh.pcp_mesh``."""
        weight_ranks = lax.axis_size(ALL_RANKS)
        weights, pcp = rank % weight_ranks, rank // weight_ranks
        dcp = lax.axis_size(DCP)
        tokens = decode_dcp_rank(weights, dcp)
        if sharding.axes == PAGE_RANKS:
            return cls(weights, pcp, tokens * lax.axis_size(PCP) + pcp)
        return cls(weights, pcp, tokens)


def make_blocks(
    shape: StepShape,
    inputs: dict[str, Array],
    rank: Array,
    sharding: TokenSharding,
    pcp_rank: Array | None = None,
) -> tuple[Block, ...]:
    """The decode and the prompt block; lengths as uint32: division without sign handling."""
    decode_rows = shape.decode_rows
    parts = (
        (shape.decode_width, 0, decode_rows, False),
        (shape.prefill_width, decode_rows, shape.rows, shape.is_expanded),
    )
    return tuple(
        make_block(
            width,
            inputs["page_tables"][start:stop],
            inputs["prior_lengths"][start:stop].astype(jnp.uint32),
            inputs["num_tokens"][start:stop].astype(jnp.uint32),
            rank,
            sharding,
            pcp_rank if sharding.layer_ranks > 1 else None,
            is_expanded=is_expanded,
        )
        for width, start, stop, is_expanded in parts
        if stop > start
    )


def gather_prefixes(
    inputs: dict[str, Array], shape: StepShape
) -> Integer[Array, "ranks B 2"] | None:
    """What each rank has before each chunk: so many tokens, of this digest. One all-gather."""
    if not shape.checks_prefixes or not shape.prefill_rows:
        return None
    counts = inputs["prior_lengths"][shape.decode_rows :]
    return lax.all_gather(jnp.stack([counts, inputs["prefix_digests"]], axis=-1), WORLD)


def split_prompts(
    shape: StepShape,
    blocks: tuple[Block, ...],
    tokens: Integer[Array, " T"],
    pcp_rank: Array,
    prefixes: Integer[Array, "ranks B 2"] | None = None,
) -> tuple[tuple[AnyBlock, ...], Integer[Array, " t"]]:
    """The blocks and tokens that this rank computes: of prompts its chunks, with PCP."""
    ranks = lax.axis_size(PCP)
    if ranks == 1 or not shape.prefill_rows:
        return blocks, tokens
    *decode, prompts = blocks
    paired = pair_block(prompts, ranks, pcp_rank)
    if prefixes is not None:
        by_pcp_rank = prefixes.reshape(ranks, -1, *prefixes.shape[1:])
        own = lax.dynamic_index_in_dim(by_pcp_rank, pcp_rank.astype(jnp.int32), 0)
        paired = replace(paired, agrees=jnp.all(by_pcp_rank == own[:, :1], axis=(1, 3)))
    num_decode = shape.num_decode_tokens
    own = paired.take_chunks(tokens[num_decode:])
    return (*decode, paired), jnp.concatenate([tokens[:num_decode], own])


def token_ids(
    shape: StepShape, inputs: dict[str, Array], previous: Integer[Array, "rows W"]
) -> Integer[Array, " T"]:
    """Token ids of all blocks; those of a decode segment may still be on the device."""
    ids, sources = inputs["token_ids"], inputs["sources"]
    known = ids[: shape.num_decode_tokens].reshape(shape.decode_rows, shape.decode_width)
    rows = previous[:, : shape.decode_width]
    pending = jnp.take(rows, jnp.maximum(sources, 0), axis=0, mode="clip")
    decode = jnp.where((sources == FROM_HOST)[:, None], known, pending)
    return jnp.concatenate([decode.reshape(-1), ids[shape.num_decode_tokens :]])


def _output_states(
    shape: StepShape, inputs: dict[str, Array], blocks: tuple[AnyBlock, ...], hidden: Array
) -> Float[Array, "outputs E"]:
    """The states of all tokens that have an output: of a chunk the last real one."""
    prompts = blocks[-1]
    if isinstance(prompts, PairedBlock):
        num_decode = shape.num_decode_tokens
        return jnp.concatenate([hidden[:num_decode], prompts.take_last(hidden[num_decode:])])
    decode = jnp.arange(shape.num_decode_tokens, dtype=jnp.int32)
    counts = inputs["num_tokens"][shape.decode_rows :]
    starts = shape.num_decode_tokens + shape.prefill_width * jnp.arange(
        shape.prefill_rows, dtype=jnp.int32
    )
    last = jnp.concatenate([decode, starts + jnp.maximum(counts - 1, 0)])
    return jnp.take(hidden, last, axis=0, mode="clip")


def most_likely(logits: Float[Array, "R v"], rank: Array, vocab_size: int) -> Integer[Array, " R"]:
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
