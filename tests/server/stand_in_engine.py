"""Engines behind a router: real sockets, no model, and answers that a test scripts.

Each call is answered by the next of the scripts that the test has queued, else by ``usual``, which
is :func:`answer` unless a test says otherwise. A script runs in the thread of its connection and
may do anything to it.
"""

import contextlib
import json
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = ("Hel", "lo", "!")


class Exchange(BaseHTTPRequestHandler):
    """One call to a stand-in and its answer."""

    protocol_version = "HTTP/1.1"
    server: "_Server"

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def do_GET(self) -> None:
        engine = self.server.engine
        if self.path != "/health":
            engine.note(self, b"")
            self.whole(200, {"path": self.path, "engine": engine.name})
            return
        engine.may_answer_health.wait()
        self.whole(200 if engine.is_healthy else 503, {})

    def do_POST(self) -> None:
        self.raw = self.rfile.read(int(self.headers["Content-Length"]))
        engine = self.server.engine
        engine.note(self, self.raw)
        script = engine.scripts.pop(0) if engine.scripts else engine.usual
        with contextlib.suppress(ConnectionError):  # the router may leave while a script writes
            script(self)

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def engine(self) -> "StandIn":
        return self.server.engine

    def whole(self, status: int, content: Any, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.begin(status, "application/json", length=len(body), **headers)
        self.wfile.write(body)

    def begin(self, status: int, kind: str, *, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.close_connection = True
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def begin_stream(self) -> None:
        self.begin(200, "text/event-stream; charset=utf-8")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, content: Any) -> None:
        self.chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def end_stream(self, *, has_done: bool = True) -> None:
        if has_done:
            self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Break the connection, as the death of a process does."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def wait_until_left(self) -> None:
        """Until the other side has closed the connection."""
        select.select([self.connection], [], [], 30)
        assert self.connection.recv(1) == b""
        self.engine.left.release()


Script = Callable[[Exchange], None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    engine: "StandIn"


class StandIn:
    """An engine on a port, and what it was asked."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name = name
        self.calls: list[dict[str, Any]] = []
        self.raw_bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.scripts: list[Script] = []
        self.usual: Script = answer
        self.is_healthy = True
        self.may_answer_health = threading.Event()
        self.may_answer_health.set()
        self.left = threading.Semaphore(0)
        self._server = _Server(("127.0.0.1", port), Exchange)
        self._server.engine = self
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def note(self, exchange: Exchange, raw: bytes) -> None:
        self.raw_bodies.append(raw)
        self.headers.append({name.lower(): value for name, value in exchange.headers.items()})
        with contextlib.suppress(ValueError):
            self.calls.append(json.loads(raw))

    def stop(self) -> None:
        """No connection is taken any more; open ones go on."""
        self.may_answer_health.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def stand_in(name: str, port: int = 0) -> Iterator[StandIn]:
    engine = StandIn(name, port)
    try:
        yield engine
    finally:
        engine.stop()


def answer(exchange: Exchange) -> None:
    """What an engine that works does: KV for another one, or tokens."""
    params = exchange.body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode"):
        prefilled(exchange)
    elif exchange.body.get("stream"):
        exchange.begin_stream()
        for token in TOKENS:
            exchange.event(chunk_of(exchange, token))
        exchange.end_stream()
    else:
        exchange.whole(200, {**chunk_of(exchange, "".join(TOKENS)), "kv": params})


def prefilled(exchange: Exchange) -> None:
    engine = exchange.engine
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine.name,
        "remote_request_id": f"{engine.name}-{len(engine.calls)}",
    }
    exchange.whole(200, {"choices": [], "kv_transfer_params": params})


def chunk_of(exchange: Exchange, text: str) -> dict[str, Any]:
    is_chat = exchange.path == "/v1/chat/completions"
    part = {"delta": {"content": text}, "message": {"role": "assistant", "content": text}}
    return {
        "id": "x",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": None, **(part if is_chat else {"text": text})}],
    }


def refusal(status: int, message: str = "no", **headers: str) -> Script:
    error = {"error": {"message": message, "type": "t", "param": "p", "code": "c"}}
    return lambda exchange: exchange.whole(status, error, **headers)


def reset(exchange: Exchange) -> None:
    """Break before the first byte of an answer."""
    exchange.reset()


def without_params(exchange: Exchange) -> None:
    exchange.whole(200, {"choices": []})


def wait_until_left(exchange: Exchange) -> None:
    exchange.wait_until_left()


def break_after(num_events: int, rest: bytes = b"") -> Script:
    """Stream some events and a part of another one, then break."""

    def script(exchange: Exchange) -> None:
        exchange.begin_stream()
        for token in TOKENS[:num_events]:
            exchange.event(chunk_of(exchange, token))
        if rest:
            exchange.chunk(rest)
        exchange.reset()

    return script


def break_in_body(exchange: Exchange) -> None:
    exchange.begin(200, "application/json", length=1000)
    exchange.wfile.write(b'{"choices": [')
    exchange.reset()


def stream_until_left(exchange: Exchange) -> None:
    exchange.begin_stream()
    exchange.event(chunk_of(exchange, TOKENS[0]))
    exchange.wait_until_left()


def held_stream(gate: threading.Event) -> Script:
    """One event, and the rest of the stream when the gate opens."""

    def script(exchange: Exchange) -> None:
        exchange.begin_stream()
        exchange.event(chunk_of(exchange, TOKENS[0]))
        gate.wait(30)
        for token in TOKENS[1:]:
            exchange.event(chunk_of(exchange, token))
        exchange.end_stream()

    return script
