"""Waking everything that waits for something to change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Broadcast:
    """Lets any number of tasks wait for the next `notify`, all on one event loop.

    A waiter checks its condition first and waits only when there is nothing for it. Nothing is awaited in between, so
    no notification is lost.
    """

    __slots__ = ("_event", "_subscriber")

    def __init__(self) -> None:
        self._event: asyncio.Event | None = None
        self._subscriber: Callable[[], None] | None = None

    def subscribe(self, subscriber: Callable[[], None] | None) -> None:
        """Call `subscriber`, of which there is one at most, at each `notify` from now on; `None`: call nobody."""
        self._subscriber = subscriber

    def notify(self) -> None:
        """Wake all present waiters; free when there are none."""
        if self._subscriber is not None:
            self._subscriber()
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Return at the next `notify`."""
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()
