"""Which source rank serves which target rank: the half of a plan that no sequence changes.

Source ranks with equal shares are replicas of one **cell** of the cache. Cells are disjoint, so the
volumes in which a target's share meets them add up to its own volume exactly where everything that
it wants is covered once: that is the proof, and it is done for every pair of placements.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dcpjax.errors import PlanError
from dcpjax.layout import KVPlacement, KVShare
from dcpjax.transfer.runs import TokenSplit, common_runs


@dataclass(frozen=True)
class Route:
    """What one source rank holds of what one target rank wants.

    Layers ``[layer_start, layer_stop)`` × heads ``[head_start, head_stop)`` × the tokens that both
    splits hold, of the part ``[begin, end)`` of the sequence, in fractions of its length: less than
    all of it where several replicas serve the target.
    """

    source_rank: int
    target_rank: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    source: TokenSplit
    target: TokenSplit
    begin: Fraction
    end: Fraction

    def tokens(self, first: int, stop: int) -> tuple[int, int]:
        """The route's part of the tokens ``[first, stop)``, cut between pages of both sides."""
        return self._cut(self.begin, first, stop), self._cut(self.end, first, stop)

    def _cut(self, fraction: Fraction, first: int, stop: int) -> int:
        if fraction in (0, 1):
            return stop if fraction else first
        unit = math.lcm(self.source.cut_unit, self.target.cut_unit)
        return max(first, int(first + fraction * (stop - first)) // unit * unit)


@functools.lru_cache(maxsize=256)
def routes(source: KVPlacement, target: KVPlacement) -> tuple[Route, ...]:
    """The routes between two placements, by source rank, then target rank.

    Raises:
        PlanError: the placements are of different caches, their pages do not fit, the source holds
            something in two different ways, or the target wants something that no source holds.
    """
    _check_same_cache(source, target)
    cells = _cells(source)
    _check_disjoint(source, list(cells))
    _check_covered(source, list(cells), target)
    found = [
        route
        for cell, replicas in cells.items()
        for route in _balanced(cell, replicas, source.page_size, target)
    ]
    return tuple(sorted(found, key=lambda route: (route.source_rank, route.target_rank)))


def _check_same_cache(source: KVPlacement, target: KVPlacement) -> None:
    for name in ("layers", "kv_heads"):
        if getattr(source, name) != getattr(target, name):
            raise PlanError(
                f"source and target have the same {name}",
                source=getattr(source, name),
                target=getattr(target, name),
            )
    small, large = sorted((source.page_size, target.page_size))
    if large % small:
        raise PlanError(
            "of the page sizes of source and target, one is a multiple of the other",
            source=source.page_size,
            target=target.page_size,
        )


def _cells(source: KVPlacement) -> dict[KVShare, list[int]]:
    """The distinct shares that hold anything, and the ranks that hold them."""
    cells: dict[KVShare, list[int]] = {}
    for rank, share in enumerate(source.shares):
        if not share.is_empty:
            cells.setdefault(share, []).append(rank)
    return cells


def _check_disjoint(source: KVPlacement, cells: list[KVShare]) -> None:
    size = source.page_size
    for one, other in itertools.combinations(cells, 2):
        if _common_volume(one, size, other, size):
            raise PlanError("source ranks hold equal shares or disjoint ones", one=one, other=other)


def _check_covered(source: KVPlacement, cells: list[KVShare], target: KVPlacement) -> None:
    for rank, share in enumerate(target.shares):
        wanted = _common_volume(share, target.page_size, share, target.page_size)
        held = sum(
            _common_volume(cell, source.page_size, share, target.page_size) for cell in cells
        )
        if held != wanted:
            layer, head, token = _first_uncovered(source, target, rank)
            raise PlanError(
                "everything that the target wants is held by a source rank",
                target_rank=rank,
                layer=layer,
                head=head,
                token=token,
            )


def _first_uncovered(
    source: KVPlacement, target: KVPlacement, target_rank: int
) -> tuple[int, int, int]:
    """The first (layer, head, token) that a target rank wants and no source rank holds."""
    shares = [*source.shares, target.shares[target_rank]]
    period = math.lcm(*(share.ranks * share.interleave for share in shares))
    grid = np.ix_(np.arange(source.layers), np.arange(source.kv_heads), np.arange(period))
    missing = np.asarray(target.holds(target_rank, *grid))
    for rank in range(source.num_ranks):
        missing = missing & ~source.holds(rank, *grid)
    layer, head, token = np.argwhere(missing)[0].tolist()
    return layer, head, token


def _balanced(
    cell: KVShare, replicas: list[int], page_size: int, target: KVPlacement
) -> Iterator[Route]:
    """The routes from the replicas of one cell: to each an equal part of all that is wanted of it.

    The target ranks that want something of the cell lie one after the other on a line, as long as
    what they want; equal parts of the line go to the replicas, in the order of ranks.
    """
    wanted = [_common_volume(cell, page_size, share, target.page_size) for share in target.shares]
    part = sum(wanted, Fraction(0)) / len(replicas)
    start = Fraction(0)
    for target_rank, volume in enumerate(wanted):
        if not volume:
            continue
        stop = start + volume
        for place in range(start // part, math.ceil(stop / part)):
            begin = max(start, place * part) - start
            end = min(stop, (place + 1) * part) - start
            yield _route(
                (replicas[place], cell, page_size),
                (target_rank, target.shares[target_rank], target.page_size),
                (begin / volume, end / volume),
            )
        start = stop


def _route(
    source: tuple[int, KVShare, int],
    target: tuple[int, KVShare, int],
    part: tuple[Fraction, Fraction],
) -> Route:
    source_rank, cell, source_page = source
    target_rank, share, target_page = target
    return Route(
        source_rank,
        target_rank,
        max(cell.layer_start, share.layer_start),
        min(cell.layer_stop, share.layer_stop),
        max(cell.head_start, share.head_start),
        min(cell.head_stop, share.head_stop),
        TokenSplit.of(cell, source_page),
        TokenSplit.of(share, target_page),
        *part,
    )


def _common_volume(one: KVShare, one_page: int, other: KVShare, other_page: int) -> Fraction:
    """Layers × heads × fraction of all tokens that two shares have in common."""
    layers = _overlap(one.layer_start, one.layer_stop, other.layer_start, other.layer_stop)
    heads = _overlap(one.head_start, one.head_stop, other.head_start, other.head_stop)
    if not layers * heads:
        return Fraction(0)
    common = common_runs(TokenSplit.of(one, one_page), TokenSplit.of(other, other_page))
    return layers * heads * Fraction(common.num_tokens, common.period)


def _overlap(start: int, stop: int, other_start: int, other_stop: int) -> int:
    return max(0, min(stop, other_stop) - max(start, other_start))
