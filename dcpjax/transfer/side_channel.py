"""Messages between engines over ZeroMQ: one listener per producer, clients in its consumers.

On the wire a call is ``[call id, payload]`` and so is its answer; the call id is 16 random bytes
that the client chooses. A call may arrive several times, since the client repeats it while it has
no answer and connections break: the listener remembers what it answered and does nothing twice.
Answers may come late, twice or in another order: the client takes only the one with its call id.

Knows nothing about engines, pages and leases: those are behind :class:`Handler`. There is no
encryption and no access control, so it belongs on a network that only the engines can reach.
"""

import logging
import queue
import socket
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

import zmq

from dcpjax.errors import ConfigError, DcpjaxError
from dcpjax.transfer.frames import MessageError, decode_call, encode, failed
from dcpjax.transfer.handler import Handler, dispatch
from dcpjax.transfer.messages import MAX_FRAME_BYTES, AnyCall, Failed, OtherEngine, Reply

CALL_ID_BYTES = 16
CUT_OFF_BYTES = 4 * MAX_FRAME_BYTES
"""A longer frame is not read at all: its connection is closed. Below, it is answered."""

_MAX_OPEN_CALLS = 4096
_MAX_REMEMBERED = 4096
_MAX_REMEMBERED_BYTES = 16 * 2**20
_LINGER_MS = 500

_log = logging.getLogger(__name__)


def channel_address(host: str, port: int) -> str:
    """The address of a listener as its clients take it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class SideChannelServer:
    """Answers the calls to one engine, from its own thread.

    Whatever arrives is answered: what is no message with ``Failed``, what is meant for another
    engine with ``OtherEngine``.

    Args:
        engine_id: of the engine that answers.
        port: 0 chooses a free one.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self, handler: Handler, *, engine_id: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._handler = handler
        self._engine_id = engine_id
        self._context = zmq.Context()
        self._router = _listen(self._context, host, port)  # from here on the thread's alone
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.address.rpartition(":")[2])
        self._open: dict[bytes, _OpenCall] = {}
        self._answered = _Answers(_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES)
        self._finished: queue.SimpleQueue[tuple[bytes, Reply]] = queue.SimpleQueue()
        self._bell, self._bell_pull = socket.socketpair()  # wakes the thread while it polls
        for end in (self._bell, self._bell_pull):
            end.setblocking(False)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="dcpjax-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the answers that are there and stop listening. Idempotent.

        What is still open gets no answer, since what it asked for may still be going on.
        """
        self._is_closing = True
        self._ring()
        self._thread.join()

    # By any thread.

    def _finish_later(self, call_id: bytes, reply: Reply) -> None:
        self._finished.put((call_id, reply))
        self._ring()

    def _ring(self) -> None:
        try:
            self._bell_pull.send(b"!")
        except BlockingIOError:  # it has been rung often enough
            pass
        except OSError:  # the listener is closed: nobody waits for this answer any more
            _log.debug("an answer came after the side channel was closed")

    # By the listener's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._router in ready:
                self._receive()
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
            self._send_finished()
        self._end()

    def _end(self) -> None:
        self._send_finished()
        self._router.close(linger=_LINGER_MS)
        self._bell.close()
        self._bell_pull.close()
        self._context.term()

    def _send_finished(self) -> None:
        while not self._finished.empty():
            self._finish(*self._finished.get())

    def _receive(self) -> None:
        identity, *frames = self._router.recv_multipart()
        route = [identity]
        if frames[:1] == [b""]:  # what a REQ socket puts first, and wants to see again
            route.append(frames.pop(0))
        if len(frames) != 2 or len(frames[0]) != CALL_ID_BYTES:
            rule = f"a call is an id of {CALL_ID_BYTES} bytes and one payload"
            self._send([*route, b""], encode(Failed(rule=rule, values={"frames": len(frames)})))
            return
        call_id, payload = frames
        route.append(call_id)
        try:
            call = decode_call(payload)
        except MessageError as error:
            self._send(route, encode(failed(error)))
            return
        if call.engine_id == self._engine_id:
            self._serve(route, call_id, call)
        else:
            self._send(route, encode(OtherEngine(engine_id=self._engine_id)))

    def _serve(self, route: list[bytes], call_id: bytes, call: AnyCall) -> None:
        if (answer := self._answered.get(call_id)) is not None:
            self._send(route, answer)
        elif call_id in self._open:
            self._open[call_id].route = route  # the caller may have connected anew
        elif len(self._open) >= _MAX_OPEN_CALLS:
            rule = "not too many calls are open at a time"
            self._send(route, encode(Failed(rule=rule, values={"limit": _MAX_OPEN_CALLS})))
        else:
            self._start(route, call_id, call)

    def _start(self, route: list[bytes], call_id: bytes, call: AnyCall) -> None:
        try:
            work, reply_type = dispatch(self._handler, call)
        except Exception as error:  # the listener serves the others, whatever it was
            work, reply_type = _failure(error), Failed
        self._open[call_id] = _OpenCall(route, reply_type)
        if isinstance(work, Future):
            work.add_done_callback(lambda done: self._finish_later(call_id, _outcome(done)))
        else:
            self._finish(call_id, work)

    def _finish(self, call_id: bytes, reply: Reply) -> None:
        call = self._open.pop(call_id)
        if not isinstance(reply, call.reply_type | Failed):
            name, wanted = type(reply).__name__, call.reply_type.__name__
            reply = _failure(TypeError(f"{name} is no answer, {wanted} is"))
        try:
            answer = encode(reply)
        except Exception as error:  # too long, or fields of wrong types; the listener goes on
            answer = encode(_failure(error))
        self._answered.put(call_id, answer)
        self._send(call.route, answer)

    def _send(self, route: list[bytes], answer: bytes) -> None:
        self._router.send_multipart([*route, answer])  # one that is gone is skipped silently


@dataclass
class _OpenCall:
    """A call without answer yet: the frames to put before the answer, and its type."""

    route: list[bytes]
    reply_type: type[Reply]


class _Answers:
    """The latest answers by call id, as many as fit into both limits."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, call_id: bytes) -> bytes | None:
        return self._answers.get(call_id)

    def put(self, call_id: bytes, answer: bytes) -> None:
        self._answers[call_id] = answer
        self._num_bytes += len(answer)
        while len(self._answers) > self._max_count or self._num_bytes > self._max_bytes:
            _, forgotten = self._answers.popitem(last=False)
            self._num_bytes -= len(forgotten)


def check_free(host: str, port: int) -> None:
    """Raise ConfigError where nobody could listen at this address now."""
    with zmq.Context() as context, _listen(context, host, port):
        pass


def _listen(context: zmq.Context, host: str, port: int) -> zmq.Socket:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, CUT_OFF_BYTES)
    router.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a machine that is switched off closes nothing
    router.setsockopt(zmq.IPV6, ":" in host)
    try:
        router.bind(channel_address(host, port))
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(
            "the side channel can listen at its address", host=host, port=port, reason=str(error)
        ) from error
    return router


def _outcome(done: Future[Reply]) -> Reply:
    try:
        return done.result()
    except Exception as error:  # of any kind: the caller waits for an answer
        return _failure(error)


def _failure(error: Exception) -> Failed:
    """The answer to an exception of a handler; one that is not ours is told without its details."""
    if isinstance(error, DcpjaxError):
        return failed(error)
    _log.error("a message could not be handled", exc_info=error)
    return Failed(rule="the engine failed on this message; its log has the reason")
