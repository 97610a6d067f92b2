"""The limit on a request's body: `--max-request-bytes`.

A body whose length is declared too large is refused unread, one sent in chunks as soon as it passes the limit; nothing
of either is kept. The answer goes out at once; what the client is still sending is then thrown away for a while before
the connection closes, since a connection that is reset under its hands is all that many a client would see.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape_bridge.errors import ApiError, respond

LINGER_SECONDS = 10
"""How long what follows a refused request is read and thrown away."""


class BodyTooLargeError(Exception):
    """The body that is being read has passed the limit."""


class BodyLimit:
    """ASGI middleware that answers 413 to bodies above a limit."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Serve `app` with bodies of at most `max_bytes`."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _declared_length(scope) > self._max_bytes:
            await self._refuse(scope, receive, send)
        else:
            body = _Counted(receive, send, self._max_bytes)
            with contextlib.suppress(BodyTooLargeError):
                await self._app(scope, body.receive, body.send)
            if body.is_too_large:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            f"the request's body is larger than {self._max_bytes} bytes", status=413, code="request_too_large"
        )
        response = respond(error, {"connection": "close"})

        async def send_and_linger(message: Message) -> None:
            """Send the answer whole, but end it only when nothing more is to be read."""
            if message["type"] == "http.response.body":
                await send({**message, "more_body": True})
                await _drain(receive)
                message = {**message, "body": b""}
            await send(message)

        await response(scope, receive, send_and_linger)


class _Counted:
    """A request whose body is counted; once it is too large, the app can neither read nor answer."""

    def __init__(self, receive: Receive, send: Send, max_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._left = max_bytes
        self.is_too_large = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            self.is_too_large = True
            raise BodyTooLargeError
        return message

    async def send(self, message: Message) -> None:
        if not self.is_too_large:
            await self._send(message)


def _declared_length(scope: Scope) -> int:
    # The server has refused a request whose header is no number.
    return int(Headers(scope=scope).get("content-length", "0"))


async def _drain(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass
