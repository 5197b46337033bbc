"""Layer ranges: contiguous, complete, even, also for more ranks than layers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import LayoutError
from dcpjax.layout import layer_owner, layer_range, layer_slots

SPLITS = [(0, 1), (0, 3), (1, 1), (1, 8), (7, 8), (8, 8), (9, 8), (30, 4), (78, 8)]
splits = st.sampled_from(SPLITS) | st.tuples(st.integers(0, 100), st.integers(1, 40))


@given(split=splits)
def test_ranges_are_contiguous_complete_and_even(split):
    num_layers, ranks = split
    ranges = [layer_range(num_layers, ranks, rank) for rank in range(ranks)]
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(
        range(num_layers)
    )
    sizes = [stop - start for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@given(split=splits)
def test_the_owner_is_the_rank_whose_range_contains_the_layer(split):
    num_layers, ranks = split
    for rank in range(ranks):
        for layer in range(*layer_range(num_layers, ranks, rank)):
            assert layer_owner(layer, num_layers, ranks) == rank


@pytest.mark.parametrize("num_layers, ranks", SPLITS[2:])
def test_arrays_agree_with_ints(array_kind, num_layers, ranks):
    def owner_of(layer):
        return layer_owner(layer, num_layers, ranks)

    def start_of(rank):
        return layer_range(num_layers, ranks, rank)[0]

    def slots_of(rank):
        return layer_slots(num_layers, ranks, rank)

    for function, count in ((owner_of, num_layers), (start_of, ranks), (slots_of, ranks)):
        expected = [function(number) for number in range(count)]
        np.testing.assert_array_equal(array_kind.call(function, np.arange(count)), expected)


def test_slots_are_the_owned_layers_and_a_transient_one():
    assert [layer_slots(78, 8, rank) for rank in range(8)] == [11] * 6 + [10] * 2
    assert layer_slots(3, 8, 7) == 1


@pytest.mark.parametrize("layer", [8, 100])
def test_a_layer_lies_inside_the_model(layer):
    with pytest.raises(LayoutError, match=rf"layer={layer}, num_layers=8"):
        layer_owner(layer, 8, 4)


def test_counts_are_checked():
    with pytest.raises(LayoutError, match="ranks=0"):
        layer_range(8, 0, 0)
    with pytest.raises(LayoutError, match="num_layers=-1"):
        layer_range(-1, 4, 0)
