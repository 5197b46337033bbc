"""A block of a step: ``rows`` segments of ``width`` tokens each, and where their tokens live.

Static shape, traced content. Rows that are not used have no tokens; tokens past a segment's end are
padding and go to the scratch page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Integer, Shaped

from dcpjax.layout import window_rows, write_slots
from dcpjax.mesh import DCP


@dataclass(frozen=True)
class TokenSharding:
    """How the tokens of a sequence are spread over the pools of ``ranks`` ranks.

    ``axes``: of the mesh, along which these ranks are counted, the slow one first. With
    ``layer_ranks`` each PCP rank has all tokens, of its own layers alone.
    """

    ranks: int
    interleave: int
    page_size: int
    scratch_page: int
    axes: tuple[str, ...] = (DCP,)
    layer_ranks: int = 1

    def splits(self, width: int) -> bool:
        """Whether any window of ``width`` tokens holds the same number of tokens of each rank."""
        return self.ranks > 1 and width % (self.ranks * self.interleave) == 0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_tables", "prior_lengths", "num_tokens", "own", "rank", "layer_rank"],
    meta_fields=["width", "sharding", "is_expanded"],
)
@dataclass(frozen=True)
class Block:
    """The segments of one block as one rank sees them.

    ``own`` lists, per segment, the token offsets that this rank keeps: width / ranks of them where
    the width splits evenly, else all (and then ownership is a matter of masks). ``layer_rank`` is
    this rank among those that split the layers, if any do. ``is_expanded``: where a model caches
    latents, the queries meet keys and values of each head, see ``attention/expanded.py``.
    """

    width: int
    page_tables: Integer[Array, "B M"]
    prior_lengths: Integer[Array, " B"]
    num_tokens: Integer[Array, " B"]
    own: Integer[Array, "B S"]
    rank: Integer[Array, ""]
    sharding: TokenSharding
    layer_rank: Integer[Array, ""] | None = None
    is_expanded: bool = False

    @property
    def rows(self) -> int:
        return self.page_tables.shape[0]

    @property
    def positions(self) -> Integer[Array, " T"]:
        """Global position of each token, segments one after the other."""
        offsets = jnp.arange(self.width, dtype=self.prior_lengths.dtype)
        return (self.prior_lengths[:, None] + offsets[None, :]).reshape(-1)

    @property
    def own_positions(self) -> Integer[Array, "B S"]:
        return self.prior_lengths[:, None] + self.own

    @property
    def is_real(self) -> Bool[Array, " T"]:
        """Of each token whether it is one, and not padding."""
        offsets = jnp.arange(self.width, dtype=self.num_tokens.dtype)
        return (offsets[None, :] < self.num_tokens[:, None]).reshape(-1)

    def whole(self) -> "Block":
        """The same segments where every rank keeps all tokens: a page has those of all ranks."""
        sharding = TokenSharding(
            ranks=1,
            interleave=1,
            page_size=self.sharding.ranks * self.sharding.page_size,
            scratch_page=self.sharding.scratch_page,
        )
        rank = jnp.zeros_like(self.rank)
        segments = (self.page_tables, self.prior_lengths, self.num_tokens)
        return make_block(self.width, *segments, rank, sharding, is_expanded=self.is_expanded)

    def take_own(self, tokens: Array) -> Array:
        """Of values per token [B · width, ...] those of ``own``: [B, S, ...]."""
        by_segment = tokens.reshape(self.rows, self.width, *tokens.shape[1:])
        if self.own.shape[1] == self.width:
            return by_segment
        return take_tokens(by_segment, self.own)

    def write_slots(self) -> tuple[Integer[Array, " N"], Integer[Array, " N"]]:
        """Local page and offset of each ``own`` token; the scratch page for what is not kept."""
        segments = jnp.repeat(jnp.arange(self.rows, dtype=jnp.int32), self.own.shape[1])
        return write_slots(
            self.page_tables,
            self.own_positions.reshape(-1),
            (self.own < self.num_tokens[:, None]).reshape(-1),
            self.rank,
            rows=segments,
            ranks=self.sharding.ranks,
            interleave=self.sharding.interleave,
            page_size=self.sharding.page_size,
            scratch_page=self.sharding.scratch_page,
        )


def take_tokens(
    values: Shaped[Array, "B T ..."], offsets: Integer[Array, "B S"]
) -> Shaped[Array, "B S ..."]:
    """values[b, offsets[b, s]] for every segment b.

    The offsets are below T by their arithmetic. That they are is said once more, in a way that can
    be proven from the program alone: a gather out of range ends a process on Neuron.
    """
    last = jnp.full((1, 1), values.shape[1] - 1, offsets.dtype)
    index = jnp.minimum(offsets, last)
    index = index.reshape(*offsets.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")


def window_offsets(
    width: int, prior_lengths: Integer[Array, " B"], rank: Array | int, sharding: TokenSharding
) -> Integer[Array, "B S"]:
    """Per segment, the offsets of the tokens of ``rank``; only where the width splits evenly."""
    return jax.vmap(
        lambda start: window_rows(
            start, width, rank, ranks=sharding.ranks, interleave=sharding.interleave
        )
    )(prior_lengths)


def make_block(
    width: int,
    page_tables: Integer[Array, "B M"],
    prior_lengths: Integer[Array, " B"],
    num_tokens: Integer[Array, " B"],
    rank: Integer[Array, ""],
    sharding: TokenSharding,
    layer_rank: Integer[Array, ""] | None = None,
    *,
    is_expanded: bool = False,
) -> Block:
    """A block seen by ``rank``."""
    if sharding.splits(width):
        own = window_offsets(width, prior_lengths, rank, sharding)
    else:
        offsets = jnp.arange(width, dtype=prior_lengths.dtype)
        own = jnp.broadcast_to(offsets, (page_tables.shape[0], width))
    segments = (page_tables, prior_lengths, num_tokens)
    return Block(width, *segments, own, rank, sharding, layer_rank, is_expanded)


@runtime_checkable
class Rows(Protocol):
    """What has tokens in rows of one width."""

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int: ...


def split_blocks(tokens: Array, blocks: Sequence[Rows]) -> list[Array]:
    """Values per token of all blocks [T, ...], cut into those of each block."""
    stops = list(accumulate(block.rows * block.width for block in blocks))
    return [tokens[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
