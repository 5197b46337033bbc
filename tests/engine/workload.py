"""Requests of every kind for an engine's tests, and what it means that two engines agree on one."""

import random
from typing import Any

import pytest

from dcpjax.engine.request import Request
from tests.engine.serving import Served, request_of
from tests.golden.tiny import random_tokens

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.0, "seed": 7},
    "no seed": {"temperature": 0.8},
    "filters": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "sampled penalties": {"temperature": 0.9, "frequency_penalty": 1.0, "seed": 11},
    "logprobs": {"logprobs": 5},
    "chosen logprob": {"temperature": 1.0, "seed": 5, "logprobs": 0},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(0, 131, 3))},
    "stop ids": {"stop_token_ids": tuple(range(0, 131, 4)), "ignore_eos": True},
    "logit bias": {"logit_bias": ((7, 5.0), (9, -100.0))},
    "ignore eos": {"ignore_eos": True},
}
EOS = range(1, 131, 17)


def workload(count: int, seed: int) -> list[Request]:
    """Requests of all kinds and lengths up to 100 tokens, some with a common beginning."""
    chance, shared = random.Random(seed), random_tokens("shared", 40)
    requests = []
    for index in range(count):
        kind = list(FEATURES)[index % len(FEATURES)]
        length = chance.choice([1, 2, 15, 16, 17, 31, 33, 50])
        prompt = random_tokens(f"{seed} {index}", length)
        if chance.random() < 0.4:
            prompt = shared[: chance.randrange(1, 40)] + prompt[:20]
        params = {"max_tokens": chance.choice([1, 2, 12, 70]), **FEATURES[kind]}
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        eos = EOS if chance.random() < 0.3 else ()
        requests.append(request_of(f"{index} {kind}", prompt, eos=eos, **params))
    return requests


def copies(requests: list[Request]) -> list[Request]:
    """Fresh requests of the same content."""
    return [Request(r.request_id, r.prompt_token_ids, r.params, r.eos_token_ids) for r in requests]


def assert_same(found: Served, expected: Served) -> None:
    assert (found.tokens, found.finish_reason, found.stop_token_id) == (
        expected.tokens,
        expected.finish_reason,
        expected.stop_token_id,
    )
    assert len(found.logprobs) == len(expected.logprobs)
    for details, others in zip(found.logprobs, expected.logprobs, strict=True):
        assert (details.token_id, details.rank) == (others.token_id, others.rank)
        assert [token for token, _ in details.top] == [token for token, _ in others.top]
        assert details.logprob == pytest.approx(others.logprob, abs=1e-4)
