"""The last of the chosen, found by bisection, is the one that sorting finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcpjax.attention import static_indexer
from dcpjax.attention.static_indexer import MAX_TOKENS, lowest_chosen
from dcpjax.errors import ConfigError
from dcpjax.form import STATIC

NUM_PLACES = 37
LARGEST = np.finfo(np.float32).max
KINDS = {
    "few": lambda random, shape: random.integers(-2, 3, shape),
    "many": lambda random, shape: random.standard_normal(shape),
    "wide": lambda random, shape: (
        np.exp2(random.uniform(-120, 120, shape)) * random.choice([-1, 1], shape)
    ),
    "ends": lambda random, shape: random.choice([-LARGEST, LARGEST, np.inf, 0.0, -0.0], shape),
    "none": lambda random, shape: np.full(shape, -np.inf),
}


def chosen(scores: np.ndarray, positions: np.ndarray, top_k: int) -> np.ndarray:
    lowest = jax.jit(lambda *both: lowest_chosen(*both, top_k, STATIC))(scores, positions)
    score, last = (np.asarray(part)[..., None] for part in lowest)
    is_chosen = (scores > score) | ((scores == score) & (positions <= last))
    return is_chosen & (scores > -np.inf)


def sorted_out(scores: np.ndarray, positions: np.ndarray, top_k: int) -> np.ndarray:
    is_chosen = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:2]):
        order = np.lexsort((positions, -scores[row].astype(np.float64)))
        is_chosen[row][order[:top_k]] = True
    return is_chosen & (scores > -np.inf)


def example(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores [4, 3, S], of which the first rows see few tokens, and positions in any order."""
    random = np.random.default_rng(len(kind))
    scores = np.asarray(KINDS[kind](random, (4, 3, NUM_PLACES)), np.float32)
    for row, visible in enumerate((0, 1, NUM_PLACES // 2)):
        scores[row, :, visible:] = -np.inf
    return scores, random.permutation(NUM_PLACES).astype(np.float32)


@pytest.mark.parametrize("top_k", [1, 5, NUM_PLACES - 1, NUM_PLACES, NUM_PLACES + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_chosen_is_what_sorting_chooses(kind, top_k):
    scores, positions = example(kind)
    found = chosen(scores, positions, top_k)
    np.testing.assert_array_equal(found, sorted_out(scores, positions, top_k))
    num_any = (scores > -np.inf).sum(axis=-1)
    np.testing.assert_array_equal(found.sum(axis=-1), np.minimum(num_any, top_k))


def test_the_lowest_position_wins_and_not_the_first_place():
    scores, positions = example("few")
    assert (chosen(scores, positions, 5) != chosen(scores, np.sort(positions), 5)).any()


def test_one_round_less_is_not_enough(monkeypatch):
    """Of the bits of a score and of a position all are needed."""
    scores, positions = example("wide")
    repeat = static_indexer.repeat
    monkeypatch.setattr(
        static_indexer, "repeat", lambda form, times, *rest: repeat(form, times - 1, *rest)
    )
    assert (chosen(scores, positions, 5) != sorted_out(scores, positions, 5)).any() or (
        chosen(*example("few"), 5) != sorted_out(*example("few"), 5)
    ).any()


def test_more_tokens_than_are_counted_exactly_are_refused():
    scores = jax.ShapeDtypeStruct((1, 1, MAX_TOKENS), jnp.float32)
    positions = jax.ShapeDtypeStruct((MAX_TOKENS,), jnp.float32)
    with pytest.raises(ConfigError, match="float32 counts exactly.*num_tokens=16777216"):
        jax.eval_shape(lambda *both: lowest_chosen(*both, 4, STATIC), scores, positions)
