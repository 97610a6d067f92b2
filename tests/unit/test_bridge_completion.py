"""The rules of a call's stream: what breaks one is an error, never a shorter answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.sampled import STARTED, call_event
from tokentape.v1.generation_pb2 import GenerateResponse
from tokentape.v1.types_pb2 import FINISH_REASON_STOP, Completion, TopLogprobs
from tokentape_bridge.completion import Call, CallEvent, StreamError, collect


def delta(
    choice: int, *token_ids: int, logprobs: list[float] | None = None, top: TopLogprobs | None = None
) -> GenerateResponse:
    values = [-float(token_id) for token_id in token_ids] if logprobs is None else logprobs
    return GenerateResponse(
        delta=GenerateResponse.Delta(choice=choice, token_ids=token_ids, logprobs=values, top_logprobs=top)
    )


def finished(choice: int, count: int) -> GenerateResponse:
    return GenerateResponse(finished=Completion(choice=choice, finish_reason=FINISH_REASON_STOP, token_count=count))


class Events:
    """A call's events, and whether the stream was closed."""

    def __init__(self, *events: GenerateResponse) -> None:
        self._events = events
        self.closed = False

    async def stream(self) -> AsyncGenerator[CallEvent]:
        try:
            for event in self._events:
                yield call_event(event)
                await asyncio.sleep(0)
        finally:
            self.closed = True


async def collected(*events: GenerateResponse, choices: int = 1) -> Call:
    return await collect(Events(*events).stream(), choices)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=0, max_size=6))
def test_any_chunking_is_one_completion(chunks: list[list[int]]) -> None:
    whole = [token_id for chunk in chunks for token_id in chunk]
    events = [STARTED, *(delta(0, *chunk) for chunk in chunks), finished(0, len(whole))]
    call = asyncio.run(collected(*events))
    assert call.choices[0].token_ids == whole
    assert call.choices[0].logprobs == [-float(token_id) for token_id in whole]
    assert call.choices[0].top_logprobs == [()] * len(whole)


async def test_choices_may_interleave() -> None:
    call = await collected(STARTED, delta(1, 5), delta(0, 6), finished(1, 1), delta(0, 7), finished(0, 2), choices=2)
    assert [choice.token_ids for choice in call.choices] == [[6, 7], [5]]
    assert (call.call_id, call.prompt_token_count) == ("c", 3)


async def test_top_logprobs_lie_by_position() -> None:
    top = TopLogprobs(k=2, token_ids=[1, 2, 3, 4], logprobs=[-1, -2, -3, -4])
    call = await collected(STARTED, delta(0, 8, 9, top=top), finished(0, 2))
    assert call.choices[0].top_logprobs == [[(1, -1.0), (2, -2.0)], [(3, -3.0), (4, -4.0)]]


@pytest.mark.parametrize(
    "events",
    [
        [],
        [STARTED],
        [STARTED, delta(0, 5)],
        [delta(0, 5), finished(0, 1)],
        [STARTED, STARTED, delta(0, 5), finished(0, 1)],
        [STARTED, delta(0, 5, logprobs=[]), finished(0, 1)],
        [STARTED, delta(0, 5), finished(0, 2)],
        [STARTED, delta(0, 5), delta(0, 5), finished(0, 1)],
        [STARTED, delta(0, 5), finished(0, 1), finished(0, 1)],
        [STARTED, delta(0, 5), finished(0, 1), delta(0, 6)],
        [STARTED, delta(1, 5), finished(0, 0)],
        [STARTED, delta(0, 5, top=TopLogprobs(k=2, token_ids=[1], logprobs=[-1])), finished(0, 1)],
    ],
)
async def test_a_broken_stream_is_an_error_and_closed(events: list[GenerateResponse]) -> None:
    source = Events(*events)
    with pytest.raises(StreamError):
        await collect(source.stream(), 1)
    assert source.closed


async def test_a_choice_that_never_ends_is_an_error() -> None:
    with pytest.raises(StreamError, match="before all choices"):
        await collected(STARTED, delta(0, 5), finished(0, 1), choices=2)


async def test_a_count_that_is_refused_may_be_any_number() -> None:
    async def refused() -> AsyncGenerator[CallEvent]:
        raise ValueError("n: must be at most 128")
        yield STARTED.started

    with pytest.raises(ValueError, match="at most 128"):
        await collect(refused(), 2**32 - 1)
