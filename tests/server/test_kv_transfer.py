"""``kv_transfer_params`` on its way through the API: in, out, and when the KV does not come."""

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from dcpjax.engine.kv_params import MAX_PAGES, MAX_RANKS, KVTransferParams
from dcpjax.engine.request import FinishReason, Request, TokenOutput
from dcpjax.errors import RequestError
from dcpjax.server.protocol import ChatCall, CompletionCall, parse, transfer_params
from tests.fakes import CountUpEngine
from tests.server.conftest import Api, events_of, open_api

pytestmark = pytest.mark.anyio

TO_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
FROM_PREFILL = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2], [3]],
    "remote_num_tokens": 40,
    "remote_block_size": 16,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "tp_size": 8,
    "dcp_size": 4,
    "pcp_size": 1,
    "pp_size": 1,
}


class TransferEngine(CountUpEngine):
    """Hands the KV on where it is asked to, and fails requests whose KV lies at the engine "gone"
    after ``tokens_before_failure``. ``answers`` come before ``FROM_PREFILL``."""

    tokens_before_failure = 0
    answers: list[dict[str, Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answers = []

    def step(self) -> list[TokenOutput]:
        before = {request.request_id: request for request in self.open_requests}
        return [self._changed(before.get(output.request_id), output) for output in super().step()]

    def _changed(self, request: Request | None, output: TokenOutput) -> TokenOutput:
        params = (request and request.kv_transfer_params) or {}
        if request is not None and params.get("remote_engine_id") == "gone":
            if len(request.output_token_ids) > self.tokens_before_failure:
                self._open.pop(request.request_id, None)
                reason = FinishReason.ERROR
                return TokenOutput(request.request_id, (), reason, error="the KV did not come")
        if params.get("do_remote_decode") and output.finish_reason is not None:
            params = self.answers.pop(0) if self.answers else FROM_PREFILL
            return dataclasses.replace(output, kv_transfer_params=params)
        return output


@pytest.fixture
def engine() -> TransferEngine:
    return TransferEngine()


@pytest.fixture
async def api(engine: TransferEngine) -> AsyncIterator[Api]:
    async with open_api(engine) as api:
        yield api


def completion(**fields: Any) -> CompletionCall:
    return parse(msgspec.json.encode({"prompt": "a", **fields}), CompletionCall)


def chat(**fields: Any) -> ChatCall:
    messages = [{"role": "user", "content": "hi"}]
    return parse(msgspec.json.encode({"messages": messages, **fields}), ChatCall)


class TestParameters:
    @pytest.mark.parametrize("call", [completion, chat])
    @pytest.mark.parametrize("params", [TO_DECODE, FROM_PREFILL])
    def test_what_was_given_reaches_the_engine(self, call: Any, params: dict[str, Any]) -> None:
        given = {name: value for name, value in params.items() if value is not None}
        assert transfer_params(call(kv_transfer_params=params)) == given
        assert KVTransferParams.read(params).json() == given

    @pytest.mark.parametrize(
        "params",
        [
            None,
            {},
            {"do_remote_decode": False, "do_remote_prefill": False},
            {"do_remote_decode": None, "remote_engine_id": "p"},
        ],
    )
    def test_an_ordinary_call(self, params: Any) -> None:
        assert transfer_params(completion(kv_transfer_params=params)) is None
        assert transfer_params(completion(kv_transfer_params=params, n=2, prompt=["a"])) is None

    def test_unknown_keys_are_ignored(self) -> None:
        params = transfer_params(completion(kv_transfer_params={**TO_DECODE, "x": [{"y": 1}]}))
        assert params == {"do_remote_decode": True, "do_remote_prefill": False}

    @pytest.mark.parametrize("ids", [[], [0], [0, 2**31 - 1], [[]], [[1, 2], []]])
    def test_page_ids_are_one_list_or_one_per_group(self, ids: Any) -> None:
        params = transfer_params(
            completion(kv_transfer_params=FROM_PREFILL | {"remote_block_ids": ids})
        )
        assert params is not None and params["remote_block_ids"] == ids

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("do_remote_decode", 1),
            ("do_remote_prefill", "true"),
            ("remote_engine_id", 5),
            ("remote_engine_id", ""),
            ("remote_engine_id", "x" * 257),
            ("remote_request_id", ["r"]),
            ("remote_host", 1),
            ("remote_port", 0),
            ("remote_port", 65_536),
            ("remote_port", "5600"),
            ("remote_port", True),
            ("remote_block_ids", 1),
            ("remote_block_ids", [-1]),
            ("remote_block_ids", [2**31]),
            ("remote_block_ids", [10**30]),
            ("remote_block_ids", [[-1]]),
            ("remote_block_ids", [1.5]),
            ("remote_block_ids", [[[1]]]),
            ("remote_block_ids", [1, [2]]),
            ("remote_block_ids", [0] * (MAX_PAGES + 1)),
            ("remote_block_size", 0),
            ("remote_block_size", -16),
            ("remote_num_tokens", -1),
            ("remote_num_tokens", 2**31),
            ("remote_blocks_expiry_time", "soon"),
            ("transfer_mode", "copy"),
            ("tp_size", 0),
            ("tp_size", MAX_RANKS + 1),
            ("dcp_size", -1),
            ("pcp_size", 10**30),
            ("pp_size", 1.0),
        ],
    )
    def test_a_wrong_value_is_refused(self, name: str, value: Any) -> None:
        params = FROM_PREFILL | {name: value}
        for read in (
            lambda: transfer_params(completion(kv_transfer_params=params)),
            lambda: KVTransferParams.read(params),
        ):
            with pytest.raises(RequestError) as caught:
                read()
            assert caught.value.param == "kv_transfer_params"
            assert name in str(caught.value)

    @pytest.mark.parametrize(
        "name", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"]
    )
    def test_a_decode_engine_must_know_where_the_kv_is(self, name: str) -> None:
        with pytest.raises(RequestError, match="where the KV is") as caught:
            transfer_params(completion(kv_transfer_params=FROM_PREFILL | {name: None}))
        assert caught.value.values == {"missing": [name]}

    def test_both_directions_at_once_are_refused(self) -> None:
        with pytest.raises(RequestError, match="not both"):
            KVTransferParams.read(FROM_PREFILL | {"do_remote_decode": True})

    @pytest.mark.parametrize("params", [1, "x", [], [{}]])
    def test_it_is_an_object(self, params: Any) -> None:
        with pytest.raises(RequestError) as caught:
            completion(kv_transfer_params=params)
        assert caught.value.param == "kv_transfer_params"


class TestAnswers:
    @pytest.mark.parametrize("is_chat", [False, True])
    async def test_a_prefill_engine_answers_with_parameters(self, api: Api, is_chat: bool) -> None:
        ask = api.chat if is_chat else api.complete
        answer = await ask(max_tokens=1, kv_transfer_params=TO_DECODE)
        assert answer.json()["kv_transfer_params"] == FROM_PREFILL

    @pytest.mark.parametrize("is_chat", [False, True])
    async def test_the_last_chunk_has_them(self, api: Api, is_chat: bool) -> None:
        ask = api.chat if is_chat else api.complete
        answer = await ask(max_tokens=3, stream=True, kv_transfer_params=TO_DECODE)
        *events, last = events_of(answer.text)
        assert last["kv_transfer_params"] == FROM_PREFILL
        assert last["choices"][0]["finish_reason"] == "length"
        assert len(events) == 2
        assert not any("kv_transfer_params" in event for event in events)

    async def test_also_when_the_first_token_is_a_stop_string(self, api: Api) -> None:
        answer = await api.complete("a", max_tokens=1, stop="b", kv_transfer_params=TO_DECODE)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["kv_transfer_params"] == FROM_PREFILL

    async def test_an_ordinary_answer_has_none(self, api: Api) -> None:
        assert "kv_transfer_params" not in (await api.complete(max_tokens=1)).json()
        answer = await api.complete(max_tokens=1, stream=True, kv_transfer_params=None)
        assert not any("kv_transfer_params" in event for event in events_of(answer.text))

    async def test_a_decode_engine_streams(self, api: Api) -> None:
        answer = await api.complete("a", max_tokens=3, stream=True, kv_transfer_params=FROM_PREFILL)
        texts = [event["choices"][0]["text"] for event in events_of(answer.text)]
        assert texts == ["b", "c", "d"]

    @pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}])
    async def test_several_sequences_are_refused(self, api: Api, fields: dict[str, Any]) -> None:
        prompt = fields.pop("prompt", "a")
        for params in (TO_DECODE, FROM_PREFILL):
            response = await api.complete(prompt, kv_transfer_params=params, **fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert "one prompt and n = 1" in error["message"]
            assert error["param"] == "kv_transfer_params"
        assert (await api.complete(["a"], max_tokens=1, n=1)).status_code == 200

    async def test_what_the_engine_refuses_is_a_400(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def add(request: Request) -> None:
            raise RequestError("this engine has no KV transfer", param="kv_transfer_params")

        monkeypatch.setattr(api.engine, "add", add)
        for is_stream in (False, True):
            response = await api.complete(stream=is_stream, kv_transfer_params=TO_DECODE)
            assert response.status_code == 400
            assert "no KV transfer" in response.json()["error"]["message"]


class TestFailures:
    GONE = FROM_PREFILL | {"remote_engine_id": "gone"}

    @pytest.mark.parametrize("is_stream", [False, True])
    async def test_kv_that_does_not_come_is_a_500(self, api: Api, is_stream: bool) -> None:
        """Also of a stream, of which no status has been sent: a router can ask again."""
        response = await api.complete("a", stream=is_stream, kv_transfer_params=self.GONE)
        assert response.status_code == 500
        error = response.json()["error"]
        assert error["message"] == "the KV did not come"
        assert error["code"] == "sequence_failed"
        assert api.client.num_open == 0
        assert 'finished_reason="error",model_name="counter"} 1.0' in await scrape(api)

    async def test_a_failure_after_some_tokens_is_an_error_event(
        self, api: Api, engine: TransferEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.tokens_before_failure = 2
        response = await api.complete("a", stream=True, kv_transfer_params=self.GONE)
        assert response.status_code == 200
        *chunks, error = events_of(response.text)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["b", "c"]
        assert error["error"]["message"] == "the KV did not come"
        assert caplog.text == ""  # no bug of ours: no traceback

    async def test_never_a_200_with_part_of_the_text(
        self, api: Api, engine: TransferEngine
    ) -> None:
        engine.tokens_before_failure = 2
        response = await api.complete("a", kv_transfer_params=self.GONE)
        assert response.status_code == 500
        assert "choices" not in json.loads(response.text)

    async def test_the_others_go_on(self, api: Api) -> None:
        assert (await api.complete("a", kv_transfer_params=self.GONE)).status_code == 500
        assert (await api.complete("a", max_tokens=2)).json()["choices"][0]["text"] == "bc"


async def scrape(api: Api) -> str:
    return (await api.http.get("/metrics")).text
