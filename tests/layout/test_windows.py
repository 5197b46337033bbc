"""Windows: which rows a rank computes of a chunk that starts anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import LayoutError
from dcpjax.layout import window_order, window_rows

WINDOWS = [(1, 1, 4), (2, 1, 8), (3, 2, 12), (4, 16, 64), (5, 1, 5), (2, 3, 0)]  # N, I, width
windows = st.sampled_from(WINDOWS)


def by_name(window):
    return {"ranks": window[0], "interleave": window[1]}


def rows_at(start, rank, *, width, **split):
    return window_rows(start, width, rank, **split)


def order_at(start, *, width, **split):
    return window_order(start, width, **split)


def call(kind, function, *args, window):
    """``kind.call``, but the result is an array for ints as well."""
    call_as_kind = kind.call if kind.dtype else lambda function, *args, **n: function(*args, **n)
    return call_as_kind(function, *args, width=window[2], **by_name(window))


@given(window=windows, start=st.integers(0, 600))
def test_rows_are_those_of_the_deal(kind, deal, window, start):
    ranks, interleave, width = window
    holders = deal(start + width, ranks, interleave)[start:, 0]
    for rank in range(ranks):
        rows = call(kind, rows_at, start, rank, window=window)
        assert rows.shape == (width // ranks,)
        np.testing.assert_array_equal(rows, np.flatnonzero(holders == rank))


@given(window=windows, start=st.integers(0, 2**31 - 1 - 64))
def test_the_order_puts_rows_back(kind, window, start):
    rows = [call(kind, rows_at, start, rank, window=window) for rank in range(window[0])]
    order = call(kind, order_at, start, window=window)
    np.testing.assert_array_equal(np.concatenate(rows)[order], np.arange(window[2]))


def test_rows_of_an_unaligned_window_differ_from_those_of_an_aligned_one():
    split = {"ranks": 2, "interleave": 2}
    aligned, shifted = (window_rows(start, 8, 0, **split).tolist() for start in (0, 1))
    assert aligned == [0, 1, 4, 5] and shifted == [0, 3, 4, 7]


def test_ints_give_int32():
    assert window_rows(3, 8, 1, ranks=2, interleave=2).dtype == np.int32
    assert window_order(3, 8, ranks=2, interleave=2).dtype == np.int32


@pytest.mark.parametrize("function", [window_order, lambda s, w, **n: window_rows(s, w, 0, **n)])
def test_a_width_is_a_multiple_of_a_cycle(function):
    with pytest.raises(LayoutError, match=r"width=10, ranks \* interleave=4"):
        function(0, 10, ranks=2, interleave=2)
