"""A real server on a port: the ``openai`` package, clients that leave, shutting down."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from dcpjax.errors import ConfigError, EngineDeadError
from dcpjax.server import run
from tests.fakes import CountUpEngine
from tests.server.conftest import MODEL, Gate, LiveServer, live_server

ENDLESS = 1_000_000
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_list_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcd", "length")
    assert answer.usage and answer.usage.total_tokens == 4


def test_completion_of_token_ids_with_choices_and_stop(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[[97], [107]], n=2, max_tokens=50, stop=["e", "q"]
    )
    assert [choice.text for choice in answer.choices] == ["bcd", "bcd", "lmnop", "lmnop"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=2, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.tokens == ["b", "c"]
    assert logprobs.top_logprobs and logprobs.top_logprobs[0] == {"b": -0.5}


def test_chat_and_its_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_completion_tokens=2, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", ";<")
    assert choice.logprobs and choice.logprobs.content
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2]
    assert answer.usage and answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_with_usage_and_extra_fields(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=USER,
            max_tokens=3,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1},
        )
    )
    texts: dict[int, str] = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {0: ";<=", 1: ";<="}
    assert chunks[-1].choices == []
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 6


def test_errors_have_the_right_class(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 600}]
        )
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_a_wrong_key_is_an_authentication_error(engine: CountUpEngine) -> None:
    with live_server(engine, api_keys=("right",)) as live:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


def test_closing_a_stream_aborts_the_request() -> None:
    engine = CountUpEngine(max_model_len=2 * ENDLESS)
    gate = engine.gate = Gate()
    with live_server(engine) as live:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client:
            gate.allow(2)
            stream = client.completions.create(
                model=MODEL,
                prompt="a",
                max_tokens=ENDLESS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            assert next(iter(stream)).choices[0].text == "b"
            stream.close()
        step_until_aborted(gate, engine)
        text = httpx.get(live.url + "/metrics").text
        assert 'finished_reason="abort",model_name="counter"} 1.0' in text


def test_leaving_without_a_stream_aborts_the_request() -> None:
    engine = CountUpEngine(max_model_len=2 * ENDLESS)
    gate = engine.gate = Gate()
    with live_server(engine) as live:
        body = json.dumps({"prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True}).encode()
        with socket.create_connection(address_of(live)) as raw:
            raw.sendall(post("/v1/completions", body))
            gate.waiting.acquire()
        step_until_aborted(gate, engine)


def test_leaving_in_the_middle_of_a_body_is_harmless(live: LiveServer) -> None:
    with socket.create_connection(address_of(live)) as raw:
        raw.sendall(post("/v1/completions", b'{"prompt": "a"}')[:-4])
    assert httpx.post(live.url + "/v1/completions", json={"prompt": "a"}).status_code == 200


def test_connections_are_kept_alive(live: LiveServer) -> None:
    with httpx.Client() as client:
        for stream in (False, True, False):
            body = {"prompt": "a", "max_tokens": 2, "stream": stream}
            response = client.post(live.url + "/v1/completions", json=body)
            assert response.status_code == 200
            assert response.extensions["network_stream"] is not None
        assert response.headers.get("connection") != "close"


def test_shutdown_lets_running_streams_finish(engine: CountUpEngine) -> None:
    gate = engine.gate = Gate()
    with live_server(engine, shutdown_timeout=600.0) as live, httpx.Client() as client:
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        with client.stream("POST", live.url + "/v1/completions", json=body) as response:
            gate.waiting.acquire()
            live.signal()
            refused = wait_for_refusal(live)
            assert "shutting down" in refused.json()["error"]["message"]
            gate.open()
            lines = [line for line in response.iter_lines() if line]
        assert live.ended.result(30) is True
    assert finish_reason(lines) == "length"
    assert engine.is_closed


@pytest.mark.parametrize("second_signal", [False, True])
def test_shutdown_ends_streams_that_take_too_long(second_signal: bool) -> None:
    """By the timeout, or by a second signal."""
    engine = CountUpEngine(max_model_len=2 * ENDLESS)
    gate = engine.gate = Gate()
    timeout = 600.0 if second_signal else 0.01
    with live_server(engine, shutdown_timeout=timeout) as live, httpx.Client() as client:
        body = {"prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        with client.stream("POST", live.url + "/v1/completions", json=body) as response:
            gate.waiting.acquire()
            live.signal()
            wait_for_refusal(live)
            if second_signal:
                live.signal()
            step_until_aborted(gate, engine)
            lines = [line for line in response.iter_lines() if line]
        live.ended.result(30)
    assert finish_reason(lines) == "abort"


@pytest.mark.parametrize("end", ["taken", "timeout", "second signal"])
def test_shutdown_waits_for_offers_that_are_not_yet_taken(end: str) -> None:
    """A prompt that was computed for another engine is worth a while."""
    engine = CountUpEngine(num_offers=1)
    timeout = 0.3 if end == "timeout" else 600.0
    with live_server(engine, shutdown_timeout=timeout) as live:
        live.signal()
        wait_for_refusal(live)
        assert not live.ended.done() and not engine.is_closed
        if end == "taken":
            engine.num_offers = 0
        elif end == "second signal":
            live.signal()
        assert live.ended.result(30) is True
    assert engine.is_closed


def test_the_third_signal_does_not_wait_for_the_step(engine: CountUpEngine) -> None:
    """The engine is held in a step: it is neither waited for nor closed beside it."""
    gate = engine.gate = Gate()
    with live_server(engine, shutdown_timeout=600.0) as live, httpx.Client() as client:
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        with client.stream("POST", live.url + "/v1/completions", json=body):
            gate.waiting.acquire()
            for _ in range(3):
                live.signal()
            assert live.ended.result(30) is False
            assert (engine.is_closed, engine.num_steps) == (False, 0)
    wait_until(lambda: engine.is_closed)  # by its own thread, after the step


@pytest.mark.parametrize("num_signals", [0, 1])
def test_a_server_whose_engine_died_ends(engine: CountUpEngine, num_signals: int) -> None:
    gate = engine.gate = Gate()
    engine.fail_at_step = 3
    with live_server(engine, shutdown_timeout=600.0) as live, httpx.Client() as client:
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        with client.stream("POST", live.url + "/v1/completions", json=body) as response:
            gate.waiting.acquire()
            for _ in range(num_signals):
                live.signal()
            gate.open()
            lines = [line for line in response.iter_lines() if line]
        with pytest.raises(EngineDeadError):
            live.ended.result(30)
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (error["code"], lines[-1]) == ("unavailable", "data: [DONE]")


def test_an_engine_that_dies_while_idle_ends_the_server(
    engine: CountUpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
    with live_server(engine) as live:
        assert httpx.get(live.url + "/stats").status_code == 503
        with pytest.raises(EngineDeadError):
            live.ended.result(30)


def test_the_port_is_held_and_a_second_server_is_refused(live: LiveServer) -> None:
    port = address_of(live)[1]
    with pytest.raises(ConfigError, match="address to listen on") as caught:
        run.bind(run.ServerConfig(port=port))
    assert caught.value.values["port"] == port


@pytest.mark.parametrize(
    "settings",
    [
        {"port": 70000},
        {"port": -1},
        {"max_queued_requests": -1},
        {"shutdown_timeout": -1.0},
        {"api_keys": ("",)},
    ],
)
def test_wrong_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run.ServerConfig(**settings)


@pytest.mark.parametrize("host", ["host.invalid", "a" * 70, "a..b", "a\0b"])
def test_an_unknown_host(host: str) -> None:
    with pytest.raises(ConfigError, match="address to listen on") as caught:
        run.bind(run.ServerConfig(host=host))
    assert caught.value.values["host"] == host


def address_of(live: LiveServer) -> tuple[str, int]:
    url = httpx.URL(live.url)
    assert url.port is not None
    return url.host, url.port


def post(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def step_until_aborted(gate: Gate, engine: CountUpEngine) -> None:
    """Go on slowly; a request for ENDLESS tokens can end in no other way."""
    while not engine.aborted:
        gate.allow(1)
        gate.waiting.acquire(timeout=0.01)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_refusal(live: LiveServer) -> httpx.Response:
    """The first answer that refuses a call; the signal is handled in another thread."""
    while True:
        response = httpx.get(live.url + "/health")
        if response.status_code != 200:
            return response


def finish_reason(lines: list[str]) -> str:
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    return last["choices"][0]["finish_reason"]
