"""Every wrong call gets an OpenAI error object that names what is wrong, and the others go on."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpjax.server import app, endpoint
from dcpjax.server.protocol import ChatCall, CompletionCall
from dcpjax.server.unsupported import NEUTRAL_VALUES
from tests.fakes import CountUpEngine
from tests.server.conftest import Api, Gate, events_of, open_api

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def error_of(response: Any) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\\ud800 and so on"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "a", "suffix": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "Expected"),
        (b"{}", "required field `prompt`"),
    ],
)
async def test_what_is_not_a_call(api: Api, body: bytes, words: str) -> None:
    response = await api.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert words in error_of(response)["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"promt": "b"}, "promt"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),  # more than this server takes at a time
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop": ["x" * 100] * 10_000}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(65)}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"echo": True}, "echo"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"usage": True}}, "usage"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ],
)
async def test_wrong_fields_are_named(api: Api, fields: dict[str, Any], param: str) -> None:
    for is_stream in (False, True):
        body = {"prompt": "a", "stream": is_stream, **fields}
        response = await api.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert len(error["message"]) < 1000
    assert api.client.num_open == 0
    assert (await api.complete()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "has content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "Invalid enum value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url' is not",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part of a message"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls is not supported"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "two names of one limit"),
        ({"prompt": "a"}, "unknown field `prompt`"),
        ({"chat_template_kwargs": {"fail": True}}, "no"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": [{}]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"documents": [{}]}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x" * 2561}]}, "5 bytes at most"),
    ],
)
async def test_wrong_chats(api: Api, fields: dict[str, Any], words: str) -> None:
    response = await api.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 400
    assert words in error_of(response)["message"]


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
@pytest.mark.parametrize("kind", [ChatCall, CompletionCall])
async def test_neutral_values_pass_and_others_do_not(api: Api, kind: Any, name: str) -> None:
    if name not in kind.__struct_fields__:
        return
    path, body = {
        ChatCall: ("/v1/chat/completions", CHAT),
        CompletionCall: ("/v1/completions", {"prompt": "a"}),
    }[kind]
    for value in (None, *NEUTRAL_VALUES[name]):
        response = await api.http.post(path, json={**body, name: value, "max_tokens": 1})
        assert response.status_code == 200, value
    response = await api.http.post(path, json={**body, name: {"some": "thing"}, "max_tokens": 1})
    assert response.status_code == 400
    assert error_of(response)["message"] == f"{name} is not supported"


async def test_labels_are_accepted(api: Api) -> None:
    labels = {
        "user": "u",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    assert (await api.complete(**labels)).status_code == 200
    assert (await api.chat(**labels, parallel_tool_calls=True)).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_too_long_says_maximum_context_length(api: Api, is_stream: bool) -> None:
    for response in (
        await api.complete("a" * 513, stream=is_stream),
        await api.complete("a", max_tokens=512, stream=is_stream),
        await api.chat("a" * 600, stream=is_stream),
    ):
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length of 512 tokens" in error["message"]
    assert (await api.complete("a", max_tokens=511)).status_code == 200


async def test_unknown_paths_and_methods_are_error_objects_too(api: Api) -> None:
    missing = await api.http.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["type"]) == (404, "not_found_error")
    wrong = await api.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "GET /v1/completions" in error_of(wrong)["message"]
    assert (await api.http.get("/v1/models/")).status_code == 404


async def test_a_body_beyond_the_limit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", len(body))
    assert (await api.http.post("/v1/completions", content=body)).status_code == 200
    response = await api.http.post("/v1/completions", content=body + b" ")
    assert response.status_code == 413
    assert "too large" in error_of(response)["message"]


async def test_when_too_many_wait(engine: CountUpEngine) -> None:
    gate = engine.gate = Gate()
    async with open_api(engine, max_open=2) as api:
        assert (await api.complete(["a", "b", "c"])).status_code == 400
        running = asyncio.create_task(api.complete(n=2, max_tokens=1))
        await asyncio.to_thread(gate.waiting.acquire)
        for is_stream in (False, True):
            refused = await api.complete(stream=is_stream)
            assert refused.status_code == 503
            assert "too many requests wait" in error_of(refused)["message"]
        gate.open()
        assert (await running).status_code == 200
        assert (await api.complete()).status_code == 200


async def test_a_failing_step_ends_all_and_stays_visible(engine: CountUpEngine) -> None:
    engine.fail_at_step = 3
    async with open_api(engine) as api:
        response = await api.complete("a", stream=True)
        events = events_of(response.text)
        assert [e["choices"][0]["text"] for e in events[:-1]] == ["b", "c"]
        assert events[-1]["error"]["code"] == "unavailable"
        for path in ("/health", "/ping"):
            assert (await api.http.get(path)).status_code == 503
        for response in (
            await api.complete("a"),
            await api.chat(),
            await api.complete(stream=True),
        ):
            assert response.status_code == 503
            assert "the engine stopped" in error_of(response)["message"]
        assert (await api.http.post("/reset_prefix_cache")).status_code == 503
        assert (await api.http.get("/metrics")).status_code == 200


async def test_a_failing_step_ends_a_call_without_stream(engine: CountUpEngine) -> None:
    engine.fail_at_step = 3
    async with open_api(engine) as api:
        response = await api.complete("a")
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")


async def test_a_bug_is_a_500_without_details(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.CompletionFormat, "chunk", lambda *args: 1 / 0)
    monkeypatch.setattr(app.CompletionFormat, "whole", lambda *args: 1 / 0)
    response = await api.complete()
    assert response.status_code == 500
    assert "division" not in error_of(response)["message"]
    (event,) = events_of((await api.complete(stream=True)).text)
    assert event["error"]["type"] == "internal_server_error"
    assert "ZeroDivisionError" in caplog.text
    assert (await api.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}])
async def test_too_many_prompts_are_refused_before_one_is_read(
    api: Api, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """64 sequences may be open; every choice of every prompt is one."""
    allowed = 64 // fields.get("n", 1)
    assert (await api.complete(["a"] * allowed, max_tokens=1, **fields)).status_code == 200
    monkeypatch.setattr(api.text.tokenizer.__class__, "encode", lambda *args: 1 / 0)
    response = await api.complete(["a"] * (allowed + 1), **fields)
    assert response.status_code == 400
    assert "more sequences than the server takes" in error_of(response)["message"]


async def test_a_text_that_cannot_fit_is_refused_before_it_is_read(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.text.tokenizer.__class__, "encode", lambda *args: 1 / 0)
    response = await api.complete("a" * (5 * api.engine.max_model_len + 1))
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@settings(max_examples=60)
@given(name=st.text(max_size=8) | st.sampled_from(dir(str) + dir(dict)), value=st.integers())
def test_no_template_variable_gives_a_500(name: str, value: int) -> None:
    async def send() -> int:
        async with open_api(CountUpEngine()) as api:
            return (await api.chat(max_tokens=1, chat_template_kwargs={name: value})).status_code

    assert asyncio.run(send()) in (200, 400)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
_FIELDS = sorted({*CompletionCall.__struct_fields__, *ChatCall.__struct_fields__})


@settings(max_examples=60)
@given(
    fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3),
    is_chat=st.booleans(),
    is_valid_otherwise=st.booleans(),
)
def test_no_json_gives_a_500(
    fields: dict[str, Any], is_chat: bool, is_valid_otherwise: bool
) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    base: dict[str, Any] = {"max_tokens": 2, **(CHAT if is_chat else {"prompt": "a"})}
    body = json.dumps({**base, **fields} if is_valid_otherwise else fields)

    async def send() -> int:
        async with open_api(CountUpEngine()) as api:
            response = await api.http.post(path, content=body)
            if response.status_code != 200:
                error_of(response)
            return response.status_code

    assert asyncio.run(send()) in (200, 400, 404)


@settings(max_examples=60)
@given(body=st.binary(max_size=60))
def test_no_bytes_give_a_500(body: bytes) -> None:
    async def send() -> list[int]:
        async with open_api(CountUpEngine()) as api:
            paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
            return [(await api.http.post(path, content=body)).status_code for path in paths]

    assert set(asyncio.run(send())) <= {200, 400, 404}
