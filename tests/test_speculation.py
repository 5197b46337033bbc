"""What is proposed and accepted, against searches that look at everything; and as distributions."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.sampling import SamplingInputs, init_state, sample
from dcpjax.speculation import (
    AcceptanceCounts,
    NgramIndex,
    emitted,
    num_accepted,
    num_accepted_synthetically,
)

# Acceptance


def accepted_one_by_one(drafts: Sequence[int], sampled: Sequence[int], count: int) -> int:
    for place in range(count):
        if drafts[place] != sampled[place]:
            return place
    return count


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_drafts_are_accepted_up_to_the_first_wrong_one(width: int, seed: int) -> None:
    chance = np.random.RandomState(seed)
    drafts = chance.randint(0, 2, (7, width)).astype(np.int32)
    sampled = chance.randint(0, 2, (7, width + 1)).astype(np.int32)
    counts = chance.randint(0, width + 1, 7).astype(np.int32)
    rows = list(zip(drafts.tolist(), sampled.tolist(), counts.tolist(), strict=True))
    found = num_accepted(drafts, sampled, counts)
    assert found.dtype == np.int32
    assert found.tolist() == [accepted_one_by_one(*row) for row in rows]
    for new, (proposed, chosen, _), count in zip(
        emitted(drafts, sampled, found).tolist(), rows, found, strict=True
    ):
        assert new[: count + 1] == [*proposed[:count], chosen[count]] == chosen[: count + 1]


def test_traced_arrays_give_what_numpy_gives() -> None:
    chance = np.random.RandomState(0)
    drafts, sampled = (chance.randint(0, 2, (40, n)).astype(np.int32) for n in (3, 4))
    counts = chance.randint(0, 4, 40).astype(np.int32)
    seeds = chance.randint(0, 2**32, (40, 2), dtype=np.uint32)
    expected = num_accepted(drafts, sampled, counts)
    np.testing.assert_array_equal(jax.jit(num_accepted)(drafts, sampled, counts), expected)
    np.testing.assert_array_equal(
        jax.jit(emitted)(drafts, sampled, expected), emitted(drafts, sampled, expected)
    )
    synthetic = jax.jit(num_accepted_synthetically, static_argnums=3)
    np.testing.assert_array_equal(
        synthetic(seeds, counts, counts, 2.4),
        num_accepted_synthetically(seeds, counts, counts, 2.4),
    )


@pytest.mark.parametrize("length", [1, 1.25, 2, 2.9, 4])
def test_synthetic_acceptance_has_the_length_asked_for(length: float) -> None:
    """Of each request by itself, and always the same."""
    counters, all_drafts = np.arange(20_000, dtype=np.int32), np.full(20_000, 3, np.int32)
    for seed in (0, 2**32 - 1):
        seeds = np.full((20_000, 2), seed, np.uint32)
        counts = num_accepted_synthetically(seeds, counters, all_drafts, length)
        assert 1 + counts.mean() == pytest.approx(length, abs=0.02)
        assert counts.max() - counts.min() <= 1
        again = num_accepted_synthetically(seeds, counters, all_drafts, length)
        np.testing.assert_array_equal(counts, again)
    few = num_accepted_synthetically(seeds, counters, all_drafts - 2, 4)
    assert few.tolist() == [1] * 20_000


def test_counts() -> None:
    counts = AcceptanceCounts(3)
    assert counts.mean_length == 1
    for num_drafts, accepted in ((3, 3), (3, 0), (0, 0), (2, 1)):
        counts.add(num_drafts, accepted)
    assert counts.num_accepted_per_position == [2, 1, 1]
    assert (counts.num_verifications, counts.num_drafts, counts.num_accepted) == (3, 8, 4)
    assert counts.mean_length == 1 + 4 / 3
    assert counts.as_stats()["num_accepted_tokens_per_pos"] == [2, 1, 1]


# Rejection sampling

draw = jax.jit(partial(sample, with_filters=False, with_logprobs=False))
VOCAB, LENGTH, DRAFTS, DRAWS = 4, 4, 3, 40_000
LOGITS = np.random.RandomState(5).standard_normal((VOCAB, VOCAB)).astype(np.float32)
"""Of the next token, by the token before."""


def neutral_inputs(count: int) -> SamplingInputs:
    """At temperature 0.8, each row with a seed of its own."""
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    return SamplingInputs(
        temperature=ones * np.float32(0.8),
        top_k=np.zeros(count, np.int32),
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seed=np.random.RandomState(6).randint(0, 2**32, (count, 2), dtype=np.uint32),
        counter=np.zeros(count, np.int32),
        slot=np.full(count, 1, np.int32),
        bias_ids=np.zeros((count, 0), np.int32),
        bias_values=np.zeros((count, 0), np.float32),
    )


def choose(before: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The sampler's token behind ``before`` as output ``index``, for every draw."""
    inputs = neutral_inputs(len(before))._replace(counter=index.astype(np.int32))
    arrays = jax.tree.map(jnp.asarray, (LOGITS[before], inputs, init_state(1, VOCAB)))
    return np.asarray(draw(*arrays)[0].tokens)


def plainly() -> np.ndarray:
    outputs = [np.zeros(DRAWS, np.int32)]
    for index in range(LENGTH):
        outputs.append(choose(outputs[-1], np.full(DRAWS, index)))
    return np.stack(outputs[1:], axis=1)


def speculatively(accept: Callable[..., np.ndarray]) -> np.ndarray:
    """The same number of outputs by verifications of drafts, which are as likely as not right."""
    chance = np.random.RandomState(7)
    outputs, known = np.zeros((DRAWS, LENGTH + DRAFTS + 1), np.int32), np.zeros(DRAWS, np.int32)
    rows, last = np.arange(DRAWS), np.zeros(DRAWS, np.int32)
    while known.min() < LENGTH:
        drafts = np.where(chance.random((DRAWS, DRAFTS)) < 0.5, LOGITS[last].argmax(-1)[:, None], 0)
        drafts = drafts.astype(np.int32)
        before = np.concatenate([last[:, None], drafts], axis=1)
        chosen = np.stack(
            [choose(before[:, place], known + place) for place in range(DRAFTS + 1)], axis=1
        )
        counts = accept(drafts, chosen, np.full(DRAWS, DRAFTS, np.int32))
        new, is_open = emitted(drafts, chosen, counts), known < LENGTH
        for place in range(DRAFTS + 1):
            takes = is_open & (place <= counts)
            outputs[rows[takes], known[takes] + place] = new[takes, place]
        last = np.where(is_open, new[rows, counts], last)
        known = np.where(is_open, known + counts + 1, known)
    return outputs[:, :LENGTH]


def chi_square(outputs: np.ndarray) -> float:
    """Of all sequences against their probabilities, in standard deviations above its mean."""
    scaled = LOGITS.astype(np.float64) / 0.8
    table = np.exp(scaled) / np.exp(scaled).sum(axis=1, keepdims=True)
    sequences = np.stack(np.meshgrid(*[np.arange(VOCAB)] * LENGTH, indexing="ij"), -1)
    sequences = sequences.reshape(-1, LENGTH)
    before = np.concatenate([np.zeros((len(sequences), 1), np.int64), sequences[:, :-1]], axis=1)
    expected = DRAWS * table[before, sequences].prod(axis=1)
    seen = Counter(map(tuple, outputs.tolist()))
    observed = np.asarray([seen[tuple(sequence)] for sequence in sequences.tolist()])
    is_likely = expected >= 5
    observed = np.append(observed[is_likely], observed[~is_likely].sum())
    expected = np.append(expected[is_likely], expected[~is_likely].sum())
    freedom = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def test_speculation_draws_from_the_models_distribution() -> None:
    """And draws the very tokens that are drawn without it."""
    plain, speculative = plainly(), speculatively(num_accepted)
    assert abs(chi_square(plain)) < 4
    assert abs(chi_square(speculative)) < 4
    np.testing.assert_array_equal(plain, speculative)


def accept_one_more(drafts: Any, sampled: Any, num_drafts: Any) -> np.ndarray:
    return np.minimum(num_accepted(drafts, sampled, num_drafts) + 1, num_drafts)


def accept_all(drafts: Any, sampled: Any, num_drafts: Any) -> np.ndarray:
    return num_drafts


@pytest.mark.parametrize("accept", [accept_one_more, accept_all])
def test_the_distribution_shows_wrong_acceptance(accept: Callable[..., np.ndarray]) -> None:
    assert chi_square(speculatively(accept)) > 50


# N-grams


def proposed_by_search(
    tokens: list[int], shortest: int, longest: int, count: int
) -> tuple[int, ...]:
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for stop in range(len(tokens) - 1, n - 1, -1):
            if tokens[stop - n : stop] == tokens[-n:]:
                going_on = list(tokens)
                for place in range(count):
                    going_on.append(going_on[stop + place])
                return tuple(going_on[len(tokens) :])
    return ()


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
    st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_the_index_finds_what_a_search_finds(
    prompt: list[int], steps: list[list[int]], shortest: int, more: int, count: int
) -> None:
    index = NgramIndex(prompt, shortest=shortest, longest=shortest + more)
    outputs: list[int] = []
    for tokens in [[], *steps]:
        outputs += tokens
        expected = proposed_by_search(prompt + outputs, shortest, shortest + more, count)
        assert index.propose(outputs, count) == expected


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([1], ()),
        ([1, 2], ()),
        ([1, 1], ()),  # one token is not enough
        ([1, 1, 1], (1, 1, 1)),  # goes on with what it proposes
        ([1, 2, 3, 1, 2], (3, 1, 2)),
        ([1, 2, 3, 1, 2, 4, 1, 2], (4, 1, 2)),  # the latest
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], (3, 6, 1)),  # the longest before the latest
    ],
)
@pytest.mark.parametrize("num_outputs", [0, 1, 3])
def test_proposals(tokens: list[int], expected: tuple[int, ...], num_outputs: int) -> None:
    """Wherever the prompt ends."""
    cut = max(len(tokens) - num_outputs, 1)
    index = NgramIndex(tokens[:cut], shortest=2, longest=4)
    assert index.propose(tokens[cut:], 3) == expected


def test_a_proposal_costs_what_is_new() -> None:
    """Of a long prompt no token is looked at twice."""
    chance = random.Random(0)
    tokens = [chance.randrange(50) for _ in range(20_000)]
    index, num_looked_at = NgramIndex(tokens, shortest=1, longest=4), 0
    original = index._token

    def counted(position: int, outputs: Sequence[int]) -> int:
        nonlocal num_looked_at
        num_looked_at += 1
        return original(position, outputs)

    index._token = counted
    outputs: list[int] = []
    for _ in range(50):
        outputs += index.propose(outputs, 2)
    assert len(outputs) == 100
    assert num_looked_at < 40 * 50
