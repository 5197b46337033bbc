"""Drafts of a model's own draft layer: right or wrong, the tokens are those without speculation.

A sparse model with a latent cache; prompts in chunks, few pages, cached prefixes, eight at once.
"""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from dcpjax.engine.compilations import COMPILATIONS
from dcpjax.engine.engine import Engine
from dcpjax.engine.mtp_drafter import MtpDrafter
from dcpjax.engine.request import Request
from dcpjax.models.checkpoint import Checkpoint
from tests.engine.drafting_glm import drafting_glm
from tests.engine.serving import Served, opening_engines, request_of, serve
from tests.engine.workload import assert_same
from tests.golden.tiny import random_tokens

NUM_DRAFTS, VOCABULARY = 3, 61
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 96, "block_size": 4}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}}
ENGINES: dict[str, dict[str, Any]] = {
    "one device, few pages": {"num_pages": 36},
    "dcp 3, whole index": {
        "tensor_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "index_kv": "replicated",
        "num_pages": 70,
    },
    "dcp 4, few pages": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "cp_kv_cache_interleave_size": 2,
        "dcp_comm_backend": "a2a",
        "num_pages": 9,
    },
}
FEW_PAGES = [name for name, settings in ENGINES.items() if settings["num_pages"] < 40]
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 7},
    {"logprobs": 2},
    {"temperature": 0.4, "top_k": 9, "seed": 3},
]


def requests() -> list[Request]:
    """More than fit at once, of all lengths, some with a common beginning."""
    shared = random_tokens("shared", 20, VOCABULARY)
    prompts = {
        f"{number} of {length}": (shared if number % 3 == 2 else [])
        + random_tokens(f"mtp {number}", length, VOCABULARY)
        for number, length in enumerate((1, 2, 15, 16, 17, 3, 33, 47, 8, 40, 4, 31))
    }
    return [
        request_of(
            name, prompt, max_tokens=(1, 44, 40, 43, 44)[index % 5], **PARAMS[index % len(PARAMS)]
        )
        for index, (name, prompt) in enumerate(prompts.items())
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return drafting_glm(tmp_path_factory.mktemp("models") / "drafting")


@pytest.fixture(scope="module")
def open_engine(model) -> Iterator[Callable[..., Engine]]:
    with opening_engines() as open_one:
        yield lambda **settings: open_one(model, **SMALL | settings)


@pytest.fixture(scope="module")
def plain(open_engine) -> Engine:
    return open_engine(num_pages=200)


@pytest.fixture(scope="module")
def expected(plain) -> dict[str, Served]:
    return serve(plain, requests())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name.startswith("dcp 4") else pytest.mark.matrix)
        for name in ENGINES
    ],
)
def speculating(request, open_engine) -> Engine:
    return open_engine(**ENGINES[request.param], **MTP)


def accepted(engine: Engine) -> int:
    return engine.stats()["speculation"]["num_accepted_tokens"]


def test_tokens_are_those_without_speculation(speculating, expected, request):
    served = serve(speculating, requests())
    for name, found in expected.items():
        assert_same(served[name], found)
    stats = speculating.stats()
    counts = stats["speculation"]
    assert 1.5 < stats["acceptance_length"] < 1 + NUM_DRAFTS
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] + 50
    assert all(count > 10 for count in counts["num_accepted_tokens_per_pos"])
    is_crowded = request.node.callspec.params["speculating"] in FEW_PAGES
    assert (stats["num_preemptions"] > 0) == is_crowded
    assert stats["kv_cache_usage"] == 0


def test_cached_prefixes_hold_accepted_drafts(speculating, plain):
    """A second request goes on behind what the first has generated, with drafts that fit."""
    prompt = random_tokens("again", 21, VOCABULARY)
    params = {"max_tokens": 30, "ignore_eos": True}
    first = serve(speculating, [request_of("first", prompt, **params)])["first"]
    longer, before = prompt + first.tokens, accepted(speculating)
    again = serve(speculating, [request_of("again", longer, **params)])["again"]
    page = speculating.config.virtual_page_size
    assert again.num_cached_tokens == (len(longer) - 1) // page * page
    assert again.tokens == serve(plain, [request_of("plain", longer, **params)])["plain"].tokens
    assert accepted(speculating) > before + 10


WRONG: dict[str, Callable[[Array], Array]] = {
    "shifted by one": lambda drafts: jnp.roll(drafts, -1, axis=1),
    "other tokens": lambda drafts: (drafts + 1) % VOCABULARY,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_drafts_cost_acceptance_and_change_no_token(
    wrong, speculating, expected, monkeypatch
):
    before = accepted(speculating)
    serve(speculating, requests())
    right = accepted(speculating) - before
    follow = MtpDrafter.follow

    def change(previous: Array) -> Array:
        rows = previous.reshape(-1, 1 + NUM_DRAFTS)
        return jnp.concatenate([rows[:, :1], WRONG[wrong](rows[:, 1:])], axis=1).reshape(-1)

    def follow_wrongly(self, step, pools):
        previous, pools = follow(self, step, pools)
        with COMPILATIONS.expected():
            return jax.jit(change, out_shardings=previous.sharding)(previous), pools

    monkeypatch.setattr(MtpDrafter, "follow", follow_wrongly)
    served = serve(speculating, requests())
    for name, found in expected.items():
        assert_same(served[name], found)
    assert accepted(speculating) - before - right < right / 2


# Live


@pytest.fixture(scope="module")
def oracle(model, tmp_path_factory):
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    pytest.importorskip("transformers", reason="the oracle is transformers")
    live = pytest.importorskip("tests.golden.live_drafts")
    return live.draft_oracle(model, tmp_path_factory.mktemp("oracle"))


def drafted(engine: Engine, prompt: list[int], monkeypatch) -> list[tuple[list[int], list[int]]]:
    """Pairs of all tokens known and the drafts behind them, of one request alone."""
    follow, rows = MtpDrafter.follow, []

    def follow_and_keep(self, step, pools):
        previous, pools = follow(self, step, pools)
        table = np.asarray(previous).reshape(-1, 1 + NUM_DRAFTS)
        rows.extend(table[row].tolist() for row in step.rows.values())
        return previous, pools

    monkeypatch.setattr(MtpDrafter, "follow", follow_and_keep)
    served = serve(engine, [request_of("a", prompt, max_tokens=40)])["a"]
    tokens, known, found = prompt + served.tokens, len(prompt) + 1, []
    for last, *drafts in rows[:-1]:
        assert tokens[known - 1] == last
        found.append((tokens[:known], drafts))
        pairs = zip(drafts, tokens[known:], strict=False)
        known += 1 + len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return found


@pytest.mark.oracle
def test_drafts_are_those_of_the_layer_in_transformers(speculating, oracle, monkeypatch):
    """After a prompt in three chunks, and behind every verification whatever it accepted."""
    found = drafted(speculating, random_tokens("drafted", 37, VOCABULARY), monkeypatch)
    assert len(found) > 8
    for tokens, drafts in found:
        assert drafts == oracle.drafts(tokens, NUM_DRAFTS), len(tokens)


@pytest.mark.oracle
@pytest.mark.parametrize("mistake", [{"sees_state": False}, {"sees_first": True}], ids=str)
def test_other_drafts_would_be_seen(mistake, speculating, oracle, monkeypatch):
    other = dataclasses.replace(oracle, **mistake)
    prompt = random_tokens("drafted", 1 if "sees_first" in mistake else 37, VOCABULARY)
    found = drafted(speculating, prompt, monkeypatch)
    assert any(drafts != other.drafts(tokens, NUM_DRAFTS) for tokens, drafts in found)
