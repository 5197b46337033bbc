"""The parts of the router that need no socket: bodies, event boundaries, loads, settings."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpjax.errors import ConfigError
from dcpjax.server.errors import LegError, UnavailableError
from dcpjax.server.router_bodies import (
    decode_body,
    prefill_body,
    read_fields,
    transfer_params_of,
)
from dcpjax.server.router_calls import EndableBlocks, OpenCalls
from dcpjax.server.router_config import RouterConfig, normal_url
from dcpjax.server.router_legs import whole_events
from dcpjax.server.router_peers import HealthChecks, Peers, Role

pytestmark = pytest.mark.anyio

P, D = ("http://p:1",), ("http://d:1",)


class TestBodies:
    ODD = b'{"prompt":"a","temperature":1e0,"seed":123456789012345678901234567890,"x":[ 1,2 ]}'

    def test_values_go_on_byte_for_byte(self) -> None:
        fields = read_fields(self.ODD)
        assert fields is not None
        assert decode_body(fields, None) == self.ODD
        both = decode_body(fields, msgspec.Raw(b'{ "y":1 }'))
        assert both == self.ODD[:-1] + b',"kv_transfer_params":{ "y":1 }}'
        assert prefill_body(fields, is_chat=False).startswith(self.ODD[:-1])

    def test_a_name_that_is_there_twice_counts_once_everywhere(self) -> None:
        """The last one wins, as in the engines, and not one here and one there."""
        fields = read_fields(b'{"prompt":"a","n":5,"n":1,"max_tokens":3,"max_tokens":9}')
        assert fields is not None
        assert decode_body(fields, None) == b'{"prompt":"a","n":1,"max_tokens":9}'
        assert read_fields(b'{"prompt":"a","n":1,"n":5}') is None

    @pytest.mark.parametrize("is_chat", [False, True])
    def test_the_prefill_leg_makes_one_token(self, is_chat: bool) -> None:
        fields = read_fields(
            b'{"max_tokens":9,"max_completion_tokens":9,"min_tokens":5,"stream":true,"n":1,'
            b'"stream_options":{},"best_of":1,"return_token_ids":true,"stop":"x"}'
        )
        assert fields is not None
        body = json.loads(prefill_body(fields, is_chat=is_chat))
        assert body.pop("kv_transfer_params")["do_remote_decode"] is True
        limit = 1 if is_chat else 9  # a name that completions do not know is not ours to change
        expected = {"max_tokens": 1, "max_completion_tokens": limit, "stream": False, "stop": "x"}
        assert body == expected

    @pytest.mark.parametrize(
        ("answer", "expected"),
        [
            (b'{"kv_transfer_params":{"a": 1}}', b'{"a": 1}'),
            (b'{"kv_transfer_params":null}', None),
            (b'{"kv_transfer_params":[1]}', None),
            (b"{}", None),
            (b"[]", None),
            (b"<html>", None),
            (b"", None),
        ],
    )
    def test_what_a_prefill_engine_says(self, answer: bytes, expected: bytes | None) -> None:
        params = transfer_params_of(answer)
        assert (None if params is None else bytes(params)) == expected

    @given(body=st.binary(max_size=60))
    def test_no_bytes_are_an_error(self, body: bytes) -> None:
        read_fields(body)
        transfer_params_of(body)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


def events_from(pieces: Sequence[bytes]) -> tuple[list[bytes], str | None]:
    """What comes out of whole_events, and what its error says."""

    async def source() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def collect() -> tuple[list[bytes], str | None]:
        got: list[bytes] = []
        try:
            async for events in whole_events(source()):
                got.append(events)
        except LegError as error:
            return got, error.rule
        return got, None

    return asyncio.run(collect())


EVENTS = st.lists(st.sampled_from([b"data: {}", b"data: x\ndata: y", b": ping"]), max_size=5)
CUTS = st.lists(st.integers(0, 200), max_size=8)


class TestWholeEvents:
    @given(events=EVENTS, cuts=CUTS, end=st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    def test_they_are_the_same_bytes_cut_behind_events(
        self, events: list[bytes], cuts: list[int], end: bytes
    ) -> None:
        data = b"".join(event + end for event in [*events, b"data: [DONE]"])
        got, error = events_from(cut(data, cuts))
        assert (b"".join(got), error) == (data, None)
        assert all(piece.endswith(end) for piece in got)

    @given(events=EVENTS, cuts=CUTS, missing=st.integers(4, 300))
    def test_a_stream_cut_short_is_an_error_and_its_last_event_is_not_passed_on(
        self, events: list[bytes], cuts: list[int], missing: int
    ) -> None:
        whole = b"".join(event + b"\n\n" for event in [*events, b"data: [DONE]"])
        data = whole[: max(0, len(whole) - missing)]
        got, error = events_from(cut(data, cuts))
        assert error == "a stream ends with [DONE]"
        assert b"".join(got) == data[: data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0]

    @pytest.mark.parametrize(
        "data",
        [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]", b"data: x\n\ndata: [DONE]\n"],
    )
    def test_ends_that_are_allowed(self, data: bytes) -> None:
        got, error = events_from([data])
        assert (b"".join(got), error) == (data, None)

    @pytest.mark.parametrize("data", [b"", b"\n\n", b"data: x\n\n", b'data: "[DONE]"\n\n'])
    def test_ends_that_are_not(self, data: bytes) -> None:
        assert events_from([data])[1] == "a stream ends with [DONE]"


class TestPeers:
    def peers(self) -> Peers:
        peers = Peers(["p0", "p1", "p2"], ["d0", "d1"])
        for role in Role:
            for peer in peers.of(role):
                peer.note_answer(True)
        return peers

    async def test_prefill_goes_by_the_size_of_prompts_and_decode_by_their_number(self) -> None:
        peers = self.peers()
        p0, p1, p2 = peers.of(Role.PREFILL)
        d0, d1 = peers.of(Role.DECODE)
        assert (peers.choose(Role.PREFILL, ()), peers.choose(Role.DECODE, ())) == (p0, d0)
        async with p0.leg(100), p1.leg(30), p1.leg(30), p2.leg(90), d0.leg(1), d1.leg(0):
            assert peers.choose(Role.PREFILL, ()) is p1
            assert peers.choose(Role.PREFILL, {p1}) is p2
            assert peers.choose(Role.DECODE, ()) is d0
            async with d0.leg(1):
                assert peers.choose(Role.DECODE, ()) is d1
        assert [peer.num_open + peer.work_bytes for peer in (p0, p1, p2, d0, d1)] == [0] * 5

    async def test_only_healthy_ones_that_were_not_tried(self) -> None:
        peers = self.peers()
        d0, d1 = peers.of(Role.DECODE)
        d0.note_unreachable()
        assert peers.choose(Role.DECODE, ()) is d1
        assert peers.choose(Role.DECODE, {d1}) is None
        d0.note_answer(True)
        assert peers.choose(Role.DECODE, {d1}) is d0
        d0.note_answer(False)
        assert peers.healthy(Role.DECODE) == [d1]
        assert peers.summary() == "3 of 3 prefill engines, 1 of 2 decode engines"

    def test_an_engine_starts_unknown_and_so_unused(self) -> None:
        assert Peers(["p"], ["d"]).choose(Role.DECODE, ()) is None

    async def test_only_silence_for_long_ends_legs(self) -> None:
        """An engine that says that it is not well may be letting its streams finish."""
        peer = self.peers().of(Role.DECODE)[0]
        with pytest.raises(LegError, match="health checks") as caught:
            async with peer.leg(1):
                for _ in range(10):
                    peer.note_answer(False)
                for _ in range(2):
                    peer.note_silence()
                peer.note_answer(True)
                for _ in range(2):
                    peer.note_silence()
                await asyncio.sleep(0)
                assert not peer.is_healthy
                for _ in range(2):
                    peer.note_silence()
                await asyncio.Event().wait()
        assert caught.value.values == {"engine": "d0"}
        assert peer.num_open == 0

    async def test_changes_are_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        peer = Peers(["p"], ["d"]).of(Role.PREFILL)[0]
        for is_healthy in (False, True, True, False, False):
            peer.note_answer(is_healthy)
        assert [record.getMessage() for record in caplog.records] == [
            "the prefill engine at p is healthy",
            "the prefill engine at p is not healthy",
        ]

    @pytest.mark.parametrize("answer", [200, 204, 503, httpx.ReadError("x")])
    async def test_only_200_is_healthy(self, answer: Any) -> None:
        def respond(request: httpx.Request) -> httpx.Response:
            if isinstance(answer, Exception):
                raise answer
            return httpx.Response(answer)

        peers = Peers(["http://p"], ["http://d"])
        async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
            await HealthChecks(http, peers, interval=1, timeout=5).once()
        assert len(peers.healthy(Role.DECODE)) == (answer == 200)


class TestCalls:
    async def test_a_block_that_is_ended_raises_its_error(self) -> None:
        blocks = EndableBlocks()
        with pytest.raises(LegError):
            async with blocks.block(LegError("a")):
                assert len(blocks) == 1
                blocks.end_all()
                blocks.end_all()
                await asyncio.Event().wait()
        assert len(blocks) == 0

    async def test_other_errors_pass(self) -> None:
        for error in (TimeoutError(), KeyError(), asyncio.CancelledError()):
            with pytest.raises(type(error)):
                async with EndableBlocks().block(LegError("a")):
                    raise error

    async def test_blocks_in_blocks(self) -> None:
        inner, outer = EndableBlocks(), EndableBlocks()
        for ended, expected in ((inner, LegError), (outer, UnavailableError)):
            with pytest.raises(expected):
                async with outer.block(UnavailableError("o")), inner.block(LegError("i")):
                    ended.end_all()
                    await asyncio.Event().wait()

    async def test_idle_is_when_no_call_is_open(self) -> None:
        calls = OpenCalls(2)
        await calls.wait_idle()
        async with calls.opened():
            async with calls.opened():
                with pytest.raises(UnavailableError, match="too many"):
                    calls.check_accepting()
            waiting = asyncio.create_task(calls.wait_idle())
            await asyncio.sleep(0)
            assert not waiting.done()
            calls.stop_accepting()
            with pytest.raises(UnavailableError, match="shutting down"):
                async with calls.opened():
                    pass
        await waiting


class TestConfig:
    @pytest.mark.parametrize(
        ("url", "normal"),
        [
            ("http://h:1", "http://h:1"),
            ("http://h:1/", "http://h:1"),
            ("HTTP://H", "http://h:80"),
            ("https://h", "https://h:443"),
            ("http://[::1]:5", "http://[::1]:5"),
        ],
    )
    def test_urls(self, url: str, normal: str) -> None:
        assert normal_url(url) == normal

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"prefill_urls": ()}, "at least one prefill engine"),
            ({"decode_urls": ()}, "at least one decode engine"),
            ({"decode_urls": ("h:1",)}, "http://host:port"),
            ({"decode_urls": ("h",)}, "http://host:port"),
            ({"decode_urls": ("//h:1",)}, "http://host:port"),
            ({"decode_urls": ("ftp://h:1",)}, "http://host:port"),
            ({"decode_urls": ("http://:1",)}, "http://host:port"),
            ({"decode_urls": ("http://h:x",)}, "http://host:port"),
            ({"decode_urls": ("http://h:99999",)}, "http://host:port"),
            ({"decode_urls": ("http://[h",)}, "http://host:port"),
            ({"decode_urls": ("",)}, "http://host:port"),
            ({"decode_urls": ("http://h:0",)}, "a port is in"),
            ({"decode_urls": ("http://h:1/v1",)}, "no path"),
            ({"decode_urls": ("http://h:1?x",)}, "no path"),
            ({"decode_urls": ("http://u:p@h:1",)}, "no path, and no user"),
            ({"decode_urls": (*D, "HTTP://D:1/")}, "named once"),
            ({"decode_urls": P}, "named once"),
            ({"prefill_fallback": "wait"}, "one of decode, error"),
            ({"port": -1}, "port is in"),
            ({"port": 65536}, "port is in"),
            ({"api_keys": ("",)}, "API key"),
            ({"max_open_requests": 0}, "at least 1"),
            ({"shutdown_timeout": -1.0}, "at least 0"),
            ({"health_interval": 0.0}, "more than 0"),
            ({"health_timeout": float("nan")}, "more than 0"),
            ({"connect_timeout": float("inf")}, "more than 0"),
        ],
    )
    def test_wrong_settings(self, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            RouterConfig(**{"prefill_urls": P, "decode_urls": D, **settings})
        assert "\n" not in str(caught.value)
