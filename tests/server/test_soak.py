"""The soak test in small: a real server with a tiny model, and the judge of its answers."""

import asyncio
import importlib
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import TEMPLATE, VOCAB_SIZE, byte_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    """A folder with everything but weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(tmp_path)


@pytest.fixture
def soak_requests(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("soak_requests")


def test_a_real_server_under_clients_that_come_and_go(
    tiny_model: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so few pages that requests are preempted, and four times as many clients as rows."""
    assert pytestconfig.cache is not None
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(pytestconfig.cache.mkdir("jax")))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    run = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "soak_server.py", "--model", tiny_model),
            *("--clients", "16", "--minutes", "0.15", "--cases", "12"),
            *("--max-words", "20", "--max-tokens", "40", "--max-growth", "0.25"),
            *("--load-format", "dummy", "--device", "cpu", "-tp", "2", "-dcp", "2"),
            *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--block-size", "2"),
            *("--num-pages", "88"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["faults"] == []
    assert (result["passed"], result["exit_code"], run.returncode) == (True, 0, 0)
    assert result["finished"] > 0 < result["left"]
    assert result["preemptions"] > 0 < result["prefix_cache_hits"]


# What is checked after the load


@pytest.fixture
def soak_server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("soak_server")


def faults_afterwards(soak_server: Any, **changes: Any) -> list[str]:
    """What is found in a server of which everything but ``changes`` is as it should be."""
    stats = dict.fromkeys(
        (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage",
            "compilations_after_warmup",
        ),
        0,
    )
    answers = {
        "/stats": httpx.Response(200, json=stats | changes),
        "/load": httpx.Response(200, json={"server_load": changes.get("server_load", 0)}),
        "/health": httpx.Response(changes.get("health", 200)),
        "/reset_prefix_cache": httpx.Response(200),
    }
    tally = soak_server.Tally()

    async def check() -> None:
        transport = httpx.MockTransport(lambda request: answers[request.url.path])
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await soak_server.check_afterwards(http, tally)

    asyncio.run(check())
    return tally.faults


@pytest.mark.parametrize(
    "changes",
    [
        {"num_requests_running": 1},
        {"num_requests_waiting": 1},
        {"kv_cache_usage": 0.01},
        {"compilations_after_warmup": 1},
        {"server_load": 1},
        {"health": 503},
    ],
    ids=str,
)
def test_what_a_load_leaves_behind_is_found(
    soak_server: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(soak_server, "SETTLE_SECONDS", 0.0)
    assert faults_afterwards(soak_server) == []
    assert len(faults_afterwards(soak_server, **changes)) == 1


def test_growing_memory_is_found(soak_server: Any) -> None:
    def faults(rss: list[int]) -> list[str]:
        tally = soak_server.Tally(rss=rss)
        soak_server.check_memory(tally, max_growth=0.05)
        return tally.faults

    assert faults([1, *[100] * 19]) == []  # it may grow in the first quarter
    assert faults(list(range(100, 120))) == ["the server's memory has grown by 9.3%"]
    assert faults([100] * 3) == ["the load was too short to say anything about memory"]


# The judge


def whole_answer(soak_requests: Any, **changes: Any) -> Any:
    usage = {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    answer = soak_requests.Answer(
        text="abc",
        token_ids=[97, 98, 99],
        margins=[1.0, 0.0005, 1.0],
        finish_reason="length",
        usage=usage,
        is_done=True,
    )
    return replace(answer, **changes)


@pytest.fixture
def case(soak_requests: Any) -> Any:
    return soak_requests.Case("/v1/completions", {"prompt": "a", "max_tokens": 3, "stop": ["x"]})


def test_the_same_answer_is_right(soak_requests: Any, case: Any) -> None:
    alone = whole_answer(soak_requests)
    assert soak_requests.judge(case, alone, alone) == soak_requests.Verdict(())
    for count in range(4):  # its client has left
        left = soak_requests.Answer("abc"[:count], [97, 98, 99][:count], has_left=True)
        assert soak_requests.judge(case, alone, left) == soak_requests.Verdict(())


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 98, 99]},
        {"token_ids": [97, 98, 1]},
        {"token_ids": [97, 98]},
        {"token_ids": [97, 98, 99, 100]},
        {"text": "abd"},
        {"text": "axc"},
        {"finish_reason": "stop"},
        {"finish_reason": "abort"},
        {"finish_reason": None},
        {"stop_reason": "x"},
        {"is_done": False},
        {"usage": None},
        {"usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}},
        {"error": "the engine stopped"},
        {"has_left": True, "token_ids": [97, 98, 1]},
        {"has_left": True, "text": "abd"},
    ],
    ids=str,
)
def test_every_wrong_answer_is_found(
    soak_requests: Any, case: Any, changes: dict[str, Any]
) -> None:
    verdict = soak_requests.judge(
        case, whole_answer(soak_requests), whole_answer(soak_requests, **changes)
    )
    assert verdict.faults
    assert not verdict.is_flipped


def test_from_a_near_tie_on_tokens_may_differ_but_the_ending_may_not(
    soak_requests: Any, case: Any
) -> None:
    alone = whole_answer(soak_requests)
    flipped = replace(alone, token_ids=[97, 1, 2], text="a??")
    assert soak_requests.judge(case, alone, flipped) == soak_requests.Verdict((), is_flipped=True)
    assert soak_requests.judge(case, alone, replace(flipped, is_done=False)).faults
    assert soak_requests.has_near_tie(alone)
    assert not soak_requests.has_near_tie(replace(alone, margins=[1.0, 0.002]))


def test_a_stop_needs_something_that_stops(soak_requests: Any) -> None:
    endless = soak_requests.Case("", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    stopped = whole_answer(soak_requests, finish_reason="stop")
    assert soak_requests.ending_faults(endless, stopped) == ["stop: something can stop it"]


def test_margins_are_read_from_both_apis(soak_requests: Any) -> None:
    answer = soak_requests.Answer()
    rest = {"token_ids": [1], "finish_reason": None, "stop_reason": None}
    chat = {"content": [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -2.0}]}]}
    answer.add({"choices": [{"delta": {"content": "a"}, "logprobs": chat, **rest}]})
    plain = {"top_logprobs": [{"b": -3.0, "c": -1.0}]}
    answer.add({"choices": [{"text": "b", "logprobs": plain, **rest}]})
    answer.add({"choices": [{"text": "", "logprobs": None, **rest}]})
    assert (answer.text, answer.margins) == ("ab", [1.5, 2.0])


def test_cases_and_visits_are_seeded_and_of_every_kind(soak_requests: Any) -> None:
    def make() -> tuple[Any, Any]:
        choose = random.Random(3)
        cases = soak_requests.make_cases(choose, count=40, max_words=20, max_tokens=16)
        return cases, [soak_requests.make_visit(choose, cases) for _ in range(100)]

    cases, visits = make()
    assert (cases, visits) == make()
    assert {case.path for case in cases} == {"/v1/completions", "/v1/chat/completions"}
    assert any(case.stops for case in cases) and any("ignore_eos" in c.body for c in cases)
    assert any(visit.leaves_after_tokens == 0 for visit in visits)
    assert any(visit.leaves_after_seconds for visit in visits)
