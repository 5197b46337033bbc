"""The client's side of a call: what has been sent decides how an error can still be said."""

from contextlib import aclosing

import msgspec
from starlette.types import Send

from dcpjax.errors import DcpjaxError
from dcpjax.server.errors import to_api_error
from dcpjax.server.router_legs import Answer, Headers
from dcpjax.server.router_metrics import Outcome
from dcpjax.server.router_ways import NoAnswerError

_JSON = [(b"content-type", b"application/json")]


class Sender:
    """Sends one answer, or an error in its place, or behind what was sent of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status: int | None = None
        self._is_broken = False
        self._is_complete = False

    @property
    def outcome(self) -> Outcome:
        """How a call ended to which all was sent."""
        if self._is_broken:
            return Outcome.BROKEN
        if self._status is None or self._status >= 500:
            return Outcome.SERVER_ERROR
        return Outcome.CLIENT_ERROR if self._status >= 400 else Outcome.SUCCESS

    async def send(self, answer: Answer) -> None:
        if answer.rest is None:
            await self._send_whole(answer.status, answer.headers, answer.body)
            return
        await self._begin(answer.status, answer.headers)
        await self._write(answer.body)
        async with aclosing(answer.rest) as rest:
            async for events in rest:
                await self._write(events)
        await self._end(b"")

    async def fail(self, error: DcpjaxError) -> None:
        """Say what went wrong: an engine's own words, an error of ours, or one more event."""
        own = error.answer if isinstance(error, NoAnswerError) else None
        api_error = to_api_error(error)
        body = msgspec.json.encode(api_error.body())
        if self._is_complete:  # ended while the client still reads it
            return
        if self._status is not None:
            self._is_broken = True
            await self._end(b"data: " + body + b"\n\ndata: [DONE]\n\n")
        elif own is not None:
            await self._send_whole(own.status, own.headers, own.body)
        else:
            await self._send_whole(api_error.status, _JSON, body)

    async def _send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self._begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._end(body)

    async def _begin(self, status: int, headers: Headers) -> None:
        self._status = status
        start = {"type": "http.response.start", "status": status, "headers": list(headers)}
        await self._send(start)

    async def _write(self, data: bytes) -> None:
        """Returns when the client has taken most of what was written before."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end(self, data: bytes) -> None:
        self._is_complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
