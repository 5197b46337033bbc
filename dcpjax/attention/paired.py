"""Prompt blocks whose tokens are computed by several ranks (prefill context parallelism, PCP).

Each segment of n tokens is cut into 2N chunks of ceil(n / 2N); a rank computes one from the front
and its mirror image from the back, see :mod:`dcpjax.layout.chunks`. A chunk is a segment like any
other: its prior tokens are those of the sequence before it, also where other ranks compute them in
this very step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Integer, Shaped

from dcpjax.attention.block import Block, TokenSharding, make_block, take_tokens
from dcpjax.layout import zigzag_chunks, zigzag_place, zigzag_size
from dcpjax.mesh import PCP


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PairedBlock:
    """A prompt block as one of the PCP ranks sees it.

    Attributes:
        chunks: what this rank computes: rows 2b and 2b + 1 are the early and the late chunk of
            segment b. Every rank may read what is before them, so they are whole.
        segments: all tokens, as the pools keep them.
        pcp_rank: this rank among those that share the tokens.
        agrees: by rank and segment, whether that rank has the same tokens before the segment as
            this one; None where nobody sends them to others.
    """

    chunks: Block
    segments: Block
    pcp_rank: Integer[Array, ""]
    agrees: Bool[Array, "N B"] | None = None

    @property
    def rows(self) -> int:
        return self.chunks.rows

    @property
    def width(self) -> int:
        return self.chunks.width

    @property
    def positions(self) -> Integer[Array, " T"]:
        """Global position of each token of this rank."""
        return self.chunks.positions

    @property
    def is_real(self) -> Bool[Array, " T"]:
        """Of each token of this rank whether it is one, and not padding."""
        return self.chunks.is_real

    @property
    def ranks(self) -> int:
        """N: ranks that share the tokens."""
        return self.segments.width // (2 * self.width)

    def whole(self) -> "PairedBlock":
        """The same where every rank keeps all tokens, see :meth:`Block.whole`."""
        return pair_block(self.segments.whole(), self.ranks, self.pcp_rank)

    def take_chunks(self, tokens: Shaped[Array, "N ..."]) -> Shaped[Array, "T ..."]:
        """Of values per token of all segments [B · width, ...] those of this rank's chunks."""
        by_segment = tokens.reshape(self.segments.rows, self.segments.width, *tokens.shape[1:])
        starts = self.chunks.prior_lengths.reshape(-1, 2) - self.segments.prior_lengths[:, None]
        offsets = jnp.arange(self.width, dtype=starts.dtype)
        index = (starts[..., None] + offsets[None, None, :]).reshape(self.segments.rows, -1)
        return take_tokens(by_segment, index).reshape(-1, *tokens.shape[1:])

    def gather_chunks(self, own: Shaped[Array, "T ..."]) -> Shaped[Array, "N ..."]:
        """Values per token of all segments, in their order, from those that each rank has.

        One all-gather. What is behind the end of a segment is of no meaning.
        """
        by_chunk = own.reshape(self.segments.rows, 2, self.width, *own.shape[1:])
        by_rank = lax.all_gather(by_chunk, PCP, axis=1)  # [B, N, 2, c, ...]
        in_order = jnp.concatenate([by_rank[:, :, 0], by_rank[:, ::-1, 1]], axis=1)
        padded = in_order.reshape(self.segments.rows, -1, *own.shape[1:])
        tokens = jnp.arange(padded.shape[1], dtype=self._sizes.dtype)[None, :]
        sizes = jnp.maximum(self._sizes, 1)[:, None]
        index = jnp.minimum(tokens // sizes * self.width + tokens % sizes, padded.shape[1] - 1)
        return take_tokens(padded, index).reshape(-1, *own.shape[1:])

    def take_last(self, own: Shaped[Array, "T E"]) -> Shaped[Array, "B E"]:
        """The value of each segment's last token, on every rank. One sum."""
        counts = self.segments.num_tokens
        last = jnp.maximum(counts, 1) - 1
        rank, is_late, offset = zigzag_place(last, counts, self.ranks)
        index = jnp.arange(counts.shape[0], dtype=counts.dtype) * 2 + is_late
        mine = jnp.take(own, index * self.width + offset, axis=0, mode="clip")
        is_here = (rank == self.pcp_rank.astype(rank.dtype))[:, None]
        return lax.psum(jnp.where(is_here, mine, jnp.zeros((), mine.dtype)), PCP)

    @property
    def _sizes(self) -> Integer[Array, " B"]:
        """Tokens of a chunk of each segment."""
        return zigzag_size(self.segments.num_tokens, self.ranks)


def pair_block(segments: Block, ranks: int, pcp_rank: Integer[Array, ""]) -> PairedBlock:
    """The block as rank ``pcp_rank`` of ``ranks`` computes it; its width is a multiple of 2N."""
    pcp_rank = pcp_rank.astype(segments.num_tokens.dtype)
    pairs = zigzag_chunks(segments.num_tokens, ranks, pcp_rank)
    starts = jnp.stack([start for start, _ in pairs], axis=1)
    counts = jnp.stack([stop - start for start, stop in pairs], axis=1)
    chunks = make_block(
        segments.width // (2 * ranks),
        jnp.repeat(segments.page_tables, 2, axis=0),
        (segments.prior_lengths[:, None] + starts).reshape(-1),
        counts.reshape(-1),
        jnp.zeros_like(segments.rank),
        _whole(segments.sharding),
        is_expanded=segments.is_expanded,
    )
    return PairedBlock(chunks, segments, pcp_rank)


def _whole(sharding: TokenSharding) -> TokenSharding:
    """As if one rank had all tokens, in pages of the same size."""
    return TokenSharding(1, 1, sharding.page_size, sharding.scratch_page)
