"""Messages between the processes of one engine, over ZeroMQ: a leader and its followers.

Knows nothing about steps. A process that dies, stops or says that it failed is noticed by the
link's own thread, whatever the others do meanwhile, and from then on :meth:`Link.check` raises on
all of them. There is no encryption and no access control, so it belongs on a network that only the
engine's processes can reach.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from dcpjax.config import DistributedConfig
from dcpjax.engine.link_messages import (
    MAX_TEXT,
    AnyMessage,
    Close,
    Failure,
    Hello,
    Message,
    Probe,
    Refused,
    decode,
    encode,
)
from dcpjax.engine.link_socket import BEAT_SECONDS, SILENCE_SECONDS, open_socket
from dcpjax.errors import ConfigError, EngineDeadError

_GLANCE_SECONDS = 0.05  # between two looks at the link while something else is waited for
_LINGER_MS = 1000
_CLOSE_SECONDS = 5.0
"""ZeroMQ was seen to wait for ever for a socket that lingered no more; its thread is left then."""

_log = logging.getLogger(__name__)


class Link:
    """One process's end. Messages of others wait in the order of their arrival.

    Raises:
        ConfigError: the address is unknown, or the leader cannot listen there.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self.rank, self.ranks = config.node_rank, config.nnodes
        self._context = zmq.Context()
        self._socket = open_socket(self._context, config)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._names: dict[bytes, int] = {}  # of followers that said hello, at the leader
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[bytes, AnyMessage]] = queue.SimpleQueue()
        self._failure: EngineDeadError | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._is_closing = False
        self._is_ended = False  # the leader has said so: it may leave
        self._leader_knows = threading.Event()  # of a failure, or it is gone itself
        self._bell, self._bell_pull = socket.socketpair()
        for end in (self._bell, self._bell_pull):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="dcpjax-link", daemon=True)
        self._thread.start()

    # By any thread.

    def send(self, message: Message) -> None:
        """Send to all others, which are the leader for a follower."""
        self._outbox.put(encode(message))
        self._ring()

    def name(self, identity: bytes, rank: int) -> None:
        """The leader: this is the process with that node rank; strangers are not heard."""
        self._names[identity] = rank

    def receive(self, timeout: float | None = None) -> tuple[int, AnyMessage]:
        """The next message and its sender; see :meth:`receive_from`."""
        identity, message = self.receive_from(timeout)
        return self._names.get(identity, 0), message

    def receive_from(self, timeout: float | None = None) -> tuple[bytes, AnyMessage]:
        """The next message and the identity of its sender.

        Raises:
            EngineDeadError: a process is gone or failed.
            TimeoutError: nothing came for so many seconds.
        """
        stop = None if timeout is None else time.monotonic() + timeout
        while True:
            with contextlib.suppress(queue.Empty):
                return self._arrived.get(timeout=_GLANCE_SECONDS)
            self.check()
            if stop is not None and time.monotonic() > stop:
                raise TimeoutError

    def check(self) -> None:
        """Raise the EngineDeadError of a process that is gone or failed."""
        if self._failure is not None:
            raise EngineDeadError(self._failure.rule, **self._failure.values)

    def wait_for_failure(self, seconds: float) -> None:
        """As :meth:`check`, for something that is known a little later."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            self.check()
            time.sleep(_GLANCE_SECONDS)

    def on_failure(self, function: Callable[[], None]) -> None:
        """Have ``function`` called, by the link's thread, when the engine has ended."""
        self._on_failure = function

    def fail(self, reason: str) -> None:
        """Tell the others that this process failed; only the first failure counts.

        A follower returns when the leader knows, or is silent for too long.
        """
        if self._failure is None and not self._is_closing:
            self._end(self.rank, reason)
            if self.rank > 0:
                self._leader_knows.wait(SILENCE_SECONDS)

    def close(self) -> None:
        """Send what is left, then say no more. Idempotent."""
        self._is_closing = True
        self._ring()
        self._thread.join(_CLOSE_SECONDS)

    def _ring(self) -> None:
        try:
            self._bell_pull.send(b"!")
        except BlockingIOError:  # it has been rung often enough
            pass
        except OSError:  # closed: nobody is there who could send it
            _log.debug("a message came after the link was closed")

    def _end(self, rank: int, reason: str) -> None:
        self._failure = EngineDeadError(
            f"the engine ended because of its process with node rank {rank}", reason=reason
        )
        self.send(Failure(node_rank=rank, reason=reason[:MAX_TEXT]))
        self._on_failure()

    # By the link's thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._bell):
            poller.register(source, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll(int(1000 * BEAT_SECONDS)))
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
            self._receive_all()
            self._send_all()
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._receive_all()  # a last message says more than the end of the connection
                self._notice_loss()
            elif not ready and self.rank == 0:
                self._notice_loss()  # what is gone may be known a little after its connection
        self._send_all()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._bell.close()
        self._bell_pull.close()
        self._context.term()

    def _receive_all(self) -> None:
        while self._socket.poll(0):
            *route, frame = self._socket.recv_multipart()
            try:
                self._take(route[0] if route else b"", decode(frame))
            except ConfigError as error:  # a stranger: the engine's own processes go on
                _log.warning("%s", error)

    def _take(self, sender: bytes, message: AnyMessage) -> None:
        if self.rank == 0 and sender not in self._names:
            if not isinstance(message, Hello):
                return
            if len(self._names) == self.ranks - 1:
                rule = "an engine has nnodes processes, and all of this one are there"
                self._send_to(sender, encode(Refused(rule, {"nnodes": str(self.ranks)})))
                return
        if isinstance(message, Failure):
            self._leader_knows.set()  # it passes on what it hears
            if self._failure is None:
                self._end(message.node_rank, message.reason)
        elif not isinstance(message, Probe):
            self._is_ended = isinstance(message, Close)
            self._arrived.put((sender, message))

    def _send_all(self) -> None:
        while not self._outbox.empty():
            frame = self._outbox.get()
            if self.rank > 0:
                self._socket.send(frame)
            for receiver in list(self._names):
                self._send_to(receiver, frame)

    def _send_to(self, identity: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart([identity, frame])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(self._names.get(identity))

    def _notice_loss(self) -> None:
        """A connection is gone: at the leader those are tried that could be meant."""
        if self.rank > 0:
            self._lose(0)
        else:
            probe = encode(Probe())
            for identity in list(self._names):
                self._send_to(identity, probe)

    def _lose(self, rank: int | None) -> None:
        if self.rank > 0:
            self._leader_knows.set()
        if rank is not None and self._failure is None and not (self._is_closing or self._is_ended):
            self._end(rank, "it is gone, or has not answered")
