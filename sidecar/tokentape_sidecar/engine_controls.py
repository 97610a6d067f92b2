"""The other half of the engine port: what whoever drives an engine does to it, beside giving it calls.

A trainer drives an engine through the sidecar's ControlService, or by the engine object itself where it has that. An
adapter sees both: `phase`, `updating_weights` and the callbacks of `on_weights_change` tell what was done by either.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class PauseMode(enum.Enum):
    """What becomes of running calls when the engine stops sampling."""

    KEEP = "keep"
    """They stay, and sample on later."""
    WAIT = "wait"
    """They finish first; calls that come meanwhile wait."""
    ABORT = "abort"
    """They are aborted."""


class Phase(enum.Enum):
    """What the engine was last told to do."""

    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"
    """All of its memory, or a part, is released."""


MEMORY_TAGS: tuple[str, ...] = ("weights", "kv_cache")
"""What `wake_up` can take back by itself."""


class EngineControls(Protocol):
    """Pauses an engine, changes its weights and lets it sleep. One method runs at a time; who calls them sees to that.

    All methods raise `EngineDead` where there is no engine any more, and anything else where the engine failed at what
    it was asked.
    """

    @property
    def phase(self) -> Phase:
        """What the engine was last told to do, by anybody."""
        ...

    @property
    def updating_weights(self) -> bool:
        """Whether something that changes its weights is going on just now."""
        ...

    def on_weights_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the beginning of every change of weights, before anything is sampled by the new ones."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling; new calls are taken and wait. What was sampled until then is in the records on return.

        `clear_cache`: forget cached prefixes and what running calls have computed. Pausing a paused engine applies
        `mode` to the calls that wait.
        """
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...

    async def check_checkpoint(self, directory: Path) -> None:
        """Raise `NotFound` where `directory` has no checkpoint that `update_weights` could load; touch nothing."""
        ...

    def check_weight_version(self, version: str) -> None:
        """Raise `InvalidArgument` where `version` cannot be the name of weights; touch nothing."""
        ...

    async def update_weights(self, directory: Path) -> None:
        """Load the weights in `directory`; the engine is paused. Where it fails, the weights may be of both."""
        ...

    async def set_weight_version(self, version: str) -> None:
        """Name the present weights: tokens that are sampled from now on carry `version`, not empty."""
        ...

    async def reset_prefix_cache(self, *, running_too: bool) -> bool:
        """Forget cached prefixes; `running_too`: and what running calls have computed.

        Returns whether it did: without `running_too` it cannot while calls run.
        """
        ...

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Stop sampling as `pause` does, clear the cache and release memory; level 1 keeps the weights elsewhere.

        Raises `Unsupported` where the engine cannot release any.
        """
        ...

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back what `tags` name (of `MEMORY_TAGS`; none: everything), and sample again when all is there.

        Returns whether all is there.
        """
        ...
