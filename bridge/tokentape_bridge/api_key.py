"""The optional key: `--api-key-file`.

The file holds one key a line; any of them opens, so that keys can be replaced one after the other. It is read again
whenever it changes, and is to be replaced as a whole. A change that leaves no key changes nothing, and the log says so.
Keys are compared in constant time, and never logged.

A client shows its key as `Authorization: Bearer KEY` (OpenAI's way) or `x-api-key: KEY` (Anthropic's).
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentape_bridge.errors import ApiError, respond
from tokentape_bridge.file_signature import Signature, signature_of

_logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/docs", "/openapi.json"})
"""What needs no key: probes and scrapers have none, and nothing of a conversation is there."""


class ApiKeys:
    """The keys of a file, as it is now."""

    def __init__(self, file: Path) -> None:
        """Read `file`. Raises `OSError`, or `ValueError` where it holds no key."""
        self._file = file
        self._seen: Signature | None = signature_of(file)
        self._keys = _read(file)

    def accept(self, key: bytes) -> bool:
        """Whether `key` is one of them."""
        self._refresh()
        # All are compared, so that the time tells nothing.
        return sum(secrets.compare_digest(key, known) for known in self._keys) > 0

    def _refresh(self) -> None:
        found = signature_of(self._file)
        if found == self._seen:
            return
        self._seen = found
        try:
            self._keys = _read(self._file)
        except (OSError, ValueError) as error:
            _logger.error("--api-key-file %s cannot be used, the keys stay as they are: %s", self._file, error)
        else:
            _logger.info("--api-key-file %s has changed: %d keys", self._file, len(self._keys))


class ApiKeyGate:
    """ASGI middleware that answers 401 to whoever shows no key."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
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


def _read(file: Path) -> list[bytes]:
    keys = [line.strip() for line in file.read_bytes().splitlines() if line.strip()]
    if not keys:
        raise ValueError("it holds no key")
    return keys


def _no_key() -> ApiError:
    return ApiError(
        "no API key, or a wrong one: send the header Authorization: Bearer KEY", status=401, code="invalid_api_key"
    )
