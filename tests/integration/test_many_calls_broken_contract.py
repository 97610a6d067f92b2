"""The client of GenerateMany at a server that breaks the contract, fails or is silent: each call ends, and says why."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from support.many_client import read, request
from support.refusals import refused
from support.waiting import eventually
from tokentape.channel import dial
from tokentape.many_calls import ManyCalls
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateManyResponse, GenerateResponse

Status = grpc.StatusCode
Started = GenerateManyResponse.CallStarted
Finished = GenerateManyResponse.ChoiceFinished
Ended = GenerateManyResponse.CallEnded

Requests = AsyncIterator[GenerateManyRequest]
Messages = AsyncGenerator[GenerateManyResponse]
Answering = Callable[[Any, Requests], Messages]


@asynccontextmanager
async def answered_by(answering: Answering) -> AsyncGenerator[ManyCalls]:
    """Calls to a server whose `GenerateMany` is `answering`, of the requests."""

    async def generate_many(requests: Requests, context: Any) -> Messages:
        async for message in answering(context, requests):
            yield message

    handler = grpc.stream_stream_rpc_method_handler(
        generate_many,
        request_deserializer=GenerateManyRequest.FromString,
        response_serializer=GenerateManyResponse.SerializeToString,
    )
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler("tokentape.v1.GenerationService", {"GenerateMany": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = dial(f"127.0.0.1:{port}")
    many = ManyCalls(channel)
    try:
        yield many
    finally:
        await many.close()
        await channel.close()
        await server.stop(None)


def started(key: int) -> Started:
    return Started(key=key, started=GenerateResponse.Started(call_id=f"call-{key}", prompt_token_count=3))


def finished(key: int, count: int, choice: int = 0) -> Finished:
    completion = types_pb2.Completion(choice=choice, finish_reason=types_pb2.FINISH_REASON_STOP, token_count=count)
    return Finished(key=key, completion=completion)


ONE = GenerateManyResponse(keys=[0], token_ids=[7], logprobs=[-0.5])
NAN_TOP = types_pb2.TopLogprobs(k=1, token_ids=[1], logprobs=[math.nan])
INFINITE_TOP = types_pb2.TopLogprobs(k=1, token_ids=[1], logprobs=[math.inf])
TOP = types_pb2.TopLogprobs(k=2, token_ids=[1, 2, 3], logprobs=[-1, -1, -1])


@pytest.mark.parametrize(
    "message",
    [
        GenerateManyResponse(keys=[9], token_ids=[7], logprobs=[-0.5]),
        GenerateManyResponse(keys=[9], choices=[1], token_ids=[7], logprobs=[-0.5]),
        GenerateManyResponse(keys=[0, 0], token_ids=[7], logprobs=[-0.5]),
        GenerateManyResponse(keys=[0], token_ids=[7, 8], logprobs=[-0.5, -0.5]),
        GenerateManyResponse(token_ids=[7], logprobs=[-0.5]),
        GenerateManyResponse(keys=[0], token_ids=[7]),
        GenerateManyResponse(keys=[0], token_counts=[3], token_ids=[7, 8], logprobs=[-0.5, -0.5]),
        GenerateManyResponse(keys=[0, 0], token_counts=[2, 0], token_ids=[7, 8], logprobs=[-0.5, -0.5]),
        GenerateManyResponse(keys=[0], choices=[0, 1], token_ids=[7], logprobs=[-0.5]),
        GenerateManyResponse(keys=[0], token_ids=[7], logprobs=[-0.5], top_logprobs=TOP),
        GenerateManyResponse(keys=[0], token_ids=[7], logprobs=[math.nan]),
        GenerateManyResponse(keys=[0], token_ids=[7], logprobs=[-math.inf]),
        GenerateManyResponse(keys=[0], token_ids=[7], logprobs=[-0.5], top_logprobs=NAN_TOP),
        GenerateManyResponse(keys=[0], token_ids=[7], logprobs=[-0.5], top_logprobs=INFINITE_TOP),
        GenerateManyResponse(started=[started(0)]),
        GenerateManyResponse(started=[started(9)]),
        GenerateManyResponse(finished=[finished(0, 2)]),
        GenerateManyResponse(finished=[finished(0, 1), finished(0, 1)]),
        GenerateManyResponse(finished=[finished(9, 0)]),
        GenerateManyResponse(ended=[Ended(key=9)]),
    ],
)
async def test_a_stream_that_breaks_the_contract_ends_its_calls_and_the_next_call_has_another(
    message: GenerateManyResponse,
) -> None:
    streams = 0

    async def answering(_context: Any, requests: Requests) -> Messages:
        nonlocal streams
        streams += 1
        await anext(requests)
        yield GenerateManyResponse(started=[started(0)])
        yield ONE
        if streams == 1:
            yield message
        else:
            yield GenerateManyResponse(finished=[finished(0, 1)], ended=[Ended(key=0)])

    async with answered_by(answering) as many:
        with refused(Status.INTERNAL, "contract of GenerateMany"):
            await many.begin(request()).whole()
        good = many.begin(request())
        await good.whole()
        assert list(good.first.token_ids) == [7]


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_logprobs": [-0.5, math.nan]},
        {"prompt_logprobs": [math.inf, -0.5]},
        {"prompt_top_logprobs": NAN_TOP},
        {"prompt_top_logprobs": INFINITE_TOP},
    ],
)
async def test_a_prompt_with_an_impossible_logprob_is_an_error(told: dict[str, Any]) -> None:
    async def answering(_context: Any, requests: Requests) -> Messages:
        await anext(requests)
        yield GenerateManyResponse(started=[Started(key=0, started=GenerateResponse.Started(call_id="call", **told))])
        await anext(requests)

    async with answered_by(answering) as many:
        with refused(Status.INTERNAL, "contract of GenerateMany"):
            await many.begin(request()).accepted()


@pytest.mark.parametrize(
    "messages",
    [
        [GenerateManyResponse(ended=[Ended(key=0)])],
        [GenerateManyResponse(started=[started(0)]), ONE, GenerateManyResponse(ended=[Ended(key=0)])],
        [
            GenerateManyResponse(started=[started(0)]),
            ONE,
            GenerateManyResponse(finished=[finished(0, 1)]),
            ONE,
            GenerateManyResponse(ended=[Ended(key=0)]),
        ],
    ],
)
@pytest.mark.parametrize("whole", [True, False])
async def test_a_call_that_ends_well_before_it_is_whole_is_an_error(
    messages: list[GenerateManyResponse], *, whole: bool
) -> None:
    async def answering(_context: Any, requests: Requests) -> Messages:
        await anext(requests)
        for message in messages:
            yield message
        await anext(requests)

    async with answered_by(answering) as many:
        broken = many.begin(request())
        with refused(Status.INTERNAL, "contract of GenerateMany"):
            await (broken.whole() if whole else read(broken))


async def test_a_stream_that_fails_ends_its_calls_with_its_status() -> None:
    async def answering(context: Any, requests: Requests) -> Messages:
        await anext(requests)
        yield GenerateManyResponse(started=[started(0)])
        await context.abort(Status.RESOURCE_EXHAUSTED, "too much")

    async with answered_by(answering) as many:
        for each in [many.begin(request()), many.begin(request())]:
            with refused(Status.RESOURCE_EXHAUSTED, "too much"):
                await each.whole()


async def test_a_prompt_whose_logprobs_are_more_than_a_message_may_have_ends_no_other_call_D01() -> None:
    goes_on = asyncio.Event()

    async def answering(context: Any, requests: Requests) -> Messages:
        begin = (await anext(requests)).begin[0]
        yield GenerateManyResponse(started=[started(0)])
        if begin.request.sampling.HasField("prompt_logprobs"):
            await context.abort(Status.RESOURCE_EXHAUSTED, "larger than max")
        await goes_on.wait()
        yield GenerateManyResponse(finished=[finished(0, 0)], ended=[Ended(key=0)])

    async with answered_by(answering) as many:
        other = many.begin(request())
        await other.accepted()
        with refused(Status.RESOURCE_EXHAUSTED, "larger than max"):
            await many.begin(request(sampling=types_pb2.SamplingParameters(prompt_logprobs=0))).whole()
        goes_on.set()
        await other.whole()


async def test_a_stream_that_ends_before_its_calls_is_an_error_of_theirs() -> None:
    async def answering(_context: Any, requests: Requests) -> Messages:
        await anext(requests)
        yield GenerateManyResponse(started=[started(0)])

    async with answered_by(answering) as many:
        with refused(Status.INTERNAL, "before the calls on it"):
            await many.begin(request()).whole()


async def test_a_call_ends_in_time_where_the_sidecar_is_silent() -> None:
    seen: list[GenerateManyRequest] = []

    async def answering(_context: Any, requests: Requests) -> Messages:
        async for each in requests:
            seen.append(each)  # noqa: PERF401 - as they come
        yield GenerateManyResponse()

    async with answered_by(answering) as many:
        late = many.begin(request(), timeout=0.2)
        with refused(Status.DEADLINE_EXCEEDED, "timeout"):
            await read(late)
        await eventually(lambda: len(seen) == 2)
    assert [begin.key for begin in seen[0].begin] == list(seen[1].leave)


async def test_what_comes_with_a_call_is_sent_and_what_begins_together_goes_together() -> None:
    seen: list[GenerateManyRequest] = []

    async def answering(_context: Any, requests: Requests) -> Messages:
        async for each in requests:
            seen.append(each)
            ended = [Ended(key=begin.key, code=Status.ABORTED.value[0], message="no") for begin in each.begin]
            yield GenerateManyResponse(ended=ended)

    async with answered_by(answering) as many:
        metadata = (("x-request-id", "abc"), ("traceparent", "00-1-2-01"))
        calls = [many.begin(request(tape_id="t"), timeout=2.25, metadata=metadata), many.begin(request())]
        # Never sent: leaving goes before beginning in a message.
        many.begin(request()).leave()
        large = [many.begin(request(anchor="x" * 700_000)) for _ in range(3)]
        for each in (*calls, *large):
            with refused(Status.ABORTED, "no"):
                await each.whole()
    first, second = seen[0].begin[:2]
    assert (first.request, second.request) == (request(tape_id="t"), request())
    assert first.timeout.ToNanoseconds() == 2_250_000_000
    assert dict(first.metadata) == dict(metadata)
    assert not second.HasField("timeout")
    assert [len(each.begin) for each in seen] == [3, 1, 1]
    assert not any(each.leave for each in seen)
