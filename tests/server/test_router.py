"""The router between real sockets: both legs, every way to fail, clients that leave, shutdown."""

import asyncio
import contextlib
import json
import random
import select
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from dcpjax.server import endpoint, router, run
from dcpjax.server.router_config import RouterConfig
from dcpjax.server.router_metrics import Outcome
from dcpjax.server.router_peers import Peers, Role
from tests.server.conftest import events_of, live_server
from tests.server.stand_in_engine import (
    TOKENS,
    Exchange,
    Script,
    StandIn,
    answer,
    break_after,
    break_in_body,
    held_stream,
    refusal,
    reset,
    stand_in,
    stream_until_left,
    wait_until_left,
    without_params,
)
from tests.server.test_kv_transfer import FROM_PREFILL, TransferEngine
from tests.server.test_live import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEVER = 3600.0
"""A health interval: after the first check an engine's state changes by calls alone."""


@dataclass
class Live:
    """A router in a thread."""

    url: str
    peers: Peers
    server: run.GracefulServer
    ended: "Future[None]"

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)

    def complete(self, prompt: Any = "a", path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"prompt": prompt, **fields}, timeout=60)

    def metrics(self) -> str:
        return httpx.get(self.url + "/metrics").text

    def count(self, name: str, **labels: str) -> float:
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        start = f"dcpjax:router_{name}{{{shown}}} " if labels else f"dcpjax:router_{name} "
        (line,) = [line for line in self.metrics().splitlines() if line.startswith(start)]
        return float(line.split()[-1])


@contextlib.contextmanager
def live_router(
    prefill: list[StandIn] | list[str], decode: list[StandIn] | list[str], **settings: Any
) -> Iterator[Live]:
    config = RouterConfig(
        prefill_urls=tuple(one if isinstance(one, str) else one.url for one in prefill),
        decode_urls=tuple(one if isinstance(one, str) else one.url for one in decode),
        port=0,
        **{"health_interval": NEVER, **settings},
    )
    ready: Future[tuple[run.GracefulServer, Peers]] = Future()
    ended: Future[None] = Future()
    address: Future[str] = Future()

    def route() -> None:
        with run.bind(config) as bound:
            address.set_result(run.url_of(bound))
            asyncio.run(router.serve(config, bound, on_ready=lambda *args: ready.set_result(args)))
        ended.set_result(None)

    thread = threading.Thread(target=route)
    thread.start()
    url = address.result(20)
    server, peers = ready.result(20)
    live = Live(url, peers, server, ended)
    try:
        yield live
    finally:
        if not ended.done():
            live.signal()
            live.signal()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def prefills() -> Iterator[list[StandIn]]:
    with stand_in("p0") as first, stand_in("p1") as second:
        yield [first, second]


@pytest.fixture
def decodes() -> Iterator[list[StandIn]]:
    with stand_in("d0") as first, stand_in("d1") as second:
        yield [first, second]


@pytest.fixture
def one(prefills: list[StandIn], decodes: list[StandIn]) -> Iterator[Live]:
    """One engine of each kind."""
    with live_router(prefills[:1], decodes[:1]) as live:
        yield live


@pytest.fixture
def two(prefills: list[StandIn], decodes: list[StandIn]) -> Iterator[Live]:
    with live_router(prefills, decodes) as live:
        yield live


def text_of(response: httpx.Response) -> str:
    if response.headers["content-type"].startswith("text/event-stream"):
        return "".join(event["choices"][0]["text"] for event in events_of(response.text))
    return response.json()["choices"][0]["text"]


def num_calls(*engines: StandIn) -> list[int]:
    return [len(engine.raw_bodies) for engine in engines]


class TestTwoLegs:
    @pytest.mark.parametrize("is_stream", [False, True])
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_what_the_engines_are_asked(
        self, one: Live, prefills: list[StandIn], decodes: list[StandIn], path: str, is_stream: bool
    ) -> None:
        fields = {
            "stream": is_stream,
            "max_tokens": 7,
            "min_tokens": 3,
            "n": 1,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "new_field": {"x": [1]},
            "kv_transfer_params": None,
        }
        headers = {"X-Request-Id": "my-id", "Authorization": "Bearer k", "Cookie": "c"}
        body = {"prompt": "a", **fields}
        response = httpx.post(one.url + path, json=body, headers=headers)
        assert (response.status_code, response.headers["x-request-id"]) == (200, "my-id")
        (prefill,), (decode,) = prefills[0].calls, decodes[0].calls
        limit = {"max_completion_tokens": 1} if path == CHAT else {}
        assert prefill == {
            "prompt": "a",
            "stream": False,
            "max_tokens": 1,
            **limit,
            "temperature": 0.5,
            "new_field": {"x": [1]},
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p0",
            "remote_request_id": "p0-1",
        }
        assert decode == {**body, "kv_transfer_params": params}
        for seen in (*prefills[0].headers, *decodes[0].headers):
            assert (seen["x-request-id"], seen["authorization"]) == ("my-id", "Bearer k")
            assert "cookie" not in seen

    def test_both_legs_get_one_id_where_the_client_sent_none(
        self, one: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        response = one.complete()
        (prefill,), (decode,) = prefills[0].headers, decodes[0].headers
        assert prefill["x-request-id"] == decode["x-request-id"] == response.headers["x-request-id"]

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_the_bytes_of_the_answer_go_through(
        self, one: Live, decodes: list[StandIn], is_stream: bool
    ) -> None:
        body = {"prompt": "a", "stream": is_stream, "kv_transfer_params": FROM_PREFILL}
        alone = httpx.post(decodes[0].url + COMPLETIONS, json=body)
        assert one.complete(**body).content == alone.content
        routed = one.complete(stream=is_stream)
        assert text_of(routed) == "".join(TOKENS)
        assert routed.headers["content-type"] == alone.headers["content-type"]

    def test_the_openai_client(self, one: Live, prefills: list[StandIn]) -> None:
        user = [{"role": "user", "content": "hi"}]
        with openai.OpenAI(base_url=one.url + "/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="m", messages=user)  # type: ignore
            assert answer.choices[0].message.content == "".join(TOKENS)
            chunks = client.chat.completions.create(model="m", messages=user, stream=True)  # type: ignore
            assert [chunk.choices[0].delta.content for chunk in chunks] == list(TOKENS)
            chunks = client.completions.create(model="m", prompt="a", stream=True)
            assert [chunk.choices[0].text for chunk in chunks] == list(TOKENS)
            prefills[0].scripts.append(refusal(400, "too long"))
            with pytest.raises(openai.BadRequestError, match="too long"):
                client.completions.create(model="m", prompt="a")
        assert num_calls(*prefills) == [4, 0]

    def test_real_api_servers(self) -> None:
        """Of fake engines, whose KV comes only the second time."""
        prefill, decode = TransferEngine(), TransferEngine()
        answers = [{**FROM_PREFILL, "remote_engine_id": "gone"}, FROM_PREFILL]
        prefill.answers = answers
        with live_server(prefill) as p, live_server(decode) as d:
            with live_router([p.url], [d.url]) as live:
                response = live.complete(stream=True, max_tokens=3)
                assert text_of(response) == "bcd"
                assert live.count("repeated_prefills_total") == 1
        assert answers == []


class TestCallsForDecodeAlone:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"prompt": "a", "n": 2}',
            b'{"prompt": ["a", "b"]}',
            b'{"prompt": [[1], [2]] }',
            b'{"prompt":\t[ "a" , "b"]}',
            b'{"prompt": "a", "kv_transfer_params": {"do_remote_decode": false}}',
            b'{"prompt": "a"',
            b"[1]",
            b"",
        ],
    )
    def test_they_go_on_as_they_are(
        self, one: Live, prefills: list[StandIn], decodes: list[StandIn], body: bytes
    ) -> None:
        decodes[0].scripts.append(refusal(418, "seen"))
        response = httpx.post(one.url + COMPLETIONS, content=body)
        assert (response.status_code, response.json()["error"]["message"]) == (418, "seen")
        assert decodes[0].raw_bodies == [body]
        assert num_calls(*prefills) == [0, 0]

    @pytest.mark.parametrize("fields", [{"n": 1}, {"n": None}, {"best_of": 1}])
    @pytest.mark.parametrize("prompt", ["a", ["a"], [[1, 2]], [1, 2], [], None])
    def test_calls_for_one_sequence_do_not(
        self, one: Live, prefills: list[StandIn], prompt: Any, fields: dict[str, Any]
    ) -> None:
        assert one.complete(prompt, **fields).status_code == 200
        assert num_calls(*prefills) == [1, 0]

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/org%2Fname", "/version"])
    def test_questions(self, one: Live, decodes: list[StandIn], path: str) -> None:
        assert httpx.get(one.url + path).json() == {"path": path, "engine": "d0"}

    @pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
    def test_text_tools(self, one: Live, decodes: list[StandIn], path: str) -> None:
        decodes[0].scripts.append(lambda exchange: exchange.whole(200, {"path": exchange.path}))
        assert one.complete(path=path).json() == {"path": path}

    def test_another_engine_is_asked_too(self, two: Live, decodes: list[StandIn]) -> None:
        decodes[0].stop()
        assert httpx.get(two.url + "/version").json()["engine"] == "d1"


class TestPrefillFails:
    @pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
    def test_what_is_wrong_with_the_call_is_answered_as_it_is(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn], status: int
    ) -> None:
        prefills[0].scripts.append(refusal(status, "wrong", www_authenticate="Bearer"))
        response = two.complete(stream=True)
        assert response.status_code == status
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"] == {
            "message": "wrong",
            "type": "t",
            "param": "p",
            "code": "c",
        }
        assert num_calls(*prefills, *decodes) == [1, 0, 0, 0]
        assert two.count("calls_total", outcome="client_error") == 1

    @pytest.mark.parametrize(
        "script", [refusal(500), refusal(503), refusal(302), reset, break_in_body, without_params]
    )
    def test_another_one_is_asked(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn], script: Script
    ) -> None:
        prefills[0].scripts.append(script)
        assert text_of(two.complete()) == "".join(TOKENS)
        assert num_calls(*prefills, *decodes) == [1, 1, 1, 0]
        assert decodes[0].calls[0]["kv_transfer_params"]["remote_engine_id"] == "p1"
        assert two.count("failed_legs_total", role="prefill") == 1

    def test_one_that_is_gone_is_not_asked_again(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        prefills[0].stop()
        assert [two.complete().status_code for _ in range(3)] == [200] * 3
        assert num_calls(*prefills) == [0, 3]
        assert two.count("failed_legs_total", role="prefill") == 1
        assert two.count("healthy", role="prefill", url=prefills[0].url) == 0

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_decode_computes_alone_if_none_is_left(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn], is_stream: bool
    ) -> None:
        prefills[0].scripts.append(refusal(500))
        prefills[1].stop()
        assert text_of(two.complete(stream=is_stream)) == "".join(TOKENS)
        assert decodes[0].calls == [{"prompt": "a", "stream": is_stream}]
        assert two.count("fallbacks_total") == 1

    def test_or_the_call_fails_if_that_is_wanted(
        self, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        with live_router(prefills, decodes, prefill_fallback="error") as live:
            prefills[1].scripts.append(refusal(500, "the device is lost"))
            prefills[0].scripts.append(without_params)
            response = live.complete()
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "the device is lost"
            prefills[0].stop()
            prefills[1].scripts.append(without_params)
            for _ in range(2):  # an answer without KV, and nobody at all
                response = live.complete()
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "unavailable"
                prefills[1].scripts.append(reset)
            assert num_calls(*decodes) == [0, 0]


class TestDecodeFails:
    @pytest.mark.parametrize("is_stream", [False, True])
    @pytest.mark.parametrize("script", [refusal(500), refusal(503), reset])
    def test_another_one_gets_the_same_parameters(
        self,
        two: Live,
        prefills: list[StandIn],
        decodes: list[StandIn],
        script: Script,
        is_stream: bool,
    ) -> None:
        decodes[0].scripts.append(script)
        assert text_of(two.complete(stream=is_stream)) == "".join(TOKENS)
        assert num_calls(*prefills, *decodes) == [1, 0, 1, 1]
        assert decodes[0].calls == decodes[1].calls

    @pytest.mark.parametrize("script", [break_in_body, break_after(0), break_after(0, b"data: {")])
    def test_also_when_it_broke_before_anything_was_passed_on(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn], script: Script
    ) -> None:
        decodes[0].scripts.append(script)
        is_stream = script is not break_in_body
        assert text_of(two.complete(stream=is_stream)) == "".join(TOKENS)
        assert num_calls(*prefills, *decodes) == [1, 0, 1, 1]

    def test_one_that_is_gone_is_not_asked_again(self, two: Live, decodes: list[StandIn]) -> None:
        decodes[0].stop()
        assert [two.complete().status_code for _ in range(3)] == [200] * 3
        assert num_calls(*decodes) == [0, 3]
        assert two.count("failed_legs_total", role="decode") == 1

    def test_then_the_prompt_is_computed_once_more(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        for engine in decodes:
            engine.scripts.append(refusal(500, "the KV did not come"))
        assert text_of(two.complete(stream=True)) == "".join(TOKENS)
        assert num_calls(*prefills, *decodes) == [2, 0, 2, 1]
        first, second = (call["kv_transfer_params"] for call in decodes[0].calls)
        assert (first["remote_request_id"], second["remote_request_id"]) == ("p0-1", "p0-2")
        assert two.count("repeated_prefills_total") == 1

    def test_and_then_the_last_words_of_an_engine_are_the_answer(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        for engine in decodes:
            engine.scripts += [refusal(500, "first"), refusal(500, "second")]
        response = two.complete(stream=True)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "second"
        assert num_calls(*prefills, *decodes) == [2, 0, 2, 2]
        assert two.count("calls_total", outcome="server_error") == 1

    def test_a_full_engine_is_no_reason_to_compute_again(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        for engine in decodes:
            engine.scripts.append(refusal(503, "full", retry_after="7"))
        response = two.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")
        assert num_calls(*prefills, *decodes) == [1, 0, 1, 1]

    def test_a_refusal_is_final(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        decodes[0].scripts.append(refusal(400, "max_tokens"))
        assert two.complete().status_code == 400
        assert num_calls(*prefills, *decodes) == [1, 0, 1, 0]

    def test_nobody_is_asked_to_compute_for_nobody(
        self, two: Live, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        for engine in decodes:
            engine.stop()
        statuses = [two.complete().status_code for _ in range(2)]
        assert statuses == [503, 503]
        assert sum(num_calls(*prefills)) == 2  # of the first call, which found out
        health = httpx.get(two.url + "/health")
        assert health.status_code == 503
        assert "no decode engine is healthy" in health.json()["error"]["message"]


class TestAfterTheFirstByte:
    @pytest.mark.parametrize("rest", [b"", b'data: {"choices": [{"te', b"data: [DONE]"[:-1]])
    @pytest.mark.parametrize("num_events", [1, 3])
    def test_a_stream_that_breaks_says_so(
        self,
        two: Live,
        prefills: list[StandIn],
        decodes: list[StandIn],
        num_events: int,
        rest: bytes,
    ) -> None:
        """And nothing of an incomplete event is passed on: all that comes is JSON."""
        decodes[0].scripts.append(break_after(num_events, rest))
        response = two.complete(stream=True)
        assert response.status_code == 200
        *events, error = events_of(response.text)
        assert [event["choices"][0]["text"] for event in events] == list(TOKENS[:num_events])
        assert error["error"]["code"] == "unavailable"
        assert num_calls(*prefills, *decodes) == [1, 0, 1, 0]
        assert two.count("calls_total", outcome="broken") == 1

    def test_a_stream_that_just_ends_is_broken_too(self, one: Live, decodes: list[StandIn]) -> None:
        def script(exchange: Exchange) -> None:
            exchange.begin_stream()
            exchange.event({"choices": [{"text": "x"}]})
            exchange.end_stream(has_done=False)

        decodes[0].scripts.append(script)
        error = events_of(one.complete(stream=True).text)[-1]["error"]
        assert "ends with [DONE]" in error["message"]

    def test_an_error_event_of_an_engine_goes_through(
        self, one: Live, decodes: list[StandIn]
    ) -> None:
        def script(exchange: Exchange) -> None:
            exchange.begin_stream()
            exchange.event({"error": {"message": "lost"}})
            exchange.end_stream()

        decodes[0].scripts.append(script)
        assert events_of(one.complete(stream=True).text) == [{"error": {"message": "lost"}}]

    def test_the_openai_client_raises(self, one: Live, decodes: list[StandIn]) -> None:
        decodes[0].scripts.append(break_after(1))
        with openai.OpenAI(base_url=one.url + "/v1", api_key="none", max_retries=0) as client:
            chunks = iter(client.completions.create(model="m", prompt="a", stream=True))
            assert next(chunks).choices[0].text == TOKENS[0]
            with pytest.raises(openai.APIError, match="complete"):
                next(chunks)

    def test_a_slow_client_slows_the_engine(self, one: Live, decodes: list[StandIn]) -> None:
        """Nothing piles up in the router: the engine cannot write until the client reads."""
        event = b"data: " + b"x" * 65536 + b"\n\n"
        num_events, stalled = 2000, threading.Event()  # 131 MB, more than all buffers on the way

        def script(exchange: Exchange) -> None:
            exchange.begin_stream()
            for _ in range(num_events):
                if not select.select([], [exchange.connection], [], 1.0)[1]:
                    stalled.set()
                exchange.chunk(event)
            exchange.end_stream()

        decodes[0].scripts.append(script)
        body = {"prompt": "a", "stream": True}
        with httpx.stream("POST", one.url + COMPLETIONS, json=body, timeout=60) as response:
            assert stalled.wait(30)
            size = sum(len(piece) for piece in response.iter_raw())
        assert size == num_events * len(event) + len(b"data: [DONE]\n\n")


class TestClientsThatLeave:
    def test_the_prefill_engine_notices(self, one: Live, prefills: list[StandIn]) -> None:
        prefills[0].scripts.append(wait_until_left)
        self.leave(one, prefills[0])
        assert one.count("open_legs", role="prefill", url=prefills[0].url) == 0

    def test_the_decode_engine_notices(self, one: Live, decodes: list[StandIn]) -> None:
        decodes[0].scripts.append(wait_until_left)
        self.leave(one, decodes[0])

    def test_in_the_middle_of_a_stream(self, one: Live, decodes: list[StandIn]) -> None:
        decodes[0].scripts.append(stream_until_left)
        body = {"prompt": "a", "stream": True}
        with httpx.stream("POST", one.url + COMPLETIONS, json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
        assert decodes[0].left.acquire(timeout=30)
        wait_until(lambda: one.count("calls_total", outcome="left") == 1)
        assert one.count("open_legs", role="decode", url=decodes[0].url) == 0
        assert httpx.get(one.url + "/load").json() == {"server_load": 0}

    def test_while_the_engine_waits_for_them_to_read(
        self, one: Live, decodes: list[StandIn]
    ) -> None:
        """The router is in the middle of writing, not of reading, when they leave."""
        stalled = threading.Event()

        def script(exchange: Exchange) -> None:
            exchange.begin_stream()
            with pytest.raises(ConnectionError):
                while True:
                    if not select.select([], [exchange.connection], [], 0.5)[1]:
                        stalled.set()
                    exchange.event("x" * 65536)
            exchange.engine.left.release()

        decodes[0].scripts.append(script)
        body = {"prompt": "a", "stream": True}
        with httpx.stream("POST", one.url + COMPLETIONS, json=body):
            assert stalled.wait(30)
        assert decodes[0].left.acquire(timeout=30)
        wait_until(lambda: one.count("open_legs", role="decode", url=decodes[0].url) == 0)

    def leave(self, live: Live, engine: StandIn) -> None:
        """Call, wait until an engine works on it, and go."""

        async def call() -> None:
            async with httpx.AsyncClient() as http:
                task = asyncio.create_task(http.post(live.url + COMPLETIONS, json={"prompt": "a"}))
                while not engine.raw_bodies:
                    await asyncio.sleep(0.01)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        asyncio.run(call())
        assert engine.left.acquire(timeout=30)
        wait_until(lambda: live.count("calls_total", outcome="left") == 1)


class TestHealth:
    def test_engines_are_skipped_and_taken_back(
        self, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        decodes[0].is_healthy = False
        with live_router(prefills, decodes, health_interval=0.02) as live:
            assert [peer.url for peer in live.peers.healthy(Role.DECODE)] == [decodes[1].url]
            assert live.complete().status_code == 200
            assert num_calls(*decodes) == [0, 1]
            decodes[0].is_healthy, decodes[1].is_healthy = True, False
            wait_until(lambda: [p.url for p in live.peers.healthy(Role.DECODE)] == [decodes[0].url])
            assert live.complete().status_code == 200
            assert num_calls(*decodes) == [1, 1]
            assert httpx.get(live.url + "/health").content == b""

    def test_an_engine_that_comes_back_on_its_port_is_taken_back(
        self, prefills: list[StandIn]
    ) -> None:
        with stand_in("old") as old, live_router(prefills, [old], health_interval=0.02) as live:
            old.stop()
            wait_until(lambda: httpx.get(live.url + "/health").status_code == 503)
            assert live.complete().status_code == 503
            with stand_in("new", old.port) as new:
                wait_until(lambda: httpx.get(live.url + "/health").status_code == 200)
                assert live.complete().status_code == 200
                assert num_calls(old, new) == [0, 1]

    SILENCE = {"health_interval": 0.02, "health_timeout": 0.4}

    def test_a_stream_of_an_engine_that_is_silent_for_long_is_given_up(
        self, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        """No connection breaks when a machine loses its power."""
        decodes[0].scripts.append(stream_until_left)
        with live_router(prefills, decodes, **self.SILENCE) as live:
            body = {"prompt": "a", "stream": True}
            url = live.url + COMPLETIONS
            with httpx.stream("POST", url, json=body, timeout=60) as response:
                decodes[0].may_answer_health.clear()
                response.read()
            assert decodes[0].left.acquire(timeout=30)
            decodes[0].may_answer_health.set()
        event, error = events_of(response.text)
        assert event["choices"][0]["text"] == TOKENS[0]
        assert "health checks" in error["error"]["message"]

    def test_a_stream_of_an_engine_that_only_takes_no_calls_any_more_goes_on(
        self, prefills: list[StandIn]
    ) -> None:
        """As that of one that shuts down and lets its streams finish."""
        gate = threading.Event()
        with stand_in("d") as decode:
            decode.scripts.append(held_stream(gate))
            with live_router(prefills, [decode], health_interval=0.01) as live:
                body = {"prompt": "a", "stream": True}
                with httpx.stream("POST", live.url + COMPLETIONS, json=body) as response:
                    decode.stop()
                    wait_until(lambda: httpx.get(live.url + "/health").status_code == 503)
                    for _ in range(10):  # as many health checks, at least
                        httpx.get(live.url + "/health")
                    gate.set()
                    response.read()
        assert text_of(response) == "".join(TOKENS)

    def test_a_call_that_such_an_engine_has_not_answered_goes_to_another(
        self, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        def fall_silent(exchange: Exchange) -> None:
            decodes[0].may_answer_health.clear()
            exchange.wait_until_left()

        decodes[0].scripts.append(fall_silent)
        with live_router(prefills, decodes, **self.SILENCE) as live:
            assert text_of(live.complete()) == "".join(TOKENS)
            assert decodes[0].left.acquire(timeout=30)
            decodes[0].may_answer_health.set()
        assert num_calls(*prefills, *decodes) == [1, 0, 1, 1]

    def test_calls_go_to_the_engine_with_the_least_to_do(
        self, two: Live, decodes: list[StandIn], prefills: list[StandIn]
    ) -> None:
        gate = threading.Event()
        decodes[0].scripts.append(held_stream(gate))
        body = {"prompt": "a", "stream": True}
        with httpx.stream("POST", two.url + COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            for _ in range(2):
                assert two.complete().status_code == 200
            gate.set()
            assert sum(line.startswith("data: ") for line in lines) == 3
        assert num_calls(*prefills, *decodes) == [3, 0, 1, 2]
        assert two.complete().status_code == 200
        assert num_calls(*decodes) == [2, 2]


class TestShutdown:
    def test_running_streams_finish_and_new_calls_are_refused(
        self, prefills: list[StandIn], decodes: list[StandIn]
    ) -> None:
        gate = threading.Event()
        decodes[0].scripts.append(held_stream(gate))
        with live_router(prefills, decodes, shutdown_timeout=600.0) as live:
            body = {"prompt": "a", "stream": True}
            with httpx.stream("POST", live.url + COMPLETIONS, json=body) as response:
                live.signal()
                wait_until(lambda: httpx.get(live.url + "/health").status_code == 503)
                refused = live.complete()
                assert refused.status_code == 503
                assert "shutting down" in refused.json()["error"]["message"]
                gate.set()
                response.read()
            live.ended.result(30)
        assert text_of(response) == "".join(TOKENS)

    @pytest.mark.parametrize("second_signal", [False, True])
    def test_streams_that_take_too_long_are_ended_with_an_error(
        self, prefills: list[StandIn], decodes: list[StandIn], second_signal: bool
    ) -> None:
        decodes[0].scripts.append(stream_until_left)
        timeout = 600.0 if second_signal else 0.01
        with live_router(prefills, decodes, shutdown_timeout=timeout) as live:
            body = {"prompt": "a", "stream": True}
            with httpx.stream("POST", live.url + COMPLETIONS, json=body) as response:
                for _ in range(1 + second_signal):
                    live.signal()
                response.read()
            live.ended.result(30)
        assert "shutting down" in events_of(response.text)[-1]["error"]["message"]
        assert decodes[0].left.acquire(timeout=30)


class TestLimits:
    def test_a_body_beyond_the_limit(
        self, one: Live, prefills: list[StandIn], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 100)
        assert one.complete("a" * 60).status_code == 200
        assert one.complete("a" * 100).status_code == 413
        assert num_calls(*prefills) == [1, 0]

    @pytest.mark.parametrize("is_stream", [False, True])
    def test_an_answer_beyond_the_limit(
        self, one: Live, decodes: list[StandIn], monkeypatch: pytest.MonkeyPatch, is_stream: bool
    ) -> None:
        monkeypatch.setattr("dcpjax.server.router_legs.MAX_ANSWER_BYTES", 10_000)

        def script(exchange: Exchange) -> None:
            if is_stream:
                exchange.begin_stream()
                exchange.chunk(b"data: " + b"y" * 20_000)  # and the event goes on
                exchange.wait_until_left()
            else:
                exchange.whole(200, "y" * 20_000)

        decodes[0].scripts += [script, script]
        response = one.complete(stream=is_stream)
        assert response.status_code == 503
        assert "holds no more of an answer" in response.json()["error"]["message"]

    def test_too_many_calls_at_once(self, prefills: list[StandIn], decodes: list[StandIn]) -> None:
        gate = threading.Event()
        decodes[0].scripts.append(held_stream(gate))
        with live_router(prefills, decodes, max_open_requests=1) as live:
            body = {"prompt": "a", "stream": True}
            with httpx.stream("POST", live.url + COMPLETIONS, json=body) as response:
                refused = live.complete()
                assert refused.status_code == 503
                assert "too many requests" in refused.json()["error"]["message"]
                gate.set()
                response.read()
            wait_until(lambda: live.complete().status_code == 200)

    def test_keys(self, prefills: list[StandIn], decodes: list[StandIn]) -> None:
        with live_router(prefills, decodes, api_keys=("right",)) as live:
            assert live.complete().status_code == 401
            assert httpx.get(live.url + "/v1/models").status_code == 401
            assert httpx.get(live.url + "/health").status_code == 200
            with openai.OpenAI(base_url=live.url + "/v1", api_key="right") as client:
                client.completions.create(model="m", prompt="a")
        assert prefills[0].headers[0]["authorization"] == "Bearer right"

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", COMPLETIONS, 405), ("POST", "/v1/embeddings", 404), ("GET", "/stats", 404)],
    )
    def test_other_paths_are_error_objects(
        self, one: Live, method: str, path: str, status: int
    ) -> None:
        response = httpx.request(method, one.url + path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_call_is_open_while_its_body_arrives(
    prefills: list[StandIn], decodes: list[StandIn]
) -> None:
    """So that bodies which never end are bounded too."""
    with live_router(prefills[:1], decodes[:1], max_open_requests=1) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            wait_until(lambda: httpx.get(live.url + "/load").json() == {"server_load": 1})
            assert live.complete().status_code == 503
        wait_until(lambda: httpx.get(live.url + "/load").json() == {"server_load": 0})
        assert live.complete().status_code == 200
        assert live.count("calls_total", outcome="left") == 1
    assert num_calls(*prefills, *decodes) == [1, 0, 1, 0]


def test_the_log_says_who_answered_what(
    one: Live, prefills: list[StandIn], caplog: pytest.LogCaptureFixture
) -> None:
    prefills[0].scripts.append(refusal(500))
    assert one.complete().status_code == 200
    (message,) = [r.getMessage() for r in caplog.records if "prefill engine" in r.getMessage()]
    assert message.startswith(f"the prefill engine at {prefills[0].url} answered status 500, ")


def test_metrics_of_a_call_that_works(one: Live, prefills: list[StandIn]) -> None:
    assert one.complete(stream=True).status_code == 200
    assert one.count("calls_total", outcome="success") == 1
    for role in ("prefill", "decode"):
        assert one.count("leg_seconds_count", role=role) == 1
        assert one.count("failed_legs_total", role=role) == 0
    assert one.count("healthy", role="prefill", url=prefills[0].url) == 1
    assert json.loads(httpx.get(one.url + "/load").text) == {"server_load": 0}


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_no_call_gets_a_wrong_answer(
    prefills: list[StandIn], decodes: list[StandIn], seed: int
) -> None:
    """Engines fail at random and clients leave: a 200 has the whole text or says that it broke."""
    faults = [refusal(500), refusal(503), reset, break_in_body, break_after(1)]
    choose = random.Random(seed)
    for engine in prefills:
        engine.usual = one_of(choose, [*faults, without_params, *[answer] * 6])
    for engine in decodes:
        engine.usual = one_of(choose, [*faults, *[answer] * 6])
    with live_router(prefills, decodes, health_interval=0.02) as live:
        results = asyncio.run(many_calls(live.url + COMPLETIONS, 80, choose))
        wait_until(lambda: httpx.get(live.url + "/load").json() == {"server_load": 0})
        for role, engines in (("prefill", prefills), ("decode", decodes)):
            for engine in engines:
                assert live.count("open_legs", role=role, url=engine.url) == 0
        ended = sum(live.count("calls_total", outcome=outcome.value) for outcome in Outcome)
        assert ended == len(results)
    assert {"whole", "left"} < set(results) <= {"whole", "broken", "error", "left"}


def one_of(choose: random.Random, scripts: list[Script]) -> Script:
    return lambda exchange: choose.choice(scripts)(exchange)


async def many_calls(url: str, count: int, choose: random.Random) -> list[str]:
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(limits=limits, timeout=60) as http:
        kinds = [(choose.random() < 0.5, choose.random() < 0.2) for _ in range(count)]
        return await asyncio.gather(*(one_call(http, url, *kind) for kind in kinds))


async def one_call(http: httpx.AsyncClient, url: str, is_stream: bool, leaves: bool) -> str:
    """How a call ended; the text of every kind of success is checked."""
    body = {"prompt": "a", "stream": is_stream}
    async with http.stream("POST", url, json=body) as response:
        if leaves:
            return "left"
        await response.aread()
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return "error"
    if response.headers["content-type"].startswith("text/event-stream"):
        events = events_of(response.text)
        if "error" in events[-1]:
            texts = [event["choices"][0]["text"] for event in events[:-1]]
            assert texts == list(TOKENS[: len(texts)]) != []
            return "broken"
    assert text_of(response) == "".join(TOKENS)
    return "whole"
