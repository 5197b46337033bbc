"""Which rank holds which layers × heads × tokens of one part of an engine's cache.

A placement is the common language of pools, transfer plans and capacity numbers. It has no
addresses: where a page of a rank lies in memory is known elsewhere. The constructors are the known
systems.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcpjax.errors import LayoutError
from dcpjax.layout.domain import Booleans, Integers, check_below, check_divides, static_count
from dcpjax.layout.interleave import active_mask, local_filled
from dcpjax.layout.layers import layer_range
from dcpjax.layout.ranks import (
    decode_dcp_rank,
    decode_groups,
    decode_head_group,
    head_group,
    num_head_groups,
    prefill_cp_rank,
    prefill_head_group,
)


@dataclass(frozen=True)
class KVShare:
    """What one rank holds: every combination of a layer, a head and a token of these.

    Layers ``[layer_start, layer_stop)``; heads ``[head_start, head_stop)``; the tokens p with
    ``owner(p, ranks, interleave) == residue``, all tokens if ``ranks`` is 1.
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    ranks: int
    residue: int
    interleave: int

    def __post_init__(self) -> None:
        _check_range("layer", self.layer_start, self.layer_stop)
        _check_range("head", self.head_start, self.head_stop)
        static_count("ranks", self.ranks)
        static_count("interleave", self.interleave)
        check_below("residue", self.residue, "ranks", self.ranks)

    @property
    def num_layers(self) -> int:
        """Layers that the rank holds."""
        return self.layer_stop - self.layer_start

    @property
    def num_heads(self) -> int:
        """Heads that the rank holds."""
        return self.head_stop - self.head_start

    @property
    def is_empty(self) -> bool:
        """Whether the rank holds nothing of any sequence."""
        return self.num_layers == 0 or self.num_heads == 0

    def num_tokens(self, length: Integers) -> Integers:
        """Tokens that the rank holds of a sequence of ``length`` tokens."""
        return local_filled(length, self.residue, ranks=self.ranks, interleave=self.interleave)

    def holds(self, layer: Integers, head: Integers, token: Integers) -> Booleans:
        """Whether the rank holds this head of this token in this layer; elementwise for arrays."""
        return (
            (self.layer_start <= layer)
            & (layer < self.layer_stop)
            & (self.head_start <= head)
            & (head < self.head_stop)
            & active_mask(token, self.residue, ranks=self.ranks, interleave=self.interleave)
        )


@dataclass(frozen=True)
class KVPlacement:
    """The shares of all ranks, by rank, in a cache of ``layers`` × ``kv_heads``.

    A rank stores the tokens of its share in the order of their local index, ``page_size`` to a
    page. A rank that holds all tokens of a sequence has the page size as its interleave. All
    constructors raise :class:`dcpjax.errors.LayoutError` for counts below 1 and sizes that do not
    divide; shares may be empty.
    """

    layers: int
    kv_heads: int
    page_size: int
    shares: tuple[KVShare, ...]

    def __post_init__(self) -> None:
        static_count("layers", self.layers)
        static_count("kv_heads", self.kv_heads)
        static_count("page_size", self.page_size)
        static_count("ranks", len(self.shares))
        for share in self.shares:
            check_divides("interleave", share.interleave, "page_size", self.page_size)
            if share.layer_stop > self.layers or share.head_stop > self.kv_heads:
                raise LayoutError(
                    "a share lies inside the cache",
                    share=share,
                    layers=self.layers,
                    kv_heads=self.kv_heads,
                )

    @classmethod
    def tensor_parallel(
        cls, ranks: int, *, layers: int, kv_heads: int, page_size: int
    ) -> "KVPlacement":
        """Every rank holds all tokens of its heads; ranks beyond the heads hold copies."""
        return cls.decode(
            ranks, 1, layers=layers, kv_heads=kv_heads, page_size=page_size, interleave=page_size
        )

    @classmethod
    def decode(
        cls, tp: int, dcp: int, *, layers: int, kv_heads: int, page_size: int, interleave: int
    ) -> "KVPlacement":
        """``tp`` ranks in the decode order: the ranks of a DCP group are neighbours."""
        num_head_groups(tp, dcp)
        interleave = _interleave(dcp, interleave, page_size)
        shares = tuple(
            _share(
                (0, layers),
                head_group(tp, dcp, kv_heads, decode_head_group(rank, dcp)),
                (dcp, decode_dcp_rank(rank, dcp), interleave),
            )
            for rank in range(tp)
        )
        return cls(layers, kv_heads, page_size, shares)

    @classmethod
    def prefill_dcp(
        cls, tp: int, dcp: int, *, layers: int, kv_heads: int, page_size: int, interleave: int
    ) -> "KVPlacement":
        """``tp`` ranks in the DCP prefill order: ranks with the same tokens are neighbours."""
        num_head_groups(tp, dcp)
        interleave = _interleave(dcp, interleave, page_size)
        shares = tuple(
            _share(
                (0, layers),
                head_group(tp, dcp, kv_heads, prefill_head_group(rank, tp, dcp)),
                (dcp, prefill_cp_rank(rank, tp, dcp), interleave),
            )
            for rank in range(tp)
        )
        return cls(layers, kv_heads, page_size, shares)

    @classmethod
    def layer_split(
        cls, ranks: int, *, layers: int, kv_heads: int, page_size: int, tp: int = 1
    ) -> "KVPlacement":
        """Every rank holds all tokens of its own layers.

        All heads of them, or with ``tp`` ranks for each of the ``ranks`` ranges of layers, its
        head group: rank = layer rank · tp + tp rank.
        """
        ranks, tp = static_count("ranks", ranks), static_count("tp", tp)
        shares = tuple(
            _share(
                layer_range(layers, ranks, rank // tp),
                head_group(tp, 1, kv_heads, rank % tp),
                (1, 0, page_size),
            )
            for rank in range(ranks * tp)
        )
        return cls(layers, kv_heads, page_size, shares)

    @classmethod
    def pcp(
        cls,
        ranks: int,
        *,
        layers: int,
        kv_heads: int,
        page_size: int,
        interleave: int | None = None,
    ) -> "KVPlacement":
        """The ranks of prefill context parallelism, all layers and heads on each.

        ``interleave`` None: each rank holds all tokens. Else the tokens are sharded over the ranks.
        """
        ranks = static_count("ranks", ranks)
        if interleave is None:
            token_ranks, interleave = 1, page_size
        else:
            token_ranks, interleave = ranks, _interleave(ranks, interleave, page_size)
        shares = tuple(
            _share((0, layers), (0, kv_heads), (token_ranks, rank % token_ranks, interleave))
            for rank in range(ranks)
        )
        return cls(layers, kv_heads, page_size, shares)

    @classmethod
    def pcp_dcp(
        cls,
        tp: int,
        pcp: int,
        dcp: int,
        *,
        layers: int,
        kv_heads: int,
        page_size: int,
        interleave: int,
    ) -> "KVPlacement":
        """``tp`` × ``pcp`` ranks, rank = pcp rank · tp + tp rank; tokens dealt over DCP groups.

        ``dcp`` is 1 (every PCP rank holds all tokens) or a multiple of ``pcp``; the PCP ranks of
        a DCP group come first in the deal (:func:`dcpjax.layout.decode_groups`).
        """
        groups = decode_groups(tp, dcp, pcp)
        if dcp > 1:
            check_divides("pcp", pcp, "dcp", dcp)
        head_groups = tp if dcp == 1 else len(groups)
        interleave = _interleave(dcp, interleave, page_size)
        places = {
            rank: (head_group(head_groups, 1, kv_heads, group % head_groups), token_rank)
            for group, ranks in enumerate(groups)
            for token_rank, rank in enumerate(ranks)
        }
        shares = tuple(
            _share((0, layers), heads, (dcp, token_rank, interleave))
            for _, (heads, token_rank) in sorted(places.items())
        )
        return cls(layers, kv_heads, page_size, shares)

    def select_layers(self, layers: Sequence[int]) -> "KVPlacement":
        """The placement of a cache part that only some layers have, on the ranks of those layers.

        Layer k of the result is layer ``layers[k]`` of this one.

        Raises:
            LayoutError: ``layers`` are not ascending layers of this placement.
        """
        for before, layer in zip([-1, *layers], layers, strict=False):
            if not before < layer < self.layers:
                raise LayoutError(
                    "selected layers ascend and are layers of the cache",
                    layer=layer,
                    before=before,
                    layers=self.layers,
                )
        shares = tuple(
            replace(
                share,
                layer_start=bisect_left(layers, share.layer_start),
                layer_stop=bisect_left(layers, share.layer_stop),
            )
            for share in self.shares
        )
        return replace(self, layers=len(layers), shares=shares)

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine, those with empty shares included."""
        return len(self.shares)

    def holds(self, rank: int, layer: Integers, head: Integers, token: Integers) -> Booleans:
        """Whether ``rank`` holds this head of this token in this layer; elementwise for arrays.

        Raises:
            LayoutError: the rank is out of range.
        """
        check_below("rank", rank, "ranks", self.num_ranks)
        return self.shares[rank].holds(layer, head, token)


def _share(
    layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int, int]
) -> KVShare:
    return KVShare(*layers, *heads, *tokens)


def _check_range(name: str, start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise LayoutError(f"a {name} range has 0 <= start <= stop", start=start, stop=stop)


def _interleave(ranks: int, interleave: int, page_size: int) -> int:
    """The interleave to record: of one rank all mean the same, so one of them stands for all."""
    interleave = static_count("interleave", interleave)
    check_divides("interleave", interleave, "page_size", static_count("page_size", page_size))
    return page_size if ranks == 1 else interleave
