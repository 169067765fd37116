"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``, with the field's name in ``param``."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from tiercel.core.errors import UserError
from tiercel.server.engine_client import EngineDied

logger = logging.getLogger(__name__)

TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""By status; other 4xx are ``invalid_request_error``, 5xx ``server_error``."""


class ApiError(HTTPException):
    """What a client is told instead of an answer.

    Args:
        status: HTTP status.
        message: what, where, and what to do.
        param: the field or header that is wrong.
        code: OpenAI's code, for programs.
        headers: sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param, code)


def as_api_error(error: Exception) -> ApiError:
    """What clients are told of an exception; one that nobody foresaw is logged, and told without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, EngineDied):
        return ApiError(503, "the engine has ended; try again later", code="engine_dead", headers={"Retry-After": "5"})
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why")


def error_body(error: ApiError) -> dict[str, Any]:
    """The body that goes with an error."""
    kind = TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    """ASCII JSON: a message may quote half a surrogate pair, which has no UTF-8."""
    body = json.dumps(error_body(error)).encode()
    return Response(body, error.status_code, error.headers, "application/json")


def handle_errors(app: FastAPI) -> None:
    """Have every error of ``app`` in OpenAI's shape."""

    async def answer(_: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))

    async def answer_misfit(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_misfit(error.errors(), error.body))

    for kind in (HTTPException, UserError, EngineDied, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, answer_misfit)


def _misfit(errors: Sequence[Any], body: Any) -> ApiError:
    """The first field that does not fit; every way of a union that was tried is told."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']} at position {first['loc'][-1]}")
    place = _place(first, body)
    said = list(dict.fromkeys(error["msg"] for error in errors if _place(error, body) == place))
    return ApiError(400, f"{place or 'the body'}: {', or '.join(said)}", place or None)


def _place(error: Any, body: Any) -> str:
    """``messages[0].content`` for ``("body", "messages", 0, "content", "str")``: names of a union's members are left out."""
    source, *parts = error["loc"]
    if source != "body":
        return str(parts[-1])
    place, here = "", body
    for number, part in enumerate(parts, start=1):
        is_missing = error["type"] == "missing" and number == len(parts)
        if isinstance(here, Mapping) and (part in here or is_missing):
            place += f".{part}" if place else str(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            place += f"[{part}]"
            here = here[part]
    return place
