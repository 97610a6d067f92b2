"""SIGINT and SIGTERM: the first ends the run in good order and in time, the second at once.

The handlers are Python's own and not the event loop's, so that an agent that blocks the loop does not block them. When
this process ends at once, the leashes of its children end those (`_leash.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

_SIGNALLED = 128
_SECONDS = 4.7
"""How long good order may take."""


class Interruption:
    """Whether, and by what, this process was told to stop."""

    def __init__(self, before_exit: Callable[[], object]) -> None:
        """`before_exit` is called, from any thread, before the process ends at once."""
        self._before_exit = before_exit
        self._number: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = asyncio.Event()

    @property
    def status(self) -> int | None:
        """The exit status that the signal makes; `None`: there was none."""
        return None if self._number is None else _SIGNALLED + self._number

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Handle the signals in this block. One that comes while no event loop waits raises `SystemExit`."""
        before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def wait(self) -> None:
        """Return when a signal has come."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._told.wait()
        finally:
            self._loop = None

    def _arrived(self, number: int, _: FrameType | None) -> None:
        if self._number is not None:
            self._exit(_SIGNALLED + number)
        self._number = number
        if self._loop is None:
            raise SystemExit(_SIGNALLED + number)
        watchdog = threading.Timer(_SECONDS, self._exit, [_SIGNALLED + number])
        watchdog.daemon = True
        watchdog.start()
        self._loop.call_soon_threadsafe(self._told.set)

    def _exit(self, status: int) -> None:
        self._before_exit()
        os._exit(status)
