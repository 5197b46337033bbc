"""The formulas with which other systems name the ranks and pages of a transfer.

The planner needs none of them: it intersects two placements. They are here for peers that speak in
these terms and for comparison; what each of them names holds what is wanted, though the planner may
choose another replica. :func:`dcpjax.layout.filter_pages` is the page filter of SGLang's reshard.
"""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcpjax.errors import PlanError
from dcpjax.layout import (
    decode_dcp_rank,
    decode_head_group,
    global_page,
    head_group,
    heads_per_rank,
    num_head_groups,
)


def should_filter_cp_indices(
    *, is_cp_layersplit: bool, attn_cp_size: int, enable_all_cp_ranks_for_transfer: bool
) -> bool:
    """Whether a prefill rank keeps only its CP share of the page indices before it sends (SGLang).

    Never in a layer split, where each CP rank sends all pages of its own layers, nor with any other
    CP, where the pages of a rank are its own already.
    """
    if is_cp_layersplit or attn_cp_size > 1:
        return False
    return enable_all_cp_ranks_for_transfer


def transfer_page_size(*, page_size: int, dcp_size: int, is_sharded: bool) -> int:
    """Tokens of the pages that a transfer counts in (SGLang).

    The physical page where the pool is sharded by DCP; the allocator's virtual page where every
    rank holds all tokens, as the draft's pool does.
    """
    return page_size if is_sharded else page_size * dcp_size


def pair_dcp_pages(
    source_pages: Sequence[int],
    target_pages: Sequence[int],
    *,
    source_ranks: int,
    source_rank: int,
    target_ranks: int,
    target_rank: int,
    num_computed_pages: int = 0,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pages that two DCP ranks have in common, pairwise, in order (vLLM's NIXL connector).

    Pairs are equal global pages, and never the ends of two lists: with different numbers of ranks
    the lists have different lengths for other reasons than a prefix hit.

    Args:
        source_pages: page ids of the source rank, from the beginning of the sequence.
        target_pages: page ids of the target rank from its page ``num_computed_pages`` on.
        num_computed_pages: pages that the target rank has already.

    Returns:
        source page ids and target page ids, of equal length.
    """
    source_ids, target_ids = _ids(source_pages), _ids(target_pages)
    at_source = global_page(np.arange(len(source_ids)), source_rank, ranks=source_ranks)
    at_target = global_page(
        num_computed_pages + np.arange(len(target_ids)), target_rank, ranks=target_ranks
    )
    _, of_source, of_target = np.intersect1d(
        at_source, at_target, assume_unique=True, return_indices=True
    )
    return source_ids[of_source], target_ids[of_target]


def vllm_dcp_source_ranks(
    rank: int, *, source_tp: int, source_dcp: int, target_dcp: int
) -> list[int]:
    """The source ranks that a target rank reads from, one latent head on both sides (vLLM).

    Either side has no DCP or as many DCP as TP ranks.
    """
    residue = decode_dcp_rank(rank, target_dcp)
    if target_dcp <= source_dcp:
        return [r for r in range(source_tp) if decode_dcp_rank(r, target_dcp) == residue]
    return [decode_dcp_rank(residue, source_dcp)]


def vllm_tp_mapping(
    rank: int, *, prefill_tp: int, decode_tp: int, num_kv_heads: int, is_mla: bool
) -> tuple[list[int], int]:
    """The prefill ranks that a decode rank reads its heads from, and where its heads begin there.

    The offset is counted in shares of the decode rank; it is 0 if it reads whole shares of the
    prefill ranks. From vLLM's NIXL connector; heads are sharded by tensor parallelism alone.

    Raises:
        PlanError: neither size divides the other.
    """
    _check_multiple("prefill_tp", prefill_tp, "decode_tp", decode_tp)
    if is_mla:
        return [rank * prefill_tp // decode_tp], 0
    if decode_tp < prefill_tp:
        return _first_of_each_head(rank, prefill_tp // decode_tp, prefill_tp, num_kv_heads), 0
    source = rank * prefill_tp // decode_tp
    if decode_tp == prefill_tp:
        return [source], 0
    if decode_tp > num_kv_heads:
        first_head = rank * num_kv_heads // decode_tp
        return [source], first_head - source * num_kv_heads // prefill_tp
    return [source], rank % (decode_tp // prefill_tp)


class HeadAction(enum.Enum):
    """What becomes of a page's heads between a prefill and a decode rank of Neuron's connector."""

    MATCH = "match"
    """Both hold the same heads of a page."""
    SPLIT = "split"
    """The decode rank reads a part of the prefill rank's heads."""
    MERGE = "merge"
    """The decode rank puts the heads of several prefill ranks together."""


def neuron_head_action(
    *, prefill_tp: int, prefill_dcp: int, decode_tp: int, decode_dcp: int, num_kv_heads: int
) -> HeadAction:
    """By the bytes of a page on both sides, which are as their heads.

    Raises:
        LayoutError: ranks and heads that do not divide.
    """
    prefill = heads_per_rank(prefill_tp, prefill_dcp, num_kv_heads)
    decode = heads_per_rank(decode_tp, decode_dcp, num_kv_heads)
    if prefill == decode:
        return HeadAction.MATCH
    return HeadAction.SPLIT if prefill > decode else HeadAction.MERGE


def neuron_remote_ranks(
    rank: int,
    *,
    prefill_tp: int,
    prefill_dcp: int,
    decode_tp: int,
    decode_dcp: int,
    num_kv_heads: int,
    is_dcp_slowest: bool = True,
) -> list[int]:
    """The prefill ranks that a decode rank of Neuron's connector reads from, heads before tokens.

    Both sides shard whole pages. Replicas of a head are read from the first of them. The rank
    arithmetic is that of vllm-neuron 0.24; where it puts the DCP ranks of prefill differs:
    ``is_dcp_slowest``: rank = dcp rank · (tp / dcp) + head group, as documented and as in 0.21
    (``KVPlacement.prefill_dcp``); else rank = head group · dcp + dcp rank (``KVPlacement.decode``).

    The documentation also prints an older formula (``num_target_ranks = tp_ratio * head_ratio``).
    With 8 KV heads it contradicts what is said beside it::

        prefill -> decode          decode rank   said        the formula gives
        tp 32, dcp 2 -> 16, 2      1             [16]        [17]
        tp 32, dcp 4 -> 16, 2      0             [0, 16]     [0]
        tp 32, dcp 4 -> 16, 2      1             [8, 24]     [17]
        tp 16        -> 16, 2      1             one rank    []

    Raises:
        LayoutError: ranks and heads that do not divide.
        PlanError: of the two DCP sizes, or of the heads per rank, neither divides the other.
    """
    groups = num_head_groups(prefill_tp, prefill_dcp)
    wanted = head_group(decode_tp, decode_dcp, num_kv_heads, decode_head_group(rank, decode_dcp))
    _check_multiple("prefill_dcp", prefill_dcp, "decode_dcp", decode_dcp)
    dcp_ranks = _prefill_dcp_ranks(decode_dcp_rank(rank, decode_dcp), prefill_dcp, decode_dcp)
    return [
        dcp_rank * groups + group if is_dcp_slowest else group * prefill_dcp + dcp_rank
        for group in _groups_of_heads(*wanted, groups, num_kv_heads)
        for dcp_rank in dcp_ranks
    ]


def _groups_of_heads(head_start: int, head_stop: int, groups: int, num_kv_heads: int) -> list[int]:
    """The head groups of the heads ``[head_start, head_stop)``, the first of each's replicas."""
    heads = heads_per_rank(groups, 1, num_kv_heads)
    _check_multiple(
        "prefill heads per rank", heads, "decode heads per rank", head_stop - head_start
    )
    replicas = max(1, groups // num_kv_heads)
    first, stop = head_start // heads, -(-head_stop // heads)
    return [place * replicas for place in range(first, stop)]


def _prefill_dcp_ranks(decode_rank: int, prefill_dcp: int, decode_dcp: int) -> list[int]:
    """The prefill DCP ranks that hold pages of a decode DCP rank."""
    if prefill_dcp <= decode_dcp:
        return [decode_dcp_rank(decode_rank, prefill_dcp)]
    return list(range(decode_rank, prefill_dcp, decode_dcp))


def _first_of_each_head(rank: int, count: int, prefill_tp: int, num_kv_heads: int) -> list[int]:
    """Of the ``count`` prefill ranks of a decode rank, the first that begins with each head."""
    ranks = np.arange(rank * count, (rank + 1) * count)
    _, first = np.unique(ranks * num_kv_heads // prefill_tp, return_index=True)
    return ranks[first].tolist()


def _ids(pages: Sequence[int]) -> npt.NDArray[Any]:
    return np.asarray(pages, np.int64)


def _check_multiple(one_name: str, one: int, other_name: str, other: int) -> None:
    small, large = sorted((one, other))
    if large % small:
        raise PlanError(
            f"of {one_name} and {other_name}, one is a multiple of the other",
            **{one_name: one, other_name: other},
        )
