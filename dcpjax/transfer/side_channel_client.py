"""The consumer's end of the side channel: a call, and its answer or an error within a deadline."""

import math
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import create_connection
from typing import TypeVar

import zmq

from dcpjax.errors import PeerError
from dcpjax.transfer.frames import MessageError, decode_reply, encode, to_error
from dcpjax.transfer.messages import (
    Abort,
    Aborted,
    AnyCall,
    AnyReply,
    Claim,
    Claimed,
    Computed,
    Failed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Landed,
    OtherEngine,
    Push,
    Pushed,
    Released,
    Wait,
    Welcome,
)
from dcpjax.transfer.side_channel import CALL_ID_BYTES, CUT_OFF_BYTES

Answer = TypeVar("Answer", Welcome, Claimed, Computed, Pushed, Released, HeartbeatReply, Aborted)


class PeerSilentError(PeerError):
    """No answer within the deadline. What was asked for may have happened, or be happening."""


class PeerGoneError(PeerError):
    """Another engine answers at the address of the one that was meant."""


def is_deserted(host: str, port: int, *, timeout_s: float) -> bool:
    """Whether a host says that nobody listens at a port. One that does not answer says nothing.

    A listener lives as long as its engine may write, so then the engine is gone.
    """
    try:
        create_connection((host, port), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class SideChannelClient:
    """Calls one engine. All methods may be used by many threads at once.

    Every method of a message waits at most ``timeout_s`` seconds for the answer. All but
    :meth:`push` repeat the message meanwhile; the other side notices that it is the same call.

    Args:
        address: of the listener, see ``channel_address``. Need not listen yet, or may come back.
        repeat_s: seconds without an answer after which a message is sent again.

    Raises (every method of a message):
        PeerRefusedError: it was not done; the rule and values are those of the other side.
        PeerGoneError: it was not done, by an engine that is not the one that is meant.
        PeerSilentError: nothing came; like after all that follow, it may have been done.
        PeerError: the answer is nonsense, the address is none, or the client is closed.
    """

    def __init__(self, address: str, *, repeat_s: float = 1.0) -> None:
        self.address = address
        self._repeat_s = repeat_s
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._idle: list[zmq.Socket] = []
        self._is_closed = False

    def hello(self, call: Hello, *, timeout_s: float) -> Welcome:
        return self._call(call, Welcome, timeout_s)

    def claim(self, call: Claim, *, timeout_s: float) -> Claimed:
        return self._call(call, Claimed, timeout_s)

    def wait(self, call: Wait, *, timeout_s: float) -> Computed:
        return self._call(call, Computed, timeout_s)

    def push(self, call: Push, *, timeout_s: float) -> Pushed:
        """Returns when the write has ended. After a PeerSilentError it may still go on: abort."""
        return self._call(call, Pushed, timeout_s, may_repeat=False)

    def landed(self, call: Landed, *, timeout_s: float) -> Released:
        return self._call(call, Released, timeout_s)

    def heartbeat(self, call: Heartbeat, *, timeout_s: float) -> HeartbeatReply:
        return self._call(call, HeartbeatReply, timeout_s)

    def abort(self, call: Abort, *, timeout_s: float) -> Aborted:
        return self._call(call, Aborted, timeout_s)

    def close(self) -> None:
        """End the calls of other threads with a PeerError. Idempotent."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close(linger=0)
        self._context.term()

    def _call(
        self, call: AnyCall, answer_type: type[Answer], timeout_s: float, *, may_repeat: bool = True
    ) -> Answer:
        with self._socket() as socket:
            answer = self._exchange(socket, call, timeout_s, may_repeat)
        if isinstance(answer, answer_type):
            return answer
        raise self._error(call, answer)

    def _error(self, call: AnyCall, answer: AnyReply) -> PeerError:
        match answer:
            case Failed():
                return to_error(answer, peer=self.address)
            case OtherEngine():
                return PeerGoneError(
                    "the engine at an address is the one that is expected there",
                    expected=call.engine_id,
                    found=answer.engine_id,
                    peer=self.address,
                )
            case _:
                return MessageError(
                    "an answer fits to its call",
                    call=type(call).__name__,
                    answer=type(answer).__name__,
                    peer=self.address,
                )

    def _exchange(
        self, socket: zmq.Socket, call: AnyCall, timeout_s: float, may_repeat: bool
    ) -> AnyReply:
        call_id = secrets.token_bytes(CALL_ID_BYTES)
        frames = [call_id, encode(call)]
        deadline = time.monotonic() + timeout_s
        socket.send_multipart(frames)
        while (left := deadline - time.monotonic()) > 0:
            if socket.poll(math.ceil(1000 * min(left, self._repeat_s))):
                answer = socket.recv_multipart()
                if answer[0] == call_id and len(answer) == 2:
                    return decode_reply(answer[1])
            elif may_repeat:
                socket.send_multipart(frames)
        raise PeerSilentError(
            "a peer answers within the deadline",
            peer=self.address,
            call=type(call).__name__,
            timeout_s=timeout_s,
        )

    @contextmanager
    def _socket(self) -> Iterator[zmq.Socket]:
        """A connected socket for one call.

        It is kept for the next call, except after an error: with it go the messages that it has
        not sent yet, which nobody wants to arrive after the deadline.
        """
        socket = self._take()
        try:
            yield socket
        except zmq.ContextTerminated as error:
            socket.close(linger=0)
            raise self._closed() from error
        except BaseException:  # a socket with half a message on it is used by nobody again
            socket.close(linger=0)
            raise
        self._put_back(socket)

    def _take(self) -> zmq.Socket:
        # All under the lock: `close` waits for every socket, so it has to know all of them.
        with self._lock:
            if self._is_closed:
                raise self._closed()
            return self._idle.pop() if self._idle else self._connect()

    def _connect(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, CUT_OFF_BYTES)
        # From the start: once the context ends it cannot be set any more, and what nobody takes
        # would keep the context from ending.
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in self.address)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise PeerError("a peer has an address", peer=self.address) from error
        return socket

    def _put_back(self, socket: zmq.Socket) -> None:
        with self._lock:
            if self._is_closed:
                socket.close(linger=0)
            else:
                self._idle.append(socket)

    def _closed(self) -> PeerError:
        return PeerError("a side channel is used while it is open", peer=self.address)
