"""Errors as the OpenAI API words them: one JSON object, one status, no HTML.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dcpjax.errors import DcpjaxError, EngineDeadError, RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    503: "service_unavailable_error",
}


@dataclass(frozen=True)
class ApiError:
    """What one failed call answers."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def body(self) -> Mapping[str, object]:
        kind = _TYPES.get(self.status, "internal_server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class UnavailableError(DcpjaxError):
    """Too many requests wait, or the server is shutting down. Another attempt may succeed."""


class UnknownModelError(DcpjaxError):
    """A model name that this server does not answer to."""


class BodyTooLargeError(DcpjaxError):
    """A request body beyond the limit."""


class LegError(DcpjaxError):
    """Of the router: an engine did not answer, or its answer broke off."""


class SequenceFailedError(DcpjaxError):
    """The engine gave up one sequence, and goes on with the others."""


class AccessError(DcpjaxError):
    """A missing or wrong API key."""


def to_api_error(error: Exception) -> ApiError:
    """The answer to an exception; what is not one of ours is an internal error without details."""
    match error:
        case RequestError():
            return ApiError(400, str(error), error.param, error.code)
        case AccessError():
            return ApiError(401, str(error), code="invalid_api_key")
        case UnknownModelError():
            return ApiError(404, str(error), "model", "model_not_found")
        case BodyTooLargeError():
            return ApiError(413, str(error), code="request_too_large")
        case SequenceFailedError():
            return ApiError(500, str(error), code="sequence_failed")
        case UnavailableError() | EngineDeadError() | LegError():
            return ApiError(503, str(error), code="unavailable")
        case _:
            return ApiError(500, "the server failed on this request; its log has the reason")
