"""A sequence spread over ranks by dealing its tokens, without any formula of the layout."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

EPS32 = float(np.finfo(np.float32).eps)
HALF_ULP_BF16 = 2.0**-9


def deal(num_tokens: int, ranks: int, interleave: int) -> list[np.ndarray]:
    """Positions of the tokens of each rank, dealt ``interleave`` at a time."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for count, start in enumerate(range(0, num_tokens, interleave)):
        hands[count % ranks].extend(range(start, min(start + interleave, num_tokens)))
    return [np.array(hand, int) for hand in hands]


@dataclass(frozen=True)
class Pages:
    """Pages of all ranks, and the table of one sequence, the same for every rank."""

    table: np.ndarray  # [M], longer than the sequence needs
    rows: np.ndarray  # [ranks, pages, K, P, W] float32; NaN where nothing was written


def lay_out(
    rows: np.ndarray,
    num_tokens: int,
    *,
    ranks: int,
    interleave: int,
    page_size: int,
    num_entries: int,
    generator: np.random.Generator,
) -> Pages:
    """The first ``num_tokens`` of ``rows`` [S, K, W] in shuffled pages; everything else is NaN.

    Table entries past the end of the sequence name the last page, which nobody owns.
    """
    needed = -(-num_tokens // (ranks * page_size))
    spare = num_entries  # the page past all that a table may name
    table = np.full(num_entries, spare, np.int32)
    table[:needed] = generator.permutation(num_entries)[:needed]
    pages = np.full((ranks, num_entries + 1, rows.shape[1], page_size, rows.shape[2]), np.nan)
    for rank, hand in enumerate(deal(num_tokens, ranks, interleave)):
        index = np.arange(len(hand))
        pages[rank][table[index // page_size], :, index % page_size] = rows[hand]
    return Pages(table, pages.astype(np.float32))


@dataclass(frozen=True)
class Tolerance:
    """How far float32 attention may be from another order of the same sums.

    A score is a sum of ``width`` products up to ``score`` in size, a normaliser and an output sums
    of ``terms``, and each step rounds by half an ulp of float32. The relative error of a weight is
    the absolute one of its score and of the lse; an output averages values up to ``value``. Values
    in bfloat16 meet weights rounded to bfloat16; nothing else is rounded so.
    """

    width: int
    terms: int
    score: float
    value: float
    weights_are_bf16: bool = False

    @property
    def lse(self) -> float:
        return EPS32 * ((self.width + 2) * self.score + self.terms)

    @property
    def out(self) -> float:
        rounding = HALF_ULP_BF16 if self.weights_are_bf16 else 0.0
        return self.value * (2 * self.lse + EPS32 * self.terms + rounding)


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which every two values of two factors meet. Greedy and deterministic."""
    names = list(factors)
    product = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    open_pairs = {pair for combination in product for pair in _pairs(combination)}
    chosen = []
    while open_pairs:
        best = max(product, key=lambda combination: len(open_pairs & set(_pairs(combination))))
        open_pairs -= set(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(combination: Mapping[str, Any]) -> Iterator[Any]:
    return itertools.combinations(combination.items(), 2)


def as_bits(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Float32 values as a pool stores them."""
    if dtype == jnp.float32:
        return values
    return np.asarray(jnp.asarray(values).astype(dtype)).view(np.uint16)
