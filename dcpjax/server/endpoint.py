"""What the endpoints of the server and of the router share: reading a body, wording an error."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dcpjax.errors import DcpjaxError
from dcpjax.server.errors import ApiError, BodyTooLargeError, to_api_error
from dcpjax.server.streaming import ClientLeftError, JsonResponse

MAX_BODY_BYTES = 32 * 1024 * 1024
CLIENT_LEFT = 499  # nobody reads it; logs do


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        BodyTooLargeError: after reading no more than the limit.
    """
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError("the body is too large", limit_bytes=MAX_BODY_BYTES)
    return bytes(body)


async def _error(request: Request, error: Exception) -> Response:
    answer = to_api_error(error)
    return JsonResponse(answer.body(), answer.status)


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the application."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = ApiError(error.status_code, message)
    return JsonResponse(answer.body(), answer.status, headers=error.headers)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


ERROR_HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _http_error,
    ClientLeftError: _client_left,
    ClientDisconnect: _client_left,
    DcpjaxError: _error,
    Exception: _error,
}
