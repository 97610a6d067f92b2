"""The optional key: `--api-key-file` (see `tokentape.secret_file` for what such a file holds).

A client shows its key as `Authorization: Bearer KEY` (OpenAI's way) or `x-api-key: KEY` (Anthropic's).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentape.secret_file import SecretFile
from tokentape_bridge.errors import ApiError, respond

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/docs", "/openapi.json"})
"""What needs no key: probes and scrapers have none, and nothing of a conversation is there."""


class ApiKeyGate:
    """ASGI middleware that answers 401 to whoever shows no key."""

    def __init__(self, app: ASGIApp, keys: SecretFile) -> None:
        """Serve `app` to those who have one of `keys`."""
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or self._keys.accept(_shown_key(Headers(scope=scope))):
            await self._app(scope, receive, send)
        else:
            await respond(_no_key(), {"www-authenticate": "Bearer"})(scope, receive, send)


def _shown_key(headers: Headers) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    shown = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # Headers are decoded as Latin-1: this gives the bytes that were sent.
    return shown.strip().encode("latin-1")


def _no_key() -> ApiError:
    return ApiError(
        "no API key, or a wrong one: send the header Authorization: Bearer KEY", status=401, code="invalid_api_key"
    )
