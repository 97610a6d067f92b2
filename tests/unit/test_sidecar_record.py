"""A call's record: its columns, and what fails a call."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.records import ids_of, record, runs_of
from tokentape_sidecar.call_reader import CallReader
from tokentape_sidecar.choice_record import Completion
from tokentape_sidecar.engine import FinishReason, Sampling, TopLogprobs, Weights
from tokentape_sidecar.errors import CallError, EngineDead
from tokentape_sidecar.record import CallRecord, Parent

LOGPROBS = st.floats(min_value=-100, max_value=0, width=32)


def test_a_record_keeps_ids_and_logprobs_as_they_were_sampled() -> None:
    call = record()
    call.append(0, [42, 7], [-4.25, -0.5])
    call.append(0, [0], [0.0])
    call.finish(0, FinishReason.STOP)
    assert ids_of(call) == [42, 7, 0]
    assert list(call.choices[0].logprobs) == [-4.25, -0.5, 0.0]
    assert call.choices[0].completion == Completion(0, FinishReason.STOP, None, 3)
    assert call.ended
    assert call.error is None


@pytest.mark.parametrize(
    ("token_ids", "logprobs"),
    [
        ([5], []),
        ([5], [-1.0, -1.0]),
        ([5, 6], [-1.0]),
        ([5], [math.nan]),
        ([5], [math.inf]),
        ([5], [-math.inf]),
        ([5, 6], [-1.0, math.nan]),
        ([5], [-1e300]),  # finite, but not in the 32 bits that it is kept and sent in
    ],
)
def test_missing_or_unusable_logprobs_fail_the_call_and_keep_what_came_before(
    token_ids: list[int], logprobs: list[float]
) -> None:
    call = record()
    call.append(0, [4], [-1.0])
    call.append(0, token_ids, logprobs)
    assert isinstance(call.error, CallError)
    assert ids_of(call) == [4]
    assert list(call.choices[0].logprobs) == [-1.0]


def test_the_message_of_an_unusable_logprob_names_value_and_token() -> None:
    call = record()
    call.append(0, [5, 6], [-1.0, math.nan])
    assert str(call.error) == "the engine gave the log-probability nan for sampled token id 6"


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), LOGPROBS), min_size=1), st.data())
def test_columns_are_of_one_length_and_finite_whatever_the_steps(
    tokens: list[tuple[int, float]], data: st.DataObject
) -> None:
    call = record()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)))) | {len(tokens)})
    start = 0
    for end in cuts:
        call.append(0, [t for t, _ in tokens[start:end]], [p for _, p in tokens[start:end]])
        start = end
        assert len(call.choices[0].token_ids) == len(call.choices[0].logprobs) == end
    assert list(zip(call.choices[0].token_ids, call.choices[0].logprobs, strict=True)) == tokens
    assert all(map(math.isfinite, call.choices[0].logprobs))


LATE_EVENTS: list[Callable[[CallRecord], None]] = [
    lambda call: call.append(0, [9], [-1.0]),
    lambda call: call.finish(0, FinishReason.LENGTH),
    lambda call: call.fail(CallError("late")),
]


@pytest.mark.parametrize("late", LATE_EVENTS)
def test_nothing_is_added_to_a_finished_record(late: Callable[[CallRecord], None]) -> None:
    call = record()
    call.append(0, [5], [-1.0])
    call.finish(0, FinishReason.STOP, 5)
    late(call)
    assert ids_of(call) == [5]
    assert call.choices[0].completion == Completion(0, FinishReason.STOP, 5, 1)
    assert call.error is None


@pytest.mark.parametrize("late", LATE_EVENTS)
def test_nothing_is_added_to_a_failed_record(late: Callable[[CallRecord], None]) -> None:
    call = record()
    first = CallError("first")
    call.fail(first)
    late(call)
    assert ids_of(call) == []
    assert call.choices[0].completion is None
    assert call.error is first


def test_a_finished_choice_takes_no_more_tokens_while_another_goes_on() -> None:
    call = record(n=2)
    call.append(1, [5], [-1.0])
    call.finish(1, FinishReason.STOP)
    call.append(1, [6], [-1.0])
    call.append(0, [7], [-1.0])
    assert ids_of(call, 1) == [5]
    assert ids_of(call, 0) == [7]
    assert not call.ended


def test_a_record_ends_when_its_last_choice_does() -> None:
    call = record(n=2)
    ends: list[str] = []
    call.on_end(lambda: ends.append("end"))
    call.finish(1, FinishReason.LENGTH)
    assert (call.ended, ends) == (False, [])
    call.finish(0, FinishReason.STOP)
    call.finish(0, FinishReason.STOP)
    assert (call.ended, ends) == (True, ["end"])
    call.on_end(lambda: ends.append("late"))
    assert ends == ["end", "late"]


def test_an_unexpected_error_does_not_tell_its_details() -> None:
    call = record()
    cause = RuntimeError("/secret/path")
    call.fail(cause)
    assert isinstance(call.error, CallError)
    assert "secret" not in str(call.error)
    assert call.error.__cause__ is cause


def test_a_domain_error_is_kept_as_it_is() -> None:
    call = record()
    error = EngineDead("the engine died")
    call.fail(error)
    assert call.error is error


# Weight versions


def test_a_run_never_mixes_weight_versions() -> None:
    call = record()
    reader = CallReader(call)
    call.append(0, [1, 2], [-1.0, -2.0], weights=Weights("a"))
    call.append(0, [3], [-3.0], weights=Weights("a"))
    call.append(0, [4, 5], [-4.0, -5.0], weights=Weights("b"))
    call.append(0, [6], [-6.0], weights=Weights("a"))
    runs = runs_of(reader.read_new())
    assert [(run.weights.version, run.start, list(run.token_ids), list(run.logprobs)) for run in runs] == [
        ("a", 0, [1, 2, 3], [-1.0, -2.0, -3.0]),
        ("b", 3, [4, 5], [-4.0, -5.0]),
        ("a", 5, [6], [-6.0]),
    ]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc")), min_size=1, max_size=12), st.data())
def test_any_range_of_a_choice_has_its_own_versions(steps: list[tuple[int, str]], data: st.DataObject) -> None:
    call = record()
    versions: list[str] = []
    for count, version in steps:
        ids = range(len(versions), len(versions) + count)
        call.append(0, list(ids), [-float(i) for i in ids], weights=Weights(version))
        versions += [version] * count
    start = data.draw(st.integers(0, len(versions)))
    end = data.draw(st.integers(start, len(versions)))
    runs = list(call.choices[0].runs(0, start, end, 0))
    read = [
        (token_id, logprob, run.weights.version)
        for run in runs
        for token_id, logprob in zip(run.token_ids, run.logprobs, strict=True)
    ]
    assert read == [(i, -float(i), versions[i]) for i in range(start, end)]
    assert [run.start for run in runs] == [run.token_ids[0] for run in runs]


# Top log-probabilities


def test_top_logprobs_stay_with_their_positions_across_versions() -> None:
    call = record(top_logprobs=2)
    reader = CallReader(call)
    call.append(0, [9], [-3.0], weights=Weights("a"), top_logprobs=TopLogprobs(2, [10, 11], [-0.5, -1.0]))
    call.append(
        0, [8, 7], [-1.0, -2.0], weights=Weights("b"), top_logprobs=TopLogprobs(2, [20, 21, 30, 31], [-1, -2, -3, -4])
    )
    tops = [run.top_logprobs for run in runs_of(reader.read_new())]
    assert [(top.k, list(top.token_ids), list(top.logprobs)) for top in tops if top] == [
        (2, [10, 11], [-0.5, -1.0]),
        (2, [20, 21, 30, 31], [-1.0, -2.0, -3.0, -4.0]),
    ]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (2, None),
        (None, TopLogprobs(1, [5], [-1.0])),
        (2, TopLogprobs(1, [5], [-1.0])),
        (2, TopLogprobs(2, [5], [-1.0])),
        (2, TopLogprobs(2, [5, 6], [-1.0])),
        (2, TopLogprobs(2, [5, 6, 7], [-1.0, -2.0, -3.0])),
    ],
)
def test_a_wrong_number_of_top_logprobs_fails_the_call(asked: int | None, given: TopLogprobs | None) -> None:
    call = record(top_logprobs=asked)
    call.append(0, [5], [-1.0], top_logprobs=given)
    assert isinstance(call.error, CallError)
    assert ids_of(call) == []


# Prompt


def test_the_prompt_of_a_child_is_the_parents_then_its_own_A13() -> None:
    root = record()
    root.append(0, [10, 11, 12], [-1.0] * 3)
    child = CallRecord(
        call_id="call-2", prompt_suffix=[20], sampling=Sampling(n=2), parent=Parent(root, choice=0, offset=2)
    )
    child.append(1, [30, 31], [-1.0] * 2)
    grandchild = CallRecord(
        call_id="call-3", prompt_suffix=[], sampling=Sampling(), parent=Parent(child, choice=1, offset=2)
    )
    # What the parent samples after the child was made is not the child's.
    root.append(0, [13], [-1.0])
    assert list(child.prompt_token_ids()) == [1, 2, 3, 10, 11, 20]
    assert list(grandchild.prompt_token_ids()) == [1, 2, 3, 10, 11, 20, 30, 31]
    assert (child.prompt_token_count, grandchild.prompt_token_count) == (6, 8)


def test_prompt_logprobs_are_needed_before_a_call_has_started() -> None:
    call = record(prompt_logprobs=0)
    assert not call.started
    call.take_prompt_logprobs([-1.0, -2.0], None)
    assert call.started
    assert list(call.prompt_logprobs or ()) == [-1.0, -2.0]
    assert record().started


@pytest.mark.parametrize("values", [[], [-1.0], [-1.0, -2.0, -3.0], [-1.0, math.nan], [-1.0, math.inf]])
def test_a_wrong_number_of_prompt_logprobs_or_an_impossible_one_fails_the_call(values: list[float]) -> None:
    call = record(prompt_logprobs=0)
    call.take_prompt_logprobs(values, None)
    assert isinstance(call.error, CallError)


IMPOSSIBLE = [
    *([math.nan, -1.0], [-1.0, math.nan], [-math.inf, math.nan]),
    *([math.inf, -1.0], [math.inf, -math.inf], [1e39, 0]),
]


@pytest.mark.parametrize("values", IMPOSSIBLE)
def test_an_impossible_logprob_of_a_most_probable_token_fails_the_call(values: list[float]) -> None:
    call, prompt = record(top_logprobs=2), record(prompt_logprobs=1)
    call.append(0, [5], [-1.0], top_logprobs=TopLogprobs(2, [5, 6], values))
    prompt.take_prompt_logprobs([-1.0, -1.0], TopLogprobs(1, [5, 6], values))
    assert isinstance(call.error, CallError)
    assert str(call.error).startswith("the engine gave the top log-probability ")
    assert isinstance(prompt.error, CallError)
    assert ids_of(call) == []


def test_a_token_that_was_ruled_out_may_be_among_the_most_probable() -> None:
    call, prompt = record(top_logprobs=2), record(prompt_logprobs=1)
    call.append(0, [5], [-1.0], top_logprobs=TopLogprobs(2, [5, 6], [-1.0, -math.inf]))
    prompt.take_prompt_logprobs([-1.0, -math.inf], TopLogprobs(1, [5, 6], [-1.0, -math.inf]))
    assert (call.error, prompt.error) == (None, None)
    assert list(call.choices[0].top_logprobs) == [-1.0, -math.inf]


def test_a_call_that_ends_without_the_prompt_logprobs_it_asked_for_fails() -> None:
    call = record(prompt_logprobs=0)
    call.append(0, [5], [-1.0])
    call.finish(0, FinishReason.STOP)
    assert isinstance(call.error, CallError)


def test_a_call_that_is_aborted_before_its_prompt_logprobs_are_there_is_no_failure() -> None:
    call = record(prompt_logprobs=0)
    call.finish(0, FinishReason.ABORT)
    assert call.ended
    assert call.error is None
