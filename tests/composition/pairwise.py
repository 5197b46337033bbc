"""Few combinations that have every pair of values in one of them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Choice = dict[str, Any]


def all_choices(
    options: Mapping[str, Sequence[Any]], is_valid: Callable[[Choice], bool]
) -> list[Choice]:
    """Every valid combination."""
    choices = (dict(zip(options, values, strict=True)) for values in product(*options.values()))
    return [choice for choice in choices if is_valid(choice)]


def pairwise_cover(choices: Sequence[Choice]) -> list[Choice]:
    """A subset of ``choices`` with every pair of values that occurs in them; the same every time.

    Greedy: the combination with most new pairs next, the first one of equals.
    """
    pairs_of = [_pairs(choice) for choice in choices]
    missing = set().union(*pairs_of)
    cover = []
    while missing:
        best = max(range(len(choices)), key=lambda index: len(pairs_of[index] & missing))
        cover.append(choices[best])
        missing -= pairs_of[best]
    return cover


def _pairs(choice: Choice) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(choice.items(), 2))
