"""Ending work that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from tokentape_bridge.errors import ClientDisconnectedError

_T = TypeVar("_T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what `work` returns; when the client of `request` leaves first, cancel it.

    The request's body must have been read. Raises `ClientDisconnectedError` after cancelling.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
