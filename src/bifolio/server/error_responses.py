"""Errors in the form of the OpenAI API: a status, and an object that names the parameter."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response

from bifolio.errors import (
    BifolioError,
    EngineDeadError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from bifolio.request import ErrorCode
from bifolio.wording import cut

MOST_CHARS = 1000
"""Of the text of an error: what a template or a library says may hold what a client sent."""

_CODES = {
    HTTPStatus.BAD_REQUEST: "invalid_request",
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.INTERNAL_SERVER_ERROR: ErrorCode.INTERNAL,
}
"""Codes of errors that have none of their own, where the status is called otherwise."""


class ErrorResponse(NamedTuple):
    """One error as HTTP shows it. Without a `code` it has that of its status."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed

    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        status = HTTPStatus(self.status)
        own = _CODES.get(status) or status.phrase.lower().replace(" ", "_").replace("-", "_")
        return {
            "error": {
                "message": cut(self.message, MOST_CHARS),
                "type": self.kind,
                "param": self.param,
                "code": self.code or own,
            }
        }

    def response(self) -> Response:
        return Response(
            orjson.dumps(self.body()),
            self.status,
            headers=self.headers,
            media_type="application/json",
        )

    def event(self) -> bytes:
        """The error as an event of a stream that has begun; nothing follows it."""
        return b"data: " + orjson.dumps(self.body()) + b"\n\n"


MODEL_NOT_FOUND = "model_not_found"


def failure_of(error: Exception) -> ErrorResponse:
    """The response for an error of the tree, or any other."""
    text = str(error)
    match error:
        case RequestError():
            status = 404 if error.code == MODEL_NOT_FOUND else 400
            return ErrorResponse(status, "invalid_request_error", text, error.param, error.code)
        case OverloadedError():
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ErrorResponse(429, "rate_limit_error", text, code="overloaded", headers=wait)
        case EngineDeadError():
            return ErrorResponse(
                503, "server_error", text, code="engine_unavailable", headers={"Retry-After": "5"}
            )
        case GenerationError(code=ErrorCode.DEADLINE):
            # Clients of OpenAI send again what failed with 5xx; this would fail again.
            once = {"x-should-retry": "false"}
            return ErrorResponse(504, "timeout_error", text, code=error.code, headers=once)
        case GenerationError():
            return ErrorResponse(500, "server_error", text, code=error.code)
    known = isinstance(error, BifolioError)
    return ErrorResponse(
        500, "server_error", text if known else "internal error", code="internal_error"
    )
