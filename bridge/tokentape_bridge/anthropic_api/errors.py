"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message", "details"}, "request_id"}`.

They are translated on their way out, so that every error is: those of the routes, and those of the key, of the limit on
bodies and of a bridge that stops, which know of no API.

Anthropic's clients try again what has a status from 500 on, unless the header `x-should-retry` says otherwise: it is
on every error, true where another try may succeed.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape.logs import REQUEST_ID_HEADER
from tokentape_bridge.errors import to_api_error, to_json
from tokentape_bridge.responses import Json
from tokentape_bridge.sse import data_frame

_PATH = re.compile(r"(/tapes/[^/]*)?/v1/messages(/.*)?")
_SERVER_ERROR = 500
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; any other is the request's fault, or from 500 on ours."""

_PASSING = frozenset({"engine_error", "sidecar_unavailable", "sidecar_timeout", "bridge_stopping"})
"""Codes of errors that need not happen again."""

_OVERFLOW = "context_length_exceeded"

_ROLE = re.compile(r"^(messages\.\d+)\.(user|assistant|system)(?=[.:])")
"""Where the schema puts a message's role into a field's path."""

_FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
    "user": "metadata.user_id",
}
"""Fields of a chat that have another name in Anthropic's API."""


class MessageErrorBody(BaseModel):
    """What went wrong."""

    type: str
    message: str
    details: dict[str, str] | None = None
    """`error_code` in it is a word for programs."""


class MessageErrorAnswer(BaseModel):
    """Every error's answer."""

    type: str
    error: MessageErrorBody
    request_id: str | None = None


MESSAGE_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessageErrorAnswer, "description": "The client's mistake."},
    "5XX": {"model": MessageErrorAnswer, "description": "The engine's, a sidecar's or the bridge's."},
}
"""What any route may answer, for OpenAPI."""


def translated(error: Json, status: int) -> Json:
    """Return an error of OpenAI's shape, that of an answer with `status`, in Anthropic's."""
    said: Json = error["error"]
    otherwise = "api_error" if status >= _SERVER_ERROR else "invalid_request_error"
    body: Json = {"type": _TYPES.get(status, otherwise), "message": _message(said)}
    if said["code"] is not None:
        body["details"] = {"error_code": said["code"]}
    return {"type": "error", "error": body}


def error_frame(error: Exception) -> bytes:
    """Return the last frame of a stream that failed. Anthropic's clients raise it."""
    found = to_api_error(error)
    return data_frame(translated(to_json(found), found.status), "error")


class MessageErrors:
    """ASGI middleware that translates the errors of the Messages API, and gives its answers their `request-id`.

    An error's body must be sent in one piece, as `errors.respond` does.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Serve `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_ours = scope["type"] == "http" and _PATH.fullmatch(scope["path"])
        await self._app(scope, receive, _Translator(send).send if is_ours else send)


class _Translator:
    """Sends one answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: Message | None = None
        """The beginning of an error whose body is yet to come."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["request-id"] = headers[REQUEST_ID_HEADER]
            if _is_error(message):
                self._held = message
                return
        elif self._held is not None:
            start, self._held = self._held, None
            message = _translate(start, message)
            await self._send(start)
        await self._send(message)


def _is_error(start: Message) -> bool:
    is_json = Headers(scope=start).get("content-type", "").startswith("application/json")
    return start["status"] >= 400 and is_json  # noqa: PLR2004 - the first status of an error


def _translate(start: Message, body: Message) -> Message:
    """Return an error's body in Anthropic's shape, and put what belongs to it into the headers of `start`."""
    error: Json = json.loads(body["body"])
    headers = MutableHeaders(scope=start)
    answer = translated(error, start["status"]) | {"request_id": headers["request-id"]}
    content = json.dumps(answer).encode()
    headers["content-length"] = str(len(content))
    headers["x-should-retry"] = "true" if error["error"]["code"] in _PASSING else "false"
    return {**body, "body": content}


def _message(error: Json) -> str:
    """Return the message, with fields as Anthropic names them; clients know a full context by how it begins."""
    message, param = str(error["message"]), error["param"]
    if error["code"] == _OVERFLOW:
        return f"prompt is too long: {message}"
    if param in _FIELDS:
        return message.replace(f"{param}: ", f"{_FIELDS[param]}: ", 1)
    return _ROLE.sub(r"\1", message)
