"""Answers that take time: server-sent events, and work that ends when the client leaves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcpjax.server.errors import SequenceFailedError, to_api_error

Result = TypeVar("Result")
Event = TypeVar("Event")

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
]

_log = logging.getLogger(__name__)


class ClientLeftError(Exception):
    """The client closed the connection before the answer was complete."""


async def while_connected(
    receive: Receive,
    work: Coroutine[Any, Any, Result],
    discard: Callable[[Result], None] = lambda result: None,
) -> Result:
    """The result of ``work``, which is cancelled when the client leaves, or with the caller.

    Args:
        receive: of a request whose body has been read.
        discard: gets a result that came, but too late to be returned.

    Raises:
        ClientLeftError: and nobody will read the answer.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    is_taken = False
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        is_taken = task.done()  # from here to the return nothing waits
    finally:
        watcher.cancel()
        if not is_taken:
            await _drop(task, discard)
    if not is_taken:
        raise ClientLeftError
    return task.result()


async def _drop(task: "asyncio.Task[Result]", discard: Callable[[Result], None]) -> None:
    """Cancel a task and wait for its end. Its result is discarded whenever it comes, also if the
    waiting is cancelled."""

    def discard_result(ended: "asyncio.Task[Result]") -> None:
        if not ended.cancelled() and ended.exception() is None:
            discard(ended.result())

    task.add_done_callback(discard_result)
    task.cancel()
    await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def begun(
    events: AsyncGenerator[Event, None], close: Callable[[], None]
) -> AsyncGenerator[Event, None]:
    """The same events, of which the first has come; what fails before it is raised here.

    Args:
        close: called if this fails, and otherwise left to the caller.
    """
    try:
        first = await anext(events)
    except BaseException:  # also when the caller is cancelled here
        close()
        raise
    return _resumed(first, events)


async def _resumed(first: Event, rest: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class EventStream:
    """An ASGI response that sends objects as server-sent events, then ``[DONE]``.

    An error is one more event, since the status has been sent. ``close`` is called at the end,
    however it comes; who does not send the response calls it.
    """

    def __init__(self, events: AsyncGenerator[Any, None], close: Callable[[], None]) -> None:
        self._events = events
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientLeftError:
            _log.debug("the client left a stream")
        finally:
            self.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        async with aclosing(self._encoded()) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _encoded(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    yield _event(event)
        except Exception as error:  # the status is out: the stream itself has to say it
            answer = to_api_error(error)
            if answer.status == 500 and not isinstance(error, SequenceFailedError):
                _log.exception("a stream failed")
            yield _event(answer.body())
        yield b"data: [DONE]\n\n"


def _event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
