"""From a tape's entries to samples. No I/O: entries are fed in, a trajectory comes out.

Invariants, for every tape that the assembler accepts (numbers in brackets are DESIGN.md's):

- For every action (s, e) of a sample there is one choice of one call, such that `tokens[:s]` is the prompt that the
  engine was given for the call and `tokens[s:e]` all that it sampled for the choice, the stop token included (1, 5).
- Every sampled token of the tape is in exactly one action of exactly one sample, or is dropped, with a reason. The
  receipt counts both, and `sampled == kept + dropped` (2).
- `logprobs` has the value that was sampled with each token in the actions, and 0.0 elsewhere (3).
- A call with a parent extends the sample that ends with the parent's completion. Where another call does so already,
  or the parent's completion is kept in part only, it begins a new sample; what it shares with the other is then prompt
  in the new sample, and action only in the other. A call without a parent begins a new sample, for the cause that the
  tape gives. Nothing is inferred from equal ids (4).
- How the tape was chunked, and how its calls were interleaved, makes no difference: not to the samples, nor to the
  receipt and its hash (7).
- Versions of the weights, and the marks of uncertain boundaries and stale caches, are each token's own (8). The LoRA
  adapter is each call's, and a call has its parent's: all of a sample was sampled by one adapter, or by the base model.

What is dropped (10). A *child* of a call is any call that continues one of its choices, wherever. *Siblings* are calls
of the same parent place (call, choice, tokens kept), the same further ids, the same LoRA adapter or none, and equal
parameters in force; the n choices of one call are none.

1. `superseded`: a call without a child, after which a sibling was made that completed or has a child. So of siblings
   all but the last that have no child are dropped, but a repetition that was itself abandoned takes nothing away.
2. Otherwise `abandoned` or `failed`: a call without a child of which a choice was aborted or failed, with all its
   choices (one failed choice makes it `failed`): its client never got its answer. A call that the seal aborted counts
   so too: it still ran when the agent had ended. Of a call with a child, those of its aborted or failed choices that
   nothing continues.

Parameters are compared as the tape has them, `seed` and the clamped `max_tokens` included: calls that a tape's
`policy_seed` gave seeds of their own are no siblings.

Each choice that is kept is a branch of its own, so n choices of a call give n samples with a common prompt. Of several
branches that continue one completion, that extends its sample which was itself continued; then one that completed; then
the one that leads to the latest call; then the first choice. Choices without a sampled token are left out unless
something continues them: a call that sampled nothing leaves no sample, and is no error.

What contradicts the contract raises `TapeInconsistent`: entries out of order, missing or repeated, log-probabilities
that are missing or not finite, prompts without ids, another LoRA adapter than the parent's, counts that do not add up.
Nothing is repaired.
"""

from __future__ import annotations

import math

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor._branches import build_samples
from tokentape_executor._drops import dropped_choices
from tokentape_executor._ledger import make_receipt
from tokentape_executor._tree import Call, Choice, WeightRun
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.receipt import SplitCause
from tokentape_executor.trajectory import FinishReason, Trajectory

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    types_pb2.FINISH_REASON_REPETITION: FinishReason.REPETITION,
}
_CAUSE_PREFIX = "SPLIT_CAUSE_"
_SPLIT_CAUSES = {number: SplitCause[name.removeprefix(_CAUSE_PREFIX)] for name, number in types_pb2.SplitCause.items()}


def positions(entry: tape_pb2.TapeEntry) -> int:
    """Return how many sequence numbers `entry` takes: one per sampled token, one for anything else."""
    return len(entry.tokens_sampled.token_ids) if entry.HasField("tokens_sampled") else 1


class Assembler:
    """Takes one tape's entries, from its beginning to its seal."""

    def __init__(self) -> None:
        self._next_sequence = 0
        self._calls: dict[str, Call] = {}
        self._sampled = 0
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

    def prompts(self) -> dict[str, list[int]]:
        """Return the whole prompt of every call, by its id, in the order of the calls."""
        return {call.call_id: call.prompt() for call in self._calls.values()}

    def trajectory(self) -> Trajectory:
        """Return the samples of the whole tape, and its receipt. Raises `TapeInconsistent` where it is not sealed."""
        _require(self._sealed, "the tape is not sealed")
        calls = list(self._calls.values())
        dropped = dropped_choices(calls)
        samples = build_samples(calls, dropped)
        return Trajectory(samples, make_receipt(calls, samples, dropped, self._sampled), list(self._calls))

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
            started.sampling,
            # A cause from a later version of the contract is news for people, and no reason to lose the rollout.
            _SPLIT_CAUSES.get(started.split_cause, SplitCause.UNSPECIFIED),
            started.lora_name,
            [Choice() for _ in range(started.sampling.n if started.sampling.HasField("n") else 1)],
        )

    def _parent(self, started: tape_pb2.TapeEntry.CallStarted) -> tuple[tuple[Call, int], int, int]:
        """Return the parent call and choice, how many of its sampled tokens are kept, and the tokens up to there."""
        parent = self._call(started.parent.call_id)
        _require(
            parent.lora_name == started.lora_name,
            f"call {started.call_id} of the LoRA adapter {started.lora_name!r} continues one of {parent.lora_name!r}",
        )
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
        run = WeightRun(len(choice.token_ids), sampled.weight_version, sampled.boundary_uncertain, sampled.stale_cache)
        choice.append(sampled.token_ids, sampled.logprobs, run)
        self._sampled += count

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
        match completion.WhichOneof("stop_reason"):
            case "stop_token_id":
                choice.stop_reason = completion.stop_token_id
            case "stop_string":
                choice.stop_reason = completion.stop_string
            case None:
                pass

    def _fail(self, failed: tape_pb2.TapeEntry.CallFailed) -> None:
        open_choices = [choice for choice in self._call(failed.call_id).choices if choice.finish_reason is None]
        _require(bool(open_choices), f"call {failed.call_id} fails after its end")
        for choice in open_choices:
            choice.finish_reason = FinishReason.FAILED

    def _seal(self, sealed: tape_pb2.TapeEntry.TapeSealed) -> None:
        for call in self._calls.values():
            ended = all(choice.finish_reason is not None for choice in call.choices)
            _require(ended, f"the tape is sealed while call {call.call_id} is running")
        counts = (len(self._calls), self._sampled)
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


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise TapeInconsistent(problem)
