"""The outermost middleware: every request gets an id and a span, is counted, and leaves one line in the log.

The line has the route, never a body, a query or a tape's id: that is a secret, and only its sidecar's name is told.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape.logs import REQUEST_ID_HEADER, bind
from tokentape_bridge import account, metrics
from tokentape_bridge.account import Account
from tokentape_bridge.errors import bridge_stopping, respond
from tokentape_bridge.tracing import begin_request, end_request

_logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_PROBES = frozenset({"/health", "/metrics", "/version"})
"""Asked every few seconds by programs; their lines are for debugging."""


class RequestLog:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp) -> None:
        """Serve `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        with account.opened() as opened, metrics.IN_FLIGHT.track_inprogress():
            try:
                await self._app(scope, receive, exchange.send)
            except asyncio.CancelledError:
                await exchange.end_cancelled(scope, receive)
            finally:
                exchange.record(opened)


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._began = time.perf_counter()
        self._status = 0
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        self._id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        bind(request_id=self._id)
        self._span = None if scope["path"] in _PROBES else begin_request(scope)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = self._id
        await self._send(message)

    async def end_cancelled(self, scope: Scope, receive: Receive) -> None:
        """Answer a request that was cancelled because the bridge stops. A stream has said so itself."""
        if self._status:
            _logger.warning("the bridge stops in the middle of an answer, id=%s", self._id)
            return
        await respond(bridge_stopping())(scope, receive, self.send)

    def record(self, opened: Account) -> None:
        """Count the request and log it."""
        seconds = time.perf_counter() - self._began
        # The app raises what is unexpected again after its answer; without one, the server's is a 500.
        status = self._status or 500
        method, handler = _method(self._scope), _handler(self._scope)
        metrics.REQUESTS.labels(method, handler, status).inc()
        metrics.DURATION.labels(method, handler).observe(seconds)
        if self._span is not None:
            end_request(self._span, method=method, route=handler, status=status, account=opened)
        _logger.log(
            logging.DEBUG if handler in _PROBES else logging.INFO,
            "%s %s %d %.0f ms%s id=%s",
            method,
            handler,
            status,
            seconds * 1000,
            _told(opened),
            self._id,
        )


def _method(scope: Scope) -> str:
    """Return the method; one word for all that HTTP does not name, as a client may send any."""
    method: str = scope["method"]
    return method if method in _METHODS else "other"


def _handler(scope: Scope) -> str:
    """Return the template of the route that served; one word for all paths that have none, as they have no end."""
    route = cast("BaseRoute | None", scope.get("route"))
    return getattr(route, "path", "none")


def _told(opened: Account) -> str:
    if not opened.sidecar:
        return ""
    return f" sidecar={opened.sidecar} prompt={opened.prompt_tokens} completion={opened.completion_tokens}"
