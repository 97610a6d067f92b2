"""A value that one thread sets and that coroutines of any event loop wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Shared(Generic[_T]):
    """The value. All methods may be called from any thread."""

    def __init__(self, value: _T) -> None:
        self._value = value
        self._lock = threading.Lock()
        self._waiters: list[_Waiter] = []

    @property
    def value(self) -> _T:
        """The value now."""
        return self._value

    def update(self, change: Callable[[_T], _T]) -> None:
        """Replace the value by `change` of it, and wake whoever waits."""
        with self._lock:
            self._value = change(self._value)
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            # A loop that was closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, future)

    async def wait_for(self, take: Callable[[_T], _R | None]) -> _R:
        """Return what `take` makes of the value, as soon as that is not `None`; an error of `take` is raised here."""
        while True:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            with self._lock:
                taken = take(self._value)
                if taken is not None:
                    return taken
                self._waiters.append((loop, future))
            try:
                await future
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._waiters.remove((loop, future))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
