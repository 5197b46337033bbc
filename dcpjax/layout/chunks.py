"""Which tokens of a prompt a rank computes when the prompt is split over ranks.

Causal attention makes late tokens dearer than early ones. Of 2N equal chunks each of N ranks takes
one from the front and its mirror image from the back, so that all ranks do the same work::

    chunk   0  1  2  3  4  5  6  7
    rank    0  1  2  3  3  2  1  0
"""

from dcpjax.layout.domain import (
    Integers,
    check_below,
    check_not_negative,
    in_type_of,
    maximum,
    minimum,
    static_count,
)

TokenRange = tuple[Integers, Integers]
"""Tokens ``[start, stop)``."""


def zigzag_chunks(
    num_tokens: Integers, ranks: int, rank: Integers
) -> tuple[TokenRange, TokenRange]:
    """The early and the late range of tokens that ``rank`` computes.

    Chunks have ``ceil(num_tokens / (2 * ranks))`` tokens; the last ones may be shorter, and are
    empty (``start == stop``) where there are too few tokens.

    Raises:
        LayoutError: a count or the rank is out of range.
    """
    ranks = static_count("ranks", ranks)
    check_not_negative("num_tokens", num_tokens)
    check_below("rank", rank, "ranks", ranks)
    size = zigzag_size(num_tokens, ranks)

    def chunk(number: Integers) -> TokenRange:
        number = in_type_of(num_tokens, number)
        return minimum(number * size, num_tokens), minimum((number + 1) * size, num_tokens)

    return chunk(rank), chunk(2 * ranks - 1 - rank)


def zigzag_size(num_tokens: Integers, ranks: int) -> Integers:
    """Tokens of each chunk but the last ones: ``ceil(num_tokens / (2 * ranks))``."""
    return (num_tokens + 2 * ranks - 1) // (2 * ranks)


def zigzag_place(
    token: Integers, num_tokens: Integers, ranks: int
) -> tuple[Integers, Integers, Integers]:
    """Where one of ``num_tokens`` tokens is computed, the inverse of :func:`zigzag_chunks`.

    Returns:
        the rank; 0 if it is in its early chunk, 1 in its late one; the place in this chunk. Of a
        token past the end, any place.

    Raises:
        LayoutError: a count or the token is out of range.
    """
    ranks = static_count("ranks", ranks)
    check_not_negative("token", token)
    size = maximum(zigzag_size(num_tokens, ranks), 1)  # of nothing, too, the arithmetic is defined
    chunk = minimum(token // size, 2 * ranks - 1)
    return minimum(chunk, 2 * ranks - 1 - chunk), chunk // ranks, token % size
