"""Server-sent events: frames, and the response that sends them.

Frames are ASCII: some clients take U+2028 or U+0085 for the end of a line, and some guess Latin-1. So what else msgspec
has written is escaped, which JSON has only in its strings.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import anyio
import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from tokentape_bridge.errors import bridge_stopping, to_api_error, to_json

KEEP_ALIVE_SECONDS = 15.0
"""How long a stream is silent at most; proxies cut connections that are for 60 s."""

DONE = b"data: [DONE]\n\n"
"""The frame after the last one of an OpenAI stream that ended well."""

COMMENT = b": keep-alive\n\n"
"""A frame that clients leave out."""

_ESCAPING = "tokentape.json"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return JSON's escapes for characters that ASCII lacks (see `codecs.register_error`)."""
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(_ESCAPING, _escaped)


def _ascii_json(body: object) -> bytes:
    try:
        data = msgspec.json.encode(body)
    except UnicodeEncodeError:
        # Half a surrogate pair, which a model may have escaped in a tool call.
        return json.dumps(body, separators=(",", ":")).encode()
    return data if data.isascii() else data.decode().encode("ascii", _ESCAPING)


def data_frame(body: object, event: str = "") -> bytes:
    """Return the frame with a JSON object, of the kind `event` where that is given."""
    head = f"event: {event}\n".encode() if event else b""
    return b"%bdata: %b\n\n" % (head, _ascii_json(body))


def error_frame(error: Exception) -> bytes:
    """Return the last frame of an OpenAI stream that failed. openai's clients raise it; `DONE` must not follow."""
    return data_frame(to_json(to_api_error(error)))


class EventStreamResponse(Response):
    """Sends frames as they come, and such as say nothing while none do.

    When the client leaves, or takes no more, `frames` is closed at once. The next frame is asked for when the client's
    connection has taken the last one: a slow client makes the source wait.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        *,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = COMMENT,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        to_error_frame: Callable[[Exception], bytes] = error_frame,
    ) -> None:
        """`frames` are whole ones; `headers` come beside those of every event stream; `keep_alive` is sent in silence.

        `to_error_frame` makes the last frame of an answer that is cancelled, since the bridge stops.

        A generator that nobody has asked for anything yet cannot be closed: what it holds, it must take after that.
        """
        # X-Accel-Buffering: nginx would collect the frames.
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames
        self._keep_alive_frame = keep_alive
        self._keep_alive_seconds = keep_alive_seconds
        self._to_error_frame = to_error_frame
        self._has_begun = False
        self._sent_at = 0.0
        self._clock = asyncio.get_running_loop().time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as long as its client is there."""
        try:
            async with aclosing(self._frames):
                is_whole = False
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
                    tasks.start_soon(self._keep_alive, send)
                    await self._send_all(send)
                    is_whole = True
                    tasks.cancel_scope.cancel()
                if is_whole:
                    # Only now: a keep-alive that waited for the client beside the last frame may still have been sent.
                    await _end(send)
        except asyncio.CancelledError:
            # Not by a client that leaves.
            if self._has_begun:
                await self._send(send, self._to_error_frame(bridge_stopping()))
                await _end(send)
            raise

    async def _send_all(self, send: Send) -> None:
        self._sent_at = self._clock()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._has_begun = True
        async for frame in self._frames:
            await self._send(send, frame)

    async def _send(self, send: Send, frame: bytes) -> None:
        # Whoever sends it: a server takes a frame whole, when it takes it.
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._sent_at = self._clock()

    async def _watch_client(self, receive: Receive, serving: anyio.CancelScope) -> None:
        """End the answer when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        serving.cancel()

    async def _keep_alive(self, send: Send) -> None:
        while True:
            if self._has_begun and self._clock() - self._sent_at >= self._keep_alive_seconds:
                await self._send(send, self._keep_alive_frame)
            await asyncio.sleep(max(0.01, self._sent_at + self._keep_alive_seconds - self._clock()))


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
