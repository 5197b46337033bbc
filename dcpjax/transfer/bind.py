"""Plans to addresses: page ids and memory regions make a plan something that can be moved."""

import numpy as np

from dcpjax.transfer.blocks import BoundPath as BoundPath
from dcpjax.transfer.blocks import BoundTransfer as BoundTransfer
from dcpjax.transfer.blocks import Landing as Landing
from dcpjax.transfer.blocks import PageGroup, page_groups, path_blocks
from dcpjax.transfer.blocks import StridedBlocks as StridedBlocks
from dcpjax.transfer.check import check_sides
from dcpjax.transfer.memory import SequenceMemory
from dcpjax.transfer.plan import TransferPlan
from dcpjax.transfer.runs import StridedRuns
from dcpjax.transfer.staging import (
    PIECE_COST_BYTES,
    StagingMemory,
    is_staging_faster,
    stage,
)


def bind(
    plan: TransferPlan,
    source: SequenceMemory,
    target: SequenceMemory,
    *,
    staging: StagingMemory | None = None,
    piece_cost_bytes: int = PIECE_COST_BYTES,
) -> BoundTransfer:
    """Give a plan the pages and the memory of one sequence on both sides.

    Args:
        staging: where whole source pages may be moved instead, to be put in order at landing, if
            the pieces that the two ranks have in common are too short. None: never.
        piece_cost_bytes: how many bytes move in the time that one more piece takes.

    Returns:
        With ``landings`` if staging was chosen: then the bytes have moved into ``staging`` and each
        target rank still has to copy its rows.

    Raises:
        PlanError: memory of another placement than the planned one, or staging where the source
            deals its tokens in more than one way.
        TransferError: page ids or regions that cannot be right; nothing has moved.
    """
    check_sides(plan, source, target)
    if staging is not None and is_staging_faster(
        plan, token_bytes=_token_bytes(source), piece_cost_bytes=piece_cost_bytes
    ):
        return stage(plan, source, target, staging)
    return _bind_directly(plan, source, target)


def _bind_directly(
    plan: TransferPlan, source: SequenceMemory, target: SequenceMemory
) -> BoundTransfer:
    source_page_ids, target_page_ids = np.asarray(source.page_ids), np.asarray(target.page_ids)
    groups: dict[StridedRuns, list[PageGroup]] = {}
    paths: list[BoundPath] = []
    for path in plan.paths:
        if path.runs not in groups:
            groups[path.runs] = list(page_groups(path.runs, source_page_ids, target_page_ids))
        blocks = tuple(
            path_blocks(plan, path, group, source.ranks, target.ranks)
            for group in groups[path.runs]
        )
        paths.append(BoundPath(path.source_rank, path.target_rank, blocks))
    return BoundTransfer(source.ranks, target.ranks, tuple(paths))


def _token_bytes(memory: SequenceMemory) -> int:
    return max(rank.token_bytes for rank in memory.ranks)
