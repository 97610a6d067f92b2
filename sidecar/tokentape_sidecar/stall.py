"""Noticing an engine that is there but gives nothing: a core that is stopped, a GPU that hangs.

Such an engine is not dead, so nothing tells of it, and its calls would wait for ever. `StallWatch` looks at the calls
at regular times. Invariants:

1. A stall is a whole limit in which calls ran, the engine was not held, and nothing at all was sampled and no call
   ended by itself. One token of one call is enough to begin anew: a long queue is no stall.
2. Who drives the engine holds it: while it is paused, asleep or in the middle of a weight update, silence is no stall.
3. What counts is looks, not the clock. A process that was itself stopped, or an event loop that was blocked by others,
   looked less often, and does not take its own absence for the engine's silence.
4. In a stall every running call has failed and every new one is refused. It ends when the engine answers a question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import Engine

logger = logging.getLogger(__name__)

DEFAULT_STALL_LIMIT_SECONDS = 300.0
"""How long an engine may be silent: far above the longest step, as long as vLLM itself waits for its workers."""

_LOOKS = 20
"""How often it is looked in the time of the limit."""


class StallWatch:
    """Watches one engine and its calls; `run` it for as long as the engine lives."""

    def __init__(
        self, engine: Engine, calls: Calls, *, limit_seconds: float, on_change: Callable[[], Awaitable[None]]
    ) -> None:
        """`limit_seconds` is above 0; `on_change` is called when a stall has begun, and when it has ended."""
        self._engine = engine
        self._calls = calls
        self._limit_seconds = limit_seconds
        self._on_change = on_change

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._silence()
            logger.error(
                "the engine has emitted nothing for %g s: its %d calls fail, and no more are taken until it answers",
                self._limit_seconds,
                self._calls.running_count,
            )
            with self._calls.stalled(self._limit_seconds):
                await self._on_change()
                await self._answer()
            logger.warning("the engine answers again; calls are taken")
            await self._on_change()

    async def _silence(self) -> None:
        """Return when the engine has been silent for the limit."""
        silent_looks, emitted = 0, -1
        # The first look may come just after a call's start.
        while silent_looks <= _LOOKS:
            await asyncio.sleep(self._limit_seconds / _LOOKS)
            silent = self._calls.running_count and not self._engine.held and self._calls.emitted_count == emitted
            silent_looks = silent_looks + 1 if silent else 0
            emitted = self._calls.emitted_count

    async def _answer(self) -> None:
        """Return when the engine answers. One that cannot be asked does not."""
        while True:
            try:
                await self._engine.ping()
            except Exception:
                logger.exception("the stalled engine cannot be asked")
                await asyncio.sleep(self._limit_seconds / _LOOKS)
            else:
                return
