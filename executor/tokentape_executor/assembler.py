"""From a tape's entries to samples. No I/O: entries are fed in, a trajectory comes out.

Invariants, for every tape that the assembler accepts:

1. For every action range (s, e) of a sample there is one choice of one call, such that `tokens[:s]` is the prompt that
   the engine was given for the call and `tokens[s:e]` all that it sampled for the choice, the stop token included.
2. Every sampled token of the tape is in exactly one range of exactly one sample.
3. `logprobs` has the value that was sampled with each token in the ranges, and 0.0 elsewhere.
4. A call with a parent extends the sample that ends with the parent's completion. Where another call does so already,
   or the parent's completion is kept in part only, it begins a new sample; what it shares with the other is then prompt
   in the new sample. A call without a parent begins a new sample. Nothing is inferred from equal ids.
5. How the tape was chunked, and how its calls were interleaved, makes no difference to the samples.

Each choice is a branch of its own, so n choices of a call give n samples with a common prompt. Of several calls that
continue one completion, that extends its sample which was itself continued; then one that completed; then the one that
leads to the latest call. So a request that its client repeated does not cut the conversation in two. Choices without a
sampled token are left out unless something continues them.

What contradicts the contract raises `TapeInconsistent`: entries out of order, missing or repeated, log-probabilities
that are missing or not finite, counts that do not add up. Nothing is repaired.
"""

from __future__ import annotations

import math

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor._branches import Call, Choice, build_samples
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.trajectory import FinishReason, Trajectory

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    types_pb2.FINISH_REASON_REPETITION: FinishReason.REPETITION,
}


def positions(entry: tape_pb2.TapeEntry) -> int:
    """Return how many sequence numbers `entry` takes: one per sampled token, one for anything else."""
    return len(entry.tokens_sampled.token_ids) if entry.HasField("tokens_sampled") else 1


class Assembler:
    """Takes one tape's entries, from its beginning to its seal."""

    def __init__(self) -> None:
        self._next_sequence = 0
        self._calls: dict[str, Call] = {}
        self._sealed = False

    @property
    def next_sequence(self) -> int:
        """The sequence number that the next entry must have."""
        return self._next_sequence

    @property
    def sealed(self) -> bool:
        """Whether the tape has been taken to its end."""
        return self._sealed

    def feed(self, entry: tape_pb2.TapeEntry) -> None:
        """Take the next entry. Raises `TapeInconsistent`; the assembler is of no use after that."""
        _require(not self._sealed, "an entry follows the seal")
        _require(
            entry.sequence == self._next_sequence,
            f"expected sequence number {self._next_sequence}, got {entry.sequence}",
        )
        match entry.WhichOneof("entry"):
            case "call_started":
                self._start(entry.call_started)
            case "tokens_sampled":
                self._append(entry.tokens_sampled)
            case "choice_finished":
                self._finish(entry.choice_finished)
            case "call_failed":
                self._fail(entry.call_failed)
            case "tape_sealed":
                self._seal(entry.tape_sealed)
            case None:
                raise TapeInconsistent(f"entry {entry.sequence} is of a kind that this version does not know")
        self._next_sequence += positions(entry)

    def trajectory(self) -> Trajectory:
        """Return the samples of the whole tape. Raises `TapeInconsistent` where it is not sealed."""
        _require(self._sealed, "the tape is not sealed")
        calls = list(self._calls.values())
        return Trajectory(build_samples(calls), len(calls), self._sampled_token_count())

    def _start(self, started: tape_pb2.TapeEntry.CallStarted) -> None:
        _require(started.call_id not in self._calls, f"call {started.call_id} starts twice")
        _require(started.call_index == len(self._calls), f"call {started.call_id} has index {started.call_index}")
        parent, kept, before = self._parent(started) if started.HasField("parent") else (None, 0, 0)
        _require(
            started.prompt_token_count == before + len(started.prompt_token_ids) > 0,
            f"the prompt of call {started.call_id} has {before} + {len(started.prompt_token_ids)} tokens, "
            f"not {started.prompt_token_count}",
        )
        self._calls[started.call_id] = Call(
            started.call_id,
            started.call_index,
            parent,
            kept,
            list(started.prompt_token_ids),
            started.prompt_token_count,
            [Choice() for _ in range(started.sampling.n if started.sampling.HasField("n") else 1)],
        )

    def _parent(self, started: tape_pb2.TapeEntry.CallStarted) -> tuple[tuple[Call, int], int, int]:
        """Return the parent call and choice, how many of its sampled tokens are kept, and the tokens up to there."""
        parent = self._call(started.parent.call_id)
        choice = self._choice(parent, started.parent.choice)
        sampled = len(choice.token_ids)
        kept = started.parent.offset if started.parent.HasField("offset") else sampled
        _require(kept <= sampled, f"call {started.call_id} keeps {kept} of its parent's {sampled} tokens")
        return (parent, started.parent.choice), kept, parent.prompt_token_count + kept

    def _append(self, sampled: tape_pb2.TapeEntry.TokensSampled) -> None:
        choice = self._open_choice(sampled.call_id, sampled.choice)
        count = len(sampled.token_ids)
        _require(count > 0, f"call {sampled.call_id} sampled no token")
        _require(
            len(sampled.logprobs) == count and all(map(math.isfinite, sampled.logprobs)),
            f"call {sampled.call_id} has {count} tokens without as many finite log-probabilities",
        )
        choice.append(sampled.token_ids, sampled.logprobs, sampled.weight_version)

    def _finish(self, finished: tape_pb2.TapeEntry.ChoiceFinished) -> None:
        completion = finished.completion
        choice = self._open_choice(finished.call_id, completion.choice)
        _require(
            completion.token_count == len(choice.token_ids),
            f"call {finished.call_id} finished with {completion.token_count} tokens, {len(choice.token_ids)} came",
        )
        reason = _FINISH_REASONS.get(completion.finish_reason)
        if reason is None:
            raise TapeInconsistent(f"call {finished.call_id} finished for no known reason: {completion.finish_reason}")
        choice.finish_reason = reason

    def _fail(self, failed: tape_pb2.TapeEntry.CallFailed) -> None:
        open_choices = [choice for choice in self._call(failed.call_id).choices if choice.finish_reason is None]
        _require(bool(open_choices), f"call {failed.call_id} fails after its end")
        for choice in open_choices:
            choice.finish_reason = FinishReason.FAILED

    def _seal(self, sealed: tape_pb2.TapeEntry.TapeSealed) -> None:
        for call in self._calls.values():
            ended = all(choice.finish_reason is not None for choice in call.choices)
            _require(ended, f"the tape is sealed while call {call.call_id} is running")
        counts = (len(self._calls), self._sampled_token_count())
        _require(
            counts == (sealed.call_count, sealed.sampled_token_count),
            f"the seal counts {sealed.call_count} calls and {sealed.sampled_token_count} tokens, not {counts}",
        )
        self._sealed = True

    def _call(self, call_id: str) -> Call:
        call = self._calls.get(call_id)
        if call is None:
            raise TapeInconsistent(f"call {call_id} has not started")
        return call

    def _choice(self, call: Call, index: int) -> Choice:
        _require(index < len(call.choices), f"call {call.call_id} has no choice {index}")
        return call.choices[index]

    def _open_choice(self, call_id: str, index: int) -> Choice:
        choice = self._choice(self._call(call_id), index)
        _require(choice.finish_reason is None, f"choice {index} of call {call_id} goes on after its end")
        return choice

    def _sampled_token_count(self) -> int:
        return sum(len(choice.token_ids) for call in self._calls.values() for choice in call.choices)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise TapeInconsistent(problem)
