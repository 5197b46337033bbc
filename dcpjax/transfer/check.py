"""What must hold of page ids and memory regions before a byte moves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcpjax.errors import PlanError, TransferError
from dcpjax.layout import KVPlacement, KVShare
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import TransferPlan


def check_sides(plan: TransferPlan, source: SequenceMemory, target: SequenceMemory) -> None:
    """Refuse memory that the plan cannot be bound to.

    Raises:
        PlanError: memory of another placement than the planned one.
        TransferError: page ids that are not distinct pages of the ranks or too few for the tokens;
            regions that are missing, overlap themselves, or have tokens of different sizes.
    """
    source_ranks = sorted({path.source_rank for path in plan.paths})
    target_ranks = sorted({path.target_rank for path in plan.paths})
    _check_side("source", plan.source, source, source_ranks, plan.num_tokens)
    _check_side("target", plan.target, target, target_ranks, plan.num_tokens)
    _check_token_bytes(plan, source.ranks, target.ranks)


def check_region(side: str, rank: int, share: KVShare, page_size: int, region: RankMemory) -> None:
    """Refuse a region in which the values of a rank's share would overlap, or that is none.

    Raises:
        TransferError: with the two sizes.
    """
    if region.address <= 0:
        raise TransferError(
            f"a {side} rank that holds something has memory", rank=rank, address=region.address
        )
    page = region.first + page_size * region.token_bytes
    sizes = (
        ("token_bytes", region.token_bytes, "one byte", 1),
        ("first", region.first, "nothing", 0),
        ("head_stride", region.head_stride, "a page of tokens", page),
        ("layer_stride", region.layer_stride, "its heads", share.num_heads * region.head_stride),
        ("page_stride", region.page_stride, "its layers", share.num_layers * region.layer_stride),
    )
    for name, size, content, least in sizes:
        if size < least:
            raise TransferError(
                f"the {name} of a {side} region is at least the size of {content}",
                **{"rank": rank, name: size, "least": least},
            )


def check_page_ids(
    side: str, page_ids: Sequence[int] | npt.NDArray[Any], *, needed: int, num_pages: int
) -> None:
    """Refuse page ids that are fewer than ``needed``, or no distinct pages of ``num_pages``.

    Raises:
        TransferError: with what is wrong and the limit.
    """
    ids = np.asarray(page_ids)
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise TransferError(
            f"{side} page ids are one row of integers", shape=ids.shape, dtype=ids.dtype.name
        )
    if len(ids) < needed:
        raise TransferError(
            f"the {side} has enough page ids for the tokens", page_ids=len(ids), needed=needed
        )
    ids = np.sort(ids)
    if len(ids) and not 0 <= ids[0] <= ids[-1] < num_pages:
        raise TransferError(
            f"{side} page ids are in [0, num_pages)",
            page_id=int(ids[0] if ids[0] < 0 else ids[-1]),
            num_pages=num_pages,
        )
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        raise TransferError(
            f"the {side} page ids of a sequence are distinct", page_id=int(repeated[0])
        )


def _check_side(
    side: str, placement: KVPlacement, memory: SequenceMemory, ranks: list[int], num_tokens: int
) -> None:
    if memory.placement != placement:
        raise PlanError(
            f"the {side} memory has the placement of the plan",
            plan=placement,
            memory=memory.placement,
        )
    if not ranks:
        return
    for rank in ranks:
        check_region(side, rank, placement.shares[rank], placement.page_size, memory.ranks[rank])
    least = min(placement.shares[rank].ranks for rank in ranks) * placement.page_size
    check_page_ids(
        side,
        memory.page_ids,
        needed=-(-num_tokens // least),
        num_pages=min(memory.ranks[rank].num_pages for rank in ranks),
    )


def _check_token_bytes(
    plan: TransferPlan, source: tuple[RankMemory, ...], target: tuple[RankMemory, ...]
) -> None:
    for path in plan.paths:
        sizes = source[path.source_rank].token_bytes, target[path.target_rank].token_bytes
        if sizes[0] != sizes[1]:
            raise TransferError(
                "a token has the same bytes at the source and the target",
                source=sizes[0],
                target=sizes[1],
            )
