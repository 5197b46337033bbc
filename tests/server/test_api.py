"""The endpoints over ASGI: what a client sends and gets."""

import asyncio
from typing import Any

import pytest

import dcpjax
from tests.fakes import EOS, CountUpEngine
from tests.server.conftest import MODEL, Api, Gate, events_of, open_api

pytestmark = pytest.mark.anyio


async def test_a_completion(api: Api) -> None:
    answer = (await api.complete("a", max_tokens=4)).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "bcde",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 4,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat(api: Api) -> None:
    answer = (await api.chat("hi", max_completion_tokens=3)).json()
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": ";<=", "refusal": None}
    assert answer["choices"][0]["message"] == message
    assert answer["usage"]["prompt_tokens"] == len("u:hi\na:")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": len("u:hi\na:") // 2}


async def test_defaults_are_those_of_openai(api: Api) -> None:
    """16 tokens for completions; a chat goes on until the end of sequence."""
    completion = (await api.complete("\x00", max_tokens=None)).json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = (await api.chat(max_tokens=None)).json()
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert chat["usage"]["completion_tokens"] == EOS - ord(":")


async def test_a_chat_without_end_fills_the_context(api: Api) -> None:
    chat = (await api.chat(ignore_eos=True)).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["total_tokens"] == api.engine.max_model_len


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["bc"]),
        (["a"], ["bc"]),
        (["a", "k"], ["bc", "lm"]),
        ([97], ["bc"]),
        ([[97], [107]], ["bc", "lm"]),
    ],
)
async def test_prompts_come_in_many_forms(api: Api, prompt: Any, texts: list[str]) -> None:
    answer = (await api.complete(prompt, max_tokens=2)).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == len(texts)


async def test_choices_are_numbered_by_prompt_then_answer(api: Api) -> None:
    answer = (await api.complete(["aa", "kk"], n=2, max_tokens=1)).json()
    shown = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert shown == [(0, "b"), (1, "b"), (2, "l"), (3, "l")]
    assert answer["usage"] == {
        "prompt_tokens": 4,  # a prompt counts once, however many answers it has
        "completion_tokens": 4,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_content_may_be_parts_and_roles_may_repeat(api: Api) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "assistant", "content": "z"},
    ]
    body = {"messages": messages, "return_token_ids": True, "max_tokens": 1}
    answer = (await api.http.post("/v1/chat/completions", json=body)).json()
    assert bytes(answer["prompt_token_ids"]) == b"s:be\nu:xy\na:\na:z\na:"
    assert answer["choices"][0]["token_ids"] == [ord(";")]


async def test_a_stream_of_completions(api: Api) -> None:
    response = await api.complete("a", max_tokens=3, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert {event["object"] for event in events} == {"text_completion"}
    assert [event["choices"][0]["text"] for event in events] == ["b", "c", "d"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "length"]
    assert not any("usage" in event for event in events)


async def test_a_stream_of_chat(api: Api) -> None:
    events = events_of((await api.chat(max_tokens=2, n=2, stream=True)).text)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ";"}
        assert choices[1]["delta"] == {"content": "<"}
        assert [choice["finish_reason"] for choice in choices] == [None, "length"]


async def test_the_last_event_has_the_usage(api: Api) -> None:
    options = {"include_usage": True}
    events = events_of((await api.complete(max_tokens=2, stream=True, stream_options=options)).text)
    assert [bool(event["choices"]) for event in events] == [True, True, False]
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert "usage" not in events[0]


async def test_usage_may_come_with_each_event(api: Api) -> None:
    options = {"continuous_usage_stats": True}
    events = events_of((await api.complete(max_tokens=3, stream=True, stream_options=options)).text)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]


async def test_half_characters_are_not_sent(api: Api) -> None:
    """0xC3 begins a character that 0xC4 does not continue: nothing until that is known."""
    events = events_of((await api.complete([[0xC2]], max_tokens=2, stream=True)).text)
    assert [event["choices"][0]["text"] for event in events] == ["\ufffd\ufffd"]
    events = events_of(
        (await api.complete([[0xC2]], max_tokens=2, stream=True, return_token_ids=True)).text
    )
    assert [event["choices"][0]["token_ids"] for event in events] == [[0xC3], [0xC4]]
    assert events[0]["choices"][0]["prompt_token_ids"] == [0xC2]
    assert "prompt_token_ids" not in events[1]["choices"][0]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_ends_the_engine_request(api: Api, is_stream: bool) -> None:
    """The engine is held after the step that completes the stop string."""
    gate = api.engine.gate = Gate()
    gate.allow(len("bcdef"))
    response = await api.complete("a", stop=["ef"], max_tokens=100, stream=is_stream)
    answers = events_of(response.text) if is_stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == "bcd"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "ef")
    gate.open()
    await api.client.call(lambda engine: None)
    assert len(api.engine.aborted) == 1
    assert api.client.num_open == 0


async def test_min_tokens_and_stop_token_ids(api: Api) -> None:
    answer = (await api.complete("a", stop_token_ids=[98, 101], min_tokens=2)).json()
    assert answer["choices"][0]["text"] == "bcd"
    assert answer["choices"][0]["stop_reason"] == 101


async def test_logprobs_of_completions(api: Api) -> None:
    answer = (await api.complete("a", max_tokens=2, logprobs=2)).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["b", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}],
        "text_offset": [0, 1],
    }
    events = events_of((await api.complete("a", max_tokens=2, logprobs=0, stream=True)).text)
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    assert [one["text_offset"] for one in logprobs] == [[0], [1]]
    assert [one["top_logprobs"] for one in logprobs] == [[{"b": -0.5}], [{"c": -0.5}]]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_halves_of_a_character_have_one_offset(api: Api, is_stream: bool) -> None:
    """0xC3 begins a character; that 0xC4 does not continue it is known only then."""
    response = await api.complete([[0xC2]], max_tokens=4, logprobs=0, stream=is_stream)
    answers = events_of(response.text) if is_stream else [response.json()]
    found = [answer["choices"][0]["logprobs"]["text_offset"] for answer in answers]
    assert sum(found, []) == [0, 0, 1, 2]


async def test_logprobs_of_chat(api: Api) -> None:
    answer = (await api.chat(max_tokens=1, logprobs=True, top_logprobs=1)).json()
    entry = {"token": ";", "logprob": -0.5, "bytes": [59]}
    content = answer["choices"][0]["logprobs"]["content"]
    assert content == [{**entry, "top_logprobs": [entry]}]


async def test_chat_template_variables(api: Api) -> None:
    assert (await api.chat(chat_template_kwargs={"fail": False}, max_tokens=1)).status_code == 200
    failed = await api.chat(chat_template_kwargs={"fail": True}, max_tokens=1)
    assert failed.status_code == 400
    assert (await api.complete(max_tokens=1)).status_code == 200


async def test_models(api: Api) -> None:
    answer = (await api.http.get("/v1/models")).json()
    assert [card["id"] for card in answer["data"]] == [MODEL, "alias"]
    assert answer["data"][0]["max_model_len"] == api.engine.max_model_len
    assert (await api.http.get("/v1/models/alias")).json()["id"] == "alias"
    assert (await api.http.get("/v1/models/other")).status_code == 404


async def test_the_answer_has_the_model_name_that_was_asked_for(api: Api) -> None:
    assert (await api.complete(model="alias")).json()["model"] == "alias"
    assert (await api.complete(model=None)).json()["model"] == MODEL
    unknown = await api.complete(model="other")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("salt", [None, "", "s"])
@pytest.mark.parametrize("send", [Api.complete, Api.chat])
async def test_the_cache_salt_reaches_every_request_of_a_call(send: Any, salt: str | None) -> None:
    engine = CountUpEngine()
    gate = engine.gate = Gate()
    async with open_api(engine) as api:
        call = asyncio.create_task(send(api, "a", n=2, max_tokens=1, cache_salt=salt))
        await asyncio.to_thread(gate.waiting.acquire)
        salts = [request.cache_salt for request in engine.open_requests]
        gate.open()
        await call
    assert salts == [salt or ""] * 2


async def test_small_endpoints(api: Api) -> None:
    assert (await api.http.get("/version")).json() == {"version": dcpjax.__version__}
    for path in ("/health", "/ping"):
        response = await api.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    assert (await api.http.get("/stats")).json() == api.engine.stats()
    assert (await api.http.get("/load")).json() == {"server_load": 0}
    assert (await api.http.post("/reset_prefix_cache")).status_code == 200
    assert api.engine.num_cache_resets == 1


async def test_tokenize_and_back(api: Api) -> None:
    answer = (
        await api.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
    ).json()
    assert answer["tokens"] == list("hé".encode())
    assert answer["count"] == 3
    assert answer["max_model_len"] == api.engine.max_model_len
    assert answer["token_strs"] == ["h", "\ufffd", "\ufffd"]
    body = {"tokens": answer["tokens"]}
    assert (await api.http.post("/detokenize", json=body)).json() == {"prompt": "hé"}
    chat = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    assert bytes((await api.http.post("/tokenize", json=chat)).json()["tokens"]) == b"u:hi\n"
    for wrong in ({}, {**chat, "prompt": "x"}):
        assert (await api.http.post("/tokenize", json=wrong)).status_code == 400


async def test_request_ids_are_echoed(api: Api) -> None:
    response = await api.http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "abc-1"}
    )
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    named = await api.complete(request_id="mine")
    assert named.json()["id"] == "cmpl-mine"
    dirty = await api.http.get("/version", headers={"X-Request-Id": "a b"})
    assert dirty.headers["x-request-id"] != "a b"


async def test_two_calls_may_share_a_request_id(api: Api) -> None:
    for _ in range(2):
        assert (await api.complete(request_id="same")).status_code == 200


async def test_api_keys(engine: CountUpEngine) -> None:
    async with open_api(engine, api_keys=("one", "two")) as api:
        for headers, status in [
            ({}, 401),
            ({"Authorization": "Bearer three"}, 401),
            ({"Authorization": "Basic one"}, 401),
            ({"Authorization": "Bearer "}, 401),
            ({"Authorization": "Bearer \xe9".encode("latin-1")}, 401),
            ({"Authorization": "Bearer one"}, 200),
            ({"Authorization": "bearer two"}, 200),
        ]:
            response = await api.http.get("/v1/models", headers=headers)
            assert response.status_code == status, headers
            if status == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["x-request-id"]
        for path in ("/health", "/metrics", "/ping", "/version"):
            assert (await api.http.get(path)).status_code == 200


async def test_without_a_tokenizer_ids_go_in_and_out(engine: CountUpEngine) -> None:
    async with open_api(engine, has_tokenizer=False) as api:
        answer = (await api.complete([97], max_tokens=2, return_token_ids=True, logprobs=0)).json()
        assert answer["choices"][0]["token_ids"] == [98, 99]
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:98", "token_id:99"]
        for response in (
            await api.complete("a"),
            await api.complete([97], stop="x"),
            await api.chat(),
            await api.http.post("/tokenize", json={"prompt": "a"}),
            await api.http.post("/detokenize", json={"tokens": [97]}),
        ):
            assert response.status_code == 400
            assert "needs a tokenizer" in response.json()["error"]["message"]


async def test_metrics_after_some_calls(api: Api) -> None:
    await api.complete("a", max_tokens=3)
    await api.complete([[254]], max_tokens=9)
    text = (await api.http.get("/metrics")).text
    for line in (
        'vllm:request_success_total{finished_reason="length",model_name="counter"} 1.0',
        'vllm:request_success_total{finished_reason="stop",model_name="counter"} 1.0',
        'vllm:request_success_total{finished_reason="abort",model_name="counter"} 0.0',
        'vllm:generation_tokens_total{model_name="counter"} 5.0',
        'vllm:time_to_first_token_seconds_count{model_name="counter"} 2.0',
        'vllm:inter_token_latency_seconds_count{model_name="counter"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="counter"} 0.25',
        'vllm:cache_config_info{block_size="16",model_name="counter",num_gpu_blocks="64"} 1.0',
        'dcpjax:compilations_after_warmup_total{model_name="counter"} 0.0',
        'dcpjax:audited_steps{model_name="counter"} 1.0',
    ):
        assert line in text.splitlines()
    assert (await api.http.head("/metrics")).status_code == 200
