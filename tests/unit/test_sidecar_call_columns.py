"""The columns of many calls: each call's events whole, once and in order, however reads fall between steps."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.many import OK, Calls, code_of
from support.records import record
from tokentape_sidecar.call_columns import Cursor, new_of
from tokentape_sidecar.call_reader import CallReader
from tokentape_sidecar.engine import FinishReason, TopLogprobs, Weights
from tokentape_sidecar.errors import EngineDead
from tokentape_sidecar.record import CallRecord

LOGPROBS = st.floats(min_value=-100, max_value=0, width=32)
TOKENS = st.lists(st.tuples(st.integers(0, 2**32 - 1), LOGPROBS), max_size=4)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 1), TOKENS, st.sampled_from(["", "1", "2"]), st.booleans(), st.booleans()
    ),
    max_size=30,
)
"""Which call and choice, its tokens and their version, whether it ends with them, and whether all is read then."""
KINDS = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2)), min_size=3, max_size=3)
"""Of three calls: n and k."""


def top_of(tokens: list[tuple[int, float]], k: int) -> TopLogprobs | None:
    if not k:
        return None
    return TopLogprobs(k, [t for t, _ in tokens for _ in range(k)], [p for _, p in tokens for _ in range(k)])


def read(cursors: list[Cursor], calls: Calls) -> None:
    for message in new_of(cursors):
        calls.take(message)


@given(KINDS, STEPS, st.sampled_from([1, 3, CallReader.MAX_VALUES]))
def test_each_token_comes_once_in_its_call_with_its_own_values(
    kinds: list[tuple[int, int]], steps: list[tuple[int, int, list[tuple[int, float]], str, bool, bool]], most: int
) -> None:
    records = [record(n=n, top_logprobs=k or None) for n, k in kinds]
    cursors, calls = [Cursor(10 + key, call) for key, call in enumerate(records)], Calls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallReader, "MAX_VALUES", most)
        for number, choice, tokens, version, ends, reads in steps:
            call, (n, k) = records[number], kinds[number]
            ids, values = [t for t, _ in tokens], [p for _, p in tokens]
            call.append(choice % n, ids, values, weights=Weights(version), top_logprobs=top_of(tokens, k))
            if ends:
                call.finish(choice % n, FinishReason.LENGTH)
            if reads:
                read(cursors, calls)
        for call, (n, _) in zip(records, kinds, strict=True):
            for choice in range(n):
                call.finish(choice, FinishReason.STOP)
        read(cursors, calls)
    assert calls.ended == dict.fromkeys((10, 11, 12), OK)
    assert all(cursor.has_ended for cursor in cursors)
    for key, (call, (n, k)) in enumerate(zip(records, kinds, strict=True), 10):
        for choice in range(n):
            is_told(calls, key, call, choice, k)


def is_told(calls: Calls, key: int, call: CallRecord, choice: int, k: int) -> None:
    generated, columns = calls.generated[key], call.choices[choice]
    assert generated.token_ids(choice) == list(columns.token_ids)
    assert generated.logprobs(choice) == list(columns.logprobs)
    versions = [
        run.weights.version for run in columns.runs(choice, 0, len(columns.token_ids), 0) for _ in run.token_ids
    ]
    assert generated.weight_versions(choice) == versions
    deltas = [delta for delta in generated.deltas if delta.choice == choice]
    assert all(delta.top_logprobs.k == k for delta in deltas)
    assert [t for delta in deltas for t in delta.top_logprobs.token_ids] == list(columns.top_token_ids)
    assert [p for delta in deltas for p in delta.top_logprobs.logprobs] == list(columns.top_logprobs)
    assert generated.finished[choice].token_count == len(columns.token_ids)


def test_what_comes_between_two_messages_is_not_lost() -> None:
    """A record that ends while its reader is told of its first tokens has more to tell, and has not ended before."""
    calls, call = Calls(), record()
    cursor = Cursor(1, call)
    call.append(0, [5], [-1.0], weights=Weights("1"))
    call.append(0, [6], [-1.0], weights=Weights("2"))
    messages = new_of([cursor])
    calls.take(next(messages))
    call.append(0, [7], [-1.0], weights=Weights("3"))
    call.finish(0, FinishReason.STOP)
    for message in messages:
        calls.take(message)
    read([cursor], calls)
    assert calls.generated[1].token_ids() == [5, 6, 7]
    assert calls.ended == {1: OK}


def test_nothing_is_told_before_the_prompts_logprobs() -> None:
    call = record(prompt_logprobs=0)
    cursor = Cursor(1, call)
    assert list(new_of([cursor])) == []
    call.take_prompt_logprobs([-0.5, -1.5], None)
    (message,) = new_of([cursor])
    assert list(message.started[0].started.prompt_logprobs) == [-0.5, -1.5]


def test_a_failed_call_gives_its_tokens_then_its_status() -> None:
    calls, call = Calls(), record()
    call.append(0, [5], [-1.0])
    call.fail(EngineDead("it died"))
    read([Cursor(1, call)], calls)
    assert calls.generated[1].token_ids() == [5]
    assert calls.ended == {1: (code_of(grpc.StatusCode.UNAVAILABLE), "it died")}


def test_common_messages_leave_out_the_columns_that_say_nothing() -> None:
    cursors = [Cursor(key, record()) for key in range(3)]
    list(new_of(cursors))
    for cursor in cursors:
        cursor.record.append(0, [cursor.key], [-1.0])
    (message,) = new_of(cursors)
    assert (list(message.keys), list(message.token_ids)) == ([0, 1, 2], [0, 1, 2])
    assert not message.choices
    assert not message.token_counts
