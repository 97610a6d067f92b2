"""An engine that replays a script: for tests, benchmarks and debugging, without a model.

It behaves as an engine does in everything but the choice of tokens: it pushes at its own pace whether or not anyone
reads, ends at `max_tokens`, at stop tokens and stop strings, and on abort, and fails a call where the script says so or
is exhausted. It can be paused, given weights and put to sleep; only that it has none, so that a checkpoint of it is a
`weights.json` that says whether loading works.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from typing_extensions import override

from tokentape_sidecar.call_weights import CallWeights
from tokentape_sidecar.driven_controls import DrivenControls
from tokentape_sidecar.engine import (
    EngineCall,
    FinishReason,
    LogprobsMode,
    Model,
    Sampling,
    Sink,
    TopLogprobs,
    Weights,
)
from tokentape_sidecar.engine_controls import EngineControls
from tokentape_sidecar.errors import CallError, InvalidArgument, NotFound
from tokentape_sidecar.script import Script, ScriptedCall, ScriptError, Step
from tokentape_sidecar.scripted_core import WEIGHTS_FILE, ScriptedCore, read_weights
from tokentape_sidecar.weights import WeightObserver

logger = logging.getLogger(__name__)

_UNSCRIPTED_LOGPROB = -1.0


class ScriptedControls(DrivenControls):
    """Drives a script."""

    @override
    async def check_checkpoint(self, directory: Path) -> None:
        """Raise `NotFound` where there is no `weights.json`, or one that says nothing a script understands."""
        await super().check_checkpoint(directory)
        try:
            await asyncio.to_thread(read_weights, directory)
        except (OSError, ValueError) as error:
            raise NotFound(f"directory: it holds no checkpoint of a script: {WEIGHTS_FILE}: {error}") from None


class ScriptedEngine:
    """Serves a script's calls in the order in which calls arrive."""

    def __init__(self, script: Script, tokenizer_directory: Path) -> None:
        """`tokenizer_directory` holds a `tokenizer.json`; it encodes the script's texts and finds stop strings.

        Raises `ScriptError` where there is none, or none that can be read.
        """
        self._script = script
        self._tokenizer = _load_tokenizer(tokenizer_directory)
        self._next_call = 0
        self._running: dict[str, _RunningCall] = {}
        self._core = ScriptedCore(self._running.keys, self._abort_all)
        self.observer = WeightObserver(self._core)
        self._controls = ScriptedControls(self._core, self.observer)
        self._model = Model(
            name=script.model.name,
            max_context_tokens=script.model.max_model_len,
            vocabulary_size=script.model.vocab_size,
            eos_token_ids=script.model.eos_token_ids,
            logprobs_mode=LogprobsMode.PROCESSED,
            default_sampling=Sampling(),
            max_top_logprobs=script.model.max_logprobs,
            engine="scripted",
            engine_version=importlib.metadata.version("tokentape"),
            tokenizer_directory=tokenizer_directory,
            lora_names=script.model.lora_names,
        )

    @property
    def model(self) -> Model:
        """What the script claims to serve."""
        return self._model

    @property
    def weight_version(self) -> str:
        """The version of the last step or update that named one."""
        return self.observer.version

    @property
    def held(self) -> bool:
        """Whether it is paused, asleep, or loads weights (see `engine.Engine`)."""
        return self.observer.held

    @property
    def controls(self) -> EngineControls:
        """What pauses it (see `engine.Engine`)."""
        return self._controls

    @property
    def unused_call_count(self) -> int:
        """Scripted calls that nobody made."""
        return max(0, len(self._script.calls) - self._next_call)

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        """Start the next scripted call (see `engine.Engine`)."""
        scripted = self._take()
        n = call.sampling.n or 1
        if any(step.index >= n for step in scripted.steps):
            raise InvalidArgument("sampling.n", f"the script has more choices than the {n} asked for")
        if scripted.expect is not None and scripted.expect.prompt_token_ids != tuple(call.prompt_token_ids):
            raise CallError(
                f"the script expects the prompt {list(scripted.expect.prompt_token_ids)}, "
                f"but the call has {list(call.prompt_token_ids)}"
            )
        running = _RunningCall(call, sink, scripted, self, CallWeights(self.observer))
        self._running[call.call_id] = running
        running.task = asyncio.create_task(self._play(running))
        running.task.add_done_callback(lambda _: self._end(running))

    async def abort(self, call_id: str) -> None:
        """End a running call; what it was given stands (see `engine.Engine`)."""
        running = self._running.get(call_id)
        if running is not None and running.task is not None:
            running.task.cancel()

    async def ping(self) -> None:
        """Return: only calls wait in a script (see `engine.Engine`)."""

    async def wait_dead(self) -> None:
        """Never returns: a script does not die."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Abort what runs, and report scripted calls that nobody made."""
        await self._abort_all(list(self._running))
        if self.unused_call_count:
            logger.warning(
                "%d of the script's %d calls were never made", self.unused_call_count, len(self._script.calls)
            )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text`, special tokens recognised, none added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _take(self) -> ScriptedCall:
        index = self._next_call
        count = len(self._script.calls)
        if count == 0 or (index >= count and not self._script.repeat):
            raise CallError(f"the script is exhausted: it has {count} calls, and this is call {index + 1}")
        self._next_call += 1
        return self._script.calls[index % count]

    async def _abort_all(self, call_ids: Collection[str]) -> None:
        tasks = [task for call_id in call_ids if (task := self._running[call_id].task) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, running: _RunningCall) -> None:
        try:
            running.take_prompt()
            for step in running.scripted.steps:
                # Even a step without a delay lets other tasks run: an engine never delivers within `submit`.
                await asyncio.sleep(step.delay_ms / 1000)
                await self._core.wait_may_play(running.call.call_id)
                if step.error is not None:
                    running.sink.fail(CallError(step.error))
                    return
                running.take(step)
            for choice in running.open_choices():
                running.sink.fail(CallError(f"the script ends without finishing choice {choice}"))
        except Exception as error:
            logger.exception("the script failed the call %s", running.call.call_id)
            running.sink.fail(error)

    def _end(self, running: _RunningCall) -> None:
        """Close what an abort left open, even if it came before the first step."""
        self._running.pop(running.call.call_id, None)
        self._core.note_ended()
        for choice in running.open_choices():
            running.sink.finish(choice, FinishReason.ABORT)


@dataclass(slots=True)
class _RunningCall:
    """One call being played."""

    call: EngineCall
    sink: Sink
    scripted: ScriptedCall
    engine: ScriptedEngine
    weights: CallWeights
    task: asyncio.Task[None] | None = None
    sampled: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    finished: set[int] = field(default_factory=set[int])

    def open_choices(self) -> list[int]:
        return [choice for choice in range(self.call.sampling.n or 1) if choice not in self.finished]

    def take_prompt(self) -> None:
        """Give the sink the prompt's log-probabilities, if the call asks for them."""
        k, prompt = self.call.sampling.prompt_logprobs, self.call.prompt_token_ids[1:]
        if k is None:
            return
        scripted = self.scripted.prompt_logprobs
        if scripted is None:
            scripted = tuple({token_id: _UNSCRIPTED_LOGPROB} for token_id in prompt)
        own = [logprobs[token_id] for token_id, logprobs in zip(prompt, scripted, strict=False) if token_id in logprobs]
        best = [pair for logprobs in scripted for pair in _most_probable(logprobs, k)]
        self.sink.take_prompt_logprobs(own, TopLogprobs(k, *_columns(best)) if k else None)

    def take(self, step: Step) -> None:
        """Give the sink a step's tokens, as far as the sampling parameters let them come."""
        choice = step.index
        if choice in self.finished:
            return
        weights = self.weights.of_step(step.weight_version)
        for token_id, logprobs in self._tokens(step):
            self._append(choice, token_id, logprobs, weights)
            if self._ends_here(choice, token_id):
                return
        if step.finish_reason is not None:
            self._finish(choice, FinishReason(step.finish_reason), step.stop_reason)

    def _tokens(self, step: Step) -> Iterator[tuple[int, dict[int, float] | None]]:
        token_ids = self.engine.encode(step.text) if step.text is not None else step.token_ids
        for position, token_id in enumerate(token_ids):
            if step.logprobs is None:
                yield token_id, {token_id: _UNSCRIPTED_LOGPROB}
            else:
                yield token_id, step.logprobs[position] if position < len(step.logprobs) else None

    def _append(self, choice: int, token_id: int, logprobs: dict[int, float] | None, weights: Weights) -> None:
        sampled = [logprobs[token_id]] if logprobs is not None and token_id in logprobs else []
        k = self.call.sampling.top_logprobs or 0
        best = _most_probable(logprobs or {}, k)
        top = TopLogprobs(len(best), *_columns(best)) if best else None
        self.sampled.setdefault(choice, []).append(token_id)
        self.sink.append(choice, [token_id], sampled, weights=weights, top_logprobs=top)

    def _ends_here(self, choice: int, token_id: int) -> bool:
        sampling, sampled = self.call.sampling, self.sampled[choice]
        enough = len(sampled) >= (sampling.min_tokens or 0)
        if enough and token_id in sampling.stop_token_ids:
            self._finish(choice, FinishReason.STOP, token_id)
        elif enough and token_id in self.engine.model.eos_token_ids and not sampling.ignore_eos:
            self._finish(choice, FinishReason.STOP, None)
        elif enough and (stop := self._stop_string(sampled)) is not None:
            self._finish(choice, FinishReason.STOP, stop)
        elif sampling.max_tokens is not None and len(sampled) >= sampling.max_tokens:
            self._finish(choice, FinishReason.LENGTH, None)
        return choice in self.finished

    def _stop_string(self, sampled: list[int]) -> str | None:
        if not self.call.sampling.stop:
            return None
        text = self.engine.decode(sampled)
        return next((stop for stop in self.call.sampling.stop if stop in text), None)

    def _finish(self, choice: int, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finished.add(choice)
        self.sink.finish(choice, reason, stop_reason)


def _load_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ScriptError(f"--tokenizer: there is no tokenizer.json in {directory}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise ScriptError(f"--tokenizer: {file} is not a tokenizer: {error}") from None


def _most_probable(logprobs: dict[int, float], k: int) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda item: -item[1])[:k]


def _columns(pairs: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [token_id for token_id, _ in pairs], [logprob for _, logprob in pairs]
