"""A small model of a sidecar: rollouts as plain data, and their tapes in any order and chunking.

It knows what the contract says of a tape and nothing of the executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from tokentape.v1 import tape_pb2, types_pb2

Entry = tape_pb2.TapeEntry
STOP, LENGTH, ABORT = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT
REPETITION = types_pb2.FINISH_REASON_REPETITION
FAIL = None
"""As a choice's reason: the call fails before the choice finishes."""


@dataclass(frozen=True, order=True)
class Token:
    """A sampled token, and what the engine said of it."""

    token_id: int
    logprob: float
    version: str = ""
    uncertain: bool = False
    stale: bool = False


@dataclass(frozen=True)
class ModelCall:
    """A call: `prompt` has the ids after the parent's; `parent` is (call, choice, kept tokens)."""

    prompt: tuple[int, ...]
    choices: tuple[tuple[Token, ...], ...]
    parent: tuple[int, int, int] | None = None
    reasons: tuple[int | None, ...] = (STOP,)
    """Per choice; `FAIL`: the call fails before the choice finishes."""
    temperature: float = 1.0
    cause: types_pb2.SplitCause.ValueType = types_pb2.SPLIT_CAUSE_UNSPECIFIED
    lora_name: str = ""


@dataclass
class Writer:
    """Writes a tape's entries with their sequence numbers."""

    entries: list[Entry] = field(default_factory=list[Entry])
    sequence: int = 0

    def add(self, entry: Entry) -> None:
        entry.sequence = self.sequence
        self.sequence += len(entry.tokens_sampled.token_ids) if entry.HasField("tokens_sampled") else 1
        self.entries.append(entry)


def prompt_of(calls: Sequence[ModelCall], index: int) -> list[int]:
    """The whole prompt that the engine was given for a call."""
    call = calls[index]
    if call.parent is None:
        return list(call.prompt)
    parent, choice, kept = call.parent
    sampled = [token.token_id for token in calls[parent].choices[choice][:kept]]
    return prompt_of(calls, parent) + sampled + list(call.prompt)


def started(calls: Sequence[ModelCall], index: int) -> Entry:
    call = calls[index]
    start = Entry.CallStarted(
        call_id=f"call-{index}",
        call_index=index,
        prompt_token_ids=call.prompt,
        prompt_token_count=len(prompt_of(calls, index)),
        sampling=types_pb2.SamplingParameters(n=len(call.choices), temperature=call.temperature),
        split_cause=call.cause,
        lora_name=call.lora_name,
    )
    if call.parent is not None:
        parent, choice, kept = call.parent
        start.parent.CopyFrom(types_pb2.CallReference(call_id=f"call-{parent}", choice=choice))
        if kept < len(calls[parent].choices[choice]):
            start.parent.offset = kept
    return Entry(call_started=start)


def tokens(index: int, choice: int, run: Sequence[Token]) -> Entry:
    return Entry(
        tokens_sampled=Entry.TokensSampled(
            call_id=f"call-{index}",
            choice=choice,
            token_ids=[token.token_id for token in run],
            logprobs=[token.logprob for token in run],
            weight_version=run[0].version,
            boundary_uncertain=run[0].uncertain,
            stale_cache=run[0].stale,
        )
    )


def finished(index: int, choice: int, reason: int, count: int) -> Entry:
    completion = types_pb2.Completion(choice=choice, token_count=count)
    completion.finish_reason = reason  # pyright: ignore[reportAttributeAccessIssue] # any number is an enum's value here
    return Entry(choice_finished=Entry.ChoiceFinished(call_id=f"call-{index}", completion=completion))


def failed(index: int) -> Entry:
    return Entry(call_failed=Entry.CallFailed(call_id=f"call-{index}", message="out of memory"))


def sealed(calls: int, sampled: int) -> Entry:
    return Entry(tape_sealed=Entry.TapeSealed(call_count=calls, sampled_token_count=sampled))


def seal_of(calls: Sequence[ModelCall]) -> Entry:
    return sealed(len(calls), sum(len(run) for call in calls for run in call.choices))


def steps_of(call: ModelCall, index: int) -> list[Entry]:
    """What a call does after its start, one token a step; choices take turns."""
    steps: list[Entry] = []
    for position in range(max(map(len, call.choices), default=0)):
        steps += [tokens(index, c, [run[position]]) for c, run in enumerate(call.choices) if position < len(run)]
    ends = [finished(index, c, r, len(call.choices[c])) for c, r in enumerate(call.reasons) if r is not None]
    return [*steps, *ends, *([failed(index)] if FAIL in call.reasons else [])]


def tape_of(*calls: ModelCall) -> list[Entry]:
    """The tape of calls that were made one after the other, a token an entry."""
    writer = Writer()
    for index, call in enumerate(calls):
        for entry in [started(calls, index), *steps_of(call, index)]:
            writer.add(entry)
    writer.add(seal_of(calls))
    return writer.entries


def write(calls: Sequence[ModelCall], draw: st.DataObject) -> list[Entry]:
    """A tape of these calls: started in order, each after its parent's end, otherwise interleaved; runs are merged."""
    writer = Writer()
    waiting = {index: steps_of(call, index) for index, call in enumerate(calls)}
    running: list[int] = []
    next_call = 0
    while next_call < len(calls) or running:
        options = list(running)
        if next_call < len(calls) and (calls[next_call].parent or (-1,))[0] not in running:
            options.append(next_call)
        index = draw.draw(st.sampled_from(options))
        if index == next_call:
            writer.add(started(calls, index))
            running.append(index)
            next_call += 1
        elif waiting[index]:
            _add_merged(writer, waiting[index].pop(0), merge=draw.draw(st.booleans()))
        if not waiting[index]:
            running.remove(index)
    writer.add(seal_of(calls))
    return writer.entries


def _add_merged(writer: Writer, entry: Entry, *, merge: bool) -> None:
    last = writer.entries[-1]
    new, old = entry.tokens_sampled, last.tokens_sampled
    if merge and entry.HasField("tokens_sampled") and last.HasField("tokens_sampled") and _run(new) == _run(old):
        old.token_ids.extend(new.token_ids)
        old.logprobs.extend(new.logprobs)
        writer.sequence += len(new.token_ids)
    else:
        writer.add(entry)


def _run(sampled: Entry.TokensSampled) -> tuple[object, ...]:
    return (
        sampled.call_id,
        sampled.choice,
        sampled.weight_version,
        sampled.boundary_uncertain,
        sampled.stale_cache,
    )


token_ids = st.integers(0, 200)
sampled_tokens = st.builds(
    Token,
    token_ids,
    st.floats(-20, 0, width=32),
    st.sampled_from(["", "1", "2"]),
    st.booleans(),
    st.booleans(),
)
completions = st.lists(sampled_tokens, max_size=5).map(tuple)
reasons = st.sampled_from([STOP, STOP, LENGTH, REPETITION, ABORT, FAIL])
causes = st.sampled_from([cause for _, cause in types_pb2.SplitCause.items()])


@st.composite
def rollouts(draw: st.DrawFn, max_calls: int = 7) -> list[ModelCall]:
    """Random trees: turns, forks, choices, truncations, aborts, failures, empty completions, and retries."""
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(0, max_calls))):
        kind = draw(st.sampled_from(["new", "turn", "turn", "retry", "fork"])) if index else "new"
        before = draw(st.integers(0, index - 1)) if index else 0
        n = draw(st.integers(1, 3))
        made = ModelCall(
            draw(st.lists(token_ids, min_size=1, max_size=4).map(tuple)),
            tuple(draw(completions) for _ in range(n)),
            None,
            tuple(draw(reasons) for _ in range(n)),
            draw(st.sampled_from([1.0, 0.5])),
            draw(causes),
        )
        calls.append(_related(draw, calls, made, kind, before))
    return calls


def _related(draw: st.DrawFn, calls: list[ModelCall], made: ModelCall, kind: str, before: int) -> ModelCall:
    """`made` as it is, or as a turn after, a fork of, or a retry of the call `before`."""
    if kind == "new":
        return made
    old = calls[before]
    if kind == "retry":
        n = len(old.choices)
        choices = tuple(draw(completions) for _ in range(n))
        return ModelCall(
            old.prompt, choices, old.parent, tuple(draw(reasons) for _ in range(n)), old.temperature, made.cause
        )
    choice = draw(st.integers(0, len(old.choices) - 1))
    length = len(old.choices[choice])
    kept = length if kind == "turn" else draw(st.integers(0, length))
    # A continuation may bring no id of its own: it then samples on where another stopped.
    prompt = made.prompt if draw(st.integers(0, 9)) else ()
    return ModelCall(prompt, made.choices, (before, choice, kept), made.reasons, made.temperature)
