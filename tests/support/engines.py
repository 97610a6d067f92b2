"""An engine whose every step is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from support.scripted import TOY_TOKENIZER
from tokentape_sidecar.engine import EngineCall, FinishReason, LogprobsMode, Model, Sampling, Sink
from tokentape_sidecar.engine_controls import MEMORY_TAGS, PauseMode, Phase
from tokentape_sidecar.errors import InvalidArgument, NotFound


def toy_model(
    *, max_context_tokens: int = 64, vocabulary_size: int = 1000, default_sampling: Sampling | None = None
) -> Model:
    """A model to serve."""
    return Model(
        name="toy",
        max_context_tokens=max_context_tokens,
        vocabulary_size=vocabulary_size,
        eos_token_ids=(2,),
        logprobs_mode=LogprobsMode.PROCESSED,
        default_sampling=default_sampling or Sampling(),
        max_top_logprobs=20,
        engine="manual",
        engine_version="0",
        tokenizer_directory=TOY_TOKENIZER,
    )


class ManualControls:
    """Implements the engine port's controls: each does what it is asked when the test lets it."""

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.updating_weights = False
        self.weight_version = ""
        self.done: list[tuple[object, ...]] = []
        """What was asked and done, in order."""
        self.begun: list[str] = []
        """What was asked."""
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        """While clear, nothing that is asked is done."""
        self.failures: dict[str, Exception] = {}
        """What the method of this name raises."""
        self.asleep: set[str] = set()
        self.cache_is_held = False
        """Whether running calls hold cached prefixes."""
        self._callbacks: list[Callable[[], None]] = []

    def on_weights_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def change_weights(self) -> None:
        """Begin a change of weights, as a trainer with the engine object does."""
        for callback in self._callbacks:
            callback()

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self._do("pause", mode, clear_cache)
        self.phase = Phase.PAUSED

    async def resume(self) -> None:
        await self._do("resume")
        self.phase = Phase.RUNNING

    async def check_checkpoint(self, directory: Path) -> None:
        if not (directory / "weights").exists():
            raise NotFound("directory: no checkpoint")

    def check_weight_version(self, version: str) -> None:
        if version == "default":
            raise InvalidArgument("weight_version", "is taken")

    async def update_weights(self, directory: Path) -> None:
        self.change_weights()
        self.updating_weights = True
        try:
            await self._do("update_weights", directory.name)
        finally:
            self.updating_weights = False

    async def set_weight_version(self, version: str) -> None:
        await self._do("set_weight_version", version)
        self.weight_version = version

    async def reset_prefix_cache(self, *, running_too: bool) -> bool:
        await self._do("reset_prefix_cache", running_too)
        return running_too or not self.cache_is_held

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self._do("sleep", level, mode)
        self.phase, self.asleep = Phase.ASLEEP, set(MEMORY_TAGS)

    async def wake_up(self, tags: Sequence[str]) -> bool:
        await self._do("wake_up", *tags)
        self.asleep -= set(tags or MEMORY_TAGS)
        if not self.asleep:
            self.phase = Phase.RUNNING
        return not self.asleep

    async def _do(self, name: str, *arguments: object) -> None:
        self.begun.append(name)
        await self.goes_on.wait()
        if name in self.failures:
            raise self.failures[name]
        self.done.append((name, *arguments))


class ManualEngine:
    """Implements the engine port; nothing happens in it but what the test does."""

    def __init__(self, model: Model | None = None) -> None:
        self._model = model or toy_model()
        self.controls = ManualControls()
        self._dead = asyncio.Event()
        self.submitted: list[EngineCall] = []
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[str] = []
        self.takes_calls = asyncio.Event()
        self.takes_calls.set()
        """While clear, `submit` does not return."""
        self.hands_over = asyncio.Event()
        self.hands_over.set()
        """While clear, `abort` does not return, and ends nothing."""
        self.answers = asyncio.Event()
        self.answers.set()
        """While clear, `ping` does not return."""
        self.held = False
        """Whether somebody keeps it from sampling."""
        self.refusal: Exception | None = None
        """What `submit` raises."""

    @property
    def model(self) -> Model:
        return self._model

    @property
    def weight_version(self) -> str:
        return self.controls.weight_version

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        self.submitted.append(call)
        await self.takes_calls.wait()
        if self.refusal is not None:
            raise self.refusal
        self.sinks[call.call_id] = sink

    async def abort(self, call_id: str) -> None:
        self.aborted.append(call_id)
        await self.hands_over.wait()
        sink = self.sinks.pop(call_id, None)
        if sink is not None:
            for choice in range(self._call(call_id).sampling.n or 1):
                sink.finish(choice, FinishReason.ABORT)

    async def ping(self) -> None:
        await self.answers.wait()

    async def wait_dead(self) -> None:
        await self._dead.wait()

    async def close(self) -> None:
        pass

    def emit(self, call_id: str, *token_ids: int) -> None:
        """Sample tokens for the call's first choice."""
        self.sinks[call_id].append(0, token_ids, [-0.5] * len(token_ids))

    def die(self, error: Exception) -> None:
        """Fail every running call with `error` and be dead."""
        for sink in self.sinks.values():
            sink.fail(error)
        self._dead.set()

    def finish(
        self,
        call_id: str,
        *token_ids: int,
        reason: FinishReason = FinishReason.STOP,
        stop_reason: int | str | None = None,
    ) -> None:
        """Sample tokens for the call's first choice, and end it."""
        if token_ids:
            self.emit(call_id, *token_ids)
        self.sinks.pop(call_id).finish(0, reason, stop_reason)

    def _call(self, call_id: str) -> EngineCall:
        return next(call for call in self.submitted if call.call_id == call_id)
