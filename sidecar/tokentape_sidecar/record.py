"""One call, as it happened.

A `CallRecord` is what the engine adapter writes (it is the adapter's `Sink`) and what everything that leaves the
sidecar reads: `Generate`, `GenerateMany`, watchers and tapes are cursors on it. It only grows, and by columns: ids and
log-probabilities lie in flat arrays, so that a token costs 8 bytes and no object.

Invariants:

1. `len(logprobs) == len(token_ids)` in every choice, and every value is finite; those of tokens that were not sampled
   may be -infinity, where top_p, top_k or a grammar ruled them out. What breaks this fails the call.
2. What a record holds never changes: readers see prefixes of one sequence per choice.
3. A record ends once: when every choice has finished, or by a failure; after that, nothing is added.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokentape_sidecar.broadcast import Broadcast
from tokentape_sidecar.choice_record import ChoiceRecord, Completion
from tokentape_sidecar.engine import UNVERSIONED, FinishReason, Sampling, TopLogprobs, Weights
from tokentape_sidecar.errors import CallError, StaleWeights, TokentapeError
from tokentape_sidecar.origin import Origin

_LARGEST_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Parent:
    """Where a prompt begins: the first `offset` sampled tokens of a choice of an earlier call, and all before them."""

    record: CallRecord
    choice: int
    offset: int


_NO_ORIGIN = Origin()


class RecordListener(Protocol):
    """Hears of everything that a record takes, as it takes it."""

    def tokens_sampled(self, record: CallRecord, choice: int, count: int) -> None:
        """Note that `choice` got `count` more tokens."""
        ...

    def choice_finished(self, record: CallRecord, choice: int) -> None:
        """Note that `choice` has ended."""
        ...

    def call_failed(self, record: CallRecord) -> None:
        """Note that the call has failed with `record.error`."""
        ...


class CallRecord:
    """One prompt and what was sampled for it."""

    def __init__(
        self,
        *,
        call_id: str,
        prompt_suffix: Sequence[int],
        sampling: Sampling,
        parent: Parent | None = None,
        origin: Origin = _NO_ORIGIN,
        call_index: int = 0,
        lora_name: str = "",
        max_weight_changes: int | None = None,
        listener: RecordListener | None = None,
    ) -> None:
        """`prompt_suffix` is the prompt, or with a parent its ids after the parent's; `sampling.n` must be set.

        `max_weight_changes`: after how many changes of the weights, from its first token on, it samples no more.
        """
        self.call_id = call_id
        self.call_index = call_index
        self.lora_name = lora_name
        """The adapter that samples it; empty: the base model."""
        self.prompt_suffix = array("I", prompt_suffix)
        self.sampling = sampling
        self.parent = parent
        self.origin = origin
        self.prompt_token_count = len(self.prompt_suffix)
        """Tokens in the whole prompt, the parent's included."""
        if parent is not None:
            self.prompt_token_count += parent.record.prompt_token_count + parent.offset
        self.choices = [ChoiceRecord() for _ in range(sampling.n or 1)]
        self.error: TokentapeError | None = None
        self.began = time.monotonic()
        self.first_token_at: float | None = None
        """When the first token of any choice came, on the clock of `began`."""
        self.prompt_logprobs: array[float] | None = None
        self.prompt_top_logprobs: TopLogprobs | None = None
        self._top_k = sampling.top_logprobs or 0
        self._max_weight_changes = max_weight_changes
        self._weight_changes = 0
        self._listener = listener
        self._changed = Broadcast()
        self._open_choices = len(self.choices)
        self._end_callbacks: list[Callable[[], None]] = []

    def prompt_token_ids(self) -> array[int]:
        """Return the whole prompt, the parent's ids included."""
        pieces, call = [self.prompt_suffix], self
        while call.parent is not None:
            parent = call.parent
            pieces.append(parent.record.choices[parent.choice].token_ids[: parent.offset])
            pieces.append(parent.record.prompt_suffix)
            call = parent.record
        prompt = array("I")
        for piece in reversed(pieces):
            prompt.extend(piece)
        return prompt

    def spells(self, token_ids: array[int]) -> bool:
        """Whether the whole prompt and one of the completions, one after the other, are `token_ids`."""
        sampled = len(token_ids) - self.prompt_token_count
        return any(
            len(choice.token_ids) == sampled
            and choice.token_ids == token_ids[self.prompt_token_count :]
            and self.prompt_token_ids() == token_ids[: self.prompt_token_count]
            for choice in self.choices
        )

    @property
    def sampled_token_count(self) -> int:
        """Tokens sampled so far, all choices together."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def size_bytes(self) -> int:
        """Memory that the columns take: the prompt's own part and the completions. Fingerprints count as columns."""
        prompt = len(self.prompt_suffix) * self.prompt_suffix.itemsize
        fingerprints = len(self.origin.anchor) + len(self.origin.context_fingerprint)
        return fingerprints + prompt + sum(choice.size_bytes for choice in self.choices)

    @property
    def ended(self) -> bool:
        """Whether the record is complete, finished or failed."""
        return self.error is not None or not self._open_choices

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the record ends; now, if it has."""
        if self.ended:
            callback()
        else:
            self._end_callbacks.append(callback)

    async def wait_ended(self) -> None:
        """Return when the record is complete."""
        while not self.ended:
            await self._changed.wait()

    async def wait_changed(self) -> None:
        """Return at the next token, finish or failure."""
        await self._changed.wait()

    def on_change(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` at each token, finish or failure from now on; there is one at most. `None`: call nobody."""
        self._changed.subscribe(callback)

    @property
    def started(self) -> bool:
        """Whether all that precedes the first token is here: the prompt's log-probabilities, where asked for."""
        return self.sampling.prompt_logprobs is None or self.prompt_logprobs is not None or self.ended

    def note_weight_change(self) -> None:
        """Note that the weights change. Fails a call that may not live through it, before it samples on."""
        if self._max_weight_changes is None or not self.sampled_token_count:
            return
        self._weight_changes += 1
        if self._weight_changes > self._max_weight_changes:
            self.fail(StaleWeights(self._weight_changes, self._max_weight_changes))

    def take_prompt_logprobs(self, logprobs: Sequence[float], top_logprobs: TopLogprobs | None) -> None:
        """Take the prompt's log-probabilities (see `engine.Sink`). Missing or unusable ones fail the call."""
        best = top_logprobs.logprobs if top_logprobs else ()
        if len(logprobs) != self.prompt_token_count - 1 or not (_are_logprobs(logprobs) and _are_logprobs(best)):
            self.fail(CallError("the engine gave unusable log-probabilities for the prompt"))
            return
        self.prompt_logprobs = array("f", logprobs)
        self.prompt_top_logprobs = top_logprobs
        self._changed.notify()

    def append(
        self,
        choice: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        weights: Weights = UNVERSIONED,
        top_logprobs: TopLogprobs | None = None,
    ) -> None:
        """Take newly sampled tokens (see `engine.Sink`). Unusable log-probabilities fail the call."""
        columns = self.choices[choice]
        if columns.completion is not None or self.error is not None or not token_ids:
            return
        problem = self._problem_with(token_ids, logprobs, top_logprobs)
        if problem is not None:
            self.fail(CallError(problem))
            return
        # The same weights are mostly the same object, and comparing that is cheaper.
        if not columns.weights or (columns.weights[-1] is not weights and columns.weights[-1] != weights):
            if self.first_token_at is None:
                self.first_token_at = time.monotonic()
            columns.weight_starts.append(len(columns.token_ids))
            columns.weights.append(weights)
        columns.token_ids.extend(token_ids)
        columns.logprobs.extend(logprobs)
        if top_logprobs is not None:
            columns.top_token_ids.extend(top_logprobs.token_ids)
            columns.top_logprobs.extend(top_logprobs.logprobs)
        if self._listener is not None:
            self._listener.tokens_sampled(self, choice, len(token_ids))
        self._changed.notify()

    def finish(self, choice: int, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End `choice` (see `engine.Sink`)."""
        columns = self.choices[choice]
        if self.ended or columns.completion is not None:
            return
        # A call that is aborted early may not have them yet.
        if not self.started and reason is not FinishReason.ABORT:
            self.fail(CallError("the engine gave no log-probabilities for the prompt"))
            return
        columns.completion = Completion(choice, reason, stop_reason, len(columns.token_ids))
        self._open_choices -= 1
        if self._listener is not None:
            self._listener.choice_finished(self, choice)
        self._changed.notify()
        if self.ended:
            self._run_end_callbacks()

    def fail(self, error: Exception) -> None:
        """End the call by an error (see `engine.Sink`); an unexpected one becomes a `CallError` without its details."""
        if self.ended:
            return
        if isinstance(error, TokentapeError):
            self.error = error
        else:
            self.error = CallError("the engine failed this call")
            self.error.__cause__ = error
        if self._listener is not None:
            self._listener.call_failed(self)
        self._changed.notify()
        self._run_end_callbacks()

    def _run_end_callbacks(self) -> None:
        callbacks, self._end_callbacks = self._end_callbacks, []
        for callback in callbacks:
            callback()

    def _problem_with(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top_logprobs: TopLogprobs | None
    ) -> str | None:
        # By far the most common step: one usable token, and nothing else was asked for.
        if len(logprobs) == len(token_ids) == 1 and top_logprobs is None and not self._top_k:
            (logprob,) = logprobs
            if abs(logprob) <= _LARGEST_FLOAT32:
                return None
        if len(logprobs) != len(token_ids):
            return f"the engine gave {len(logprobs)} log-probabilities for {len(token_ids)} sampled tokens"
        if not all(map(_is_usable, logprobs)):
            bad = next(i for i, value in enumerate(logprobs) if not _is_usable(value))
            return f"the engine gave the log-probability {logprobs[bad]} for sampled token id {token_ids[bad]}"
        k = top_logprobs.k if top_logprobs else 0
        if k != self._top_k or (
            top_logprobs and not len(top_logprobs.token_ids) == len(top_logprobs.logprobs) == k * len(token_ids)
        ):
            return f"the engine gave {k} top log-probabilities a token where {self._top_k} were asked for"
        if top_logprobs and not _are_logprobs(top_logprobs.logprobs):
            bad = next(value for value in top_logprobs.logprobs if not value <= _LARGEST_FLOAT32)
            return f"the engine gave the top log-probability {bad}"
        return None


def _are_logprobs(logprobs: Sequence[float]) -> bool:
    """Whether tokens that were not sampled can have them: numbers, or -infinity where a token was ruled out."""
    # The largest of several says nothing where NaN is among them, but their sum does.
    return not math.isnan(sum(logprobs)) and max(logprobs, default=0.0) <= _LARGEST_FLOAT32


def _is_usable(logprob: float) -> bool:
    # Columns and messages hold 32 bits; a value beyond them would become infinite there. NaN compares false.
    return abs(logprob) <= _LARGEST_FLOAT32
