"""One OpenAI endpoint before several prefill and decode engines: its application and its process.

The router computes nothing and holds no text: it asks a prefill engine to compute the prompt, hands
what that answers to a decode engine, and passes the bytes of the answer on as they come.
"""

import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack

import httpx
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dcpjax.errors import DcpjaxError
from dcpjax.server.endpoint import ERROR_HANDLERS, read_body
from dcpjax.server.metrics import CONTENT_TYPE
from dcpjax.server.middleware import ApiKey, RequestId
from dcpjax.server.router_calls import OpenCalls
from dcpjax.server.router_config import RouterConfig, normal_url
from dcpjax.server.router_legs import Call
from dcpjax.server.router_metrics import Outcome, RouterMetrics
from dcpjax.server.router_peers import HealthChecks, Peers
from dcpjax.server.router_sender import Sender
from dcpjax.server.router_ways import CHAT, Ways
from dcpjax.server.run import KEEP_ALIVE_SECONDS, GracefulServer, listen, web_config
from dcpjax.server.streaming import ClientLeftError, while_connected

_GENERATING = frozenset({"/v1/completions", CHAT})
_PASSED_ON = ("authorization", "content-type")

_log = logging.getLogger(__name__)

_KEPT_CONNECTIONS = 256
_KEPT_SECONDS = KEEP_ALIVE_SECONDS / 2
"""The router lets go of an idle connection before an engine does, so that no call is sent into one
that is being closed."""


class _Router:
    """The endpoints."""

    def __init__(self, ways: Ways, calls: OpenCalls, metrics: RouterMetrics) -> None:
        self._ways = ways
        self._calls = calls
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            *(Route(path, self.relay, methods=["POST"]) for path in sorted(_GENERATING)),
            Route("/tokenize", self.relay, methods=["POST"]),
            Route("/detokenize", self.relay, methods=["POST"]),
            Route("/v1/models", self.relay),
            Route("/v1/models/{name:path}", self.relay),
            Route("/version", self.relay),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
        ]

    async def relay(self, request: Request) -> "_Relay":
        return _Relay(self._ways, self._calls, self._metrics, request)

    async def health(self, request: Request) -> Response:
        self._calls.check_accepting()
        self._ways.check_decode()
        return Response()

    async def load(self, request: Request) -> Response:
        return Response(b'{"server_load":%d}' % self._calls.num_open, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


class _Relay:
    """One call on its way, as an ASGI response. It is open from the first byte of its body on."""

    def __init__(
        self, ways: Ways, calls: OpenCalls, metrics: RouterMetrics, request: Request
    ) -> None:
        self._ways = ways
        self._calls = calls
        self._metrics = metrics
        self._request = request
        self._path: str = request.scope["raw_path"].decode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = Sender(send)
        try:
            await self._relay(sender)
        except (ClientLeftError, ClientDisconnect):  # which has cancelled the legs
            outcome = Outcome.LEFT
        else:
            outcome = sender.outcome
        if self._path in _GENERATING:
            self._metrics.calls[outcome].inc()

    async def _relay(self, sender: Sender) -> None:
        """Answer, or say what went wrong."""
        try:
            async with self._calls.opened():
                call = await self._read_call()
                await while_connected(self._request.receive, self._run(sender, call))
        except DcpjaxError as error:
            await sender.fail(error)
            if sender.outcome is Outcome.BROKEN:
                _log.warning("a stream broke: %s", error)

    async def _read_call(self) -> Call:
        given = self._request.headers
        return Call(
            method=self._request.method,
            path=self._path,
            body=await read_body(self._request),
            headers={
                **{name: given[name] for name in _PASSED_ON if name in given},
                "x-request-id": self._request.state.request_id,
                "accept-encoding": "identity",  # the bytes go on as they are
            },
        )

    async def _run(self, sender: Sender, call: Call) -> None:
        async with AsyncExitStack() as legs:
            way = self._ways.generate if self._path in _GENERATING else self._ways.direct
            await sender.send(await way(call, legs))


def create_router(
    config: RouterConfig, peers: Peers, http: httpx.AsyncClient, calls: OpenCalls
) -> Starlette:
    """The ASGI application over engines whose health somebody else keeps up to date."""
    metrics = RouterMetrics(peers)
    ways = Ways(
        http,
        peers,
        metrics,
        config.prefill_fallback,
        is_pipelined=config.pipelined_prefill,
    )
    middleware = [Middleware(RequestId)]
    if config.api_keys:
        middleware.append(Middleware(ApiKey, keys=config.api_keys))
    app = Starlette(
        routes=_Router(ways, calls, metrics).routes(),
        middleware=middleware,
        exception_handlers=dict(ERROR_HANDLERS),
    )
    app.router.redirect_slashes = False
    return app


async def serve(
    config: RouterConfig,
    bound: socket.socket,
    *,
    on_ready: Callable[[GracefulServer, Peers], None],
) -> None:
    """Route until a signal arrives.

    Raises:
        ConfigError: somebody else took the port in the meantime.
    """
    listen(bound, config)
    peers = Peers(
        [normal_url(url) for url in config.prefill_urls],
        [normal_url(url) for url in config.decode_urls],
    )
    calls = OpenCalls(config.max_open_requests)
    async with _engine_client(config) as http:
        checks = HealthChecks(
            http, peers, interval=config.health_interval, timeout=config.health_timeout
        )
        async with checks.running():
            server = GracefulServer(
                web_config(create_router(config, peers, http, calls), config.log_level),
                calls,
                shutdown_timeout=config.shutdown_timeout,
                on_ready=lambda server: on_ready(server, peers),
            )
            await server.serve(sockets=[bound])


def _engine_client(config: RouterConfig) -> httpx.AsyncClient:
    """Waits for answers as long as they take, since a prompt may take minutes; whether an engine
    still lives is the health checks' business. Reads nothing from the environment."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=config.connect_timeout),
        limits=httpx.Limits(
            max_connections=None,  # max_open_requests bounds them
            max_keepalive_connections=_KEPT_CONNECTIONS,
            keepalive_expiry=_KEPT_SECONDS,
        ),
        trust_env=False,
    )
