"""One completion as it grows: its columns, runs of them, and how it ended."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokentape_sidecar.engine import FinishReason, TopLogprobs, Weights


@dataclass(frozen=True, slots=True)
class Completion:
    """How a choice ended; `token_count` counts its sampled tokens, the stop token included."""

    choice: int
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_count: int


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive sampled tokens of one choice under one version of the weights.

    `token_ids` and `logprobs` are of one length; `start` is the index of the first within the choice.
    """

    choice: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weights: Weights
    top_logprobs: TopLogprobs | None


@dataclass(slots=True)
class ChoiceRecord:
    """One completion: columns of one length, and how it ended."""

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    weight_starts: list[int] = field(default_factory=list[int])
    weights: list[Weights] = field(default_factory=list[Weights])
    """Which weights sampled the tokens from the start of the same index on."""
    top_token_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("f"))
    completion: Completion | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that the columns take."""
        columns = (self.token_ids, self.logprobs, self.top_token_ids, self.top_logprobs)
        return sum(len(column) * column.itemsize for column in columns)

    def runs(self, choice: int, start: int, end: int, k: int) -> Iterator[TokenRun]:
        """Yield tokens `start` to `end` (exclusive), split where the weights changed; `k` top entries a token."""
        bounds = [*(s for s in self.weight_starts if start < s < end), end]
        span = sum(1 for s in self.weight_starts if s <= start) - 1
        for bound in bounds:
            if bound > start:
                yield TokenRun(
                    choice=choice,
                    start=start,
                    token_ids=self.token_ids[start:bound],
                    logprobs=self.logprobs[start:bound],
                    weights=self.weights[span],
                    top_logprobs=TopLogprobs(
                        k, self.top_token_ids[start * k : bound * k], self.top_logprobs[start * k : bound * k]
                    )
                    if k
                    else None,
                )
            start, span = bound, span + 1
