"""Where a token lives: which of N ranks holds it, and at which place of that rank's pool.

``interleave`` (I) consecutive tokens stay on one rank, then the next rank follows; N·I tokens make
a cycle. With two ranks and an interleave of 2::

    position      0 1 2 3 4 5 6 7 8 9
    owner         0 0 1 1 0 0 1 1 0 0
    local index   0 1 0 1 2 3 2 3 4 5

``ranks``, ``interleave`` and ``page_size`` are static Python ints; all else may be an int or an
array (see :mod:`dcpjax.layout.domain`) and the result is of the same kind and integer type.
Unsigned arrays are best in a compiled step: XLA reduces their ``//`` and ``%`` to plain divisions
and remainders without sign handling.

All functions raise :class:`dcpjax.errors.LayoutError` for static arguments outside their domain.
"""

from typing import Any

import numpy as np

from dcpjax.errors import LayoutError
from dcpjax.layout.domain import (
    Booleans,
    Integers,
    arange,
    as_array,
    check_below,
    check_divides,
    check_not_negative,
    in_type_of,
    maximum,
    minimum,
    namespace,
    static_count,
)


def owner(position: Integers, *, ranks: int, interleave: int) -> Integers:
    """The rank that holds the token at ``position``."""
    ranks, interleave = _static_split(ranks, interleave)
    check_not_negative("position", position)
    return position // interleave % ranks


def active_mask(position: Integers, rank: Integers, *, ranks: int, interleave: int) -> Booleans:
    """Whether ``rank`` holds the token at ``position``."""
    holder = owner(position, ranks=ranks, interleave=interleave)
    check_below("rank", rank, "ranks", ranks)
    return holder == in_type_of(holder, rank)


def local_index(position: Integers, *, ranks: int, interleave: int) -> Integers:
    """How many tokens of the same sequence and the same rank come before ``position``."""
    ranks, interleave = _static_split(ranks, interleave)
    check_not_negative("position", position)
    return position // (ranks * interleave) * interleave + position % interleave


def global_position(index: Integers, rank: Integers, *, ranks: int, interleave: int) -> Integers:
    """The position of the token with local ``index`` on ``rank``: inverse of the two above."""
    ranks, interleave = _static_split(ranks, interleave)
    check_not_negative("index", index)
    check_below("rank", rank, "ranks", ranks)
    first_of_rank = in_type_of(index, rank) * interleave
    return index // interleave * (ranks * interleave) + first_of_rank + index % interleave


def local_filled(length: Integers, rank: Integers, *, ranks: int, interleave: int) -> Integers:
    """How many of the tokens ``[0, length)`` are held by ``rank``.

    Lengths of the tokens of a segment are first expanded (``prior + 1 + arange``) and then
    localised: a local length does not grow by one with each token.
    """
    ranks, interleave = _static_split(ranks, interleave)
    check_not_negative("length", length)
    check_below("rank", rank, "ranks", ranks)
    cycle = ranks * interleave
    # The rank's tokens in a cycle are [start, start + interleave). Clip first and subtract last:
    # an unsigned difference must not go below zero.
    start = in_type_of(length, rank) * interleave
    reached = minimum(maximum(length % cycle, start), start + interleave)
    return length // cycle * interleave + (reached - start)


def max_local_filled(length: Integers, ranks: int, interleave: int) -> Integers:
    """The most tokens of ``[0, length)`` that any rank holds. Rank 0 is never behind another."""
    return local_filled(length, 0, ranks=ranks, interleave=interleave)


def window_rows(
    start: Integers, width: int, rank: Integers, *, ranks: int, interleave: int
) -> Integers:
    """Offsets in the window ``[start, start + width)`` of the tokens of ``rank``, ascending.

    Any window whose width is a multiple of a cycle holds exactly ``width / ranks`` tokens of each
    rank, so the shape is static wherever the window starts.

    Args:
        start: position of the first token, a scalar.
        width: static, a multiple of ``ranks * interleave``.

    Returns:
        ``[width / ranks]`` integers of the type of ``start`` (int32 if all arguments are ints).
    """
    rows = _static_rows(width, ranks, interleave)
    first = local_filled(start, rank, ranks=ranks, interleave=interleave)
    indices = first + arange(rows, like=first)
    return global_position(indices, rank, ranks=ranks, interleave=interleave) - start


def window_order(start: Integers, width: int, *, ranks: int, interleave: int) -> Integers:
    """The permutation that puts rank-major rows of a window back into the order of positions.

    With ``rows`` the concatenation of :func:`window_rows` of all ranks,
    ``rows[window_order(...)] == arange(width)``.

    Returns:
        ``[width]`` integers of the type of ``start`` (int32 for an int).
    """
    rows = _static_rows(width, ranks, interleave)
    positions = start + arange(width, like=start)
    holder = owner(positions, ranks=ranks, interleave=interleave)
    index = local_index(positions, ranks=ranks, interleave=interleave)
    first = local_filled(start, holder, ranks=ranks, interleave=interleave)
    return holder * rows + index - first


def slot_mapping(
    page_table: Integers,
    positions: Integers,
    rank: Integers,
    *,
    ranks: int,
    interleave: int,
    page_size: int,
    rows: Integers | None = None,
) -> Integers:
    """The place of each token in the pool of ``rank``, ``page id * page_size + offset``.

    Args:
        page_table: the page id of each virtual page (``ranks * page_size`` tokens) of a sequence;
            2-D for several sequences.
        positions: positions of the tokens, inside the table.
        rows: with a 2-D table, the row of each token.

    Returns:
        int32 of the shape of ``positions``; -1 where another rank holds the token. Lists count as
        NumPy arrays.
    """
    page_size = _static_page(ranks, interleave, page_size)
    xp = namespace(page_table, positions, rank, rows)
    positions = as_array(positions, xp)
    page = _page_ids(xp, page_table, positions // (ranks * page_size), rows)
    offset = local_index(positions, ranks=ranks, interleave=interleave) % page_size
    owned = active_mask(positions, rank, ranks=ranks, interleave=interleave)
    return xp.where(owned, page * page_size + offset.astype(np.int32), np.int32(-1))


def write_slots(
    page_table: Integers,
    positions: Integers,
    valid: Booleans,
    rank: Integers,
    *,
    ranks: int,
    interleave: int,
    page_size: int,
    scratch_page: int,
    rows: Integers | None = None,
) -> tuple[Integers, Integers]:
    """Where ``rank`` writes each token: page ids and offsets, both int32 like ``positions``.

    A token that is not ``valid`` (padding) or belongs to another rank is written to the scratch
    page, so that every write has a place and none needs a mask. Padding may lie past the table.
    Arguments else as in :func:`slot_mapping`.
    """
    page_size = _static_page(ranks, interleave, page_size)
    xp = namespace(page_table, positions, valid, rank, rows)
    positions = as_array(positions, xp)
    kept = active_mask(positions, rank, ranks=ranks, interleave=interleave) & valid
    virtual_page = positions // (ranks * page_size)
    last = xp.full_like(positions, as_array(page_table, xp).shape[-1] - 1)
    page = _page_ids(xp, page_table, xp.minimum(virtual_page, last), rows)
    page = xp.where(kept, page, np.int32(scratch_page))
    index = local_index(positions, ranks=ranks, interleave=interleave)
    offset = xp.where(kept, index, positions) % page_size
    return page, offset.astype(np.int32)


def page_owner(page: Integers, *, ranks: int) -> Integers:
    """The rank that holds global page ``page``, counted over all ranks."""
    return owner(page, ranks=ranks, interleave=1)


def local_page(page: Integers, *, ranks: int) -> Integers:
    """The id that global page ``page`` has on the rank that holds it."""
    return local_index(page, ranks=ranks, interleave=1)


def global_page(page: Integers, rank: Integers, *, ranks: int) -> Integers:
    """The global page that ``rank`` holds as its local ``page``: inverse of the two above."""
    return global_position(page, rank, ranks=ranks, interleave=1)


def filter_pages(pages: Integers, rank: Integers, *, ranks: int) -> Integers:
    """The local ids of those global ``pages`` that ``rank`` holds, in the given order.

    The length of the result depends on values, so traced arrays are not possible here.
    """
    pages = as_array(pages, namespace(pages))
    mine = active_mask(pages, rank, ranks=ranks, interleave=1)
    return local_page(pages[mine], ranks=ranks)


def _static_split(ranks: int, interleave: int) -> tuple[int, int]:
    return static_count("ranks", ranks), static_count("interleave", interleave)


def _static_rows(width: int, ranks: int, interleave: int) -> int:
    ranks, interleave = _static_split(ranks, interleave)
    width = static_count("width", width, minimum=0)
    check_divides("ranks * interleave", ranks * interleave, "width", width)
    return width // ranks


def _static_page(ranks: int, interleave: int, page_size: int) -> int:
    ranks, interleave = _static_split(ranks, interleave)
    page_size = static_count("page_size", page_size)
    check_divides("interleave", interleave, "page_size", page_size)
    return page_size


def _page_ids(
    xp: Any, page_table: Integers, virtual_page: Integers, rows: Integers | None
) -> Integers:
    """int32 page ids of virtual pages, as an array of ``xp``."""
    table = as_array(page_table, xp)
    dimensions = 1 if rows is None else 2
    if table.ndim != dimensions:
        raise LayoutError(
            "a page table is 1-D, or 2-D together with the row of each token",
            shape=tuple(table.shape),
            has_rows=rows is not None,
        )
    picked = table[virtual_page] if rows is None else table[rows, virtual_page]
    return picked.astype(np.int32)
