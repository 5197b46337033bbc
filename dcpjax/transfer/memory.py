"""Where an engine's pages lie: addresses and strides, one region per rank. No jax, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcpjax.errors import TransferError
from dcpjax.layout import KVPlacement


@dataclass(frozen=True)
class RankMemory:
    """The registered pages of one rank; all strides and sizes in bytes.

    The value of (page, layer, head, offset) starts at ``address + page * page_stride + layer *
    layer_stride + head * head_stride + first + offset * token_bytes`` with layer and head counted
    from the first that the rank holds. A page of this project's pools has no gaps: ``page_stride``
    is layers * ``layer_stride``, which is heads * ``head_stride``, which is page size *
    ``token_bytes``.

    Attributes:
        address: of page 0; 0 for a rank that holds nothing.
        num_pages: pages that may be read and written, ids ``[0, num_pages)``; the scratch page is
            not one of them.
        device_id: index of the device in its process, as the transfer library counts.
        agent: index of the agent that has registered it, one for each process of its engine.
        first: where the tokens begin in the page of one layer and head: 0, but for a field of them
            that has others before it.
    """

    address: int
    num_pages: int
    page_stride: int
    layer_stride: int
    head_stride: int
    token_bytes: int
    device_id: int = 0
    agent: int = 0
    first: int = 0

    @classmethod
    def dense(
        cls,
        address: int,
        *,
        num_pages: int,
        num_layers: int,
        num_heads: int,
        page_size: int,
        token_bytes: int,
        device_id: int = 0,
    ) -> "RankMemory":
        """A region ``[pages, layers, heads, page_size, token_bytes]`` without gaps."""
        head = page_size * token_bytes
        layer = num_heads * head
        page = num_layers * layer
        return cls(address, num_pages, page, layer, head, token_bytes, device_id)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_stride

    def of_field(self, first: int, num_bytes: int, page_size: int) -> "RankMemory":
        """One field of all tokens, where a page has them together, behind ``first`` bytes of each
        token in the fields before."""
        return replace(self, first=page_size * first, token_bytes=num_bytes)


@dataclass(frozen=True)
class SequenceMemory:
    """The pages of one sequence in one engine.

    Attributes:
        ranks: the regions, one per rank of the engine's placement.
        page_ids: page ids of the sequence from its beginning, one per virtual page; the same id on
            every rank.
    """

    placement: KVPlacement
    ranks: tuple[RankMemory, ...]
    page_ids: Sequence[int] | np.ndarray

    def __post_init__(self) -> None:
        if len(self.ranks) != self.placement.num_ranks:
            raise TransferError(
                "an engine has one memory region per rank",
                regions=len(self.ranks),
                ranks=self.placement.num_ranks,
            )

    def of_field(self, first: int, num_bytes: int) -> "SequenceMemory":
        """See :meth:`RankMemory.of_field`."""
        page_size = self.placement.page_size
        return replace(
            self, ranks=tuple(rank.of_field(first, num_bytes, page_size) for rank in self.ranks)
        )
