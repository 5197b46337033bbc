"""One call to one engine: what the router sends, and the answer as it comes.

An answer in one piece is read to its end before anybody sees it, so that a broken one is no answer
and another engine can be asked. A stream is handed on event by event.
"""

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import httpx

from dcpjax.server.errors import LegError
from dcpjax.server.router_peers import Peer

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of an answer in one piece, and of one event of a stream."""

Headers = Sequence[tuple[bytes, bytes]]

_PASSED_ON = frozenset(
    {b"content-type", b"cache-control", b"retry-after", b"www-authenticate", b"x-accel-buffering"}
)
_SHOWN_BYTES = 200  # of an answer, in a log
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]\s*\Z")
_DONE_BYTES = 64  # of the end of a stream, where the pattern is looked for


@dataclass(frozen=True)
class Call:
    """What a client asks. ``headers`` go to every engine."""

    method: str
    path: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What an engine answers: the whole ``body``, or its first events and the ``rest``."""

    status: int
    headers: Headers
    body: bytes
    rest: AsyncGenerator[bytes, None] | None = None

    @property
    def summary(self) -> str:
        """In a few words, for a log."""
        return f"status {self.status}, {self.body[:_SHOWN_BYTES]!r}"


@contextlib.asynccontextmanager
async def opened(http: httpx.AsyncClient, peer: Peer, call: Call) -> AsyncIterator[Answer]:
    """An engine's answer, of which the first byte has come. Leaving closes the connection, by
    which the engine notices that nobody waits any more.

    Raises:
        LegError: the engine does not answer, or, from the block, its answer broke off.
    """
    async with peer.leg(len(call.body)):
        request = http.build_request(
            call.method, peer.url + call.path, content=call.body, headers=dict(call.headers)
        )
        try:
            response = await http.send(request, stream=True)
            async with contextlib.aclosing(response):
                yield await _begun(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            peer.note_unreachable()
            raise _broken("the engine can be reached", peer, error) from error
        except httpx.HTTPError as error:
            raise _broken("the engine broke its answer off", peer, error) from error


def _broken(rule: str, peer: Peer, error: httpx.HTTPError) -> LegError:
    return LegError(rule, engine=peer.url, reason=str(error) or type(error).__name__)


async def _begun(response: httpx.Response) -> Answer:
    headers = [pair for pair in response.headers.raw if pair[0].lower() in _PASSED_ON]
    if response.status_code == 200 and _is_event_stream(response):
        events = whole_events(response.aiter_raw())
        return Answer(response.status_code, headers, await anext(events), events)
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        _check_size(body)
    return Answer(response.status_code, headers, bytes(body))


def _is_event_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def _check_size(held: bytearray) -> None:
    if len(held) > MAX_ANSWER_BYTES:
        raise LegError("the router holds no more of an answer", limit_bytes=MAX_ANSWER_BYTES)


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes, cut only behind events, so that an error can always follow as one more.

    Raises:
        LegError: they end before ``[DONE]``; nothing of an incomplete event has been yielded.
    """
    held, last = bytearray(), b""
    async for piece in pieces:
        searched_from = max(0, len(held) - max(map(len, _EVENT_ENDS)) + 1)
        held += piece
        if stop := _end_of_last_event(held, searched_from):
            last = bytes(held[:stop])
            del held[:stop]
            yield last
        _check_size(held)
    if held and _DONE.search(held[-_DONE_BYTES:]):  # not even a blank line behind it
        yield bytes(held)
    elif held.strip() or not _DONE.search(last[-_DONE_BYTES:]):
        raise LegError("a stream ends with [DONE]")


def _end_of_last_event(held: bytearray, start: int) -> int:
    """Where the last event that is complete ends; 0: there is none."""
    found = ((held.rfind(end, start), len(end)) for end in _EVENT_ENDS)
    return max(at + length if at >= 0 else 0 for at, length in found)
