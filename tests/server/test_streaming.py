"""Work that ends when the client leaves, and streams that always end."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from dcpjax.errors import EngineDeadError
from dcpjax.server.streaming import ClientLeftError, EventStream, begun, while_connected

pytestmark = pytest.mark.anyio


class Client:
    """The other end of an ASGI call. ``leave`` closes the connection."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.sent: list[Any] = []

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> Any:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def test_work_that_is_done_first_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert await while_connected(Client().receive, work()) == 7


async def test_work_that_fails_raises() -> None:
    async def work() -> int:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(Client().receive, work())


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    client, ended = Client(), asyncio.Event()

    async def work() -> None:
        try:
            client.leave()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ClientLeftError):
        await while_connected(client.receive, work())
    assert ended.is_set()


async def test_work_is_cancelled_with_its_caller() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(while_connected(Client().receive, work()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_a_result_that_comes_as_the_caller_is_cancelled_is_discarded() -> None:
    """The work is done and nobody has looked at it yet when the caller is cancelled."""
    discarded: list[int] = []
    gate = asyncio.Event()

    async def work() -> int:
        await gate.wait()
        caller.cancel()
        return 7

    caller = asyncio.create_task(while_connected(Client().receive, work(), discarded.append))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0)
    assert discarded == [7]


@pytest.mark.parametrize("is_cancelled_twice", [False, True])
async def test_a_result_of_work_that_does_not_let_itself_be_cancelled_is_discarded(
    is_cancelled_twice: bool,
) -> None:
    discarded: list[int] = []
    client, finish = Client(), asyncio.Event()

    async def work() -> int:
        try:
            client.leave()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await finish.wait()
        return 7

    caller = asyncio.create_task(while_connected(client.receive, work(), discarded.append))
    for _ in range(5):  # until it waits for the end of the work
        await asyncio.sleep(0)
    if is_cancelled_twice:
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    finish.set()
    if not is_cancelled_twice:
        with pytest.raises(ClientLeftError):
            await caller
    for _ in range(5):
        await asyncio.sleep(0)
    assert discarded == [7]


async def test_a_result_that_is_returned_is_not_discarded() -> None:
    async def work() -> int:
        return 7

    discarded: list[int] = []
    assert await while_connected(Client().receive, work(), discarded.append) == 7
    await asyncio.sleep(0)
    assert discarded == []


async def stream(client: Client, events: AsyncGenerator[Any, None]) -> list[str]:
    """Send events and say what was called."""
    calls: list[str] = []
    await EventStream(events, lambda: calls.append("close"))({}, client.receive, client.send)
    return calls


async def test_a_stream_ends_with_done() -> None:
    async def events() -> AsyncGenerator[Any, None]:
        yield {"a": 1}

    client = Client()
    assert await stream(client, events()) == ["close"]
    assert client.text == 'data: {"a":1}\n\ndata: [DONE]\n\n'
    assert client.sent[0]["status"] == 200
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_an_error_is_an_event() -> None:
    async def events() -> AsyncGenerator[Any, None]:
        yield {"a": 1}
        raise EngineDeadError("gone")

    client = Client()
    assert await stream(client, events()) == ["close"]
    assert '"message":"gone"' in client.text
    assert client.text.endswith("data: [DONE]\n\n")


async def test_a_stream_is_closed_when_the_client_leaves() -> None:
    client, ended = Client(), asyncio.Event()

    async def events() -> AsyncGenerator[Any, None]:
        try:
            yield {"a": 1}
            client.leave()
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert await stream(client, events()) == ["close"]
    assert ended.is_set()
    assert "[DONE]" not in client.text


async def test_a_stream_that_has_begun_is_whole() -> None:
    async def events() -> AsyncGenerator[Any, None]:
        yield 1
        yield 2

    started = await begun(events(), lambda: pytest.fail("closed too early"))
    assert [event async for event in started] == [1, 2]


async def test_what_fails_before_the_first_event_is_raised_at_once() -> None:
    async def events() -> AsyncGenerator[Any, None]:
        raise EngineDeadError("gone")
        yield 1

    calls: list[str] = []
    with pytest.raises(EngineDeadError):
        await begun(events(), lambda: calls.append("close"))
    assert calls == ["close"]


async def test_a_stream_is_closed_when_the_client_leaves_before_the_first_event() -> None:
    async def events() -> AsyncGenerator[Any, None]:
        client.leave()
        await asyncio.Event().wait()
        yield 1

    client, calls = Client(), list[str]()
    with pytest.raises(ClientLeftError):
        await while_connected(client.receive, begun(events(), lambda: calls.append("close")))
    assert calls == ["close"]
