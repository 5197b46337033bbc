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
    size = (num_tokens + 2 * ranks - 1) // (2 * ranks)

    def chunk(number: Integers) -> TokenRange:
        number = in_type_of(num_tokens, number)
        return minimum(number * size, num_tokens), minimum((number + 1) * size, num_tokens)

    return chunk(rank), chunk(2 * ranks - 1 - rank)
