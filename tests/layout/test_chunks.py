"""Zigzag chunks: every token on one rank, and causal work that is even."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import LayoutError
from dcpjax.layout import zigzag_chunks, zigzag_place

EDGES = [
    (t, n) for n in (1, 2, 3, 8) for t in sorted({0, 1, n - 1, n, 2 * n - 1, 2 * n, 2 * n + 1})
]
sizes = st.tuples(st.integers(0, 300), st.integers(1, 12)) | st.sampled_from(EDGES)


def tokens_of(num_tokens, ranks, rank):
    return [t for start, stop in zigzag_chunks(num_tokens, ranks, rank) for t in range(start, stop)]


@given(size=sizes)
def test_every_token_is_on_one_rank(size):
    num_tokens, ranks = size
    tokens = [token for rank in range(ranks) for token in tokens_of(num_tokens, ranks, rank)]
    assert sorted(tokens) == list(range(num_tokens))


@given(size=sizes)
def test_chunks_are_equal_pieces_and_their_mirror_images(size):
    num_tokens, ranks = size
    length = -(-num_tokens // (2 * ranks))
    pieces = [list(range(num_tokens))[k * length : (k + 1) * length] for k in range(2 * ranks)]
    for rank in range(ranks):
        assert tokens_of(num_tokens, ranks, rank) == pieces[rank] + pieces[2 * ranks - 1 - rank]


@given(size=sizes)
def test_an_empty_chunk_starts_where_it_stops(size):
    num_tokens, ranks = size
    for rank in range(ranks):
        for start, stop in zigzag_chunks(num_tokens, ranks, rank):
            assert 0 <= start <= stop <= num_tokens


@given(ranks=st.integers(1, 12), chunk=st.integers(1, 20))
def test_causal_work_is_the_same_on_all_ranks(ranks, chunk):
    num_tokens = 2 * ranks * chunk
    work = {sum(t + 1 for t in tokens_of(num_tokens, ranks, rank)) for rank in range(ranks)}
    assert len(work) == 1


@given(size=sizes)
def test_the_place_of_a_token_is_where_its_chunk_has_it(size):
    num_tokens, ranks = size
    for token in range(num_tokens):
        rank, is_late, offset = zigzag_place(token, num_tokens, ranks)
        start, stop = zigzag_chunks(num_tokens, ranks, rank)[is_late]
        assert start + offset == token < stop


def test_past_the_end_there_is_some_place():
    """Padding is computed like tokens, so its place is inside the arrays."""
    for num_tokens, ranks in EDGES:
        rank, is_late, offset = zigzag_place(num_tokens + 5, num_tokens, ranks)
        assert 0 <= rank < ranks and is_late in (0, 1) and 0 <= offset <= num_tokens


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_arrays_agree_with_ints(array_kind, ranks):
    def late_stop(num_tokens, rank, *, ranks):
        return zigzag_chunks(num_tokens, ranks, rank)[1][1]

    def early_start(num_tokens, rank, *, ranks):
        return zigzag_chunks(num_tokens, ranks, rank)[0][0]

    def holder(num_tokens, rank, *, ranks):
        return zigzag_place(rank, num_tokens, ranks)[0]

    for function in (late_stop, early_start, holder):
        for num_tokens in (0, 1, 2 * ranks, 2 * ranks + 1):
            expected = [function(num_tokens, rank, ranks=ranks) for rank in range(ranks)]
            result = array_kind.call(function, num_tokens, np.arange(ranks), ranks=ranks)
            np.testing.assert_array_equal(result, expected)


def test_the_number_of_ranks_is_checked():
    with pytest.raises(LayoutError, match="ranks=0"):
        zigzag_chunks(8, 0, 0)
    with pytest.raises(LayoutError, match="ranks=0"):
        zigzag_place(0, 8, 0)
    with pytest.raises(LayoutError, match="token=-1"):
        zigzag_place(-1, 8, 2)
