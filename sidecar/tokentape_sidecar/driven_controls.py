"""`EngineControls` by an engine object that has vLLM's own control methods, watched by a `WeightObserver`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tokentape_sidecar.engine_controls import PauseMode, Phase
from tokentape_sidecar.errors import NotFound
from tokentape_sidecar.weights import WeightObserver

_T = TypeVar("_T")
_Mode = Literal["keep", "wait", "abort"]


class DrivenEngine(Protocol):
    """vLLM's `AsyncLLM`, as far as it is driven here."""

    async def pause_generation(self, *, mode: _Mode, clear_cache: bool) -> None:
        """Stop sampling."""
        ...

    async def resume_generation(self) -> None:
        """Sample again."""
        ...

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any] | None) -> Any:
        """Call a method of all workers."""
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """Forget cached prefixes, and where asked for what running requests have computed."""
        ...

    async def sleep(self, level: int, mode: _Mode) -> None:
        """Release memory."""
        ...

    async def wake_up(self, tags: list[str] | None) -> bool | None:
        """Take memory back; whether all is there."""
        ...


class DrivenControls:
    """Drives an engine; see `engine_controls.EngineControls` for the methods."""

    reload_method = "reload_weights"
    """The workers' method that loads a checkpoint, in place, from its argument `weights_path`."""

    def __init__(self, engine: DrivenEngine, observer: WeightObserver) -> None:
        self._engine = engine
        self._observer = observer

    @property
    def phase(self) -> Phase:
        """What the engine was last told to do, by anybody."""
        return self._observer.phase

    @property
    def updating_weights(self) -> bool:
        """Whether something that changes its weights is going on just now."""
        return self._observer.updating

    def on_weights_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the beginning of every change of weights."""
        self._observer.on_change(callback)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling."""
        await self._ask(self._engine.pause_generation(mode=mode.value, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Sample again."""
        await self._ask(self._engine.resume_generation())

    async def check_checkpoint(self, directory: Path) -> None:
        """Raise `NotFound` where there is no directory of this name: what more is needed, the engine itself knows."""
        if not await asyncio.to_thread(directory.is_dir):
            raise NotFound("directory: there is no such directory below the weights root")

    def check_weight_version(self, version: str) -> None:
        """Any name will do."""

    async def update_weights(self, directory: Path) -> None:
        """Load the weights in `directory`, in place."""
        try:
            await self._ask(self._engine.collective_rpc(self.reload_method, kwargs={"weights_path": str(directory)}))
        finally:
            self._observer.end_update()

    async def set_weight_version(self, version: str) -> None:
        """Name the present weights."""
        self._observer.name_weights(version)

    async def reset_prefix_cache(self, *, running_too: bool) -> bool:
        """Forget cached prefixes."""
        return await self._ask(self._engine.reset_prefix_cache(reset_running_requests=running_too))

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Release memory."""
        await self._ask(self._engine.sleep(level=level, mode=mode.value))

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take memory back."""
        await self._ask(self._engine.wake_up(tags=list(tags) or None))
        return self.phase is not Phase.ASLEEP

    async def _ask(self, answer: Awaitable[_T]) -> _T:
        """Wait for the engine's answer; an adapter says here what its engine's errors mean."""
        return await answer
