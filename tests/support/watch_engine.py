"""An engine that a seed moves, and that writes down what a tape must say of it.

Every token that it samples has an id of its own, so that each can be told from all others. It keeps its own account of
each tape, position by position, made from nothing but what it was asked and what it gave.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.engines import ManualEngine, toy_model
from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape.v1.tape_pb2 import TapeEntry
from tokentape.v1.types_pb2 import (
    FINISH_REASON_ABORT,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    SPLIT_CAUSE_UNSPECIFIED,
    CallReference,
    Completion,
    SamplingParameters,
    TopLogprobs,
)
from tokentape_sidecar.engine import EngineCall, FinishReason, Sink, Weights
from tokentape_sidecar.engine import TopLogprobs as Alternatives
from tokentape_sidecar.errors import CallError, InvalidArgument

VOCABULARY_SIZE = 2**31
_REASONS = {
    FinishReason.ABORT: FINISH_REASON_ABORT,
    FinishReason.LENGTH: FINISH_REASON_LENGTH,
    FinishReason.STOP: FINISH_REASON_STOP,
}


@dataclass(slots=True)
class TapeAccount:
    """What a tape must hold, a position an entry, but for its seal."""

    positions: list[TapeEntry] = field(default_factory=list[TapeEntry])
    call_ids: list[str] = field(default_factory=list[str])
    requests: dict[str, GenerateRequest] = field(default_factory=dict[str, GenerateRequest])
    """What was asked, by the key that travels as the call's cache salt."""
    sampled: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Tokens per call and choice."""

    @property
    def end(self) -> int:
        """The position after the last."""
        return len(self.positions)

    def add(self, position: TapeEntry) -> None:
        """Add what happened next."""
        position.sequence = self.end
        self.positions.append(position)

    def sealed(self) -> list[TapeEntry]:
        """Return the positions of the whole tape, its seal included."""
        seal = TapeEntry.TapeSealed(call_count=len(self.call_ids), sampled_token_count=sum(self.sampled.values()))
        return [*self.positions, TapeEntry(sequence=self.end, tape_sealed=seal)]

    def start(self, call: EngineCall) -> None:
        """Note a call as it came to the engine."""
        request = self.requests[call.cache_salt]
        parent = None
        if request.HasField("parent"):
            parent = CallReference(call_id=request.parent.call_id, choice=request.parent.choice)
            whole = self.sampled.get((parent.call_id, parent.choice), 0)
            parent.offset = request.parent.offset if request.parent.HasField("offset") else whole
        sampling = SamplingParameters(n=call.sampling.n, max_tokens=call.sampling.max_tokens)
        if call.sampling.top_logprobs is not None:
            sampling.top_logprobs = call.sampling.top_logprobs
        self.add(
            TapeEntry(
                call_started=TapeEntry.CallStarted(
                    call_id=call.call_id,
                    call_index=len(self.call_ids),
                    parent=parent,
                    prompt_token_ids=request.prompt_token_ids,
                    prompt_token_count=len(call.prompt_token_ids),
                    sampling=sampling,
                    anchor=request.anchor,
                    split_cause=SPLIT_CAUSE_UNSPECIFIED if parent else request.split_cause,
                )
            )
        )
        self.call_ids.append(call.call_id)

    def fail(self, call_id: str, message: str) -> None:
        """Note a failure."""
        self.add(TapeEntry(call_failed=TapeEntry.CallFailed(call_id=call_id, message=message)))


@dataclass(slots=True)
class _Running:
    call: EngineCall
    sink: Sink
    account: TapeAccount
    open_choices: list[int]
    aborted: bool = False


class SeededEngine(ManualEngine):
    """Serves any call; `play` makes it sample. What it does next, the seed says."""

    def __init__(self, seed: int, *, step_seconds: float = 0.0) -> None:
        """`step_seconds`: how long each step takes, about."""
        super().__init__(toy_model(max_context_tokens=1_000_000, vocabulary_size=VOCABULARY_SIZE))
        self.accounts: dict[str, TapeAccount] = {}
        """By the part of the cache salt before the slash."""
        self._random = random.Random(f"engine {seed}")
        self._step_seconds = step_seconds
        self._running: dict[str, _Running] = {}
        self._next_token_id = 1
        self._weights = Weights("0")

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return not self._running

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        """Take a call, or refuse one in a few; without a break, so that nothing comes between tape and account."""
        account = self.accounts[call.cache_salt.partition("/")[0]]
        account.start(call)
        if self._random.random() < 0.05:
            refusal = InvalidArgument("sampling", "this engine does not like it")
            account.fail(call.call_id, str(refusal))
            raise refusal
        choices = list(range(call.sampling.n or 1))
        self._running[call.call_id] = _Running(call, sink, account, choices)

    async def abort(self, call_id: str) -> None:
        """Note that a call is to end; it does so in a later step, with tokens that it has sampled until then."""
        running = self._running.get(call_id)
        if running is not None:
            running.aborted = True

    async def play(self) -> None:
        """Sample for ever, whatever runs."""
        while True:
            for running in list(self._running.values()):
                if self._random.random() < 0.5:
                    self._step(running)
            if self._random.random() < 0.1:
                self._change_weights()
            pause = self._step_seconds or (0.001 if self._random.random() < 0.2 else 0)
            await asyncio.sleep(pause * self._random.random() * 2)

    def _end_aborted(self, running: _Running) -> None:
        for choice in list(running.open_choices):
            self._sample(running, choice, self._random.randrange(3))
        for choice in list(running.open_choices):
            self._finish(running, choice, FinishReason.ABORT)

    def _change_weights(self) -> None:
        self._weights = Weights(
            str(self._random.randrange(5)),
            boundary_uncertain=self._random.random() < 0.5,
            stale_cache=self._random.random() < 0.5,
        )

    def _step(self, running: _Running) -> None:
        chance = self._random.random()
        if running.aborted:
            self._end_aborted(running)
        elif chance < 0.01:
            self._fail(running)
        elif chance < 0.02:
            self._sample_without_logprob(running)
        else:
            for choice in self._random.sample(running.open_choices, self._random.randint(1, len(running.open_choices))):
                self._sample(running, choice, self._random.choice([1, 1, 1, 2, 5]))
                if choice in running.open_choices and self._random.random() < 0.05:
                    self._finish(running, choice, FinishReason.STOP)

    def _sample(self, running: _Running, choice: int, count: int) -> None:
        key = running.call.call_id, choice
        limit = running.call.sampling.max_tokens or 0
        token_ids = self._new_token_ids(min(count, limit - running.account.sampled.get(key, 0)))
        if token_ids:
            k = running.call.sampling.top_logprobs or 0
            top = Alternatives(
                k, [t + j for t in token_ids for j in range(k)], [-j / 4 for _ in token_ids for j in range(k)]
            )
            for index, token_id in enumerate(token_ids):
                self._account_for(running, choice, token_id, top, index)
            running.account.sampled[key] = running.account.sampled.get(key, 0) + len(token_ids)
            logprobs = [_logprob(token_id) for token_id in token_ids]
            running.sink.append(choice, token_ids, logprobs, weights=self._weights, top_logprobs=top if k else None)
        if running.account.sampled.get(key, 0) >= limit:
            self._finish(running, choice, FinishReason.LENGTH)

    def _account_for(self, running: _Running, choice: int, token_id: int, top: Alternatives, index: int) -> None:
        best = slice(index * top.k, (index + 1) * top.k)
        running.account.add(
            TapeEntry(
                tokens_sampled=TapeEntry.TokensSampled(
                    call_id=running.call.call_id,
                    choice=choice,
                    token_ids=[token_id],
                    logprobs=[_logprob(token_id)],
                    top_logprobs=TopLogprobs(k=top.k, token_ids=top.token_ids[best], logprobs=top.logprobs[best])
                    if top.k
                    else None,
                    weight_version=self._weights.version,
                    boundary_uncertain=self._weights.boundary_uncertain,
                    stale_cache=self._weights.stale_cache,
                )
            )
        )

    def _sample_without_logprob(self, running: _Running) -> None:
        (token_id,) = self._new_token_ids(1)
        call_id = running.call.call_id
        if running.call.sampling.top_logprobs:
            self._fail(running)
            return
        del self._running[call_id]
        running.account.fail(call_id, f"the engine gave the log-probability nan for sampled token id {token_id}")
        running.sink.append(running.open_choices[0], [token_id], [float("nan")], weights=self._weights)

    def _fail(self, running: _Running) -> None:
        call_id = running.call.call_id
        del self._running[call_id]
        error = self._random.choice([CallError("out of blocks"), RuntimeError("a secret of the engine")])
        running.account.fail(call_id, str(error) if isinstance(error, CallError) else "the engine failed this call")
        running.sink.fail(error)

    def _finish(self, running: _Running, choice: int, reason: FinishReason) -> None:
        call_id = running.call.call_id
        running.open_choices.remove(choice)
        if not running.open_choices:
            del self._running[call_id]
        stop = self._random.choice([None, 7, "stop"]) if reason is FinishReason.STOP else None
        completion = Completion(
            choice=choice,
            finish_reason=_REASONS[reason],
            token_count=running.account.sampled.get((call_id, choice), 0),
        )
        if isinstance(stop, int):
            completion.stop_token_id = stop
        elif stop is not None:
            completion.stop_string = stop
        running.account.add(TapeEntry(choice_finished=TapeEntry.ChoiceFinished(call_id=call_id, completion=completion)))
        running.sink.finish(choice, reason, stop)

    def _new_token_ids(self, count: int) -> Sequence[int]:
        first = self._next_token_id
        self._next_token_id += max(0, count)
        return range(first, self._next_token_id)


def _logprob(token_id: int) -> float:
    # Exact in 32 bits, and not the same for tokens nearby.
    return -(token_id % 997) / 64
