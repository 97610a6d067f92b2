"""The trainer's controls: one operation at a time on one engine. `control_states` says which its state allows.

Invariants:

1. The state is the engine's, whoever drives it: through here, or by the engine object itself. An update in progress
   that an operation meets is therefore somebody else's.
2. An operation that has begun ends, also if its asker leaves; only waiting for calls is called off then, and the engine
   is as before. One that has not begun is dropped with its asker.
3. Nothing is sampled by weights of which it is not known what they are: after an update that failed half way until one
   has succeeded, and after a sleep that discarded them until something has brought others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokentape_sidecar.calls import Calls
from tokentape_sidecar.control_states import Operation, State, changes_nothing, check_allowed
from tokentape_sidecar.engine import Engine
from tokentape_sidecar.engine_controls import MEMORY_TAGS, PauseMode, Phase
from tokentape_sidecar.errors import (
    ControlFailed,
    EngineDead,
    EngineStalled,
    InvalidArgument,
    ShuttingDown,
    StateForbids,
    TokentapeError,
)
from tokentape_sidecar.weights_root import checkpoint_directory

logger = logging.getLogger(__name__)

_MAX_VERSION_CHARACTERS = 256
_SLEEP_LEVELS = (1, 2)
_END_SECONDS = 1.0
_WEIGHTS = MEMORY_TAGS[0]


@dataclass(slots=True)
class _Sleep:
    """What is known of a sleep that was asked for here."""

    discarded: bool = False
    """Whether the weights are gone."""
    weights_back: bool = False
    """Whether their memory was taken back."""
    wakes_with_weights: bool = False
    """Whether the rest is to be taken back when an update has brought weights."""


class Control:
    """Drives one engine."""

    def __init__(
        self, engine: Engine, calls: Calls, *, weights_root: Path | None, on_change: Callable[[], Awaitable[None]]
    ) -> None:
        """`weights_root`: below which checkpoints are; `on_change` is called after every change of `serves`."""
        self.problem = ""
        """In the state WEIGHTS_BROKEN: why, with the engine's own words."""
        self.engine_dead = False
        """Whether the engine has died; set by who sees it."""
        self.weight_change_count = 0
        """How often the weights were changed, or begun to be, by anybody."""
        self._engine = engine
        self._calls = calls
        self._weights_root = weights_root
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self._operation: asyncio.Task[None] | None = None
        self._closing = False
        self._resumes_when_mended = False
        self._sleep = _Sleep()
        engine.controls.on_weights_change(self._note_weight_change)

    @property
    def state(self) -> State:
        """What the engine is doing."""
        if self.engine_dead:
            return State.DEAD
        if self._calls.silent_seconds is not None:
            return State.STALLED
        if self._engine.controls.updating_weights:
            return State.UPDATING_WEIGHTS
        return State.WEIGHTS_BROKEN if self.problem else State[self._engine.controls.phase.name]

    @property
    def serves(self) -> bool:
        """Whether calls are taken, though they may have to wait."""
        return self.state not in {State.DEAD, State.STALLED} and not self.problem

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling (see `ControlService.PauseGeneration`)."""
        await self._run(
            Operation.PAUSE,
            lambda: self._pause(mode, clear_cache=clear_cache),
            interruptible=mode is PauseMode.WAIT,
        )

    async def resume(self) -> None:
        """Sample again (see `ControlService.ResumeGeneration`)."""
        await self._run(Operation.RESUME, self._engine.controls.resume)

    async def update_weights(self, directory: str, version: str) -> None:
        """Load a checkpoint (see `ControlService.UpdateWeights`)."""
        self._check_version(version)
        await self._run(Operation.UPDATE_WEIGHTS, lambda: self._update_weights(directory, version))

    async def set_weight_version(self, version: str) -> None:
        """Name the present weights (see `ControlService.SetWeightVersion`)."""
        self._check_version(version)
        await self._run(Operation.SET_WEIGHT_VERSION, lambda: self._engine.controls.set_weight_version(version))

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (see `ControlService.ResetPrefixCache`)."""
        await self._run(Operation.RESET_PREFIX_CACHE, self._reset_prefix_cache)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Release the engine's memory (see `ControlService.Sleep`)."""
        if level not in _SLEEP_LEVELS:
            raise InvalidArgument("level", f"must be 1 or 2, got {level}")
        await self._run(Operation.SLEEP, lambda: self._fall_asleep(level, mode), interruptible=mode is PauseMode.WAIT)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory back (see `ControlService.WakeUp`)."""
        unknown = next((tag for tag in tags if tag not in MEMORY_TAGS), None)
        if unknown is not None:
            raise InvalidArgument("tags", f"there is no {unknown[:100]!r}; there are: {', '.join(MEMORY_TAGS)}")
        await self._run(Operation.WAKE_UP, lambda: self._wake_up(tags))

    def refuse(self) -> None:
        """Begin no further operation: the sidecar is stopping."""
        self._closing = True

    async def close(self, grace_seconds: float) -> None:
        """Let the operation that has begun end within the grace period, then cancel it.

        One that waited for calls, which are aborted by now, has a second for it in any case.
        """
        self.refuse()
        task = self._operation
        if task is None:
            return
        await asyncio.wait({task}, timeout=max(grace_seconds, _END_SECONDS))
        task.cancel()
        await asyncio.wait({task}, timeout=_END_SECONDS)

    async def _run(
        self, operation: Operation, work: Callable[[], Awaitable[object]], *, interruptible: bool = False
    ) -> None:
        """Do `work` when its turn comes. Once it has begun it ends; `interruptible`: it is told if its asker leaves."""
        await self._lock.acquire()
        # Nothing is awaited until the lock is the task's.
        task = self._operation = asyncio.create_task(self._do(operation, work))
        task.add_done_callback(self._end)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closing and task.cancelled():
                raise ShuttingDown(f"the sidecar is shutting down, too soon to {operation.value} to its end") from None
            if interruptible:
                task.cancel()
            raise

    def _end(self, _task: asyncio.Task[None]) -> None:
        self._operation = None
        self._lock.release()

    async def _do(self, operation: Operation, work: Callable[[], Awaitable[object]]) -> None:
        try:
            self._check(operation)
            if changes_nothing(self.state, operation):
                return
            await work()
            logger.info("%s: done; the engine %s", operation.value, self.state.value)
        except TokentapeError as error:
            logger.warning("%s: %s", operation.value, error)
            raise
        except Exception as error:
            logger.exception("the engine failed to %s", operation.value)
            raise ControlFailed(f"the engine failed to {operation.value}: {error}") from error

    def _check(self, operation: Operation) -> None:
        """Raise where the state forbids `operation`."""
        if self._closing:
            raise ShuttingDown("the sidecar is shutting down")
        if self._calls.silent_seconds is not None and not self.engine_dead:
            raise EngineStalled(self._calls.silent_seconds)
        if not self._asleep:
            self._sleep = _Sleep()
        check_allowed(self.state, operation, asleep=self._asleep, weights_back=self._sleep.weights_back)

    @property
    def _asleep(self) -> bool:
        return self._engine.controls.phase is Phase.ASLEEP

    def _check_version(self, version: str) -> None:
        if not 0 < len(version) <= _MAX_VERSION_CHARACTERS:
            raise InvalidArgument("weight_version", f"must have 1 to {_MAX_VERSION_CHARACTERS} characters")
        self._engine.controls.check_weight_version(version)

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        controls, before = self._engine.controls, self._engine.controls.phase
        self._resumes_when_mended = False
        try:
            await controls.pause(mode, clear_cache=clear_cache)
        except asyncio.CancelledError:
            # Whoever asked to wait for the running calls has left, and the pause would begin with nobody to end it.
            if before is Phase.RUNNING:
                await controls.resume()
            else:
                await controls.pause(PauseMode.KEEP, clear_cache=False)
            raise

    async def _reset_prefix_cache(self) -> None:
        controls = self._engine.controls
        if not await controls.reset_prefix_cache(running_too=controls.phase is Phase.PAUSED):
            raise StateForbids("running calls hold cached prefixes: pause first")

    async def _fall_asleep(self, level: int, mode: PauseMode) -> None:
        controls = self._engine.controls
        if mode is PauseMode.WAIT:
            await self._pause(mode, clear_cache=True)
            mode = PauseMode.KEEP
        try:
            await _to_its_end(controls.sleep(level, mode))
        finally:
            # Also where its asker has left: it sleeps all the same.
            self._sleep = _Sleep(discarded=level > 1 and self._asleep)

    async def _wake_up(self, tags: Sequence[str]) -> None:
        if self._sleep.discarded:
            if not self._sleep.weights_back:
                await self._engine.controls.wake_up([_WEIGHTS])
            self._sleep.wakes_with_weights |= set(tags) != {_WEIGHTS}
        else:
            await self._engine.controls.wake_up(tags)
        self._sleep.weights_back |= self._sleep.discarded or not tags or _WEIGHTS in tags

    async def _update_weights(self, name: str, version: str) -> None:
        if self._weights_root is None:
            raise StateForbids("the sidecar loads no checkpoints: it has no weights root (--weights-root)")
        controls = self._engine.controls
        directory = await asyncio.to_thread(checkpoint_directory, self._weights_root, name)
        await controls.check_checkpoint(directory)
        resumes = controls.phase is Phase.RUNNING or self._resumes_when_mended
        if controls.phase is Phase.RUNNING:
            await controls.pause(PauseMode.KEEP, clear_cache=True)
        try:
            await controls.update_weights(directory)
            await controls.set_weight_version(version)
        except EngineDead:
            raise
        except BaseException as error:
            await self._break(f"the update to {version!r} from {directory} failed half way: {error}", resumes=resumes)
            raise
        await self._mend()
        if self._sleep.wakes_with_weights:
            await controls.wake_up(())
        elif resumes:
            await controls.resume()

    async def _break(self, problem: str, *, resumes: bool) -> None:
        self.problem, self._resumes_when_mended = problem, resumes
        self._calls.break_weights()
        await self._on_change()

    async def _mend(self) -> None:
        was_broken, self.problem = bool(self.problem), ""
        self._sleep.discarded = self._resumes_when_mended = False
        self._calls.mend_weights()
        if was_broken:
            await self._on_change()

    def _note_weight_change(self) -> None:
        self.weight_change_count += 1
        self._sleep.discarded = False
        self._calls.note_weight_change()


async def _to_its_end(work: Coroutine[object, object, None]) -> None:
    """Do `work`; cancelled, wait for its end first: nobody could say what a half of it has done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
