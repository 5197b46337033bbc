"""The server over ASGI in this process, and as a real one on a port of its own."""

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from dcpjax.errors import EngineDeadError
from dcpjax.llm.sequence import TextSide
from dcpjax.server import run
from dcpjax.server.app import create_app
from dcpjax.server.engine_thread import EngineClient
from dcpjax.server.service import Service
from tests.fakes import CountUpEngine, byte_tokenizer

MODEL = "counter"


@dataclass
class Gate:
    """Lets the engine make as many steps as a test allows, and tells when it waits for one."""

    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_open: bool = False

    def __call__(self) -> None:
        if not self.is_open:
            self.waiting.release()
            self.permits.acquire()

    def allow(self, steps: int) -> None:
        self.permits.release(steps)

    def open(self) -> None:
        self.is_open = True
        self.permits.release(1000)


@dataclass
class Api:
    """A client of the application, and what is behind it."""

    http: httpx.AsyncClient
    engine: CountUpEngine
    client: EngineClient
    text: TextSide

    async def complete(self, prompt: Any = "a", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, **fields}
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> CountUpEngine:
    return CountUpEngine()


@contextlib.asynccontextmanager
async def open_api(
    engine: CountUpEngine,
    *,
    max_open: int = 64,
    api_keys: tuple[str, ...] = (),
    has_tokenizer: bool = True,
) -> AsyncIterator[Api]:
    async with EngineClient(engine, max_open=max_open) as client:
        text = TextSide.of(engine, byte_tokenizer() if has_tokenizer else None)
        service = Service(
            client, text, max_model_len=engine.max_model_len, model_names=(MODEL, "alias")
        )
        app = create_app(service, api_keys=api_keys)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Api(http, engine, client, text)


@pytest.fixture
async def api(engine: CountUpEngine) -> AsyncIterator[Api]:
    async with open_api(engine) as api:
        yield api


@dataclass
class LiveServer:
    """A uvicorn server in a thread."""

    url: str
    engine: CountUpEngine
    server: run.GracefulServer
    ended: "Future[bool]"  # what serve returned or raised

    def signal(self) -> None:
        self.server.handle_exit(signal.SIGTERM, None)


@contextlib.contextmanager
def live_server(engine: CountUpEngine, **settings: Any) -> Iterator[LiveServer]:
    config = run.ServerConfig(port=0, model_names=(MODEL,), **settings)
    ready: Future[run.GracefulServer] = Future()
    ended: Future[bool] = Future()

    def serve() -> None:
        with run.bind(config) as bound:
            address.set_result(run.url_of(bound))
            coroutine = run.serve(
                engine,
                byte_tokenizer(),
                config,
                bound,
                max_num_seqs=engine.max_num_seqs,
                on_ready=ready.set_result,
            )
            try:
                ended.set_result(asyncio.run(coroutine))
            except EngineDeadError as error:
                ended.set_exception(error)

    address: Future[str] = Future()
    thread = threading.Thread(target=serve)
    thread.start()
    live = LiveServer(address.result(20), engine, ready.result(20), ended)
    try:
        yield live
    finally:
        if isinstance(engine.gate, Gate):
            engine.gate.open()
        if not ended.done():
            live.signal()
            live.signal()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def live(engine: CountUpEngine) -> Iterator[LiveServer]:
    with live_server(engine) as live:
        yield live


def events_of(text: str) -> list[Any]:
    """The JSON of the events of a stream, which must end with [DONE]."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
