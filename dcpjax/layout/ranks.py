"""The orders in which the ranks of one device list are grouped, and the heads of each group.

    decode        rank = group * dcp + token rank          the DCP ranks are neighbours
    DCP prefill   rank = token rank * (tp / dcp) + group   ranks of the same tokens are neighbours
    PCP           rank = pcp rank * tp + tp rank           DCP groups run over PCP ranks first

``tp`` is the whole tensor parallel size, DCP ranks included: ``G = tp / dcp`` head groups.
The first two orders put the same token on different ranks; the second is for engines that only
prefill.
"""

import numpy as np

from dcpjax.errors import LayoutError
from dcpjax.layout.domain import (
    Integers,
    check_below,
    check_divides,
    check_not_negative,
    static_count,
)

Groups = list[list[int]]
"""Global ranks of each group, in the order of the ranks inside the group."""


def decode_groups(tp: int, dcp: int, pcp: int = 1) -> Groups:
    """The groups of ranks that share the tokens of a sequence in decode, for ``tp * pcp`` ranks.

    Raises:
        LayoutError: ``dcp`` does not divide the number of ranks.
    """
    tp, dcp, pcp = static_count("tp", tp), static_count("dcp", dcp), static_count("pcp", pcp)
    check_divides("dcp", dcp, "tp * pcp", tp * pcp)
    by_pcp_rank = np.arange(tp * pcp).reshape(pcp, tp)
    in_order = by_pcp_rank if dcp == 1 else by_pcp_rank.T
    return in_order.reshape(-1, dcp).tolist()


def prefill_groups(tp: int, dcp: int) -> tuple[Groups, Groups]:
    """The groups of DCP prefill: ``dcp_tp`` (same tokens, other heads), ``cp_kv`` (same heads).

    Raises:
        LayoutError: ``dcp`` does not divide ``tp``.
    """
    by_token_rank = np.arange(tp).reshape(dcp, num_head_groups(tp, dcp))
    return by_token_rank.tolist(), by_token_rank.T.tolist()


def decode_dcp_rank(rank: Integers, dcp: int) -> Integers:
    """The place of ``rank`` among the ranks that share tokens, in the decode order."""
    check_not_negative("rank", rank)
    return rank % static_count("dcp", dcp)


def decode_head_group(rank: Integers, dcp: int) -> Integers:
    """The head group of ``rank`` in the decode order."""
    check_not_negative("rank", rank)
    return rank // static_count("dcp", dcp)


def prefill_cp_rank(rank: Integers, tp: int, dcp: int) -> Integers:
    """The place of ``rank`` among the ranks that share tokens, in the DCP prefill order."""
    check_below("rank", rank, "tp", tp)
    return rank // num_head_groups(tp, dcp)


def prefill_head_group(rank: Integers, tp: int, dcp: int) -> Integers:
    """The head group of ``rank`` in the DCP prefill order."""
    check_below("rank", rank, "tp", tp)
    return rank % num_head_groups(tp, dcp)


def num_head_groups(tp: int, dcp: int) -> int:
    """G: the groups of ranks that hold different heads (or copies of one, if heads are few).

    Raises:
        LayoutError: ``dcp`` does not divide ``tp``.
    """
    tp, dcp = static_count("tp", tp), static_count("dcp", dcp)
    check_divides("dcp", dcp, "tp", tp)
    return tp // dcp


def heads_per_rank(tp: int, dcp: int, kv_heads: int) -> int:
    """KV heads that each rank holds: an equal share, at least one.

    Raises:
        LayoutError: neither of G and ``kv_heads`` divides the other.
    """
    groups, kv_heads = num_head_groups(tp, dcp), static_count("kv_heads", kv_heads)
    if groups % kv_heads and kv_heads % groups:
        raise LayoutError(
            "of the head groups tp / dcp and kv_heads, one is a multiple of the other",
            tp=tp,
            dcp=dcp,
            kv_heads=kv_heads,
        )
    return max(1, kv_heads // groups)


def head_group(tp: int, dcp: int, kv_heads: int, group: Integers) -> tuple[Integers, Integers]:
    """The KV heads ``[start, stop)`` of head group ``group``.

    More groups than heads: neighbouring groups hold the same head.

    Raises:
        LayoutError: the group is out of range, or neither of G and ``kv_heads`` divides the other.
    """
    count = heads_per_rank(tp, dcp, kv_heads)
    groups = num_head_groups(tp, dcp)
    check_below("group", group, "groups", groups)
    start = group * kv_heads // groups
    return start, start + count
