"""What readers and listeners of a call's record see."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from support.records import record, runs_of
from tokentape_sidecar.call_reader import CallReader
from tokentape_sidecar.choice_record import Completion
from tokentape_sidecar.engine import FinishReason, Sampling
from tokentape_sidecar.errors import CallError, TokentapeError
from tokentape_sidecar.record import CallRecord

LOGPROBS = st.floats(min_value=-100, max_value=0, width=32)

STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.tuples(st.integers(0, 2**32 - 1), LOGPROBS), max_size=3),
        st.booleans(),
        st.sets(st.integers(0, 1)),
    )
)
"""Which choice, its tokens, whether it ends with them, and which readers read then."""


@given(st.data())
def test_readers_see_each_token_once_and_a_completion_after_its_last_token(data: st.DataObject) -> None:
    """However reads fall between steps; a shifted id, a dropped token or a repeated delta shows here."""
    n = data.draw(st.integers(1, 3))
    call, expected = record(n=n), {choice: list[tuple[int, float]]() for choice in range(n)}
    readers = [CallReader(call) for _ in range(2)]
    read: list[dict[int, list[tuple[int, float]]]] = [{choice: [] for choice in range(n)} for _ in readers]
    completions: list[dict[int, Completion]] = [{} for _ in readers]
    over: set[int] = set()

    def let_read(which: int) -> None:
        for event in readers[which].read_new():
            if isinstance(event, Completion):
                assert event.choice not in completions[which]
                assert len(read[which][event.choice]) == event.token_count
                completions[which][event.choice] = event
            else:
                assert event.choice not in completions[which]
                assert len(read[which][event.choice]) == event.start
                read[which][event.choice] += zip(event.token_ids, event.logprobs, strict=True)

    for number, step, ends, reads in data.draw(STEPS):
        choice = number % n
        call.append(choice, [t for t, _ in step], [p for _, p in step])
        if choice not in over:
            expected[choice] += step
        if ends:
            call.finish(choice, FinishReason.LENGTH)
            over.add(choice)
        for which in reads:
            let_read(which)
    for choice in range(n):
        call.finish(choice, FinishReason.LENGTH)
    for which in range(2):
        let_read(which)
        assert readers[which].at_end
        assert read[which] == expected
        assert set(completions[which]) == set(range(n))


def test_a_reader_is_not_at_its_end_before_it_has_read_all() -> None:
    call = record()
    reader = CallReader(call)
    call.append(0, [5], [-1.0])
    call.finish(0, FinishReason.STOP)
    assert not reader.at_end
    reader.read_new()
    assert reader.at_end


def test_a_reader_of_a_failed_call_ends_after_its_tokens() -> None:
    call = record(n=2)
    reader = CallReader(call)
    call.append(0, [5], [-1.0])
    call.fail(CallError("broken"))
    assert not reader.at_end
    assert [list(run.token_ids) for run in runs_of(reader.read_new())] == [[5]]
    assert reader.at_end


async def test_a_waiting_reader_wakes_at_every_change() -> None:
    call = record()
    changes: list[Callable[[], None]] = [
        lambda: call.append(0, [5], [-1.0]),
        lambda: call.finish(0, FinishReason.STOP),
    ]
    for change in changes:
        waiter = asyncio.create_task(call.wait_changed())
        await asyncio.sleep(0)
        assert not waiter.done()
        change()
        async with asyncio.timeout(1):
            await waiter
    async with asyncio.timeout(1):
        await call.wait_ended()


class Listener:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []

    def tokens_sampled(self, record: CallRecord, choice: int, count: int) -> None:
        # By then they are in the record.
        self.heard.append(("tokens", choice, list(record.choices[choice].token_ids[-count:])))

    def choice_finished(self, record: CallRecord, choice: int) -> None:
        assert record.choices[choice].completion is not None
        self.heard.append(("finished", choice))

    def call_failed(self, record: CallRecord) -> None:
        self.heard.append(("failed", str(record.error)))


def test_a_listener_hears_everything_once_and_in_order() -> None:
    listener = Listener()
    call = CallRecord(call_id="call-1", prompt_suffix=[1], sampling=Sampling(n=2), listener=listener)
    call.append(1, [5, 6], [-1.0, -1.0])
    call.append(0, [], [])
    call.finish(1, FinishReason.STOP)
    call.finish(1, FinishReason.STOP)
    call.append(0, [7], [math.nan])
    call.fail(TokentapeError("late"))
    assert listener.heard == [
        ("tokens", 1, [5, 6]),
        ("finished", 1),
        ("failed", "the engine gave the log-probability nan for sampled token id 7"),
    ]
