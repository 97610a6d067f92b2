"""A choice of a call as its client has it: columns of tokens that grow, and a cursor on them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokentape.v1.types_pb2 import Completion


class BrokenContract(Exception):
    """A sidecar's stream is not what the contract says."""


def broken(problem: object) -> str:
    """Return the message of a status that says so."""
    return f"the sidecar broke the contract of GenerateMany: {problem}"


class Top(NamedTuple):
    """The `k` most probable tokens of each position, best first, one position after the other."""

    k: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]


class TokenRun(NamedTuple):
    """Consecutive tokens of one choice, which weights of one version sampled."""

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log-probabilities, as many as there are tokens."""
    weight_version: str
    top: Top | None


class ChoiceColumns:
    """A choice's tokens as they come."""

    __slots__ = (
        "completion",
        "first_token_at",
        "is_told",
        "logprobs",
        "position",
        "token_ids",
        "top_k",
        "top_logprobs",
        "top_token_ids",
        "version",
        "versions",
    )

    def __init__(self) -> None:
        self.token_ids = array("I")
        self.logprobs = array("f")
        """Of each of them, natural."""
        self.version: str | None = None
        """That of the last token; None: there is none yet."""
        self.versions: list[tuple[int, str]] = []
        """From which token on which version of the weights sampled them."""
        self.top_k = 0
        self.top_token_ids = array("I")
        """Of each token the `top_k` most probable ones, best first."""
        self.top_logprobs = array("f")
        self.completion: Completion | None = None
        """How the choice ended."""
        self.first_token_at: float | None = None
        """When the first of them came, on the clock of `time.monotonic`."""
        self.position = 0
        """How many tokens were read."""
        self.is_told = False
        """Whether its end was read."""

    def begin_version(self, version: str, count: int) -> None:
        """Note that `version` sampled the last `count` tokens."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if version != self.version:
            self.versions.append((len(self.token_ids) - count, version))
        self.version = version

    def add_top(self, k: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add the most probable tokens of what was just added."""
        self.top_k = k
        self.top_token_ids.extend(token_ids)
        self.top_logprobs.extend(logprobs)

    def finish(self, completion: Completion) -> None:
        """End the choice."""
        if self.completion is not None or completion.token_count != len(self.token_ids):
            raise BrokenContract(f"a choice of {len(self.token_ids)} tokens ended with {completion.token_count}")
        if len(self.top_token_ids) != len(self.token_ids) * self.top_k:
            raise BrokenContract(f"{len(self.top_token_ids)} most probable tokens of {len(self.token_ids)} positions")
        self.completion = completion

    @property
    def is_whole(self) -> bool:
        """Whether it has ended, and nothing came after that."""
        return self.completion is not None and self.completion.token_count == len(self.token_ids)

    def read(self, choice: int) -> Iterator[TokenRun | Completion]:
        """Yield what is new since the last read, the choice's end after its last token."""
        start, end = self.position, len(self.token_ids)
        if self.is_told or (self.completion is not None and not self.is_whole):
            if end > start:
                raise BrokenContract("tokens of a choice that has ended")
            return
        self.position = end
        if end > start:
            if self.versions[-1][0] <= start:
                yield self._run(choice, start, end, self.versions[-1][1])
            else:
                yield from self._runs(choice, start, end)
        if self.completion is not None:
            self.is_told = True
            yield self.completion

    def _runs(self, choice: int, start: int, end: int) -> Iterator[TokenRun]:
        bounds = [*(begin for begin, _ in self.versions[1:]), end]
        for (_, version), bound in zip(self.versions, bounds, strict=True):
            if bound > start:
                yield self._run(choice, start, bound, version)
                start = bound

    def _run(self, choice: int, start: int, end: int, version: str) -> TokenRun:
        k = self.top_k
        top = Top(k, self.top_token_ids[start * k : end * k], self.top_logprobs[start * k : end * k]) if k else None
        return TokenRun(choice, self.token_ids[start:end], self.logprobs[start:end], version, top)
