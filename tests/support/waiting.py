"""Waiting for what nothing announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_INTERVAL_SECONDS = 0.002


async def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Return when `condition` holds; TimeoutError if it does not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another process or library
            await asyncio.sleep(_INTERVAL_SECONDS)
