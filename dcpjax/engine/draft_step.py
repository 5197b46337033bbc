"""The compiled program behind a step: what was accepted, and the next drafts of the draft layer.

Nothing of it waits for the host: it takes the step's own input, its hidden states and what was
sampled, and leaves the next step's tokens on the devices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Float, Integer

from dcpjax.attention.block import Block, TokenSharding, make_block
from dcpjax.attention.chosen import Choice
from dcpjax.cache.pool import POOL_SPEC, Pools
from dcpjax.config import SpeculativeConfig
from dcpjax.engine.step import (
    SAMPLED,
    RankPlace,
    StepShape,
    make_blocks,
    most_likely,
    token_ids,
)
from dcpjax.mesh import WORLD
from dcpjax.models.glm import Glm
from dcpjax.models.weights import PlacedModel
from dcpjax.speculation import emitted, num_accepted, num_accepted_synthetically


@dataclass(frozen=True)
class _Follower:
    """The tokens of a step that count, and the token behind each of them.

    ``tokens`` [T] are the next tokens, ``counts`` [rows] how many of each row count.
    """

    tokens: Integer[Array, " T"]
    counts: Integer[Array, " rows"]


def make_draft_step(
    model: PlacedModel,
    shape: StepShape,
    sharding: TokenSharding,
    mesh: Mesh | AbstractMesh,
    *,
    speculation: SpeculativeConfig,
    vocab_size: int,
    max_rows: int,
) -> Callable[..., tuple[Pools, Array]]:
    """(parameters, draft pools, packed, previous, hidden, sampled, seeds, counters, rank ids) to
    (draft pools, the next ``previous`` [max_rows · W]).

    The arguments are those of :class:`dcpjax.engine.device_drafting.DraftInputs`.

    Args:
        sharding: of the model's tokens; the draft layer has them whole on every rank.
    """

    def on_rank(parameters, pools, packed, previous, hidden, sampled, seeds, counters, rank_ids):
        decoder = model.merge(parameters)
        assert isinstance(decoder, Glm), "only latent-cache models have a draft layer"
        rank = RankPlace.of(rank_ids[0], sharding).weights.astype(jnp.int32)
        inputs = shape.views(packed)
        tokens = token_ids(shape, inputs, previous.reshape(max_rows, -1))
        mean = speculation.synthetic_acceptance_length
        following = _following(shape, inputs, tokens, sampled, seeds, counters, mean)
        drafter = _Drafter(decoder, rank, vocab_size)
        blocks = _whole_blocks(shape, inputs, following.counts, sharding)
        state, choices, pools = drafter.first(shape, following, hidden, blocks, pools)
        drafts = [drafter.token(state)]
        for number in range(1, speculation.num_speculative_tokens):
            block = _next_block(shape, inputs, following.counts, number, sharding)
            state, choices, pools = drafter.next(drafts[-1], state, block, pools, choices)
            drafts.append(drafter.token(state))
        last = jnp.take(following.tokens, _last_tokens(shape, following.counts), mode="clip")
        rows = jnp.stack([last, *drafts], axis=1)
        return pools, jnp.pad(rows, ((0, max_rows - shape.rows), (0, 0))).reshape(-1)

    whole = PartitionSpec()
    return jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(model.partitions, POOL_SPEC, *(whole,) * 6, PartitionSpec(WORLD)),
        out_specs=(POOL_SPEC, whole),
        check_vma=False,  # drafts are equal on all ranks after sums, which JAX cannot tell
    )


@dataclass(frozen=True)
class _Drafter:
    """The draft layer at work for the rows of one step."""

    decoder: Glm
    rank: Array
    vocab_size: int

    def first(
        self,
        shape: StepShape,
        following: _Follower,
        hidden: Float[Array, "T E"],
        blocks: tuple[Block, ...],
        pools: Pools,
    ) -> tuple[Float[Array, "rows E"], tuple[Choice, ...], Pools]:
        """Go over all tokens that count; the state behind each row's last, and what it chose."""
        decoder = self.decoder
        embedded = decoder.embedding(following.tokens, self.rank)
        states, pools, choices = decoder.draft(
            embedded, decoder.norm(hidden), blocks, pools, self.rank
        )
        last = jnp.take(states, _last_tokens(shape, following.counts), axis=0, mode="clip")
        return last, self._last_choices(shape, following.counts, choices), pools

    def _last_choices(
        self, shape: StepShape, counts: Array, choices: tuple[Choice, ...]
    ) -> tuple[Choice, ...]:
        """What each row's last token chose, for later drafts to share; nothing where they choose
        themselves."""
        indexer = self.decoder.config.indexer
        if indexer is None or not indexer.shares_with_drafts:
            return ()
        last = _last_tokens(shape, counts)

        def pick(*parts: Array) -> Array:
            """Of [B, T, ...] for each block: [rows, 1, ...]."""
            joint = jnp.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])
            return jnp.take(joint, last, axis=0, mode="clip")[:, None]

        return (jax.tree.map(pick, *choices),)

    def next(
        self,
        tokens: Integer[Array, " rows"],
        state: Float[Array, "rows E"],
        block: Block,
        pools: Pools,
        choices: tuple[Choice, ...],
    ) -> tuple[Float[Array, "rows E"], tuple[Choice, ...], Pools]:
        """One more draft of each row, from the one before."""
        embedded = self.decoder.embedding(tokens, self.rank)
        state, pools, _ = self.decoder.draft(embedded, state, (block,), pools, self.rank, choices)
        return state, choices, pools

    def token(self, state: Float[Array, "rows E"]) -> Integer[Array, " rows"]:
        return most_likely(self.decoder.head_logits(state), self.rank, self.vocab_size)


def _following(
    shape: StepShape,
    inputs: dict[str, Array],
    tokens: Array,
    sampled: Array,
    seeds: Array,
    counters: Array,
    synthetic_length: float | None,
) -> _Follower:
    """Of a decode segment what was accepted, with what was put out; of a chunk all of it."""
    num_rows, num_decode = shape.decode_rows, shape.num_decode_tokens
    drafts = tokens[:num_decode].reshape(num_rows, shape.decode_width)[:, 1:]
    chosen = sampled[:num_decode].reshape(num_rows, shape.decode_width)
    computed = inputs["num_tokens"][:num_rows]
    num_drafts = jnp.maximum(computed - 1, 0)
    if synthetic_length is None:
        accepted = num_accepted(drafts, chosen, num_drafts)
    else:
        seeds, counters = seeds[:num_rows], counters[:num_rows]
        accepted = num_accepted_synthetically(seeds, counters, num_drafts, synthetic_length)
    put_out = emitted(drafts, chosen, accepted)
    counts = jnp.where(computed > 0, accepted + 1, 0)
    if not shape.prefill_rows:
        return _Follower(put_out.reshape(-1), counts)
    chunks = tokens[num_decode:].reshape(shape.prefill_rows, shape.prefill_width)
    chunk_counts = inputs["num_tokens"][num_rows:]
    known = inputs["following"]
    behind = jnp.where(known == SAMPLED, sampled[num_decode : shape.num_outputs], known)
    shifted = jnp.concatenate([chunks[:, 1:], behind[:, None]], axis=1)
    offsets = jnp.arange(shape.prefill_width, dtype=chunk_counts.dtype)
    is_last = offsets[None, :] == chunk_counts[:, None] - 1
    shifted = jnp.where(is_last, behind[:, None], shifted)
    return _Follower(
        jnp.concatenate([put_out.reshape(-1), shifted.reshape(-1)]),
        jnp.concatenate([counts, chunk_counts]),
    )


def _last_tokens(shape: StepShape, counts: Array) -> Integer[Array, " rows"]:
    """Index of each row's last token that counts, among all tokens."""
    first = jnp.asarray([shape.first_token(row) for row in range(shape.rows)], jnp.int32)
    widths = [shape.decode_width] * shape.decode_rows + [shape.prefill_width] * shape.prefill_rows
    # Counts are below the widths by what they count; Neuron's gathers want it to be seen.
    return first + jnp.clip(counts - 1, 0, jnp.asarray(widths, jnp.int32) - 1)


def _whole_blocks(
    shape: StepShape, inputs: dict[str, Array], counts: Array, sharding: TokenSharding
) -> tuple[Block, ...]:
    """The step's blocks with the tokens that count, whole on every rank."""
    rank = jnp.zeros((), jnp.uint32)
    blocks = make_blocks(shape, {**inputs, "num_tokens": counts}, rank, sharding)
    return tuple(block.whole() for block in blocks)


def _next_block(
    shape: StepShape,
    inputs: dict[str, Array],
    counts: Array,
    number: int,
    sharding: TokenSharding,
) -> Block:
    """One token of each row, ``number`` behind the last that counts, while its table reaches."""
    positions = inputs["prior_lengths"] + counts + (number - 1)
    limit = shape.table_width * sharding.ranks * sharding.page_size
    is_any = (counts > 0) & (positions < limit)
    block = make_block(
        1,
        inputs["page_tables"],
        jnp.minimum(positions, limit - 1).astype(jnp.uint32),
        is_any.astype(jnp.uint32),
        jnp.zeros((), jnp.uint32),
        sharding,
    )
    return block.whole()
