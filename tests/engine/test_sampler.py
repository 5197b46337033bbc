"""Requests to rows of parameters, rows of results to tokens."""

import jax
import numpy as np
import pytest

from dcpjax.engine.request import TokenLogprobs
from dcpjax.engine.sampler import Position, SampledTokens, Sampler, check_biases
from dcpjax.errors import RequestError
from dcpjax.sampling import SampleResult
from tests.engine.serving import request_of

VOCAB = 20


def sampled(logprobs: int | None) -> SampledTokens:
    """Two rows of three; row 0 did not sample."""
    rows = {
        1: Position(request_of("a", [1], logprobs=logprobs)),
        2: Position(request_of("b", [1])),
    }
    details = SampleResult(
        tokens=np.asarray([0, 7, 8]),
        logprobs=np.asarray([0.0, -0.5, -1.0], np.float32),
        ranks=np.asarray([1, 2, 1]),
        top_ids=np.asarray([[0, 0, 0], [3, 7, -1], [8, 1, 2]]),
        top_logprobs=np.asarray([[0, 0, 0], [-0.25, -0.5, -np.inf], [-1, -2, -3]], np.float32),
    )
    return SampledTokens(np.asarray([0, 7, 8, 0]), rows, None if logprobs is None else details)


def test_only_rows_that_sample_have_tokens():
    assert sampled(None).wait() == ([[7], [8]], [[], []])


@pytest.mark.parametrize("wanted, top", [(0, ()), (1, ((3, -0.25),)), (3, ((3, -0.25), (7, -0.5)))])
def test_log_probabilities_are_those_asked_for(wanted, top):
    """Places without a token are left out."""
    tokens, details = sampled(wanted).wait()
    assert tokens == [[7], [8]]
    assert details == [[TokenLogprobs(token_id=7, logprob=-0.5, rank=2, top=top)], []]


@pytest.mark.parametrize("max_rows, sizes", [(1, [1]), (3, [1, 3, 3]), (6, [1, 4, 4, 4, 6, 6])])
def test_few_numbers_of_rows_are_compiled(max_rows, sizes):
    sampler = Sampler(jax.devices()[0], vocab_size=VOCAB, max_num_seqs=2, max_rows=max_rows, seed=0)
    assert [sampler.bucket(rows) for rows in range(1, max_rows + 1)] == sizes


@pytest.mark.parametrize("eos, stop, biased, is_fine", [(8, 60, 60, True), (9, 60, 60, False)])
def test_biases_and_endings_have_room(eos, stop, biased, is_fine):
    request = request_of(
        "a",
        [1],
        eos=range(eos),
        stop_token_ids=range(100, 100 + stop),
        logit_bias=tuple((token, 1.0) for token in range(biased)),
        min_tokens=1,
    )
    if is_fine:
        check_biases(request)
        return
    with pytest.raises(RequestError, match="at most 128"):
        check_biases(request)
