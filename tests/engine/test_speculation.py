"""Whoever drafts and whatever is accepted: the tokens are those of an engine without speculation.

Greedy and sampled, with every parameter, on meshes and in both forms of a step, with preemption,
cached prefixes, aborts, and prompts that another engine has computed.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dcpjax.config import EngineConfig
from dcpjax.engine import verification
from dcpjax.engine.blueprint import Blueprint
from dcpjax.engine.engine import Engine
from dcpjax.engine.request import FinishReason, Request
from dcpjax.errors import ConfigError, UnsupportedCombination
from tests.engine.device_bigrams import BigramEngine
from tests.engine.pair import ask_prefill, decode_request, node, transfer
from tests.engine.serving import SMALL, Served, engine_of, request_of, serve
from tests.engine.workload import assert_same, copies, workload
from tests.golden.records import NUM_TOKENS, read_continuations
from tests.golden.tiny import random_tokens

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SPECULATION = {"speculative_config": NGRAM}
ENGINES: dict[str, dict[str, Any]] = {
    "one device, few pages": {"max_num_seqs": 4, "num_pages": 18},
    "dcp 3, eight at once": {
        "tensor_parallel_size": 3,
        "decode_context_parallel_size": 3,
        "max_num_seqs": 8,
        "num_pages": 80,
        "prefill_gather": "q",
    },
    "dcp 4, few pages": {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "dcp_comm_backend": "a2a",
        "prefill_gather": "q",
        "max_num_seqs": 4,
        "num_pages": 5,
        "block_size": 8,
    },
    "static, dcp 2": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 2,
        "max_num_seqs": 4,
        "num_pages": 9,
        "step_form": "static",
    },
}
FEW_PAGES = [name for name, settings in ENGINES.items() if settings["num_pages"] < 20]


def requests() -> list[Request]:
    """All kinds of requests, and texts that repeat themselves."""
    chance = random.Random(1)
    repeating = [
        request_of(
            f"{index} repeating",
            random_tokens(f"r{index}", chance.randrange(1, 7)) * 8,
            max_tokens=chance.choice([3, 17, 50]),
            **({"temperature": 0.5, "seed": index} if index % 2 else {}),
        )
        for index in range(12)
    ]
    return [*workload(36, seed=0), *repeating]


@pytest.fixture(scope="module")
def plain(tiny) -> Iterator[Engine]:
    engine = engine_of(tiny, max_num_seqs=4, num_pages=80, seed=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(plain) -> dict[str, Served]:
    return serve(plain, requests())


@pytest.fixture(scope="module", params=ENGINES)
def speculating(request, tiny) -> Iterator[Engine]:
    engine = engine_of(tiny, seed=1, **ENGINES[request.param], **SPECULATION)
    yield engine
    engine.close()


def test_tokens_are_those_without_speculation(speculating, expected, request):
    served = serve(speculating, requests())
    for name, found in expected.items():
        assert_same(served[name], found)
    stats = speculating.stats()
    counts = stats["speculation"]
    assert counts["num_accepted_tokens"] > 50
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] + 100
    assert sum(counts["num_accepted_tokens_per_pos"]) == counts["num_accepted_tokens"]
    assert 1.2 < stats["acceptance_length"] < 4
    is_crowded = request.node.callspec.params["speculating"] in FEW_PAGES
    assert (stats["num_preemptions"] > 0) == is_crowded
    assert stats["kv_cache_usage"] == 0


def test_cached_prefixes_hold_accepted_drafts(speculating, plain):
    """A second request goes on behind what the first has generated."""
    prompt = random_tokens("again", 5) * 5
    params = {"max_tokens": 30, "ignore_eos": True}
    first = serve(speculating, [request_of("first", prompt, **params)])["first"]
    longer = prompt + first.tokens
    again = serve(speculating, [request_of("again", longer, **params)])["again"]
    page = speculating.config.virtual_page_size
    assert again.num_cached_tokens == (len(longer) - 1) // page * page
    assert again.tokens == serve(plain, [request_of("plain", longer, **params)])["plain"].tokens


def test_aborts_at_any_moment_change_nothing_for_the_others(speculating, expected):
    chance = random.Random(3)
    copied = copies(requests())
    victims = {r.request_id: chance.randrange(60) for r in copied if chance.random() < 0.4}
    for request in copied:
        speculating.add(request)
    served: dict[str, Served] = defaultdict(Served)
    num_steps = 0
    while speculating.has_work:
        for name, step in victims.items():
            if step == num_steps:
                speculating.abort(name)
        for output in speculating.step():
            served[output.request_id].add(output)
        speculating.check_integrity()
        num_steps += 1
    for name, found in served.items():
        if found.finish_reason is FinishReason.ABORT:
            assert found.tokens == expected[name].tokens[: len(found.tokens)]
        else:
            assert_same(found, expected[name])
    assert any(found.finish_reason is FinishReason.ABORT for found in served.values())


def test_a_step_is_committed_before_the_next_is_planned(speculating):
    """The first call returns nothing, every other one what the step before has accepted."""
    before = speculating.stats()["steps"]
    speculating.add(request_of("a", [5] * 9, max_tokens=9, logit_bias=((5, 1e9),)))
    counts = []
    while speculating.has_work:
        counts.append(sum(len(output.token_ids) for output in speculating.step()))
    assert counts == [0, 1, 4, 4]
    assert speculating.stats()["steps"] - before == 3


def test_wrong_acceptance_is_noticed(speculating, expected, monkeypatch):
    """The comparison above can fail: one draft more than was right."""
    original = verification.num_accepted

    def one_more(drafts, sampled, num_drafts):
        return np.minimum(original(drafts, sampled, num_drafts) + 1, num_drafts)

    monkeypatch.setattr(verification, "num_accepted", one_more)
    served = serve(speculating, requests())
    assert any(served[name].tokens != found.tokens for name, found in expected.items())


def test_penalties_have_no_drafts(speculating):
    before = speculating.stats()["speculation"]
    serve(speculating, [request_of("a", [3] * 20, max_tokens=8, presence_penalty=0.1)])
    assert speculating.stats()["speculation"] == before


def test_programs_for_segments_and_for_single_tokens(speculating):
    names = speculating.runner.shape_names
    rows = speculating.config.max_num_seqs
    assert {name.split("+")[0] for name in names} >= {"1x1", "1x4", f"{rows}x1", f"{rows}x4"}
    assert all(name.startswith(f"{rows}x4+") for name in names if "+0x0" not in name)


# A prompt that another engine has computed


def test_a_loaded_request_starts_with_its_last_token_and_drafts(tiny):
    item = max(read_continuations("tiny_gqa"), key=lambda item: len(item.prompt))
    prompt = (*item.prompt, *item.tokens[:30])  # the model repeats itself
    with (
        node(tiny, **transfer("kv_producer")) as prefill,
        node(tiny, **transfer("kv_consumer"), **SPECULATION) as decode,
    ):
        offer = ask_prefill(prefill, prompt)
        request = decode_request(prompt, offer, max_tokens=NUM_TOKENS - 30)
        decode.engine.add(request)
        decode.run(request.request_id)
        assert tuple(decode.served[request.request_id].tokens) == tuple(item.tokens[30:])
        stats = decode.engine.stats()
        assert stats["speculation"]["num_draft_tokens"] > 0
        assert stats["kv_transfer"]["num_transfers"] == 1


# Drafts on the devices


def test_drafts_that_the_host_does_not_know(tiny, expected, monkeypatch):
    """Steps build on each other's drafts without the host; who computes them is a seam."""
    monkeypatch.setattr(Blueprint, "_decode_widths", property(lambda self: (4,)))
    settings = SMALL | {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
    settings |= {"max_num_seqs": 4, "num_pages": 9, "seed": 1, **SPECULATION}
    engine = BigramEngine(EngineConfig.from_settings(str(tiny.path), settings), tiny)
    served = serve(engine, requests())
    for name, found in expected.items():
        assert_same(served[name], found)
    stats = engine.stats()
    assert stats["speculation"]["num_accepted_tokens"] > 100
    assert stats["num_preemptions"] > 0
    engine.close()


# Benchmarks


def test_synthetic_acceptance_takes_drafts_as_they_are(tiny):
    """Prompts without repetition have drafts too; the steps are as many as were asked for."""
    length = 2.5
    config = NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    engine = engine_of(tiny, speculative_config=config, max_num_seqs=1, num_pages=40)
    params = {"max_tokens": 200, "ignore_eos": True}
    found = serve(engine, [request_of("a", range(20), temperature=1.0, **params)])["a"]
    assert len(found.tokens) == 200
    assert engine.stats()["acceptance_length"] == pytest.approx(length, abs=0.25)
    engine.reset_prefix_cache()
    again = serve(engine, [request_of("a", range(20), temperature=1.0, **params)])["a"]
    assert again.tokens == found.tokens
    engine.close()


# Settings


def test_without_speculation_nothing_is_said_of_it(plain):
    stats = plain.stats()
    assert (stats["acceptance_length"], stats["speculation"]) == (1.0, None)


def blueprint(checkpoint, **speculation: Any) -> Blueprint:
    settings = SMALL | {"speculative_config": {"num_speculative_tokens": 3, **speculation}}
    config = EngineConfig.from_settings(str(checkpoint.path), settings)
    return Blueprint(config, checkpoint.config, "cpu", "float32")


def test_a_model_without_a_draft_layer_has_no_mtp(tiny):
    with pytest.raises(UnsupportedCombination, match="'mtp'.*draft layer") as error:
        _ = blueprint(tiny, method="mtp").step_shapes
    assert error.value.values == {"method": "mtp", "architecture": tiny.config.architecture}


@pytest.mark.parametrize("drafts, is_fine", [(255, True), (256, False)])
def test_a_segment_fits_into_a_sequence(tiny, drafts, is_fine):
    shapes = blueprint(tiny, method="ngram", num_speculative_tokens=drafts)
    if is_fine:
        assert shapes.step_shapes.decode_widths == (1, 256)
        return
    with pytest.raises(ConfigError, match="below max_model_len") as error:
        _ = shapes.step_shapes
    assert error.value.values["num_speculative_tokens"] == 256
