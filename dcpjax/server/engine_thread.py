"""The engine's thread and its asyncio side. Knows token ids, not text and not HTTP.

The thread alone touches the engine, and closes it at the end. Everything else reaches it as a
function through one inbox, applied between two steps; outputs come back to the event loop, one
hand-over per step. All bookkeeping (which stream gets what) lives on the event loop, so nothing
here needs a lock.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from dcpjax.engine.request import Request, TokenOutput
from dcpjax.errors import DcpjaxError, EngineDeadError, RequestError
from dcpjax.llm.interfaces import TokenEngine
from dcpjax.server.errors import UnavailableError

Result = TypeVar("Result")
_Command = tuple[Callable[[TokenEngine], Any], Future[Any]]

_OFFER_SECONDS = 0.05  # between two looks, at shutdown, for offers that are not yet taken

_log = logging.getLogger(__name__)


class OutputStream:
    """The outputs of the requests of one call, in the order of arrival, until all have ended.

    Whoever holds one closes it: what has not ended is aborted then.
    """

    def __init__(self, client: "EngineClient", request_ids: Iterable[str]) -> None:
        self._client = client
        self._unfinished = set(request_ids)
        self._arrived: asyncio.Queue[TokenOutput | EngineDeadError] = asyncio.Queue()

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> TokenOutput:
        while self._unfinished:
            item = await self._arrived.get()
            if isinstance(item, EngineDeadError):
                self._unfinished.clear()
                raise item
            if item.request_id in self._unfinished:
                if item.finish_reason is not None:
                    self._unfinished.discard(item.request_id)
                return item
        raise StopAsyncIteration

    def put(self, item: TokenOutput | EngineDeadError) -> None:
        self._arrived.put_nowait(item)

    def abort(self, request_id: str) -> None:
        """End one request here; nothing more of it arrives."""
        self._unfinished.discard(request_id)
        self._client.forget(request_id)

    def close(self) -> None:
        for request_id in list(self._unfinished):
            self.abort(request_id)


class EngineClient:
    """An engine in a thread of its own, for one event loop.

    Args:
        max_open: requests that may be open at the same time, computed or waiting.
        on_death: called on the event loop when the engine fails, after every stream was told.
    """

    def __init__(
        self,
        engine: TokenEngine,
        *,
        max_open: int,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_open = max_open
        self.has_ended = False
        self._on_death = on_death
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}
        self._death: EngineDeadError | None = None
        self._is_accepting = True
        self._is_ending = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._may_leave = asyncio.Event()
        engine.on_wake(self._wake)
        self._thread = threading.Thread(target=self._run, name="dcpjax-engine", daemon=True)

    @property
    def is_dead(self) -> bool:
        return self._death is not None

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def __aenter__(self) -> "EngineClient":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop the thread after its current step, which closes the engine.

        ``has_ended`` tells whether it did; it did not if the client was abandoned meanwhile.
        """
        self._inbox.put(None)
        await self._may_leave.wait()
        self._die(EngineDeadError("the engine was stopped"))
        self._inbox.put(None)  # an abandoned thread has not read the first one, which is gone

    def abandon(self) -> None:
        """Let the exit not wait for the thread. The engine must not be touched any more."""
        self._may_leave.set()

    def check_not_failed(self) -> None:
        """Raise the EngineDeadError of an engine that failed."""
        if self._death is not None:
            raise self._death

    def check_alive(self) -> None:
        """Refuse everything when the engine stopped (EngineDeadError) or is about to be stopped
        (UnavailableError)."""
        self.check_not_failed()
        if not self._is_accepting:
            raise UnavailableError("the server is shutting down")

    def check_accepting(self, num_requests: int) -> None:
        """Refuse what could not be opened now.

        Raises:
            EngineDeadError, UnavailableError: nobody, or too many others, are served.
            RequestError: more than could ever be open.
        """
        self.check_alive()
        if num_requests > self.max_open:
            raise RequestError(
                "one call asks for more sequences than the server takes at a time",
                param="n",
                sequences=num_requests,
                limit=self.max_open,
            )
        if self.num_open + num_requests > self.max_open:
            raise UnavailableError(
                "too many requests wait; try again later", open=self.num_open, limit=self.max_open
            )

    async def open(self, requests: Sequence[Request]) -> OutputStream:
        """Hand requests to the engine, all or none.

        Raises:
            RequestError: the engine refused one of them.
            and what :meth:`check_accepting` raises.
        """
        self.check_accepting(len(requests))
        stream = OutputStream(self, [request.request_id for request in requests])
        for request in requests:
            self._streams[request.request_id] = stream
        self._idle.clear()
        try:
            await self.call(lambda engine: _add_all(engine, requests))
        except BaseException:  # also when the caller is cancelled here
            stream.close()
            raise
        return stream

    async def call(self, function: Callable[[TokenEngine], Result]) -> Result:
        """Run a function on the engine between two steps."""
        self.check_not_failed()
        return await asyncio.wrap_future(self._post(function))

    def forget(self, request_id: str) -> None:
        """Abort a request whose outputs nobody wants any more."""
        if self._streams.pop(request_id, None) is not None:
            self._post(lambda engine: engine.abort(request_id))
        self._note_idle()

    def stop_accepting(self) -> None:
        self._is_accepting = False

    def abort_all(self) -> None:
        """End every open request; each stream gets an output that says so. Offers count no more."""
        self._is_ending = True
        for request_id in list(self._streams):
            self._post(lambda engine, request_id=request_id: engine.abort(request_id))

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._idle.wait()

    async def wait_handed_over(self) -> None:
        """Until nobody can still take what was computed for other engines, or :meth:`abort_all`."""
        with contextlib.suppress(EngineDeadError):
            while not self._is_ending and await self.call(lambda engine: engine.num_offers):
                await asyncio.sleep(_OFFER_SECONDS)

    def _post(self, function: Callable[[TokenEngine], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._inbox.put((function, future))
        return future

    def _wake(self) -> None:
        """By any thread: let the engine's thread run a step, though nobody has a command for it."""
        self._post(lambda engine: None)

    # On the event loop, called by the thread.

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is None:
                stream = self._streams.get(output.request_id)
            else:
                stream = self._streams.pop(output.request_id, None)
            if stream is not None:
                stream.put(output)
        self._note_idle()

    def _fail(self, error: EngineDeadError) -> None:
        self._die(error)
        self._on_death()

    def _end(self) -> None:
        self.has_ended = True
        self._may_leave.set()

    def _die(self, error: EngineDeadError) -> None:
        if self._death is not None:
            return
        self._death = error
        for stream in set(self._streams.values()):
            stream.put(error)
        self._streams.clear()
        self._note_idle()
        while not self._inbox.empty():
            if (command := self._inbox.get()) is not None:
                _refuse(command[1], error)

    def _note_idle(self) -> None:
        if not self._streams:
            self._idle.set()

    # In the thread.

    def _run(self) -> None:
        try:
            while self._apply_inbox():
                # Once after every command too: an abort may leave an output behind, but no work.
                if outputs := self._engine.step():
                    self._tell(self._deliver, outputs)
            self._engine.close()
        except DcpjaxError as error:  # says all that a user can know of it; no bug, no traceback
            _log.error("the engine stopped: %s", error)
            self._tell(self._fail, error if isinstance(error, EngineDeadError) else _dead())
        except Exception:  # whatever it was, nobody else could tell the waiting streams
            _log.exception("the engine stopped")
            self._tell(self._fail, _dead())
        self._tell(self._end)

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the client was abandoned
            self._loop.call_soon_threadsafe(function, *args)

    def _apply_inbox(self) -> bool:
        """Apply what has arrived, waiting for something if there is no work. False: stop."""
        may_wait = not self._engine.has_work or self._engine.is_blocked
        while may_wait or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            _apply(self._engine, *command)
            may_wait = False
        return True


def _apply(
    engine: TokenEngine, function: Callable[[TokenEngine], Any], future: Future[Any]
) -> None:
    if not future.set_running_or_notify_cancel():  # the caller has left before we came to it
        return
    try:
        future.set_result(function(engine))
    except RequestError as error:
        future.set_exception(error)
    except Exception:  # the caller must not wait for ever; the thread ends with it
        future.set_exception(_dead())
        raise


def _dead() -> EngineDeadError:
    return EngineDeadError("the engine stopped; the server's log has the reason")


def _refuse(future: Future[Any], error: EngineDeadError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _add_all(engine: TokenEngine, requests: Sequence[Request]) -> None:
    """Add all requests or none."""
    for count, request in enumerate(requests):
        try:
            engine.add(request)
        except RequestError:
            for added in requests[:count]:
                engine.abort(added.request_id)
            raise
