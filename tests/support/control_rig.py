"""The trainer's controls over an engine that is moved by hand."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.engines import ManualEngine
from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.control import Control
from tokentape_sidecar.control_states import Operation, State
from tokentape_sidecar.engine_controls import PauseMode
from tokentape_sidecar.errors import (
    ControlFailed,
)
from tokentape_sidecar.record import CallRecord

KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT
LOADED = [("pause", KEEP, True), ("update_weights", "step-2"), ("set_weight_version", "2"), ("resume",)]
"""What an update of a running engine asks of it."""


@dataclass
class Rig:
    """Controls over an engine moved by hand."""

    root: Path
    engine: ManualEngine = field(default_factory=ManualEngine)
    told: list[bool] = field(default_factory=list[bool])
    """Whether the sidecar served, after each change of that."""

    def __post_init__(self) -> None:
        self.calls = Calls(self.engine)
        self.control = Control(self.engine, self.calls, weights_root=self.root, on_change=self._note)
        self.did = self.engine.controls.done

    async def _note(self) -> None:
        self.told.append(self.control.serves)

    async def do(self, operation: Operation) -> None:
        """Ask for it, with arguments that are right."""
        asked: dict[Operation, Callable[[], Awaitable[None]]] = {
            Operation.PAUSE: lambda: self.control.pause(KEEP, clear_cache=True),
            Operation.RESUME: self.control.resume,
            Operation.UPDATE_WEIGHTS: lambda: self.control.update_weights("step-2", "2"),
            Operation.SET_WEIGHT_VERSION: lambda: self.control.set_weight_version("2"),
            Operation.RESET_PREFIX_CACHE: self.control.reset_prefix_cache,
            Operation.SLEEP: lambda: self.control.sleep(1, KEEP),
            Operation.WAKE_UP: lambda: self.control.wake_up([]),
        }
        await asked[operation]()

    async def be(self, state: State) -> None:
        """Bring the engine there."""
        match state:
            case State.RUNNING:
                pass
            case State.PAUSED:
                await self.do(Operation.PAUSE)
            case State.ASLEEP:
                await self.do(Operation.SLEEP)
            case State.UPDATING_WEIGHTS:
                self.engine.controls.updating_weights = True
            case State.WEIGHTS_BROKEN:
                await self.break_weights()
            case State.STALLED:
                self.calls.silent_seconds = 9.0
            case State.DEAD:
                self.control.engine_dead = True
        assert self.control.state is state
        self.did.clear()
        self.engine.controls.begun.clear()

    async def break_weights(self) -> None:
        self.engine.controls.failures["update_weights"] = RuntimeError("shapes differ")
        with pytest.raises(ControlFailed, match="failed to update the weights: shapes differ"):
            await self.do(Operation.UPDATE_WEIGHTS)
        del self.engine.controls.failures["update_weights"]

    async def start(self, count: int = 1) -> list[CallRecord]:
        return [await self.calls.start(CallRequest([1, 2, 3]), None) for _ in range(count)]


@asynccontextmanager
async def opened_rig(root: Path) -> AsyncGenerator[Rig]:
    """Controls with the checkpoints `step-1` and `step-2` below `root`."""
    for name in ("step-1", "step-2"):
        (root / name).mkdir()
        (root / name / "weights").touch()
    made = Rig(root)
    yield made
    await made.control.close(0)
    await made.calls.close()
