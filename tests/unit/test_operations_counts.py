"""What a sidecar counts of its calls, and the spans that a process without a tracer provider makes: none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry.trace import SpanKind

from tokentape import tracing
from tokentape_sidecar.engine import FinishReason, Sampling
from tokentape_sidecar.errors import EngineDead, LimitReached
from tokentape_sidecar.origin import Origin, SplitCause
from tokentape_sidecar.record import CallRecord, Parent
from tokentape_sidecar.statistics import CallStatistics, Distribution, outcome_of

STOP, LENGTH, ABORT, REPETITION = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REPETITION
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def record_of(n: int = 1, *, parent: Parent | None = None, cause: SplitCause = SplitCause.UNSPECIFIED) -> CallRecord:
    origin = Origin(split_cause=cause)
    return CallRecord(call_id="call-1", prompt_suffix=[1, 2], sampling=Sampling(n=n), parent=parent, origin=origin)


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        ([STOP], "stop"),
        ([STOP, LENGTH], "length"),
        ([REPETITION, STOP], "repetition"),
        ([LENGTH, REPETITION], "length"),
        ([LENGTH, ABORT, STOP], "abort"),
    ],
)
def test_of_several_choices_the_least_good_is_the_outcome(reasons: Sequence[FinishReason], outcome: str) -> None:
    record = record_of(len(reasons))
    for choice, reason in enumerate(reasons):
        record.finish(choice, reason)
    assert outcome_of(record) == outcome


def test_a_failed_call_has_its_error_as_outcome_and_keeps_its_tokens() -> None:
    statistics, record = CallStatistics(), record_of()
    record.append(0, [5, 6], [-1.0, -1.0])
    record.fail(EngineDead("dead"))
    assert statistics.call_ended(record) == "engine_dead"
    assert (statistics.ended, statistics.sampled_tokens) == ({"engine_dead": 1}, 2)
    assert sum(statistics.first_token_seconds.counts) == sum(statistics.call_seconds.counts) == 1


def test_a_call_without_a_token_has_no_time_to_the_first() -> None:
    statistics, record = CallStatistics(), record_of()
    record.finish(0, ABORT)
    statistics.call_ended(record)
    assert sum(statistics.first_token_seconds.counts) == 0
    assert sum(statistics.call_seconds.counts) == 1


def test_prefixes_are_counted_on_tapes_alone() -> None:
    statistics, first = CallStatistics(), record_of(cause=SplitCause.HISTORY_EDITED)
    statistics.call_started(first, on_tape=False)
    statistics.call_started(first, on_tape=True)
    statistics.call_started(record_of(parent=Parent(first, 0, 0)), on_tape=True)
    assert statistics.on_tapes == {("new", "history_edited"): 1, ("kept", ""): 1}
    assert statistics.prompt_tokens == 2 + 2 + 4


def test_refusals_are_counted_and_go_on() -> None:
    statistics = CallStatistics()
    with pytest.raises(LimitReached), statistics.refusals():
        raise LimitReached("tape_id: full")
    assert statistics.refused == {"limit_reached": 1}


def test_a_bound_is_the_largest_value_of_its_bucket() -> None:
    distribution = Distribution((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        distribution.add(seconds)
    assert (distribution.counts, distribution.sum) == ([2, 1, 1], 12.0)


def test_without_a_provider_there_is_no_span_and_the_callers_trace_goes_on() -> None:
    of_nobody = tracing.begin("x", SpanKind.SERVER, {})
    assert not of_nobody.is_recording()
    assert tracing.headers_of(of_nobody) == {}
    handed_on = tracing.begin("x", SpanKind.SERVER, {"traceparent": TRACE})
    assert not handed_on.is_recording()
    assert tracing.headers_of(handed_on) == {"traceparent": TRACE}
    tracing.end(handed_on, "problem")
    with tracing.tracing(None, "nobody"):
        assert tracing.headers_of() == {}


def test_a_header_that_is_no_context_is_no_parent() -> None:
    assert tracing.headers_of(tracing.begin("x", SpanKind.SERVER, {"traceparent": "00-zz-1-01"})) == {}
