"""A tape as it unrolls before somebody's eyes: its entries in, what happened out. No I/O.

A reel may begin anywhere on a tape. Calls whose start it has not seen have no prompt, and are numbered by no index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.assembler import positions


@dataclass(frozen=True, slots=True)
class Weights:
    """Under which weights tokens were sampled, as `TokensSampled` says it."""

    version: str
    boundary_uncertain: bool = False
    stale_cache: bool = False


@dataclass(slots=True)
class Choice:
    """A completion, as far as it has come. The columns have one length, in tokens."""

    index: int
    token_ids: list[int] = field(default_factory=list[int])
    pieces: list[str] = field(default_factory=list[str])
    """The text of each token; empty strings where the tape came without text."""
    logprobs: list[float] = field(default_factory=list[float])
    weights: list[tuple[int, Weights]] = field(default_factory=list[tuple[int, Weights]])
    """From which token on they are in force, ascending; the first is 0."""
    completion: types_pb2.Completion | None = None

    def take(self, sampled: tape_pb2.TapeEntry.TokensSampled) -> None:
        """Add a run of tokens."""
        weights = Weights(sampled.weight_version, sampled.boundary_uncertain, sampled.stale_cache)
        if not self.weights or self.weights[-1][1] != weights:
            self.weights.append((len(self.token_ids), weights))
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.pieces += _pieces(sampled.text_pieces, len(sampled.token_ids))


@dataclass(slots=True)
class Call:
    """One call of a tape."""

    call_id: str
    started: tape_pb2.TapeEntry.CallStarted | None
    """`None`: its start lies before the reel's."""
    parent: Call | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    ended: bool = False

    def choice(self, index: int) -> Choice:
        """Return a choice, which begins now if it was not there."""
        return self.choices.setdefault(index, Choice(index))

    def prompt_pieces(self) -> list[str]:
        """Return the text of each of the prompt's own tokens; empty strings where the tape came without text."""
        started = self.started
        return [] if started is None else _pieces(started.text_pieces, len(started.prompt_token_ids))

    @property
    def choice_count(self) -> int:
        """How many choices it is to have."""
        started = self.started
        return max(len(self.choices), started.sampling.n if started and started.sampling.HasField("n") else 1)


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call was made."""

    call: Call


@dataclass(frozen=True, slots=True)
class ChoiceGrown:
    """A choice has `count` more tokens."""

    call: Call
    choice: Choice
    count: int


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice has its last token."""

    call: Call
    choice: Choice


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call failed; its choices that have no `completion` end here."""

    call: Call
    message: str


@dataclass(frozen=True, slots=True)
class ReelEnded:
    """The tape is sealed."""

    call_count: int
    sampled_token_count: int


Happening: TypeAlias = CallBegun | ChoiceGrown | ChoiceEnded | CallBroken | ReelEnded


class Reel:
    """What was seen of a tape."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.sampled = 0
        """Tokens."""
        self.kept = 0
        """Calls that continue another."""
        self.split = 0
        """Calls that begin a sample of their own."""
        self.failed = 0
        self.next_sequence: int | None = None
        self.weights: Weights | None = None
        """Of the token that came last."""
        self.sealed = False

    @property
    def running(self) -> Iterator[Call]:
        """Calls that have not ended, in the order in which they were made."""
        return (call for call in self.calls.values() if not call.ended)

    def take(self, entry: tape_pb2.TapeEntry) -> Happening | None:
        """Take the next entry. An entry of a kind that is not known gives `None`."""
        self.next_sequence = entry.sequence + positions(entry)
        match entry.WhichOneof("entry"):
            case "call_started":
                return self._begin(entry.call_started)
            case "tokens_sampled":
                return self._grow(entry.tokens_sampled)
            case "choice_finished":
                return self._finish(entry.choice_finished)
            case "call_failed":
                return self._break(entry.call_failed)
            case "tape_sealed":
                self.sealed = True
                return ReelEnded(entry.tape_sealed.call_count, entry.tape_sealed.sampled_token_count)
            case None:
                return None

    def _begin(self, started: tape_pb2.TapeEntry.CallStarted) -> CallBegun:
        has_parent = started.HasField("parent")
        call = Call(started.call_id, started, self._call(started.parent.call_id) if has_parent else None)
        self.calls[started.call_id] = call
        self.kept += has_parent
        self.split += not has_parent
        return CallBegun(call)

    def _grow(self, sampled: tape_pb2.TapeEntry.TokensSampled) -> ChoiceGrown:
        call = self._call(sampled.call_id)
        choice = call.choice(sampled.choice)
        choice.take(sampled)
        self.sampled += len(sampled.token_ids)
        self.weights = choice.weights[-1][1]
        return ChoiceGrown(call, choice, len(sampled.token_ids))

    def _finish(self, finished: tape_pb2.TapeEntry.ChoiceFinished) -> ChoiceEnded:
        call = self._call(finished.call_id)
        choice = call.choice(finished.completion.choice)
        choice.completion = finished.completion
        ended = sum(each.completion is not None for each in call.choices.values())
        call.ended = ended == call.choice_count
        return ChoiceEnded(call, choice)

    def _break(self, failed: tape_pb2.TapeEntry.CallFailed) -> CallBroken:
        call = self._call(failed.call_id)
        call.ended = True
        self.failed += 1
        return CallBroken(call, failed.message)

    def _call(self, call_id: str) -> Call:
        return self.calls.setdefault(call_id, Call(call_id, None))


def _pieces(texts: Sequence[str], count: int) -> list[str]:
    return list(texts) if texts else [""] * count
