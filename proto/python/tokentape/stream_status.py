"""The status that a peer ended a stream with, which grpc.aio loses where a write is under way at the time.

Such a write fails, and grpc.aio then gives the stream a status of its own, INTERNAL: before the peer's, which takes its
place without a word, or after it, which is then gone. So the first is noted as it comes, and another is looked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from tokentape.call_status import Status

Result = TypeVar("Result")

_OF_A_FAILED_WRITE = "Internal error from Core"
"""The details of the status that grpc.aio gives."""
_SECONDS = 1.0
"""How long the peer's is waited for after a failed write's."""
_INTERVAL_SECONDS = 0.01


class StreamStatus:
    """The status of one stream; make it with the stream, before it can have ended."""

    def __init__(self, rpc: grpc.aio.Call) -> None:
        """`rpc` may be read and written by others."""
        self._rpc = rpc
        self._status = asyncio.get_running_loop().create_future()
        rpc.add_done_callback(self._note)

    async def of_peer(self) -> Status:
        """Wait until the stream has ended, and return the peer's code and details; grpc.aio's if none come."""
        await self._rpc.code()
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS):
                while not self._status.done():
                    await asyncio.sleep(_INTERVAL_SECONDS)
                    self._note(self._rpc)
        return self._status.result() if self._status.done() else (await self._rpc.code(), await self._rpc.details())

    def _note(self, _rpc: grpc.aio.Call) -> None:
        details = _at_once(self._rpc.details())
        if details != _OF_A_FAILED_WRITE and not self._status.done():
            self._status.set_result((_at_once(self._rpc.code()), details or ""))


def _at_once(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that does not wait, as those for the status of an ended RPC."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError(f"{coroutine} waits")
