"""What a sidecar counts of its calls, from its start on. Nothing is counted per token: ended calls are added up."""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from tokentape_sidecar.engine import FinishReason
from tokentape_sidecar.errors import TokentapeError
from tokentape_sidecar.record import CallRecord

# As vLLM's histograms of the same quantities.
_FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_CALL_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_WORST_FIRST = (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.REPETITION, FinishReason.STOP)


class Distribution:
    """How many seconds things took: counts below bounds, for a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`, in seconds, ascend; each is its bucket's largest value."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of values up to the bound of the same index and above the one before; the last: above all."""
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class CallStatistics:
    """The counts. Calls tell of their starts and ends."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        """Of calls that were given to the engine."""
        self.sampled_tokens = 0
        """Of calls that have ended."""
        self.ended: Counter[str] = Counter()
        """Calls that have ended, by outcome: a finish reason, or a word for the error."""
        self.refused: Counter[str] = Counter()
        """Calls that were answered with an error before anything else, by a word for it."""
        self.on_tapes: Counter[tuple[str, str]] = Counter()
        """Calls on tapes, by what became of the prefix (`kept`, `new`) and why there is a new one."""
        self.stalls = 0
        self.first_token_seconds = Distribution(_FIRST_TOKEN_BOUNDS)
        self.call_seconds = Distribution(_CALL_BOUNDS)

    def call_started(self, record: CallRecord, *, on_tape: bool) -> None:
        """Count a call that goes to the engine."""
        self.prompt_tokens += record.prompt_token_count
        if on_tape:
            kept = record.parent is not None
            self.on_tapes["kept" if kept else "new", "" if kept else record.origin.split_cause.name.lower()] += 1

    def call_ended(self, record: CallRecord) -> str:
        """Count a call that has ended, and return its outcome."""
        outcome = outcome_of(record)
        self.ended[outcome] += 1
        self.sampled_tokens += record.sampled_token_count
        self.call_seconds.add(time.monotonic() - record.began)
        if record.first_token_at is not None:
            self.first_token_seconds.add(record.first_token_at - record.began)
        return outcome

    @contextmanager
    def refusals(self) -> Generator[None]:
        """Count the errors that are raised within."""
        try:
            yield
        except TokentapeError as error:
            self.refused[word_for(error)] += 1
            raise


def outcome_of(record: CallRecord) -> str:
    """Return how an ended call ended: its error's word, else the worst finish reason of its choices."""
    if record.error is not None:
        return word_for(record.error)
    reasons = {choice.completion.finish_reason for choice in record.choices if choice.completion is not None}
    return next(reason.value for reason in _WORST_FIRST if reason in reasons)


def word_for(error: Exception) -> str:
    """Return the name of an error's type as a word: `engine_dead`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
