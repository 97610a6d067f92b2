"""A sidecar in a thread of its own whose engine gives every call the same answer, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from support.engines import ManualEngine, toy_model
from support.scripted import RunningSidecar, sidecar_on
from tokentape_sidecar.engine import EngineCall, FinishReason, Sink, TopLogprobs

_T = TypeVar("_T")

OTHER_TOKENS_SEED = 1
"""Calls with this seed get the same text in other tokens."""


class AnsweringEngine(ManualEngine):
    """Samples one text for each choice, and its end. Log-probability -0.5 everywhere; the best tokens are 5, 6, …"""

    def __init__(
        self,
        tokenizer_directory: Path,
        text: str,
        *,
        end: int,
        vocabulary_size: int,
        max_context_tokens: int = 4096,
        lora_names: tuple[str, ...] = (),
    ) -> None:
        model = toy_model(max_context_tokens=max_context_tokens, vocabulary_size=vocabulary_size)
        super().__init__(
            replace(model, eos_token_ids=(end,), tokenizer_directory=tokenizer_directory, lora_names=lora_names)
        )
        self._tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
        self.say(text)

    def say(self, text: str) -> None:
        """Sample `text` from now on."""
        self.answer = [*self._encode(text), *self._model.eos_token_ids]
        self.other_answer = [*self._encode(text[:1]), *self._encode(text[1:]), *self._model.eos_token_ids]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        await super().submit(call, sink)
        asyncio.get_running_loop().call_soon(self._answer, call, sink)

    def _answer(self, call: EngineCall, sink: Sink) -> None:
        sampling = call.sampling
        if sampling.prompt_logprobs is not None:
            count = len(call.prompt_token_ids) - 1
            sink.take_prompt_logprobs([-0.5] * count, _top(count, sampling.prompt_logprobs))
        token_ids = self.other_answer if sampling.seed == OTHER_TOKENS_SEED else self.answer
        token_ids = token_ids[: sampling.max_tokens]
        for choice in range(sampling.n or 1):
            logprobs = [-0.5] * len(token_ids)
            sink.append(choice, token_ids, logprobs, top_logprobs=_top(len(token_ids), sampling.top_logprobs or 0))
            ended = token_ids[-1] in self.model.eos_token_ids
            sink.finish(choice, FinishReason.STOP if ended else FinishReason.LENGTH)


def _top(count: int, k: int) -> TopLogprobs | None:
    if not k:
        return None
    return TopLogprobs(k, [*range(5, 5 + k)] * count, [-1.0 - rank for rank in range(k)] * count)


class AnsweringSidecar:
    """What a test has of the thread."""

    def __init__(self, running: RunningSidecar, engine: AnsweringEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.address = running.sidecar.address
        self.client = running.client
        self.engine = engine
        """What it samples may be changed between calls."""
        self._loop = loop

    @property
    def calls(self) -> Sequence[EngineCall]:
        """What the engine was asked, in order."""
        return list(self.engine.submitted)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the sidecar's thread."""
        self._loop.call_soon_threadsafe(callback)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what `work`, which uses `client`, returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=20)


@contextmanager
def answering_sidecar(engine: AnsweringEngine, name: str) -> Generator[AnsweringSidecar]:
    """Serve `engine` until left."""
    ready = threading.Event()
    served: list[AnsweringSidecar] = []
    stops: list[asyncio.Event] = []

    async def serve() -> None:
        async with sidecar_on(engine, name=name) as running:
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            served.append(AnsweringSidecar(running, engine, loop))
            stops.append(stop)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="answering sidecar")
    thread.start()
    try:
        assert ready.wait(timeout=20)
        yield served[0]
    finally:
        if served:
            served[0].call_soon(stops[0].set)
        thread.join(timeout=20)
        assert not thread.is_alive()
