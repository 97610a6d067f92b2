"""Errors as OpenAI clients read them: `{"error": {"message", "type", "param", "code"}}`, whatever went wrong.

Two rules beyond the shape:

1. NeMo Gym takes a 400 for a full context when its body says "context length" or "max_tokens" anywhere, and goes on
   with an empty answer. So nothing but a full context says these words; only a client that sent a bad `max_tokens`
   reads its name.
2. What is unexpected is logged in full and answered generically. No message repeats the request's content.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

_logger = logging.getLogger(__name__)

_BAD_REQUEST = "invalid_request_error"
_SERVER_ERROR = "server_error"
_OVERFLOW = "context_length_exceeded"
_TOO_LATE = "deadline_exceeded"
_CLIENT_CLOSED_REQUEST = 499
_HTTP_BAD_REQUEST = 400
_HTTP_SERVER_ERROR = 500


class ApiError(Exception):
    """An error with its HTTP form. `param` is the request's field that is wrong, `code` a word for programs."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = _HTTP_BAD_REQUEST,
        error_type: str = _BAD_REQUEST,
    ) -> None:
        """`status` is the HTTP status; the default is the client's mistake."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.error_type = error_type


def bridge_stopping() -> ApiError:
    """Return the error of a request that still runs when the bridge's grace period is over."""
    return ApiError("the bridge stops", status=503, error_type="service_unavailable", code="bridge_stopping")


def not_let_in() -> ApiError:
    """Return the error of a request whose sidecar asks the bridge for a token that it does not have, or not yet."""
    return ApiError(
        "the sidecar does not let the bridge in: its token is not the one in --sidecar-token-file",
        status=503,
        error_type="service_unavailable",
        code="sidecar_unavailable",
    )


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The request's field that is wrong."""
    code: str | None
    """A word for programs."""


class ErrorAnswer(BaseModel):
    """Every error's answer."""

    error: ErrorBody


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The client's mistake."},
    "5XX": {"model": ErrorAnswer, "description": "The engine's, a sidecar's or the bridge's."},
}
"""What any route may answer, for OpenAPI."""


class ClientDisconnectedError(Exception):
    """The client left before its answer was complete; nobody reads what is answered."""


@dataclass(frozen=True, slots=True)
class _HttpForm:
    status: int
    error_type: str
    code: str


_HTTP_FORMS = {
    grpc.StatusCode.INVALID_ARGUMENT: _HttpForm(400, _BAD_REQUEST, "invalid_value"),
    grpc.StatusCode.OUT_OF_RANGE: _HttpForm(400, _BAD_REQUEST, _OVERFLOW),
    grpc.StatusCode.NOT_FOUND: _HttpForm(404, _BAD_REQUEST, "not_found"),
    grpc.StatusCode.FAILED_PRECONDITION: _HttpForm(400, _BAD_REQUEST, "tape_sealed"),
    # A tape's limits are for good, and a 429 is retried without end.
    grpc.StatusCode.RESOURCE_EXHAUSTED: _HttpForm(400, _BAD_REQUEST, "limit_reached"),
    # The call's own weights are gone: the client may go on with the new ones, but not by this call.
    grpc.StatusCode.ABORTED: _HttpForm(400, _BAD_REQUEST, "stale_weights"),
    grpc.StatusCode.UNAVAILABLE: _HttpForm(503, "service_unavailable", "sidecar_unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: _HttpForm(504, "timeout", "sidecar_timeout"),
    grpc.StatusCode.INTERNAL: _HttpForm(500, _SERVER_ERROR, "engine_error"),
}
"""The one table from gRPC's statuses to HTTP; a status that is not here is unexpected."""

_TOO_LARGE = "larger than max"
"""What gRPC says, at either end, of a message above the limit; the numbers follow."""

_FIELD = re.compile(r"(?P<path>[a-z_][\w.\[\]]*): ")
_OPENAI_FIELDS = {
    "prompt_token_ids": "messages",
    "tape_id": "metadata.tape_id",
    "lora_name": "model",
    "structured_output": "response_format",
    "json_schema": "response_format",
}
"""Fields of GenerateRequest that have another name in OpenAI's API."""


def from_rpc(error: grpc.aio.AioRpcError) -> ApiError:
    """Return `error`, which a sidecar or the channel to it raised, in its HTTP form."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        _logger.error("a sidecar does not let this bridge in: %s", error.details())
        return not_let_in()
    form = _HTTP_FORMS.get(error.code())
    if form is None:
        _logger.error("unexpected status from a sidecar: %s", error)
        return _unexpected()
    message = error.details() or error.code().name
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return ApiError(f"the prompt is too large for the sidecar: {message}", status=413, code="request_too_large")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        message = f"the sidecar is not available: {message}"
    param = None
    if form.error_type == _BAD_REQUEST and (named := _FIELD.match(message)):
        field = named["path"].rpartition(".")[2].partition("[")[0]
        param = _OPENAI_FIELDS.get(field, field)
        message = message[named.end() :]
        if error.code() is not grpc.StatusCode.OUT_OF_RANGE:
            message = f"{param}: {message}"
    return ApiError(message, param=param, code=form.code, status=form.status, error_type=form.error_type)


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(grpc.aio.AioRpcError, _answer_rpc_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnectedError, _answer_nobody)
    app.add_exception_handler(Exception, _answer_unexpected)


def respond(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return `error` as an answer in OpenAI's shape."""
    if error.code == _TOO_LATE:
        # Clients try again what has a status from 500 on, and it would take as long.
        headers = {**(headers or {}), "x-should-retry": "false"}
    return JSONResponse(to_json(error), status_code=error.status, headers=headers)


def to_json(error: ApiError) -> dict[str, dict[str, str | None]]:
    """Return `error` as JSON in OpenAI's shape."""
    message, param = error.message, error.param
    if error.code != _OVERFLOW and param != "max_tokens":
        message, param = _say_no_overflow(message), None if param is None else _say_no_overflow(param)
    return {"error": {"message": message, "type": error.error_type, "param": param, "code": error.code}}


def to_api_error(error: Exception) -> ApiError:
    """Return what ended an answer that had begun, in the form that it has before. What is unexpected is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc(error)
    _logger.error("an answer ends before its time", exc_info=error)
    return _unexpected()


def _unexpected() -> ApiError:
    return ApiError(
        "internal error; the bridge's log has the details",
        code="internal_error",
        status=_HTTP_SERVER_ERROR,
        error_type=_SERVER_ERROR,
    )


def _say_no_overflow(message: str) -> str:
    return message.replace("max_tokens", "max_completion_tokens").replace("context length", "context size")


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond(error)


async def _answer_rpc_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, grpc.aio.AioRpcError)
    return respond(from_rpc(error))


async def _answer_validation_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # A place in broken JSON is a number, not a field.
    path = [] if first["type"] == "json_invalid" else [str(part) for part in first["loc"] if part != "body"]
    problem = f"{first['msg']}: {first['ctx']['error']}" if first["type"] == "json_invalid" else str(first["msg"])
    field = ".".join(path)
    return respond(ApiError(f"{field or 'request body'}: {problem}", param=field or None, code="invalid_value"))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    error_type = _SERVER_ERROR if error.status_code >= _HTTP_SERVER_ERROR else _BAD_REQUEST
    headers = dict(error.headers) if error.headers else None
    return respond(ApiError(message, status=error.status_code, error_type=error_type), headers)


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    # The request's line in the log says so by the status; the path may have a tape's id.
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _answer_unexpected(_request: Request, _error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it in full.
    return respond(_unexpected())
