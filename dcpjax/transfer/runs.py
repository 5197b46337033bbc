"""The tokens that two ranks both hold, as runs in the memory of each: the periodic half of a plan.

A rank stores its tokens in the order of their local index. The tokens that a source and a target
rank both hold form a pattern that repeats after ``period`` tokens, a whole number of virtual pages
of either side. One period is worked out token by token, once per pair of ranks
(:func:`common_runs`, cached); a sequence of any length is this pattern repeated and clipped at its
two ends (:func:`strided_runs`).

With a source of 2 ranks, interleave 1, and a target of one rank, both with pages of 4::

    position              0 1 2 3 4 5 6 7 | 8 ...       period 8
    source rank 1 holds     0   1   2   3 |             by local index, one page
    target holds          0 1 2 3 4 5 6 7 | 8           two pages
    runs                  (0, 1) (1, 3) (2, 5) (3, 7)   source start, target start; 1 token each
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcpjax.layout import KVShare, active_mask, global_position, local_filled, local_index

Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSplit:
    """Which tokens of every sequence a rank holds, and how long its pages are."""

    ranks: int
    residue: int
    interleave: int
    page_size: int

    @classmethod
    def of(cls, share: KVShare, page_size: int) -> "TokenSplit":
        """The split of ``share``; all splits of one rank are one, whatever their interleave."""
        interleave = page_size if share.ranks == 1 else share.interleave
        return cls(share.ranks, share.residue, interleave, page_size)

    @property
    def virtual_page(self) -> int:
        """Tokens of a sequence that belong to one page id."""
        return self.ranks * self.page_size

    @property
    def cut_unit(self) -> int:
        """A sequence cut at multiples of so many tokens is cut between pages of every rank."""
        return self.page_size if self.interleave == self.page_size else self.virtual_page

    def holds(self, tokens: Any) -> Any:
        """Whether the rank holds the tokens, elementwise."""
        return active_mask(tokens, self.residue, ranks=self.ranks, interleave=self.interleave)

    def index(self, tokens: Any) -> Any:
        """The local index of tokens, on the rank that holds them."""
        return local_index(tokens, ranks=self.ranks, interleave=self.interleave)

    def position(self, indices: Any) -> Any:
        """The tokens with these local indices on this rank."""
        return global_position(indices, self.residue, ranks=self.ranks, interleave=self.interleave)

    def filled(self, length: int) -> int:
        """How many of the tokens ``[0, length)`` the rank holds."""
        return local_filled(length, self.residue, ranks=self.ranks, interleave=self.interleave)


@dataclass(frozen=True, eq=False)
class CommonRuns:
    """One period of the tokens that a source and a target rank both hold.

    Run j is ``length[j]`` tokens, from local index ``source_start[j]`` of the source and
    ``target_start[j]`` of the target on. It lies in one page of either and cannot be longer.

    Attributes:
        period: tokens of a sequence after which the runs repeat.
        source_step, target_step: local tokens per period, a multiple of the page size.
    """

    source: TokenSplit
    target: TokenSplit
    period: int
    source_start: Array
    target_start: Array
    length: Array
    source_step: int
    target_step: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a period that both ranks hold."""
        return int(self.length.sum())

    @functools.cached_property
    def num_source_pages(self) -> int:
        """Pages of the source that the tokens of a period lie in."""
        return len(np.unique(self.source_start // self.source.page_size))

    @functools.cached_property
    def is_in_pages(self) -> bool:
        """Whether every run is as long as a page of the side with the smaller pages."""
        page = min(self.source.page_size, self.target.page_size)
        return bool((self.length == page).all())


@functools.lru_cache(maxsize=4096)
def common_runs(source: TokenSplit, target: TokenSplit) -> CommonRuns:
    """The runs of one period, in the order of positions."""
    period = math.lcm(source.virtual_page, target.virtual_page)
    tokens = np.arange(period)
    tokens = tokens[source.holds(tokens) & target.holds(tokens)]
    at_source, at_target = source.index(tokens), target.index(tokens)
    is_start = np.ones(len(tokens), bool)
    is_start[1:] = (np.diff(at_source) != 1) | (np.diff(at_target) != 1)
    is_start |= (at_source % source.page_size == 0) | (at_target % target.page_size == 0)
    starts = np.flatnonzero(is_start)
    return CommonRuns(
        source,
        target,
        period=period,
        source_start=at_source[starts],
        target_start=at_target[starts],
        length=np.diff(starts, append=len(tokens)),
        source_step=period // source.ranks,
        target_step=period // target.ranks,
    )


@dataclass(frozen=True, eq=False)
class StridedRuns:
    """The runs of several periods: what one rank sends to another of one sequence.

    Repetition k of run j, for k in ``[0, count[j])``, is ``length[j]`` tokens from local index
    ``source_start[j] + k * common.source_step`` of the source and ``target_start[j] + k *
    common.target_step`` of the target on. It lies in one page of either side, at offsets that do
    not depend on k.
    """

    common: CommonRuns
    source_start: Array
    target_start: Array
    length: Array
    count: Array

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.length @ self.count)

    @property
    def source(self) -> TokenSplit:
        return self.common.source

    @property
    def target(self) -> TokenSplit:
        return self.common.target

    def repeated(self, members: list[int]) -> tuple[Array, Array]:
        """Source and target starts of the runs ``members``, all repetitions written out."""
        count = self.count[members]
        run = np.repeat(members, count)
        repetition = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
        return (
            self.source_start[run] + repetition * self.common.source_step,
            self.target_start[run] + repetition * self.common.target_step,
        )

    def source_indices(self) -> Array:
        """The source's local index of every token of the runs: slow, for checks."""
        start, _ = self.repeated(list(range(len(self.count))))
        length = np.repeat(self.length, self.count)
        within = np.arange(self.num_tokens) - np.repeat(np.cumsum(length) - length, length)
        return np.repeat(start, length) + within


def strided_runs(source: TokenSplit, target: TokenSplit, first: int, stop: int) -> StridedRuns:
    """The tokens ``[first, stop)`` that both ranks hold: whole periods and the rest at the ends."""
    common = common_runs(source, target)
    whole_first, whole_stop = -(-first // common.period), stop // common.period
    count = whole_stop - whole_first
    columns: list[tuple[Array, Array, Array, Array]] = []
    if count < 0:  # both ends lie in one period
        columns.append(_clipped(source, common, whole_stop, first, stop))
    else:
        if first < whole_first * common.period:
            columns.append(_clipped(source, common, whole_first - 1, first, stop))
        if count > 0:
            columns.append(_shifted(common, whole_first, count))
        if whole_stop * common.period < stop:
            columns.append(_clipped(source, common, whole_stop, first, stop))
    if not columns:
        columns.append(_shifted(common, 0, 0))
    parts = (
        columns[0] if len(columns) == 1 else [np.concatenate(c) for c in zip(*columns, strict=True)]
    )
    return StridedRuns(common, *parts)


def _shifted(common: CommonRuns, period: int, count: int) -> tuple[Array, Array, Array, Array]:
    """The runs of ``count`` whole periods, from number ``period`` on."""
    kept = slice(None) if count else slice(0)
    return (
        common.source_start[kept] + period * common.source_step,
        common.target_start[kept] + period * common.target_step,
        common.length[kept],
        np.full(len(common.length[kept]), count),
    )


def _clipped(
    source: TokenSplit, common: CommonRuns, period: int, first: int, stop: int
) -> tuple[Array, Array, Array, Array]:
    """The runs of one period, cut to the tokens ``[first, stop)``.

    Local indices grow with positions, so what is cut off in the memory of the source is what is cut
    off of the tokens, and of the target.
    """
    source_start, target_start, length, count = _shifted(common, period, 1)
    start = np.maximum(source_start, source.filled(first))
    end = np.minimum(source_start + length, source.filled(stop))
    kept = start < end
    return (
        start[kept],
        (target_start + start - source_start)[kept],
        (end - start)[kept],
        count[kept],
    )
