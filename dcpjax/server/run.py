"""Runs the application under uvicorn: binds the port early, shuts down in order.

The first signal refuses new calls, lets running ones finish for a while and other engines take what
was computed for them, then ends each of them properly; the second one ends them at once; the third
one leaves without waiting for anything, be it the step that the engine is in. When the engine
fails, every stream says so and the server ends.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import HANDLED_SIGNALS

from dcpjax.errors import ConfigError
from dcpjax.llm.interfaces import TokenEngine
from dcpjax.llm.sequence import TextSide
from dcpjax.server.app import create_app
from dcpjax.server.engine_thread import EngineClient
from dcpjax.server.service import Service
from dcpjax.text.tokenizer import Tokenizer

_FLUSH_SECONDS = 5  # for answers that are complete and not yet read by their clients
_ABORT_SECONDS = 30  # for the step that is running when everything is aborted
KEEP_ALIVE_SECONDS = 30
EXIT_FORCED = 1
"""Of a process that was told to leave in the middle of a step."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server, beside those of the engine.

    ``max_queued_requests`` is what may wait beyond the sequences computed at the same time.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queued_requests: int = 256
    shutdown_timeout: float = 30.0
    log_level: str = "warning"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port is in [0, 65535], 0 for any free one", port=self.port)
        if self.max_queued_requests < 0:
            raise ConfigError(
                "max_queued_requests is at least 0", max_queued_requests=self.max_queued_requests
            )
        if self.shutdown_timeout < 0:
            raise ConfigError(
                "shutdown_timeout is at least 0", shutdown_timeout=self.shutdown_timeout
            )
        if not all(self.api_keys):
            raise ConfigError("an API key is not empty")


class Address(Protocol):
    """Where to listen."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


class Calls(Protocol):
    """What is under way in a server that is to end."""

    def stop_accepting(self) -> None: ...

    def abort_all(self) -> None:
        """End every open call soon, properly."""
        ...

    def abandon(self) -> None:
        """Let the exit wait for nothing."""
        ...

    async def wait_idle(self) -> None: ...

    async def wait_handed_over(self) -> None:
        """Until no other process needs this one any more for what it has answered."""
        ...


def bind(config: Address) -> socket.socket:
    """A socket that holds the port and does not listen yet.

    Raises:
        ConfigError: the port is in use, not allowed, or the host is unknown.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: no host name at all, says idna
        raise _cannot_listen(config, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _cannot_listen(config, error) from error
    return bound


def listen(bound: socket.socket, config: Address) -> None:
    """Take connections.

    Raises:
        ConfigError: somebody else took the port in the meantime.
    """
    try:
        bound.listen()
    except OSError as error:
        raise _cannot_listen(config, error) from error


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    engine: TokenEngine,
    tokenizer: Tokenizer | None,
    config: ServerConfig,
    bound: socket.socket,
    *,
    max_num_seqs: int,
    on_ready: Callable[["GracefulServer"], None],
) -> bool:
    """Serve until a signal arrives, then close the engine.

    Returns:
        whether the engine is closed. After a third signal it may still be in a step, and must not
        be touched any more: leave the process.

    Raises:
        ConfigError: somebody else took the port in the meantime.
        EngineDeadError: the engine failed.
    """
    try:
        listen(bound, config)
    except ConfigError:
        engine.close()
        raise
    client = EngineClient(
        engine,
        max_open=max_num_seqs + config.max_queued_requests,
        on_death=lambda: server.end_failed(),
    )
    service = Service(
        client,
        TextSide.of(engine, tokenizer),
        max_model_len=engine.max_model_len,
        model_names=config.model_names,
    )
    server = GracefulServer(
        web_config(create_app(service, api_keys=config.api_keys), config.log_level),
        client,
        shutdown_timeout=config.shutdown_timeout,
        on_ready=on_ready,
    )
    async with client:
        await server.serve(sockets=[bound])
        client.check_not_failed()
    return client.has_ended


def web_config(app: ASGIApp, log_level: str) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=log_level,
        lifespan="off",
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


class GracefulServer(uvicorn.Server):
    """A uvicorn server whose streams end with a finish reason, not with a closed socket."""

    def __init__(
        self,
        config: uvicorn.Config,
        calls: Calls,
        *,
        shutdown_timeout: float,
        on_ready: Callable[["GracefulServer"], None],
    ) -> None:
        super().__init__(config)
        self._calls = calls
        self._shutdown_timeout = shutdown_timeout
        self._on_ready = on_ready
        self._num_signals = 0
        self._drain_task: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready(self)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As long as the server runs. One more that comes while a forced server leaves ends the
        process at once, with the same exit code."""
        with super().capture_signals():
            yield
        if self.force_exit and threading.current_thread() is threading.main_thread():
            for number in HANDLED_SIGNALS:
                signal.signal(number, lambda *_: os._exit(EXIT_FORCED))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._begin_exit)

    def _begin_exit(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._calls.stop_accepting()
            self._drain_task = self._loop.create_task(self._drain())
        elif self._num_signals == 2:
            self._calls.abort_all()
        else:
            self.force_exit = self.should_exit = True
            self._calls.abandon()

    def end_failed(self) -> None:
        """The engine failed: let the streams say so to their clients, then leave."""
        self.should_exit = True

    async def _drain(self) -> None:
        """Wait for running calls and for what they leave behind, then abort them, then leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_timeout):
                await self._calls.wait_idle()
                await self._calls.wait_handed_over()
        self._calls.abort_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._calls.wait_idle(), _ABORT_SECONDS)
        self.should_exit = True


def _cannot_listen(config: Address, error: OSError | ValueError) -> ConfigError:
    return ConfigError(
        "the server needs an address to listen on",
        host=config.host,
        port=config.port,
        reason=(error.strerror if isinstance(error, OSError) else None) or str(error),
    )
