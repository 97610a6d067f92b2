"""Streamed answers, from request to frames: what all of them have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Generic, TypeVar

from tokentape_bridge import sse
from tokentape_bridge.responses import Json
from tokentape_bridge.sidecar_pool import SidecarPool

RequestT = TypeVar("RequestT")


class FrameStream(ABC, Generic[RequestT]):
    """The answer to one request, to be given once, as frames of server-sent events."""

    def __init__(self, pool: SidecarPool, request: RequestT, tape_id: str) -> None:
        """Nothing is done yet. `tape_id` is the tape that records it (empty: none)."""
        self._pool = pool
        self._request = request
        self._tape_id = tape_id
        self._frames = self._run()
        self.extension: Json = {}
        """What the answer says of its place on the tape, once it has begun."""

    async def begin(self) -> AsyncGenerator[bytes]:
        """Return the frames once the engine has accepted every call. What is raised until then has a status."""
        await anext(self._frames)
        return self._frames

    @abstractmethod
    def _accepted(self) -> AbstractAsyncContextManager[AsyncGenerator[bytes]]:
        """Give the frames once the engine has accepted every call and `extension` is set.

        On leaving, whatever has not ended is aborted.
        """

    def _error_frame(self, error: Exception) -> bytes:
        """Return the last frame of an answer that failed after it had begun."""
        return sse.error_frame(error)

    async def _run(self) -> AsyncGenerator[bytes]:
        async with self._accepted() as answer:
            yield b""
            try:
                async with aclosing(answer) as frames:
                    async for frame in frames:
                        yield frame
            except Exception as error:  # noqa: BLE001 - the status is sent: whatever it is, the client must learn of it
                yield self._error_frame(error)
