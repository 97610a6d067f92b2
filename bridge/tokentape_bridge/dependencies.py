"""What routes take from a request beside its body, and what they put beside an answer's."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Header, Request

from tokentape_bridge.errors import ApiError
from tokentape_bridge.responses import Json
from tokentape_bridge.sidecar_pool import SidecarPool


async def _pool(request: Request) -> SidecarPool:
    return cast("SidecarPool", request.state.pool)


async def _tape_of_path(request: Request) -> str | None:
    return cast("str | None", request.path_params.get("tape_id"))


async def _require_json(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError("the content type must be application/json", status=415, code="unsupported_media_type")


Pool = Annotated[SidecarPool, Depends(_pool)]
"""The sidecars."""
TapeOfPath = Annotated[str | None, Depends(_tape_of_path)]
"""The tape that the path names; `None` where it names none."""
TapeOfHeader = Annotated[str | None, Header(alias="x-tape-id")]
"""Likewise, of the header."""
JSON_BODY = [Depends(_require_json)]
"""For routes whose requests have a JSON body."""
OR_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What OpenAPI says of routes whose answer is JSON or, on request, a stream."""
_LONGEST_HEADER = 4096
"""What no client refuses: aiohttp's, for one, takes 8190 bytes. Only the ids of many calls are longer."""


def headers_of(extension: Json) -> dict[str, str]:
    """Return an answer's extension object as headers, each as far as it has a value that is not too long for one."""
    headers = {f"x-{key.replace('_', '-')}": _header(value) for key, value in extension.items() if value is not None}
    return {name: value for name, value in headers.items() if len(value) <= _LONGEST_HEADER}


def _header(value: str | bool | list[str]) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return value if isinstance(value, str) else str(value).lower()
