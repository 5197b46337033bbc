"""Laws of sampling: what the parameters mean, that rows are independent, that the state follows."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from scipy import stats

from dcpjax.engine.request import MAX_LOGPROBS
from dcpjax.sampling import (
    NUM_LOGPROBS,
    SampleResult,
    SamplingInputs,
    SamplingState,
    greedy,
    init_state,
    reset_rows,
    sample,
)
from dcpjax.sampling.noise import negated_gumbel, random_bits, threefry
from dcpjax.sampling.sampler import _penalise

NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "counter": 0,
    "slot": 0,
}
INTEGERS = ("top_k", "counter", "slot")
SIZES = (1, 37, 300, 5500)  # no multiple of anything; one, two and more than 20 blocks

run = jax.jit(sample, static_argnames=("with_filters", "with_logprobs"))


@pytest.fixture(autouse=True)
def _strict_arrays() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def make_inputs(rows: int, **values) -> SamplingInputs:
    """Neutral parameters, except for the given ones: a number, or one per row."""
    seed = np.asarray(values.pop("seed", (7, 11)), np.uint32)
    bias_ids = np.asarray(values.pop("bias_ids", np.zeros((rows, 0))), np.int32)
    bias_values = np.asarray(values.pop("bias_values", np.zeros(bias_ids.shape)), np.float32)
    columns = {
        name: jnp.asarray(
            np.broadcast_to(values.pop(name, neutral), rows),
            jnp.int32 if name in INTEGERS else jnp.float32,
        )
        for name, neutral in NEUTRAL.items()
    }
    assert not values, values
    return SamplingInputs(
        **columns,
        seed=jnp.asarray(np.broadcast_to(seed, (rows, 2))),
        bias_ids=jnp.asarray(bias_ids),
        bias_values=jnp.asarray(bias_values),
    )


def draw(logits: np.ndarray, state: SamplingState | None = None, **values) -> SampleResult:
    with_logprobs = values.pop("with_logprobs", False)
    array = jnp.asarray(logits, jnp.float32)
    inputs = make_inputs(array.shape[0], **values)
    state = state or init_state(1, array.shape[1])
    return run(array, inputs, state, with_filters=True, with_logprobs=with_logprobs)[0]


def random_logits(rows: int, size: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(rows, size))).astype(np.float32)


def counters(rows: int) -> np.ndarray:
    return np.arange(rows)


# What the parameters mean


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}],
    ids=str,
)
def test_every_parameter_has_a_limit_that_is_greedy(size: int, values: dict) -> None:
    logits = random_logits(16, size)
    chosen = draw(logits, counter=counters(16), **values).tokens
    np.testing.assert_array_equal(chosen, greedy(jnp.asarray(logits)))
    np.testing.assert_array_equal(chosen, logits.argmax(axis=1))


def test_the_limits_test_can_fail() -> None:
    logits = random_logits(16, 300)
    assert (draw(logits, counter=counters(16)).tokens != logits.argmax(axis=1)).any()


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_greedy_ties_go_to_the_lowest_id(zeros: tuple[float, float]) -> None:
    logits = np.array([[-1.0, *zeros, -2.0], [5.0, 5.0, 5.0, 5.0]], np.float32)
    np.testing.assert_array_equal(greedy(jnp.asarray(logits)), [1, 0])
    np.testing.assert_array_equal(draw(logits, temperature=0.0).tokens, [1, 0])


def misfit(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """The chi-square p-value of drawn tokens under the probabilities of one row."""
    observed = np.bincount(tokens, minlength=len(probabilities))
    return float(stats.chisquare(observed, probabilities * len(tokens)).pvalue)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# A correct sampler fails a test at this level once in a million seeds; the seed is fixed.
LEVEL = 1e-6
DRAWS = 20_000  # the rarest token below is expected 60 times, far above the 5 that the test needs
SMALL = np.array([2.0, 0.0, -1.0, 1.0, 1.5, -3.0, 0.5, 0.5], np.float32)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_neutral_parameters_leave_the_distribution(temperature: float) -> None:
    logits = np.broadcast_to(SMALL, (DRAWS, SMALL.size))
    tokens = np.asarray(draw(logits, temperature=temperature, counter=counters(DRAWS)).tokens)
    assert misfit(tokens, softmax(SMALL / temperature)) > LEVEL
    assert misfit(tokens, softmax(SMALL / (temperature * 1.1))) < LEVEL  # it can fail


def test_seeds_draw_like_counters() -> None:
    logits = np.broadcast_to(SMALL, (DRAWS, SMALL.size))
    seeds = np.stack([np.arange(DRAWS), np.zeros(DRAWS)], axis=1)
    assert misfit(np.asarray(draw(logits, seed=seeds).tokens), softmax(SMALL)) > LEVEL


def test_filters_leave_the_renormalised_distribution() -> None:
    logits = np.broadcast_to(SMALL, (DRAWS, SMALL.size))
    tokens = np.asarray(draw(logits, top_k=3, counter=counters(DRAWS)).tokens)
    kept = np.array([0, 3, 4])
    assert set(tokens.tolist()) == set(kept.tolist())
    assert misfit(np.searchsorted(kept, tokens), softmax(SMALL[kept])) > LEVEL


def test_without_filters_the_filter_parameters_are_ignored() -> None:
    logits, state = jnp.asarray(random_logits(16, 300)), init_state(1, 300)
    filtered = make_inputs(16, counter=counters(16), top_k=1, top_p=0.1, min_p=0.9)
    neutral = make_inputs(16, counter=counters(16))
    ignoring, _ = run(logits, filtered, state, with_filters=False, with_logprobs=False)
    plain, _ = run(logits, neutral, state, with_filters=True, with_logprobs=False)
    np.testing.assert_array_equal(ignoring.tokens, plain.tokens)


# Rows are independent


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_row_draws_the_same_token_in_any_batch(rows: int) -> None:
    logits = random_logits(6, 300)
    values = {
        "counter": np.arange(6) * 1000,
        "seed": np.arange(12).reshape(6, 2),
        "top_p": np.linspace(0.3, 1, 6),
        "top_k": np.arange(6) * 50,
        "temperature": np.linspace(0, 3, 6),
    }
    expected = np.asarray(draw(logits, **values).tokens)
    for first in range(6 - rows, -1, -1):
        order = np.arange(first, first + rows)[::-1]
        part = draw(logits[order], **{name: value[order] for name, value in values.items()})
        np.testing.assert_array_equal(part.tokens, expected[order])


def test_padding_of_the_vocabulary_changes_nothing_and_is_never_chosen() -> None:
    logits = random_logits(64, 300)
    padded = np.pad(logits, ((0, 0), (0, 600)), constant_values=-np.inf)  # more blocks
    plain = draw(logits, temperature=50.0, counter=counters(64), with_logprobs=True)
    other = draw(padded, temperature=50.0, counter=counters(64), with_logprobs=True)
    for ours, theirs in zip(plain[:1] + plain[2:4], other[:1] + other[2:4], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_padding_test_can_fail() -> None:
    logits = np.pad(random_logits(64, 300), ((0, 0), (0, 77)))  # padded with likely tokens
    assert (draw(logits, temperature=50.0, counter=counters(64)).tokens >= 300).any()


@pytest.mark.parametrize("counter", [0, 1, 2**31 - 1])
def test_threefry_is_that_of_jax(counter: int) -> None:
    key = jnp.array([3, 2**32 - 1], jnp.uint32)
    counts = jnp.array([0, counter, 5, 2**32 - 1], jnp.uint32)
    first, second = threefry(key[0], key[1], counts[:2], counts[2:])
    np.testing.assert_array_equal(jnp.concatenate([first, second]), threefry_2x32(key, counts))


def test_random_bits_of_tokens_and_counters_differ() -> None:
    seed, counter = jnp.zeros((3, 2), jnp.uint32), jnp.arange(3, dtype=jnp.int32)
    bits = np.asarray(random_bits(seed, counter, 1000))
    # 3000 words of 32 bits collide with probability 3000² / 2^33, about 0.1 %; the seed is fixed.
    assert np.unique(bits).size == bits.size
    np.testing.assert_array_equal(bits[:, :5], random_bits(seed, counter, 5))


def test_noise_is_a_negated_gumbel_variate() -> None:
    seed, counter = jnp.zeros((1, 2), jnp.uint32), jnp.zeros((1,), jnp.int32)
    noise = -np.asarray(negated_gumbel(seed, counter, 50_000))[0]
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > LEVEL
    assert stats.kstest(noise + 0.05, "gumbel_r").pvalue < LEVEL  # it can fail


# Penalties and bias


def penalise_by_definition(logits, output, prompt, repetition, presence, frequency) -> np.ndarray:
    result = logits.astype(np.float64).copy()
    for token in {*output, *prompt}:
        if result[token] > 0:
            result[token] /= repetition
        else:
            result[token] *= repetition
    for token in output:
        result[token] -= frequency
    for token in set(output):
        result[token] -= presence
    return result


@pytest.mark.parametrize(
    "repetition, presence, frequency",
    [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.5, 1.5, 0.0), (1.0, -2.0, 0.7), (2.0, 0.4, -0.3)],
)
def test_penalties_follow_their_definition(
    repetition: float, presence: float, frequency: float
) -> None:
    rows, size = 4, 37
    rng = np.random.default_rng(3)
    logits = random_logits(rows, size)
    outputs = [list(rng.integers(0, size, count)) for count in (0, 1, 9, 100)]
    prompts = [list(rng.integers(0, size, count)) for count in (5, 0, 3, 30)]
    slots = [2, 0, 3, 1]
    state = reset_rows(
        init_state(rows, size),
        jnp.array(slots, jnp.int32),
        jnp.array([np.bincount(o, minlength=size) for o in outputs], jnp.int32),
        jnp.array([np.isin(np.arange(size), p) for p in prompts]),
    )
    inputs = make_inputs(
        rows,
        slot=slots,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    expected = np.stack(
        [
            penalise_by_definition(*row, repetition, presence, frequency)
            for row in zip(logits, outputs, prompts, strict=True)
        ]
    )
    # Four roundings; the largest value met is |logit| or frequency·count plus a few.
    bound = 4 * np.finfo(np.float32).eps * (np.abs(expected).max() + np.abs(logits).max())
    np.testing.assert_allclose(
        _penalise(jnp.asarray(logits), inputs, state), expected, rtol=0, atol=bound
    )
    chosen = draw(
        logits,
        state,
        temperature=0.0,
        slot=slots,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    ).tokens
    np.testing.assert_array_equal(chosen, expected.argmax(axis=1))


def test_the_penalty_test_can_fail() -> None:
    row = np.array([1.0, -1.0, 0.5], np.float32)
    wrong = row / 1.3  # negative logits divided, which makes them more likely
    assert abs(penalise_by_definition(row, [1], [], 1.3, 0, 0)[1] - wrong[1]) > 0.1


def test_banned_tokens_are_never_chosen() -> None:
    logits = np.broadcast_to(SMALL, (DRAWS, SMALL.size))
    bans = np.broadcast_to([0, -1, 4, SMALL.size], (DRAWS, 4))
    values = np.broadcast_to([-np.inf, 9.0, -np.inf, 9.0], (DRAWS, 4))
    tokens = np.asarray(
        draw(logits, counter=counters(DRAWS), bias_ids=bans, bias_values=values).tokens
    )
    left = np.array([1, 2, 3, 5, 6, 7])
    assert set(tokens.tolist()) == set(left.tolist())
    assert misfit(np.searchsorted(left, tokens), softmax(SMALL[left])) > LEVEL


@pytest.mark.parametrize("padding", [-1, 37, 10**9, -(10**9)])
def test_bias_is_added_and_its_padding_touches_nothing(padding: int) -> None:
    logits = np.zeros((2, 37), np.float32)
    ids = [[5, padding, padding], [padding, 36, 0]]
    values = [[2.0, 99.0, -np.inf], [np.inf, 1.0, 0.5]]
    chosen = draw(logits, temperature=0.0, bias_ids=ids, bias_values=values).tokens
    np.testing.assert_array_equal(chosen, [5, 36])


def test_bias_comes_before_the_repetition_penalty() -> None:
    state = reset_rows(
        init_state(1, 2),
        jnp.zeros((1,), jnp.int32),
        jnp.array([[1, 0]], jnp.int32),
        jnp.zeros((1, 2), jnp.bool_),
    )
    # token 0: (1 + 3) / 2 = 2 loses against 2.2; penalised first it would be 1/2 + 3 and win
    values = {"temperature": 0.0, "bias_ids": [[0]], "bias_values": [[3.0]]}
    logits = np.array([[1.0, 2.2]], np.float32)
    assert draw(logits, state, repetition_penalty=2.0, **values).tokens[0] == 1


# Log-probabilities


@pytest.mark.parametrize("size", SIZES)
def test_logprobs_are_those_of_the_unmodified_logits(size: int) -> None:
    logits = random_logits(5, size)
    logits[:, size // 2 :] = np.round(logits[:, size // 2 :])  # ties
    result = draw(
        logits,
        with_logprobs=True,
        temperature=0.7,
        top_k=3,
        repetition_penalty=1.5,
        counter=counters(5),
        bias_ids=np.full((5, 1), size - 1),
        bias_values=np.full((5, 1), 50.0),
    )
    expected = np.log(softmax(logits))
    tokens = np.asarray(result.tokens)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_LOGPROBS]
    count = order.shape[1]
    # A sum of V terms is off by V·eps relative at worst; then two roundings of numbers below 64.
    bound = (size + 128) * np.finfo(np.float32).eps
    close = partial(np.testing.assert_allclose, rtol=0, atol=bound)
    close(result.logprobs, np.take_along_axis(expected, tokens[:, None], 1)[:, 0])
    close(result.top_logprobs[:, :count], np.take_along_axis(expected, order, 1))
    np.testing.assert_array_equal(result.top_ids[:, :count], order)
    np.testing.assert_array_equal(result.top_ids[:, count:], -1)
    np.testing.assert_array_equal(result.top_logprobs[:, count:], -np.inf)
    chosen = np.take_along_axis(logits, tokens[:, None], 1)
    np.testing.assert_array_equal(result.ranks, 1 + (logits > chosen).sum(axis=1))


def test_all_equal_logits_are_listed_by_rising_id() -> None:
    result = draw(np.zeros((1, 5500), np.float32), temperature=0.0, with_logprobs=True)
    np.testing.assert_array_equal(result.top_ids[0], np.arange(NUM_LOGPROBS))
    assert result.ranks[0] == 1


def test_tokens_without_probability_are_not_listed() -> None:
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, [7, 290]] = [1.0, 2.0]
    result = draw(logits, with_logprobs=True)
    np.testing.assert_array_equal(result.top_ids[0], [290, 7] + [-1] * (NUM_LOGPROBS - 2))
    assert result.top_logprobs[0, 2:].max() == -np.inf


def test_without_logprobs_there_are_none() -> None:
    assert draw(random_logits(1, 37))[1:] == (None,) * 4


def test_as_many_alternatives_are_computed_as_a_request_may_ask_for() -> None:
    assert NUM_LOGPROBS == MAX_LOGPROBS


# Broken logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_never_chosen_and_shows_in_the_logprobs(temperature: float) -> None:
    logits = np.array([[np.nan, 1.0, np.nan], [0.0, 1.0, 9.0]], np.float32)
    result = draw(logits, temperature=temperature, top_p=0.9, with_logprobs=True)
    np.testing.assert_array_equal(result.tokens, [1, 2])
    np.testing.assert_array_equal(np.isnan(result.logprobs), [True, False])


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_without_finite_logits_yields_token_0(value: float) -> None:
    logits = np.full((2, 37), value, np.float32)
    np.testing.assert_array_equal(draw(logits, top_k=3, top_p=0.5).tokens, 0)
    np.testing.assert_array_equal(greedy(jnp.asarray(logits)), 0)


def test_infinite_and_very_large_logits_win() -> None:
    big = np.finfo(np.float32).max
    logits = np.array([[0.0, np.inf, -big], [-big, 0.0, big]], np.float32)
    result = draw(logits, temperature=0.01, repetition_penalty=0.5)
    np.testing.assert_array_equal(result.tokens, [1, 2])


# State


def test_counts_follow_the_chosen_tokens() -> None:
    slots, size, steps = 3, 37, 20
    state, expected = init_state(slots, size), np.zeros((slots + 1, size), np.int32)
    rows = [2, 0, slots, slots]  # two rows of a sequence, two of padding
    for step in range(steps):
        logits = jnp.asarray(random_logits(4, size, seed=step))
        inputs = make_inputs(4, slot=rows, counter=step)
        result, state = run(logits, inputs, state, with_filters=False, with_logprobs=False)
        np.add.at(expected, (rows, np.asarray(result.tokens)), 1)
    np.testing.assert_array_equal(state.output_counts, expected)
    assert not state.in_prompt.any()


def test_reset_rows_replaces_only_its_rows() -> None:
    before = SamplingState(jnp.full((4, 5), 3, jnp.int32), jnp.ones((4, 5), jnp.bool_))
    slot = jnp.array([2, 0], jnp.int32)
    counts, prompt = jnp.arange(10, dtype=jnp.int32).reshape(2, 5), jnp.zeros((2, 5), jnp.bool_)
    after = reset_rows(before, slot, counts, prompt)
    np.testing.assert_array_equal(after.output_counts[slot], counts)
    np.testing.assert_array_equal(after.in_prompt[slot], prompt)
    for untouched in (1, 3):
        np.testing.assert_array_equal(after.output_counts[untouched], 3)
        assert after.in_prompt[untouched].all()


# The compiled form


def lower(rows: int, slots: int, size: int = 5500, **flags) -> jax.stages.Lowered:
    step = jax.jit(partial(sample, **flags), donate_argnums=2)
    return step.lower(jnp.zeros((rows, size)), make_inputs(rows), init_state(slots, size))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("everything", [False, True])
def test_the_state_is_updated_in_place(rows: int, everything: bool) -> None:
    lowered = lower(rows, 300, with_filters=everything, with_logprobs=everything)
    memory = lowered.compile().memory_analysis()
    counts_bytes, prompt_bytes = 301 * 5500 * 4, 301 * 5500
    assert memory.alias_size_in_bytes >= counts_bytes + prompt_bytes
    assert memory.temp_size_in_bytes < prompt_bytes  # so neither of them was copied


def test_reset_rows_works_in_place() -> None:
    rows = (jnp.zeros(1, jnp.int32), jnp.zeros((1, 5500), jnp.int32), jnp.zeros((1, 5500), bool))
    step = jax.jit(reset_rows, donate_argnums=0)
    memory = step.lower(init_state(300, 5500), *rows).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 301 * 5500 * (4 + 1)
    assert memory.temp_size_in_bytes < 5500 * (4 + 1)


def test_the_in_place_test_can_fail() -> None:
    kept = jax.jit(partial(sample, with_filters=False, with_logprobs=False))
    args = (jnp.zeros((1, 5500)), make_inputs(1), init_state(300, 5500))
    assert kept.lower(*args).compile().memory_analysis().alias_size_in_bytes == 0


REFUSED = (" sort(", " topk(", "reduce-window(", " conditional(")


def hlo_text(lowered: jax.stages.Lowered) -> str:
    return lowered.compiler_ir("hlo").as_hlo_text().lower()


@pytest.mark.parametrize("rows", [1, 3])
def test_no_operation_that_a_target_lacks(rows: int) -> None:
    text = hlo_text(lower(rows, 3, with_filters=True, with_logprobs=True))
    assert [name for name in REFUSED if name in text] == []


@pytest.mark.parametrize(
    "operation",
    [
        partial(jnp.sort, axis=1),
        partial(jax.lax.top_k, k=3),
        partial(jnp.cumsum, axis=1),
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: -x),
    ],
)
def test_the_operation_test_can_fail(operation) -> None:
    text = hlo_text(jax.jit(operation).lower(jnp.zeros((2, 99))))
    assert [name for name in REFUSED if name in text]
