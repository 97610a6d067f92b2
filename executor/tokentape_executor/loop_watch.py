"""Tells when the event loop is blocked, and by what line.

An agent that calls `time.sleep`, or computes for long, in a coroutine stops every rollout on its loop, and nothing on
the loop can tell. A thread can: while a loop is watched, it beats, and a thread of its own logs one warning per stall
with the stack of the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Generator

_logger = logging.getLogger(__name__)

STALL_SECONDS = 2.0
"""How long the loop may stand still untold."""

_BEATS_PER_STALL = 4


class LoopWatch:
    """Watches the running event loop, from `start`, called on it, to `stop`."""

    def __init__(self, stall_seconds: float) -> None:
        """`stall_seconds`: how long the loop must stand still to be told."""
        self._stall_seconds = stall_seconds
        self._interval = stall_seconds / _BEATS_PER_STALL
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._last_beat = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tokentape loop watch", daemon=True)
        self._next_beat: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """End. The thread notices within a moment, and is not waited for."""
        self._stopped.set()
        if self._next_beat is not None:
            self._next_beat.cancel()

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._next_beat = self._loop.call_later(self._interval, self._beat)

    def _watch(self) -> None:
        told: float | None = None
        while not self._stopped.wait(self._interval):
            last_beat = self._last_beat
            stalled = time.monotonic() - last_beat
            if stalled >= self._stall_seconds and told != last_beat:
                told = last_beat
                self._tell(stalled)

    def _tell(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage] # its documented name
        if frame is None:
            return
        stack = traceback.extract_stack(frame)
        line = stack[-1]
        _logger.warning(
            "the event loop has stood still for %.1f s, and with it every rollout on it: %s:%s, in %s, does not "
            "return. Await instead, or call it by asyncio.to_thread. Its stack:\n%s",
            seconds,
            line.filename,
            line.lineno,
            line.name,
            "".join(stack.format()),
        )


_watches: dict[asyncio.AbstractEventLoop, tuple[LoopWatch, int]] = {}
"""The watch of each loop on which rollouts run, and how many of them."""


@contextlib.contextmanager
def watching_loop() -> Generator[None]:
    """Have the running loop watched in the block. Blocks may overlap; there is one watch per loop."""
    loop = asyncio.get_running_loop()
    if loop not in _watches:
        watch = LoopWatch(STALL_SECONDS)
        watch.start()
        _watches[loop] = watch, 0
    watch, users = _watches[loop]
    _watches[loop] = watch, users + 1
    try:
        yield
    finally:
        watch, users = _watches[loop]
        if users > 1:
            _watches[loop] = watch, users - 1
        else:
            del _watches[loop]
            watch.stop()
