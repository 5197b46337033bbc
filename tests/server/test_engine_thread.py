"""The thread around an engine: who gets what, and what happens when either side goes away."""

import asyncio
import itertools
import threading
from typing import Any

import pytest

from dcpjax.engine.request import FinishReason, Request, SamplingParams
from dcpjax.errors import AuditError, ConsensusError, DcpjaxError, EngineDeadError, RequestError
from dcpjax.server.engine_thread import EngineClient
from dcpjax.server.errors import UnavailableError
from tests.fakes import EOS, CountUpEngine
from tests.server.conftest import Gate

pytestmark = pytest.mark.anyio

_names = itertools.count()


def request(first: int = 0, **params: Any) -> Request:
    settings = SamplingParams(**{"max_tokens": 3, **params})
    return Request(f"r{next(_names)}", (first,), settings, frozenset({EOS}))


async def test_outputs_reach_the_stream_that_asked(engine: CountUpEngine) -> None:
    async with EngineClient(engine, max_open=100) as client:

        async def collect(first: int) -> list[int]:
            stream = await client.open([request(first)])
            return [token async for output in stream for token in output.token_ids]

        results = await asyncio.gather(*(collect(first) for first in range(0, 100, 3)))
    assert results == [[f + 1, f + 2, f + 3] for f in range(0, 100, 3)]


async def test_one_stream_has_the_outputs_of_all_its_requests(engine: CountUpEngine) -> None:
    async with EngineClient(engine, max_open=9) as client:
        requests = [request(10), request(20, max_tokens=1)]
        stream = await client.open(requests)
        outputs = [output async for output in stream]
        assert client.num_open == 0
    tokens = {r.request_id: [] for r in requests}
    for output in outputs:
        tokens[output.request_id] += output.token_ids
    assert list(tokens.values()) == [[11, 12, 13], [21]]


async def test_a_refused_request_takes_its_companions_along(engine: CountUpEngine) -> None:
    async with EngineClient(engine, max_open=9) as client:
        with pytest.raises(RequestError, match="at least one token"):
            await client.open([request(1), Request("empty", (), SamplingParams())])
        assert client.num_open == 0
        await client.wait_idle()
        for _ in range(2):  # a step lies between two calls that are waited for
            await client.call(lambda engine: None)
        assert [len(engine.aborted), engine.has_work] == [1, False]
        stream = await client.open([request(5)])
        assert len([output async for output in stream]) == 3


async def test_closing_a_stream_aborts_its_requests(engine: CountUpEngine) -> None:
    gate = engine.gate = Gate()
    async with EngineClient(engine, max_open=9) as client:
        stream = await client.open([request(1), request(2)])
        gate.allow(1)
        await anext(stream)
        stream.close()
        assert client.num_open == 0
        gate.open()
        await client.call(lambda engine: None)
        assert len(engine.aborted) == 2
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_leaving_while_the_engine_is_busy_leaves_nothing_behind(
    engine: CountUpEngine,
) -> None:
    """The caller is cancelled before its request is even added."""
    gate = engine.gate = Gate()
    async with EngineClient(engine, max_open=9) as client:
        busy = await client.open([request(1)])
        await asyncio.to_thread(gate.waiting.acquire)
        late = request(2)
        opening = asyncio.create_task(client.open([late]))
        while client.num_open < 2:  # until the task has run up to its first wait
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert client.num_open == 1
        gate.open()
        assert len([output async for output in busy]) == 3
        await client.call(lambda engine: None)
        assert not engine.has_work
        assert late.output_token_ids == []


async def test_abort_all_ends_streams_with_a_reason(engine: CountUpEngine) -> None:
    gate = engine.gate = Gate()
    async with EngineClient(engine, max_open=9) as client:
        stream = await client.open([request(1, max_tokens=400)])
        client.stop_accepting()
        with pytest.raises(UnavailableError, match="shutting down"):
            await client.open([request(2)])
        client.abort_all()
        gate.open()
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason is FinishReason.ABORT
        await client.wait_idle()


async def test_a_failing_step_ends_everything(
    engine: CountUpEngine, caplog: pytest.LogCaptureFixture
) -> None:
    gate = engine.gate = Gate()
    async with EngineClient(engine, max_open=9) as client:
        first = await client.open([request(1)])
        second = asyncio.create_task(client.open([request(5)]))
        while client.num_open < 2:  # until the task has run up to its first wait
            await asyncio.sleep(0)
        gate.allow(1)
        streams = [first, await second]
        engine.fail_at_step = 1
        gate.open()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
        assert client.is_dead
        await client.wait_idle()
        with pytest.raises(EngineDeadError):
            await client.open([request(2)])
        with pytest.raises(EngineDeadError):
            await client.call(lambda engine: engine.stats())
    assert "the device is lost" in caplog.text and "Traceback" in caplog.text


@pytest.mark.parametrize("error", [ConsensusError("ranks agree", ranks=2), AuditError("no copies")])
async def test_an_end_with_a_reason_is_logged_as_one_line(
    engine: CountUpEngine, caplog: pytest.LogCaptureFixture, error: DcpjaxError
) -> None:
    def end() -> None:
        raise error

    engine.gate = end
    async with EngineClient(engine, max_open=9) as client:
        stream = await client.open([request(1)])
        with pytest.raises(EngineDeadError) as caught:
            await anext(stream)
    assert (caught.value is error) == isinstance(error, EngineDeadError)
    (record,) = caplog.records
    assert record.getMessage() == f"the engine stopped: {error}"
    assert record.exc_info is None


async def test_a_failing_command_fails_its_caller_and_the_engine(engine: CountUpEngine) -> None:
    async with EngineClient(engine, max_open=9) as client:
        with pytest.raises(EngineDeadError):
            await client.call(lambda engine: 1 / 0)
        with pytest.raises(EngineDeadError):
            await client.call(lambda engine: None)


async def test_commands_that_arrive_as_the_engine_dies_are_answered(engine: CountUpEngine) -> None:
    gate = engine.gate = Gate()
    engine.fail_at_step = 1
    async with EngineClient(engine, max_open=9) as client:
        await client.open([request(1)])
        await asyncio.to_thread(gate.waiting.acquire)
        calls = [asyncio.create_task(client.call(lambda engine: None)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3


async def test_an_idle_engine_is_not_polled(engine: CountUpEngine) -> None:
    """Each command wakes the thread once; nothing else does."""
    calls: list[None] = []
    step = engine.step
    engine.step = lambda: (calls.append(None), step())[1]  # type: ignore[method-assign]
    async with EngineClient(engine, max_open=9) as client:
        for _ in range(3):
            await client.call(lambda engine: None)
        before = threading.active_count()
        await client.call(lambda engine: None)
        assert threading.active_count() == before
    assert len(calls) <= 4


async def test_limits(engine: CountUpEngine) -> None:
    engine.gate = Gate()
    async with EngineClient(engine, max_open=2) as client:
        with pytest.raises(RequestError, match="more sequences"):
            await client.open([request() for _ in range(3)])
        stream = await client.open([request(), request()])
        with pytest.raises(UnavailableError, match="too many"):
            await client.open([request()])
        stream.close()
        engine.gate.open()
        assert len([o async for o in await client.open([request()])]) == 3


async def test_the_thread_closes_the_engine_at_its_end(engine: CountUpEngine) -> None:
    async with EngineClient(engine, max_open=2) as client:
        await client.call(lambda engine: None)
        assert (engine.is_closed, client.has_ended) == (False, False)
    assert (engine.is_closed, client.has_ended) == (True, True)


async def test_the_owner_hears_of_a_death_after_the_streams(engine: CountUpEngine) -> None:
    heard: list[bool] = []
    engine.fail_at_step = 1
    client = EngineClient(engine, max_open=2, on_death=lambda: heard.append(client.is_dead))
    async with client:
        stream = await client.open([request(1)])
        with pytest.raises(EngineDeadError):
            await anext(stream)
    assert heard == [True]
    assert not engine.is_closed  # who knows what it would do


async def test_an_ordinary_end_is_no_death(engine: CountUpEngine) -> None:
    heard: list[None] = []
    async with EngineClient(engine, max_open=2, on_death=lambda: heard.append(None)):
        pass
    assert heard == []


async def test_after_the_end_everything_is_refused(engine: CountUpEngine) -> None:
    gate = engine.gate = Gate()
    client = await EngineClient(engine, max_open=2).__aenter__()
    stream = await client.open([request(1, max_tokens=400)])
    closing = asyncio.create_task(client.__aexit__())
    await asyncio.sleep(0)  # the wish to stop is in the inbox before the engine may go on
    gate.open()
    await closing
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await client.open([request(1)])
    assert client.num_open == 0
