"""The steps from logits to tokens, batched over rows; a row is one segment that samples.

After bias, penalties and temperature a row is turned into the *distance* of every token below the
best one, ``d = (max − logit) / temperature >= 0``, infinite for tokens that must not be chosen.
Filters set further distances to infinity, and the draw takes the token of the least ``d + noise``,
which is the Gumbel-max trick.

The order is vLLM's: bias, repetition penalty, frequency and presence penalty, temperature, min_p,
top_k, top_p (on what is left, renormalised). Log-probabilities come from the unmodified logits.

The invariant: a row's token depends on that row alone, not on the batch around it. Sums that
decide something are sums of integers, which have no order; noise depends on (seed, counter, token).

NaN logits count as −inf, that is, they are never chosen, and +inf counts as the largest finite
number; the log-probabilities of such a row are NaN, which is how a caller sees it. A row without
any finite logit yields token 0.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from dcpjax.sampling.filters import filter_distances
from dcpjax.sampling.largest import first_minimum, largest, without_nan
from dcpjax.sampling.noise import negated_gumbel

GREEDY_BELOW = 1e-5
"""Temperatures below this one mean greedy, as in vLLM; distances would only overflow."""


class SamplingInputs(NamedTuple):
    """Parameters of the rows of one step.

    ``seed`` and ``counter`` (index of the output token) determine the draw. ``slot`` is the row of
    the sequence in :class:`SamplingState`; padding rows name the last one. ``bias_ids`` outside the
    vocabulary are padding, ``bias_values`` of −inf ban a token; M may be 0.
    """

    temperature: Float32[Array, " R"]
    top_k: Int32[Array, " R"]  # 0 or less: all tokens
    top_p: Float32[Array, " R"]
    min_p: Float32[Array, " R"]
    repetition_penalty: Float32[Array, " R"]
    presence_penalty: Float32[Array, " R"]
    frequency_penalty: Float32[Array, " R"]
    seed: UInt32[Array, "R 2"]
    counter: Int32[Array, " R"]
    slot: Int32[Array, " R"]
    bias_ids: Int32[Array, "R M"]
    bias_values: Float32[Array, "R M"]


class SamplingState(NamedTuple):
    """What penalties need to know of each sequence. Donated to the step and returned from it.

    The last row belongs to no sequence: padding rows count there.
    """

    output_counts: Int32[Array, "slots+1 V"]
    in_prompt: Bool[Array, "slots+1 V"]


class SampleResult(NamedTuple):
    """Chosen tokens; the rest is None unless log-probabilities were asked for.

    ``ranks`` is 1 plus the number of tokens with a larger logit. ``top_ids`` falls by probability,
    equal ones by rising id; entries beyond the tokens that have a finite logit are −1, with
    log-probability −inf.
    """

    tokens: Int32[Array, " R"]
    logprobs: Float32[Array, " R"] | None = None
    ranks: Int32[Array, " R"] | None = None
    top_ids: Int32[Array, "R NUM_LOGPROBS"] | None = None
    top_logprobs: Float32[Array, "R NUM_LOGPROBS"] | None = None


def init_state(slots: int, vocab_size: int) -> SamplingState:
    """The state of ``slots`` sequences without tokens, and the row for padding."""
    shape = (slots + 1, vocab_size)
    return SamplingState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.bool_))


def reset_rows(
    state: SamplingState,
    slot: Int32[Array, " K"],
    output_counts: Int32[Array, "K V"],
    in_prompt: Bool[Array, "K V"],
) -> SamplingState:
    """Replace the rows of K sequences, when they start or are resumed. Donate ``state``."""
    return SamplingState(
        state.output_counts.at[slot].set(output_counts), state.in_prompt.at[slot].set(in_prompt)
    )


def greedy(logits: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """The token of the largest logit of each row, the lowest id among equals."""
    return first_minimum(-without_nan(logits))


def sample(
    logits: Float32[Array, "R V"],
    inputs: SamplingInputs,
    state: SamplingState,
    *,
    with_filters: bool,
    with_logprobs: bool,
) -> tuple[SampleResult, SamplingState]:
    """Choose one token per row and count it as output of its sequence. Donate ``state``.

    Args:
        with_filters: static; False ignores top_k, top_p and min_p, for steps where no row has any.
        with_logprobs: static; False leaves those fields of the result None.
    """
    adjusted = _penalise(_add_bias(without_nan(logits), inputs), inputs, state)
    distances = _distances(adjusted, inputs.temperature)
    if with_filters:
        distances = filter_distances(distances, inputs.top_k, inputs.top_p, inputs.min_p)
    tokens = _draw(distances, inputs)
    counts = state.output_counts.at[inputs.slot, tokens].add(1)
    result = _with_logprobs(logits, tokens) if with_logprobs else SampleResult(tokens)
    return result, state._replace(output_counts=counts)


def _add_bias(logits: Array, inputs: SamplingInputs) -> Array:
    """Padding adds 0 to token 0: an out-of-range scatter is an error on some targets."""
    is_token = (inputs.bias_ids >= 0) & (inputs.bias_ids < logits.shape[1])
    ids = jnp.where(is_token, inputs.bias_ids, 0)
    values = jnp.where(is_token, inputs.bias_values, 0.0)
    rows = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    return logits.at[rows, ids].add(values)


def _penalise(logits: Array, inputs: SamplingInputs, state: SamplingState) -> Array:
    counts = state.output_counts[inputs.slot]
    is_output = counts > 0
    is_seen = is_output | state.in_prompt[inputs.slot]
    factor = jnp.where(is_seen, inputs.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - inputs.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - jnp.where(is_output, inputs.presence_penalty[:, None], 0.0)


def _distances(logits: Array, temperature: Array) -> Array:
    """``(max − logit) / temperature``: 0 for the best token, infinite for −inf; never NaN."""
    logits = without_nan(logits)  # penalties and biases may have overflowed
    best = jnp.max(logits, axis=1, keepdims=True)
    scale = jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    return jnp.where(logits == -jnp.inf, jnp.inf, (best - logits) / scale)


def _draw(distances: Array, inputs: SamplingInputs) -> Array:
    noise = negated_gumbel(inputs.seed, inputs.counter, distances.shape[1])
    is_greedy = inputs.temperature[:, None] < GREEDY_BELOW
    return first_minimum(distances + jnp.where(is_greedy, 0.0, noise))


def _with_logprobs(logits: Array, tokens: Array) -> SampleResult:
    """The result with natural-log probabilities of the chosen tokens and the best alternatives."""
    best = jnp.max(logits, axis=1, keepdims=True)
    normaliser = best + jnp.log(jnp.sum(jnp.exp(logits - best), axis=1, keepdims=True))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    num_better = jnp.sum((logits > chosen).astype(jnp.int32), axis=1, dtype=jnp.int32)
    values, ids = largest(without_nan(logits))
    return SampleResult(
        tokens=tokens,
        logprobs=(chosen - normaliser)[:, 0],
        ranks=1 + num_better,
        top_ids=jnp.where(values == -jnp.inf, -1, ids),
        top_logprobs=values - normaliser,
    )
