"""What must hold of page ids and memory regions before a byte moves."""

import numpy as np

from dcpjax.errors import PlanError, TransferError
from dcpjax.layout import KVPlacement
from dcpjax.transfer.memory import RankMemory, SequenceMemory
from dcpjax.transfer.plan import TransferPlan
from dcpjax.transfer.runs import TokenSplit


def check_sides(plan: TransferPlan, source: SequenceMemory, target: SequenceMemory) -> None:
    """Refuse memory that the plan cannot be bound to.

    Raises:
        PlanError: memory of another placement than the planned one.
        TransferError: page ids that are not distinct pages of the ranks or too few for the tokens;
            regions that are missing, overlap themselves, or have tokens of different sizes.
    """
    sides = (
        ("source", plan.source, source, sorted({path.source_rank for path in plan.paths})),
        ("target", plan.target, target, sorted({path.target_rank for path in plan.paths})),
    )
    for side, placement, memory, ranks in sides:
        if memory.placement != placement:
            raise PlanError(
                f"the {side} memory has the placement of the plan",
                plan=placement,
                memory=memory.placement,
            )
        for rank in ranks:
            check_region(side, rank, placement, memory.ranks[rank])
        check_page_ids(side, memory, ranks, plan.num_tokens)
    _check_token_bytes(plan, source.ranks, target.ranks)


def check_region(side: str, rank: int, placement: KVPlacement, region: RankMemory) -> None:
    """Refuse a region in which the values of a rank's share would overlap, or that is none.

    Raises:
        TransferError: with the two sizes.
    """
    share = placement.shares[rank]
    if region.address <= 0:
        raise TransferError(
            f"a {side} rank that holds something has memory", rank=rank, address=region.address
        )
    sizes = (
        ("token_bytes", region.token_bytes, "one", 1),
        (
            "head_stride",
            region.head_stride,
            "a page of tokens",
            placement.page_size * region.token_bytes,
        ),
        ("layer_stride", region.layer_stride, "its heads", share.num_heads * region.head_stride),
        ("page_stride", region.page_stride, "its layers", share.num_layers * region.layer_stride),
    )
    for name, size, content, least in sizes:
        if size < least:
            raise TransferError(
                f"the {name} of a {side} region is at least the size of {content}",
                **{"rank": rank, name: size, "least": least},
            )


def check_page_ids(side: str, memory: SequenceMemory, ranks: list[int], num_tokens: int) -> None:
    """Refuse page ids that are not enough distinct pages of all of ``ranks``.

    Raises:
        TransferError: with what is wrong and the limit.
    """
    if not ranks:
        return
    page_ids = np.asarray(memory.page_ids)
    if page_ids.ndim != 1 or page_ids.dtype.kind not in "iu":
        raise TransferError(
            f"{side} page ids are one row of integers",
            shape=page_ids.shape,
            dtype=page_ids.dtype.name,
        )
    placement = memory.placement
    splits = {TokenSplit.of(placement.shares[rank], placement.page_size) for rank in ranks}
    needed = -(-num_tokens // min(split.virtual_page for split in splits))
    if len(page_ids) < needed:
        raise TransferError(
            f"the {side} has a page id for every virtual page of the sequence",
            page_ids=len(page_ids),
            needed=needed,
        )
    num_pages = min(memory.ranks[rank].num_pages for rank in ranks)
    low, high = int(page_ids.min()), int(page_ids.max())
    if low < 0 or high >= num_pages:
        raise TransferError(
            f"{side} page ids are in [0, num_pages)",
            page_id=low if low < 0 else high,
            num_pages=num_pages,
        )
    ascending = np.sort(page_ids)
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(repeated):
        raise TransferError(
            f"the {side} page ids of a sequence are distinct", page_id=int(repeated[0])
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
