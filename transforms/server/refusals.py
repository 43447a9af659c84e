"""Error responses in OpenAI's form, with weft's own error inside; and JSON responses."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from weft.errors import RequestError, WeftError
from weft.transforms.server.host import BusyError, ClosedError

_LOG = logging.getLogger("weft.server")


class Refusal(Exception):
    """An error response.

    Args:
        status: the HTTP status.
        message, kind: the fields `message` and `type` of OpenAI's error object.
        more: its other fields, such as `param` and `code`.
    """

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", **more: Any
    ) -> None:
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": None, "code": None, **more}
        }


def refusal_of(error: BaseException) -> Refusal:
    """The response to an error. An unexpected one is logged with its traceback."""
    refusal = _refusal_of(error)
    if refusal.status == 500 and not isinstance(error, WeftError | Refusal):
        _LOG.error("a request was answered by %d", refusal.status, exc_info=error)
    return refusal


def _refusal_of(error: BaseException) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, WeftError):
        ours: dict[str, Any] = {
            "weft": {"call": error.call, "seen": error.problem, "instead": error.instead}
        }
        if isinstance(error, BusyError):
            return Refusal(429, str(error), "rate_limit_error", code="busy", **ours)
        if isinstance(error, ClosedError):
            return Refusal(503, str(error), "server_error", code="closed", **ours)
        if isinstance(error, RequestError):
            # Without its call, which the server wrote and the client does not know.
            return Refusal(400, f"{error.problem}; instead: {error.instead}", **ours)
        return Refusal(500, str(error), "server_error", **ours)
    # Deep nesting exhausts Python's stack while the body is read: it is the client's mistake.
    if isinstance(error, RecursionError):
        return Refusal(400, "lists and objects within each other, too many of them")
    return Refusal(500, f"{type(error).__name__}: {error!s:.300}", "server_error")


def event(body: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(body) + b"\n\n"


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def as_json(body: Any) -> bytes:
    """JSON in ASCII; since JSON has no infinity or NaN, ±infinity is ±9999, as in vLLM, and NaN is
    null."""
    # Infinities are rare: only a body that has one is copied.
    try:
        return _ENCODER.encode(body).encode()
    except ValueError:
        return _ENCODER.encode(_finite(body)).encode()


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A body as an answer."""
    return Response(as_json(body), status, headers, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, float) and abs(value) == float("inf"):
        return max(min(value, 9999.0), -9999.0)
    return value
