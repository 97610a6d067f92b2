"""The assembler's invariants, on tapes that a small model of a sidecar writes in every order and chunking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.assembler import Assembler, positions
from tokentape_executor.errors import TapeInconsistent
from tokentape_executor.trajectory import Beginning, FinishReason, Sample, Trajectory

Entry = tape_pb2.TapeEntry
STOP, LENGTH, ABORT = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ABORT


@dataclass(frozen=True)
class Token:
    """A sampled token."""

    token_id: int
    logprob: float
    version: str = ""


@dataclass(frozen=True)
class ModelCall:
    """A call as the model of the sidecar knows it: `parent` is (call, choice, kept tokens)."""

    prompt: tuple[int, ...]
    choices: tuple[tuple[Token, ...], ...]
    parent: tuple[int, int, int] | None = None
    reasons: tuple[int | None, ...] = (STOP,)
    """Per choice; `None`: the call fails before the choice finishes."""


@dataclass
class Writer:
    """Writes a tape's entries with their sequence numbers."""

    entries: list[Entry] = field(default_factory=list[Entry])
    sequence: int = 0

    def add(self, entry: Entry) -> None:
        entry.sequence = self.sequence
        self.sequence += positions(entry)
        self.entries.append(entry)


def started(calls: list[ModelCall], index: int) -> Entry:
    call = calls[index]
    start = Entry.CallStarted(
        call_id=f"call-{index}",
        call_index=index,
        prompt_token_ids=call.prompt,
        prompt_token_count=len(prompt_of(calls, index)),
        sampling=types_pb2.SamplingParameters(n=len(call.choices)),
    )
    if call.parent is not None:
        parent, choice, kept = call.parent
        start.parent.CopyFrom(types_pb2.CallReference(call_id=f"call-{parent}", choice=choice))
        if kept < len(calls[parent].choices[choice]):
            start.parent.offset = kept
    return Entry(call_started=start)


def tokens(index: int, choice: int, run: list[Token]) -> Entry:
    return Entry(
        tokens_sampled=Entry.TokensSampled(
            call_id=f"call-{index}",
            choice=choice,
            token_ids=[token.token_id for token in run],
            logprobs=[token.logprob for token in run],
            weight_version=run[0].version,
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


def prompt_of(calls: list[ModelCall], index: int) -> list[int]:
    call = calls[index]
    if call.parent is None:
        return list(call.prompt)
    parent, choice, kept = call.parent
    sampled = [token.token_id for token in calls[parent].choices[choice][:kept]]
    return prompt_of(calls, parent) + sampled + list(call.prompt)


def steps_of(call: ModelCall, index: int) -> list[Entry]:
    """What a call does after its start, one token a step; choices take turns."""
    steps: list[Entry] = []
    for position in range(max(map(len, call.choices), default=0)):
        steps += [tokens(index, c, [run[position]]) for c, run in enumerate(call.choices) if position < len(run)]
    ends = [finished(index, c, r, len(call.choices[c])) for c, r in enumerate(call.reasons) if r is not None]
    return [*steps, *ends, *([failed(index)] if None in call.reasons else [])]


def write(calls: list[ModelCall], draw: st.DataObject) -> list[Entry]:
    """Write the calls' tape: started in order, each after its parent's end, otherwise interleaved; runs are merged."""
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
            add_merged(writer, waiting[index].pop(0), merge=draw.draw(st.booleans()))
        if not waiting[index]:
            running.remove(index)
    writer.add(sealed(len(calls), sum(len(run) for call in calls for run in call.choices)))
    return writer.entries


def add_merged(writer: Writer, entry: Entry, *, merge: bool) -> None:
    last = writer.entries[-1]
    new, old = entry.tokens_sampled, last.tokens_sampled
    same = (new.call_id, new.choice, new.weight_version) == (old.call_id, old.choice, old.weight_version)
    if merge and entry.HasField("tokens_sampled") and last.HasField("tokens_sampled") and same:
        old.token_ids.extend(new.token_ids)
        old.logprobs.extend(new.logprobs)
        writer.sequence += len(new.token_ids)
    else:
        writer.add(entry)


def assemble(entries: list[Entry]) -> Trajectory:
    assembler = Assembler()
    for entry in entries:
        assembler.feed(entry)
    return assembler.trajectory()


token_ids = st.integers(0, 200)
sampled_tokens = st.builds(
    Token,
    token_ids,
    st.floats(-20, 0, width=32),
    st.sampled_from(["", "1", "2"]),
)
completions = st.lists(sampled_tokens, max_size=5).map(tuple)
reasons = st.sampled_from([STOP, LENGTH, ABORT, None])


@st.composite
def model_calls(draw: st.DrawFn) -> list[ModelCall]:
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(0, 6))):
        parent = None
        if index and draw(st.booleans()):
            before = draw(st.integers(0, index - 1))
            choice = draw(st.integers(0, len(calls[before].choices) - 1))
            length = len(calls[before].choices[choice])
            parent = (before, choice, draw(st.sampled_from([length, length, draw(st.integers(0, length))])))
        choices = draw(st.lists(completions, min_size=1, max_size=3).map(tuple))
        calls.append(
            ModelCall(
                draw(st.lists(token_ids, min_size=0 if parent else 1, max_size=4).map(tuple)),
                choices,
                parent,
                tuple(draw(reasons) for _ in choices),
            )
        )
    return calls


def ranges(trajectory: Trajectory) -> Iterator[tuple[Sample, int, int]]:
    for sample in trajectory.samples:
        for start, end in sample.action_ranges:
            yield sample, start, end


@given(model_calls(), st.data())
def test_every_range_is_one_choice_and_every_choice_is_in_one_range(
    calls: list[ModelCall], data: st.DataObject
) -> None:
    trajectory = assemble(write(calls, data))

    expected = sorted(
        (prompt_of(calls, index), [(token.token_id, token.logprob, token.version) for token in run])
        for index, call in enumerate(calls)
        for run in call.choices
        if run
    )
    found: list[tuple[list[int], list[tuple[int, float, str]]]] = []
    for sample, start, end in ranges(trajectory):
        versions = {
            position: span.weight_version for span in sample.version_spans for position in range(span.start, span.end)
        }
        run = [(sample.tokens[i], sample.logprobs[i], versions[i]) for i in range(start, end)]
        found.append((sample.tokens[:start], run))
    assert sorted(found) == expected


@given(model_calls(), st.data())
def test_columns_are_aligned_and_silent_where_nothing_was_sampled(calls: list[ModelCall], data: st.DataObject) -> None:
    for sample in assemble(write(calls, data)).samples:
        assert len(sample.tokens) == len(sample.logprobs)
        acted = [position for start, end in sample.action_ranges for position in range(start, end)]
        assert acted == sorted(set(acted))
        assert all(start < end for start, end in sample.action_ranges)
        assert sample.action_ranges[-1][1] == len(sample.tokens)
        silent = set(range(len(sample.tokens))) - set(acted)
        assert all(sample.logprobs[position] == 0.0 for position in silent)
        assert [p for span in sample.version_spans for p in range(span.start, span.end)] == acted


@given(model_calls(), st.data())
def test_chunks_and_interleaving_make_no_difference(calls: list[ModelCall], data: st.DataObject) -> None:
    assert assemble(write(calls, data)) == assemble(write(calls, data))


@given(model_calls(), st.data())
def test_a_missing_a_repeated_or_a_swapped_entry_is_noticed(calls: list[ModelCall], data: st.DataObject) -> None:
    entries = write(calls, data)
    index = data.draw(st.integers(0, len(entries) - 1))
    damage = data.draw(st.sampled_from(["drop", "repeat", "swap"]))
    if damage == "drop":
        broken = entries[:index] + entries[index + 1 :]
    elif damage == "repeat":
        broken = entries[: index + 1] + entries[index:]
    else:
        broken = entries[:index] + entries[index : index + 2][::-1] + entries[index + 2 :]
    if broken != entries:
        with pytest.raises(TapeInconsistent):
            assemble(broken)


def tape_of(*calls: ModelCall) -> list[Entry]:
    """The tape of calls that were made one after the other."""
    writer = Writer()
    for index, call in enumerate(calls):
        for entry in [started(list(calls), index), *steps_of(call, index)]:
            writer.add(entry)
    writer.add(sealed(len(calls), sum(len(run) for call in calls for run in call.choices)))
    return writer.entries


def run(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(token_id, -float(token_id)) for token_id in ids)


def test_a_conversation_is_one_sample() -> None:
    (sample,) = assemble(
        tape_of(
            ModelCall((1, 2), (run(10, 11),)),
            ModelCall((3,), (run(12),), parent=(0, 0, 2)),
            ModelCall((4, 5), (run(13, 14),), parent=(1, 0, 1), reasons=(LENGTH,)),
        )
    ).samples

    assert sample.tokens == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert sample.action_ranges == [(2, 4), (5, 6), (8, 10)]
    assert sample.logprobs == [0, 0, -10, -11, 0, -12, 0, 0, -13, -14]
    assert sample.call_ids == ["call-0", "call-1", "call-2"]
    assert (sample.finish_reason, sample.beginning) == (FinishReason.LENGTH, Beginning.PROMPT)


def test_the_same_ids_without_a_parent_are_a_new_sample() -> None:
    first, second = assemble(tape_of(ModelCall((1,), (run(10),)), ModelCall((1, 10, 2), (run(11),)))).samples

    assert (first.tokens, first.action_ranges) == ([1, 10], [(1, 2)])
    assert (second.tokens, second.action_ranges) == ([1, 10, 2, 11], [(3, 4)])


def test_a_fork_has_the_shared_part_as_prompt() -> None:
    main, fork = assemble(
        tape_of(
            ModelCall((1,), (run(10, 11, 12),)),
            ModelCall((2,), (run(20),), parent=(0, 0, 3)),
            ModelCall((3,), (run(30),), parent=(0, 0, 1)),
        )
    ).samples

    assert (main.tokens, main.action_ranges) == ([1, 10, 11, 12, 2, 20], [(1, 4), (5, 6)])
    assert (fork.tokens, fork.action_ranges) == ([1, 10, 3, 30], [(3, 4)])
    assert fork.logprobs == [0, 0, 0, -30]
    assert fork.beginning is Beginning.FORK


@pytest.mark.parametrize("first_reason", [STOP, ABORT, None])
def test_a_repeated_request_does_not_cut_the_conversation(first_reason: int | None) -> None:
    spare, main = sorted(
        assemble(
            tape_of(
                ModelCall((1,), (run(10),)),
                ModelCall((2,), (run(20),), parent=(0, 0, 1), reasons=(first_reason,)),
                ModelCall((2,), (run(21),), parent=(0, 0, 1)),
                ModelCall((3,), (run(30),), parent=(2, 0, 1)),
            )
        ).samples,
        key=lambda sample: sample.last_call_index,
    )

    assert main.tokens == [1, 10, 2, 21, 3, 30]
    assert main.action_ranges == [(1, 2), (3, 4), (5, 6)]
    assert (spare.tokens, spare.action_ranges) == ([1, 10, 2, 20], [(3, 4)])


@pytest.mark.parametrize("first_reason", [STOP, ABORT, None])
def test_a_repeated_last_request_counts_as_the_repetition(first_reason: int | None) -> None:
    main, _ = sorted(
        assemble(
            tape_of(
                ModelCall((1,), (run(10),)),
                ModelCall((2,), (run(20),), parent=(0, 0, 1), reasons=(first_reason,)),
                ModelCall((2,), (run(21),), parent=(0, 0, 1)),
            )
        ).samples,
        key=lambda sample: -len(sample.action_ranges),
    )
    assert main.tokens == [1, 10, 2, 21]


def test_an_aborted_repetition_takes_nothing_from_the_answer() -> None:
    main, spare = assemble(
        tape_of(
            ModelCall((1,), (run(10),)),
            ModelCall((2,), (run(20),), parent=(0, 0, 1)),
            ModelCall((2,), (run(21),), parent=(0, 0, 1), reasons=(ABORT,)),
        )
    ).samples
    assert (main.tokens, main.action_ranges) == ([1, 10, 2, 20], [(1, 2), (3, 4)])
    assert (spare.tokens, spare.finish_reason) == ([1, 10, 2, 21], FinishReason.ABORT)


def test_of_two_branches_that_went_on_the_longer_lived_keeps_the_common_part() -> None:
    main, side = assemble(
        tape_of(
            ModelCall((1,), (run(10),)),
            ModelCall((2,), (run(20),), parent=(0, 0, 1)),
            ModelCall((3,), (run(30),), parent=(0, 0, 1)),
            ModelCall((4,), (run(40),), parent=(2, 0, 1)),
            ModelCall((5,), (run(50),), parent=(1, 0, 1)),
        )
    ).samples
    assert main.tokens == [1, 10, 2, 20, 5, 50]
    assert (side.tokens, side.action_ranges) == ([1, 10, 3, 30, 4, 40], [(3, 4), (5, 6)])


def test_each_of_n_choices_is_a_sample_and_can_be_continued() -> None:
    samples = assemble(
        tape_of(
            ModelCall((1, 2), (run(10), run(20), run(30, 31)), reasons=(STOP, STOP, LENGTH)),
            ModelCall((3,), (run(40),), parent=(0, 1, 1)),
        )
    ).samples

    assert [sample.tokens for sample in samples] == [[1, 2, 10], [1, 2, 20, 3, 40], [1, 2, 30, 31]]
    assert [sample.action_ranges for sample in samples] == [[(2, 3)], [(2, 3), (4, 5)], [(2, 4)]]


def test_calls_without_a_token_leave_no_sample_unless_continued() -> None:
    failing = ModelCall((1,), ((),), reasons=(None,))
    assert assemble(tape_of(failing)) == Trajectory([], 1, 0)

    (sample,) = assemble(tape_of(failing, ModelCall((2,), (run(10),), parent=(0, 0, 0)))).samples
    assert (sample.tokens, sample.action_ranges) == ([1, 2, 10], [(2, 3)])


def damaged(index: int, damage: Entry) -> list[Entry]:
    entries = tape_of(ModelCall((1, 2), (run(10, 11),)))
    sequence = entries[index].sequence
    entries[index] = damage
    entries[index].sequence = sequence
    return entries


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (damaged(1, Entry(tokens_sampled=Entry.TokensSampled(call_id="call-0", token_ids=[10]))), "log-probabilities"),
        (damaged(1, tokens(0, 0, [Token(10, math.nan)])), "finite"),
        (damaged(1, tokens(0, 0, [Token(10, -math.inf)])), "finite"),
        (damaged(1, tokens(7, 0, [Token(10, -1)])), "call-7 has not started"),
        (damaged(1, tokens(0, 1, [Token(10, -1)])), "no choice 1"),
        (damaged(1, Entry(tokens_sampled=Entry.TokensSampled(call_id="call-0"))), "sampled no token"),
        (damaged(1, Entry()), "does not know"),
        (damaged(1, finished(0, 0, STOP, 0)), "after its end"),
        (damaged(3, finished(0, 0, STOP, 3)), "finished with 3 tokens, 2 came"),
        (damaged(3, finished(0, 0, 0, 2)), "no known reason"),
        (damaged(3, tokens(0, 0, [Token(10, -1)])), "while call call-0 is running"),
        (damaged(4, sealed(1, 3)), "counts 1 calls and 3 tokens"),
        (damaged(4, sealed(2, 2)), "counts 2 calls"),
        (damaged(4, failed(0)), "fails after its end"),
        (damaged(0, started([ModelCall((), (run(10, 11),))], 0)), "the prompt of call call-0"),
        (tape_of(ModelCall((1,), (run(10),)))[:-1], "not sealed"),
    ],
)
def test_what_contradicts_the_contract_is_refused(entries: list[Entry], problem: str) -> None:
    with pytest.raises(TapeInconsistent, match=problem):
        assemble(entries)


def test_a_prompt_that_is_not_its_parents_continuation_is_refused() -> None:
    entries = tape_of(ModelCall((1,), (run(10),)), ModelCall((2,), (run(20),), parent=(0, 0, 1)))
    start = next(entry for entry in entries[1:] if entry.HasField("call_started"))
    start.call_started.prompt_token_count += 1
    with pytest.raises(TapeInconsistent, match=r"has 2 \+ 1 tokens, not 4"):
        assemble(entries)
    start.call_started.parent.offset = 2
    with pytest.raises(TapeInconsistent, match="keeps 2 of its parent's 1 tokens"):
        assemble(entries)


def test_nothing_follows_the_seal() -> None:
    entries = tape_of(ModelCall((1,), (run(10),)))
    extra = sealed(1, 1)
    extra.sequence = entries[-1].sequence + 1
    with pytest.raises(TapeInconsistent, match="follows the seal"):
        assemble([*entries, extra])
