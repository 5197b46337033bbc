"""The staged form of a transfer: whole source pages move, and are put in order where they land.

Where source and target deal tokens so differently that few consecutive ones stay together (a token
interleave of 1 against whole pages), moving each run would take a piece per run, layer and head:
tens of millions for a million tokens. Instead each source page is moved once to each target rank
that needs anything of it, into a staging page of that rank, all layers in one piece, and one
scatter per rank copies the tokens to their places (:class:`dcpjax.transfer.blocks.Landing`).

A staging page belongs to a page id and a residue of the source, and has the layers and heads of the
target rank: if several source ranks hold different layers or heads of the same tokens, they fill
the same staging page. What of a page is not wanted stays in staging.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcpjax.errors import PlanError
from dcpjax.layout import KVPlacement, local_index, owner
from dcpjax.transfer.blocks import BoundPath, BoundTransfer, Landing, PageGroup, path_blocks
from dcpjax.transfer.check import check_page_ids, check_region
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import TransferPath, TransferPlan
from dcpjax.transfer.runs import Array, StridedRuns, TokenSplit

Indices = npt.NDArray[np.int32]

PIECE_COST_BYTES = 32 * 1024
"""Bytes that move in the time of one more piece.

Measured with NIXL over shared memory: 368 MB in pages of 36,864 bytes take 55 ms longer than in
pages of 368,640 bytes, 6 us for each of 9,000 more pieces, at 5.7 GB/s for the bytes themselves.
The scatter at landing (7 GB/s) costs about as much as the move of what is wanted, which staging
saves; so staging is faster if it moves fewer bytes than this for each piece of the direct form.
"""


@dataclass(frozen=True)
class StagingMemory:
    """Free staging pages of a target engine, the same ids on every rank.

    A staging page has the tokens of a source page, and the layers and heads of the target rank.

    Attributes:
        ranks: the regions, one per target rank.
        page_ids: at least :func:`num_staging_pages` of them.
    """

    ranks: tuple[RankMemory, ...]
    page_ids: Sequence[int] | npt.NDArray[np.int64]


def is_staging_faster(
    plan: TransferPlan, *, token_bytes: int, piece_cost_bytes: int = PIECE_COST_BYTES
) -> bool:
    """Whether runs are shorter than pages, and so short that whole pages cost less.

    Decided from what the placements have in common, not from the sequence: that a short prompt ends
    in the middle of a page is no reason.
    """
    num_pieces, staged_tokens = 0.0, 0.0
    for path in plan.paths:
        common = path.runs.common
        if not common.is_in_pages:
            periods = path.num_items / common.num_tokens
            num_pieces += periods * len(common.length)
            staged_tokens += periods * common.num_source_pages * plan.source.page_size
    return staged_tokens * token_bytes < num_pieces * piece_cost_bytes


def num_staging_pages(plan: TransferPlan) -> int:
    """Staging pages that the transfer takes on the target rank that needs most of them.

    To stage with fewer, plan the tokens in several ranges, one after the other.

    Raises:
        PlanError: the source deals its tokens in more than one way.
    """
    return max((rows.num_pages for rows in _rows_by_rank(plan).values()), default=0)


def stage(
    plan: TransferPlan, source: SequenceMemory, target: SequenceMemory, staging: StagingMemory
) -> BoundTransfer:
    """Bind the staged form of a plan. The sides have been checked.

    Raises:
        PlanError: the source deals its tokens in more than one way.
        TransferError: staging regions or page ids that cannot be right, or too few of them.
    """
    rows_by_rank = _rows_by_rank(plan)
    _check_staging(plan, staging, rows_by_rank)
    source_page_ids, staging_ids = np.asarray(source.page_ids), np.asarray(staging.page_ids)
    pages_of: dict[StridedRuns, Array] = {}
    paths: list[BoundPath] = []
    for path in plan.paths:
        if path.runs not in pages_of:
            pages_of[path.runs] = _source_pages(path.runs)
        group = _staged_group(
            path, pages_of[path.runs], rows_by_rank[path.target_rank], source_page_ids, staging_ids
        )
        blocks = path_blocks(plan, path, group, source.ranks, staging.ranks)
        paths.append(BoundPath(path.source_rank, path.target_rank, (blocks,)))
    target_page_ids = np.asarray(target.page_ids)
    landings = tuple(
        rows.landing(rank, staging_ids, target_page_ids)
        for rank, rows in sorted(rows_by_rank.items())
    )
    return BoundTransfer(source.ranks, staging.ranks, tuple(paths), landings)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The tokens that a target rank wants, in the order of positions, and where they are.

    Attributes:
        slots: the number of the staging page of a source page, counted over all ranks of the
            source; of those that are needed.
        source_page: of each token, counted over all ranks of the source.
        source_offset: of each token in its page.
        target_index: local index of each token.
    """

    slots: Array
    num_pages: int
    source_page: Indices
    source_offset: Indices
    target_index: Indices
    target_page_size: int

    def landing(self, rank: int, staging_ids: Array, target_page_ids: Array) -> Landing:
        page = self.target_index // self.target_page_size
        return Landing(
            rank,
            staging_pages=staging_ids.astype(np.int32)[self.slots][self.source_page],
            staging_offsets=self.source_offset,
            target_pages=target_page_ids.astype(np.int32)[page],
            target_offsets=self.target_index - page * self.target_page_size,
        )


def _rows_by_rank(plan: TransferPlan) -> dict[int, _Rows]:
    """The rows of every target rank that wants anything; equal shares have the same object."""
    deal = _one_deal(plan.source)
    by_split: dict[TokenSplit, _Rows] = {}
    rows: dict[int, _Rows] = {}
    for path in plan.paths:
        split = path.runs.target
        if split not in by_split:
            by_split[split] = _rows(plan, deal, split)
        rows[path.target_rank] = by_split[split]
    return rows


def _rows(plan: TransferPlan, deal: TokenSplit, target: TokenSplit) -> _Rows:
    """Worked out for one period, after which places repeat on the next pages, as runs do."""
    period = math.lcm(deal.virtual_page, target.virtual_page)
    tokens = target.position(np.arange(period // target.ranks))
    split = {"ranks": deal.ranks, "interleave": deal.interleave}
    page, offset = np.divmod(local_index(tokens, **split), deal.page_size)
    number = _number(page, owner(tokens, **split), deal.ranks)

    first, stop = target.filled(plan.first_token), target.filled(plan.num_tokens)
    periods = np.arange(first // len(tokens), -(-stop // len(tokens)))[:, None]
    numbers_per_period = period // deal.page_size
    begin = len(tokens) * int(periods[0, 0])
    kept = slice(first - begin, stop - begin)
    source_page = (number + periods * numbers_per_period).astype(np.int32).ravel()[kept]
    slots = np.cumsum(_marked(source_page)) - 1
    return _Rows(
        slots=slots,
        num_pages=int(slots[-1]) + 1,
        source_page=source_page,
        source_offset=np.tile(offset.astype(np.int32), len(periods))[kept],
        target_index=np.arange(first, stop, dtype=np.int32),
        target_page_size=target.page_size,
    )


def _marked(numbers: Array | Indices) -> npt.NDArray[np.bool_]:
    """Whether each number from 0 to the greatest is among ``numbers``, of which there are some."""
    marks = np.zeros(int(numbers.max()) + 1, bool)
    marks[numbers] = True
    return marks


def _number(page: Array, residue: Array | int, ranks: int) -> Array:
    """A source page among those of all ranks."""
    return page * ranks + residue


def _source_pages(runs: StridedRuns) -> Array:
    """The pages of the source rank that the runs lie in, ascending."""
    start, _ = runs.repeated(list(range(len(runs.count))))
    return np.flatnonzero(_marked(start // runs.source.page_size))


def _staged_group(
    path: TransferPath, pages: Array, rows: _Rows, source_page_ids: Array, staging_ids: Array
) -> PageGroup:
    """Whole pages of the source to the staging pages of the target rank, by source page id."""
    split = path.runs.source
    slots = rows.slots[_number(pages, split.residue, split.ranks)]
    ids = source_page_ids[pages]
    order = np.argsort(ids)
    return PageGroup(
        0,
        0,
        split.page_size,
        ids[order].astype(np.int32),
        staging_ids[slots[order]].astype(np.int32),
    )


def _one_deal(source: KVPlacement) -> TokenSplit:
    """How all ranks of the source deal tokens: the split of any of them."""
    splits = [TokenSplit.of(s, source.page_size) for s in source.shares if not s.is_empty]
    if len({(split.ranks, split.interleave) for split in splits}) != 1:
        raise PlanError("a source that is staged deals its tokens in one way", splits=splits)
    return splits[0]


def _check_staging(plan: TransferPlan, staging: StagingMemory, rows: dict[int, _Rows]) -> None:
    if len(staging.ranks) != plan.target.num_ranks:
        raise PlanError(
            "there is a staging region for every target rank",
            regions=len(staging.ranks),
            ranks=plan.target.num_ranks,
        )
    if not rows:
        return
    for rank in rows:
        check_region(
            "staging", rank, plan.target.shares[rank], plan.source.page_size, staging.ranks[rank]
        )
    check_page_ids(
        "staging",
        staging.page_ids,
        needed=max(r.num_pages for r in rows.values()),
        num_pages=min(staging.ranks[rank].num_pages for rank in rows),
    )
