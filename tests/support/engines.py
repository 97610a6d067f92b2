"""An engine whose every step is the test's."""

from __future__ import annotations

import asyncio

from support.scripted import TOY_TOKENIZER
from tokentape_sidecar.engine import EngineCall, FinishReason, LogprobsMode, Model, Sampling, Sink


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


class ManualEngine:
    """Implements the engine port; nothing happens in it but what the test does."""

    def __init__(self, model: Model | None = None) -> None:
        self._model = model or toy_model()
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
        return ""

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
