"""What holds and releases the scripted engine's calls: vLLM's control methods, by the same names, over a script.

So the scripted engine is driven, and its weights observed, as a real one is (`driven_controls`, `weights`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokentape_sidecar.broadcast import Broadcast
from tokentape_sidecar.engine_controls import MEMORY_TAGS


class ScriptedWeights(BaseModel):
    """`weights.json`: the checkpoint of a scripted engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fail: str | None = None
    """Loading it fails half way, with this message."""
    delay_ms: float = Field(default=0, ge=0)
    """How long loading takes."""


WEIGHTS_FILE = "weights.json"


class ScriptedCore:
    """Says which calls may play on."""

    def __init__(
        self, running: Callable[[], Collection[str]], abort: Callable[[Collection[str]], Awaitable[None]]
    ) -> None:
        """Hold no call. `running` names those that run; `abort` ends some, and returns when they have ended."""
        self._running = running
        self._abort = abort
        self._held = False
        self._finishing: set[str] | None = None
        """While a pause waits for calls: which."""
        self._asleep: set[str] = set()
        self._changed = Broadcast()

    async def wait_may_play(self, call_id: str) -> None:
        """Return when the call may take its next step."""
        while self._held or (self._finishing is not None and call_id not in self._finishing):
            await self._changed.wait()

    def note_ended(self) -> None:
        """Look again whether a pause has what it waits for."""
        self._changed.notify()

    async def pause_generation(self, *, mode: Literal["keep", "wait", "abort"], clear_cache: bool) -> None:
        """Hold all calls; there is no cache to clear."""
        del clear_cache
        if mode == "wait":
            await self._finish(set(self._running()))
        self._held = True
        if mode == "abort":
            await self._abort(list(self._running()))

    async def resume_generation(self) -> None:
        """Let all calls play on."""
        self._held = False
        self._changed.notify()

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any] | None) -> None:
        """Load the weights of a directory."""
        assert method == "reload_weights"
        assert kwargs is not None
        weights = await asyncio.to_thread(read_weights, Path(kwargs["weights_path"]))
        await asyncio.sleep(weights.delay_ms / 1000)
        if weights.fail is not None:
            raise RuntimeError(weights.fail)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Answer as an engine whose running calls hold blocks."""
        return reset_running_requests or not self._running()

    async def sleep(self, level: int, mode: Literal["keep", "wait", "abort"]) -> None:
        """Hold all calls; there is no memory to release."""
        del level
        await self.pause_generation(mode=mode, clear_cache=True)
        self._asleep = set(MEMORY_TAGS)

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Let calls play on once everything is taken back."""
        self._asleep.difference_update(tags or MEMORY_TAGS)
        if not self._asleep:
            await self.resume_generation()
        return not self._asleep

    async def _finish(self, call_ids: set[str]) -> None:
        """Let these calls, and only these, play to their end."""
        held, self._held, self._finishing = self._held, False, call_ids
        self._changed.notify()
        try:
            while call_ids & set(self._running()):
                await self._changed.wait()
        except BaseException:
            self._held = held
            raise
        finally:
            self._finishing = None
            self._changed.notify()


def read_weights(directory: Path) -> ScriptedWeights:
    """Read a scripted checkpoint. Raises `OSError` where there is none, `ValueError` where it is malformed."""
    return ScriptedWeights.model_validate_json((directory / WEIGHTS_FILE).read_bytes())
