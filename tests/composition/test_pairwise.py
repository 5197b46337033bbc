"""The cover covers, is small and stays the same."""

from itertools import combinations

import pytest

from tests.composition.pairwise import all_choices, pairwise_cover

OPTIONS = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0.5, 1.5, 2.5)}


def pairs(choices):
    return {pair for choice in choices for pair in combinations(choice.items(), 2)}


@pytest.mark.parametrize(
    "is_valid", [lambda choice: True, lambda choice: choice["c"] or choice["a"] == 1]
)
def test_every_pair_that_can_occur_does(is_valid):
    choices = all_choices(OPTIONS, is_valid)
    cover = pairwise_cover(choices)
    assert pairs(cover) == pairs(choices)
    assert all(choice in choices for choice in cover)
    assert 9 <= len(cover) < len(choices) / 2
    assert pairwise_cover(choices) == cover


def test_nothing_to_choose_from():
    assert pairwise_cover([]) == []
    assert all_choices(OPTIONS, lambda choice: False) == []
