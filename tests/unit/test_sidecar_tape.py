"""A tape: whatever happens on it, every reader gets the same, from any position on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sidecar_client import Position, positions, prompts_on, sampled_on
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_sidecar.convert import entry_to_proto
from tokentape_sidecar.engine import FinishReason, Sampling, TopLogprobs, Weights
from tokentape_sidecar.errors import (
    CallError,
    InvalidArgument,
    LimitReached,
    PermissionDenied,
    SequenceOutOfRange,
    TapeSealed,
)
from tokentape_sidecar.origin import Origin, SplitCause
from tokentape_sidecar.record import CallRecord, Parent
from tokentape_sidecar.tape import Tape, TapeLimits, TapePolicy, sidecar_name_of

ALL = 2**32
TAPE_ID = "main." + "0" * 32
TOKENS = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.floats(min_value=-100, max_value=0, width=32)), min_size=1, max_size=5
)


def new_tape(limits: TapeLimits | None = None) -> Tape:
    return Tape(TAPE_ID, limits or TapeLimits(), TapePolicy())


def new_call(
    tape: Tape,
    prompt: list[int],
    *,
    n: int = 1,
    top_logprobs: int = 0,
    parent: Parent | None = None,
    max_tokens: int | None = None,
) -> CallRecord:
    record = CallRecord(
        call_id=f"call-{len(tape.calls)}",
        prompt_suffix=prompt,
        sampling=Sampling(n=n, top_logprobs=top_logprobs, max_tokens=max_tokens),
        parent=parent,
        origin=Origin("anchor", "", SplitCause.HISTORY_EDITED),
        call_index=len(tape.calls),
        listener=tape,
    )
    tape.add_call(record)
    return record


def read_entries(tape: Tape, from_sequence: int = 0, max_positions: int = ALL) -> list[tape_pb2.TapeEntry]:
    return [entry_to_proto(entry) for entry in tape.read(from_sequence, max_positions)[0]]


@dataclass
class Rollout:
    """A tape that grows at random, and beside it, written down independently, what it must say."""

    data: st.DataObject
    tape: Tape = field(default_factory=new_tape)
    expected: list[Position] = field(default_factory=list[Position])
    prompts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    sampled: dict[tuple[str, int], list[int]] = field(default_factory=dict[tuple[str, int], list[int]])
    token_count: int = 0

    def step(self) -> None:
        """Let one thing happen."""
        open_choices = [
            (call, choice)
            for call in self.tape.running_calls
            for choice, columns in enumerate(call.choices)
            if columns.completion is None
        ]
        kinds = ["start"] if len(self.tape.calls) < 5 else []
        # Tokens are what mostly happens.
        kinds += ["tokens"] * 4 + ["finish", "fail"] if open_choices else []
        if not kinds:
            return
        kind = self.data.draw(st.sampled_from(kinds))
        if kind == "start":
            self.start()
            return
        call, choice = self.data.draw(st.sampled_from(open_choices))
        if kind == "tokens":
            self.sample(call, choice)
        elif kind == "finish":
            self.finish(call, choice, self.data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])))
        else:
            call.fail(CallError("broken"))
            self.expected.append(("failed", call.call_id, "broken"))

    def start(self) -> None:
        suffix = self.data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        parent, reference, prefix = None, None, list[int]()
        if self.tape.calls and self.data.draw(st.booleans()):
            of = self.data.draw(st.sampled_from(self.tape.calls))
            choice = self.data.draw(st.integers(0, len(of.choices) - 1))
            offset = self.data.draw(st.integers(0, len(of.choices[choice].token_ids)))
            parent, reference = Parent(of, choice, offset), (of.call_id, choice, offset)
            prefix = self.prompts[of.call_id] + self.sampled[of.call_id, choice][:offset]
        n = self.data.draw(st.integers(1, 2))
        call = new_call(self.tape, suffix, n=n, top_logprobs=self.data.draw(st.sampled_from([0, 2])), parent=parent)
        # Only a call without a parent has a reason to have none.
        cause = 0 if parent else types_pb2.SPLIT_CAUSE_HISTORY_EDITED
        self.prompts[call.call_id] = prefix + suffix
        self.sampled |= {(call.call_id, choice): [] for choice in range(n)}
        self.expected.append(
            (
                "started",
                call.call_id,
                len(self.tape.calls) - 1,
                reference,
                tuple(suffix),
                len(prefix) + len(suffix),
                "anchor",
                cause,
            )
        )

    def sample(self, call: CallRecord, choice: int) -> None:
        tokens = self.data.draw(TOKENS)
        version = self.data.draw(st.sampled_from(["", "1", "2"]))
        ids, logprobs = [t for t, _ in tokens], [p for _, p in tokens]
        k = call.sampling.top_logprobs or 0
        best = [(token_id % 7 + rank, -float(rank)) for token_id in ids for rank in range(k)]
        call.append(
            choice,
            ids,
            logprobs,
            weights=Weights(version),
            top_logprobs=TopLogprobs(k, [t for t, _ in best], [p for _, p in best]) if k else None,
        )
        self.sampled[call.call_id, choice] += ids
        self.token_count += len(ids)
        self.expected += [
            ("token", call.call_id, choice, token_id, logprob, version, tuple(best[i * k : (i + 1) * k]))
            for i, (token_id, logprob) in enumerate(tokens)
        ]

    def finish(self, call: CallRecord, choice: int, reason: FinishReason) -> None:
        call.finish(choice, reason)
        number = types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")
        count = len(self.sampled[call.call_id, choice])
        self.expected.append(("finished", call.call_id, choice, number, count))

    def seal(self) -> None:
        """End everything as sealing does: what runs is aborted first."""
        self.tape.begin_sealing()
        for call in self.tape.running_calls:
            for choice, columns in enumerate(call.choices):
                if columns.completion is None:
                    self.finish(call, choice, FinishReason.ABORT)
        self.tape.seal()
        self.expected.append(("sealed", len(self.tape.calls), self.token_count))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_reader_gets_the_same_positions_from_anywhere_in_any_grouping(data: st.DataObject) -> None:
    """Gap-free numbers, no token shifted, dropped or repeated, no versions mixed; while it grows and afterwards."""
    rollout = Rollout(data)
    live: list[tuple[int, Position]] = []
    for _ in range(data.draw(st.integers(0, 25))):
        rollout.step()
        if data.draw(st.booleans()):
            live += positions(read_entries(rollout.tape, len(live), data.draw(st.integers(1, 10))))
    rollout.seal()
    numbered = list(enumerate(rollout.expected))
    while len(live) < rollout.tape.end_sequence:
        live += positions(read_entries(rollout.tape, len(live), data.draw(st.integers(1, 10))))
    assert live == numbered
    assert positions(read_entries(rollout.tape)) == numbered
    start = data.draw(st.integers(0, len(numbered)))
    page = data.draw(st.integers(1, 7))
    replayed: list[tuple[int, Position]] = []
    while start + len(replayed) < len(numbered):
        entries, end = rollout.tape.read(start + len(replayed), page)
        replayed += positions(map(entry_to_proto, entries))
        assert end == start + len(replayed)
    assert replayed == numbered[start:]


@given(st.data())
@settings(max_examples=75, deadline=None)
def test_prompts_and_completions_can_be_put_together_from_the_tape_alone(data: st.DataObject) -> None:
    rollout = Rollout(data)
    for _ in range(data.draw(st.integers(1, 25))):
        rollout.step()
    rollout.seal()
    entries = read_entries(rollout.tape)
    assert prompts_on(entries) == rollout.prompts
    assert {call.call_id: list(call.prompt_token_ids()) for call in rollout.tape.calls} == rollout.prompts
    assert {key: sampled_on(entries, *key) for key in rollout.sampled} == rollout.sampled
    assert entries[-1].WhichOneof("entry") == "tape_sealed"
    assert rollout.tape.sampled_token_count == rollout.token_count


def test_steps_of_one_choice_share_an_entry_and_another_choice_begins_a_new_one() -> None:
    tape = new_tape()
    call = new_call(tape, [1], n=2)
    call.append(0, [10], [-1.0])
    call.append(0, [11, 12], [-1.0, -1.0])
    call.append(1, [20], [-1.0])
    call.append(0, [13], [-1.0])
    runs = [(e.sequence, list(e.tokens_sampled.token_ids)) for e in read_entries(tape)[1:]]
    assert runs == [(1, [10, 11, 12]), (4, [20]), (5, [13])]


def test_a_read_can_begin_and_end_within_a_run() -> None:
    tape = new_tape()
    call = new_call(tape, [1])
    call.append(0, [10, 11, 12, 13], [-0.0, -1.0, -2.0, -3.0])
    (entry,), end = tape.read(2, 2)
    run = entry_to_proto(entry).tokens_sampled
    assert (entry.sequence, end) == (2, 4)
    assert (list(run.token_ids), list(run.logprobs)) == ([11, 12], [-1.0, -2.0])


def test_a_read_past_the_end_is_refused_and_one_at_the_end_is_empty() -> None:
    tape = new_tape()
    assert tape.read(0, 10) == ([], 0)
    new_call(tape, [1])
    assert tape.read(1, 10) == ([], 1)
    with pytest.raises(SequenceOutOfRange, match=r"from_sequence: 2 is beyond the tape's end, 1"):
        tape.read(2, 10)


def test_an_empty_tape_can_be_sealed() -> None:
    tape = new_tape()
    tape.begin_sealing()
    tape.seal()
    tape.seal()
    assert positions(read_entries(tape)) == [(0, ("sealed", 0, 0))]


def test_long_prompts_are_read_on_pages_of_their_own() -> None:
    """A page is a gRPC message, and a message has a limit."""
    tape = new_tape()
    for _ in range(4):
        new_call(tape, [7] * 600).finish(0, FinishReason.STOP)
    sizes: list[int] = []
    position = 0
    while position < tape.end_sequence:
        entries, end = tape.read(position, 1000)
        assert end > position
        sizes.append(sum(len(entry_to_proto(entry).call_started.prompt_token_ids) for entry in entries))
        position = end
    assert sizes == [600, 600, 600, 600]


def test_a_prompt_longer_than_a_page_is_still_read() -> None:
    tape = new_tape()
    new_call(tape, [7] * 5000)
    (entry,), end = tape.read(0, 1000)
    assert (entry.sequence, end) == (0, 1)


async def test_a_waiting_watcher_wakes_at_every_kind_of_event() -> None:
    tape = new_tape()

    async def next_event_after(act: object) -> None:
        waiter = asyncio.create_task(tape.wait_changed())
        await asyncio.sleep(0)
        assert callable(act)
        act()
        async with asyncio.timeout(1):
            await waiter

    await next_event_after(lambda: new_call(tape, [1]))
    await next_event_after(lambda: tape.calls[0].append(0, [5], [-1.0]))
    await next_event_after(lambda: tape.calls[0].finish(0, FinishReason.STOP))
    await next_event_after(lambda: new_call(tape, [1]))
    await next_event_after(lambda: tape.calls[1].fail(CallError("broken")))
    await next_event_after(tape.seal)


def test_a_sealing_tape_takes_no_more_calls() -> None:
    tape = new_tape()
    tape.check_open()
    tape.begin_sealing()
    with pytest.raises(TapeSealed, match="the tape is sealed"):
        tape.check_open()


def test_max_calls_binds() -> None:
    tape = new_tape(TapeLimits(max_calls=2))
    for _ in range(2):
        tape.check_open()
        new_call(tape, [1]).finish(0, FinishReason.STOP)
    with pytest.raises(LimitReached, match=r"2 calls \(max_calls\)"):
        tape.check_open()


def test_tokens_that_running_calls_may_still_sample_are_not_left_for_others() -> None:
    tape = new_tape(TapeLimits(max_sampled_tokens=20))
    call = new_call(tape, [1], n=2, max_tokens=4)
    assert tape.tokens_left() == 12
    call.append(0, [5, 6], [-1.0, -1.0])
    assert tape.tokens_left() == 12
    call.finish(0, FinishReason.STOP)
    call.finish(1, FinishReason.ABORT)
    assert tape.tokens_left() == 18
    assert new_tape().tokens_left() is None


def test_calls_are_found_by_anchor_or_by_exact_ids_in_order() -> None:
    tape = new_tape()
    first, second = new_call(tape, [1, 2], n=2), new_call(tape, [1])
    first.append(1, [3], [-1.0])
    second.append(0, [2, 3], [-1.0, -1.0])
    child = new_call(tape, [4], parent=Parent(first, 1, 1))
    child.append(0, [5], [-1.0])
    # One text of ids, cut into prompt and completion in two ways.
    assert tape.find_calls([], [1, 2, 3]) == [first, second]
    assert tape.find_calls([], [1, 2, 3, 4, 5]) == [child]
    assert tape.find_calls([], [1, 2]) == [first]
    assert tape.find_calls([], []) == []
    for near in ([1, 2, 4], [2, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1]):
        assert tape.find_calls([], near) == []
    assert tape.find_calls(["anchor"], []) == [first, second, child]
    assert tape.find_calls(["other", ""], []) == []


def test_only_the_reader_token_reads() -> None:
    tape = new_tape()
    tape.check_reader(tape.reader_token)
    for wrong in ("", tape.reader_token[:-1], new_tape().reader_token, "é"):
        with pytest.raises(PermissionDenied):
            tape.check_reader(wrong)


@pytest.mark.parametrize("name", ["a", "main", "node-1_gpu0", "A" * 64])
def test_a_tape_id_names_its_sidecar(name: str) -> None:
    assert sidecar_name_of(f"{name}.{'0a' * 16}") == name


@pytest.mark.parametrize(
    "tape_id",
    [
        "",
        "main",
        "main.",
        "." + "0" * 32,
        "main." + "0" * 31,
        "main." + "0" * 33,
        "main." + "A" * 32,
        "main." + "g" * 32,
        "main." + "0" * 32 + "\n",
        "ma in." + "0" * 32,
        "-main." + "0" * 32,
        "a" * 65 + "." + "0" * 32,
    ],
)
def test_a_malformed_tape_id_is_refused(tape_id: str) -> None:
    with pytest.raises(InvalidArgument, match="tape_id"):
        sidecar_name_of(tape_id)
