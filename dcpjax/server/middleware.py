"""What surrounds every call: request id and API key. Plain ASGI, so that streams pass through."""

import re
import secrets
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcpjax.server.errors import AccessError, to_api_error
from dcpjax.server.streaming import JsonResponse

OPEN_PATHS = frozenset({"/health", "/metrics", "/ping", "/version"})

_CLEAN_ID = re.compile(r"[!-~]{1,128}")


class RequestId:
    """Every answer carries ``X-Request-Id``, the client's own where it sent a clean one.

    The endpoints find it in ``request.state.request_id``, and when the call came (``arrival``,
    monotonic seconds).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _CLEAN_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, arrival=time.monotonic())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKey:
    """``Authorization: Bearer KEY`` is required, except for probes and metrics."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = to_api_error(AccessError("this server needs a valid API key"))
        response = JsonResponse(error.body(), error.status, headers={"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        # All keys are compared, whichever matches: the time tells nothing.
        matches = [secrets.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
