"""The client of GenerateMany over a socket: each call what Generate makes of it, and no call another's concern."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from support.certificates import secret_file
from support.engines import ManualEngine
from support.guarded import guarded_sidecar
from support.refusals import refused
from support.scripted import Json, RunningSidecar, call, scripted_sidecar, sidecar_on, tokens
from support.sidecar_client import Generated, SidecarClient, read_to_end
from support.waiting import eventually
from tokentape.access import Access
from tokentape.channel import MAX_MESSAGE_BYTES, dial
from tokentape.many_calls import ManyCalls
from tokentape.running_call import RunningCall
from tokentape.v1 import types_pb2
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateManyResponse, GenerateRequest, GenerateResponse

Sampling = types_pb2.SamplingParameters
Status = grpc.StatusCode
Started = GenerateManyResponse.CallStarted
Finished = GenerateManyResponse.ChoiceFinished
Ended = GenerateManyResponse.CallEnded

ANSWER = call(tokens(10, 11, finish="stop"))


def request(**fields: Any) -> GenerateRequest:
    given: dict[str, Any] = {"prompt_token_ids": [1, 2, 3], **fields}
    return GenerateRequest(**given)


@asynccontextmanager
async def calling(running: RunningSidecar) -> AsyncGenerator[ManyCalls]:
    many = ManyCalls(running.client.channel)
    try:
        yield many
    finally:
        await many.close()


async def read(running_call: RunningCall) -> Generated:
    return await read_to_end(running_call.events())


def top_of(generated: Generated) -> list[tuple[list[int], list[float]]]:
    return [(list(delta.top_logprobs.token_ids), list(delta.top_logprobs.logprobs)) for delta in generated.deltas]


async def test_every_kind_of_call_gives_the_events_that_generate_does() -> None:
    two = [tokens(10), tokens(20, choice=1), tokens(11, finish="stop"), tokens(21, choice=1, finish="length")]
    versions = [tokens(10, weight_version="1"), tokens(11, 12, weight_version="2"), tokens(13, finish="stop")]
    top = [tokens(10, 11, finish="stop", logprobs=[{"10": -0.5, "12": -0.25}, {"11": -0.75, "13": -2.0}])]
    prompt: Json = {"prompt_logprobs": [{"2": -0.5}, {"3": -1.5, "9": -0.25}], "steps": [tokens(10, finish="stop")]}
    calls = [call(*two), call(*versions), call(*top), prompt, call({"text": "one END two", "finish_reason": "stop"})]
    samplings = [
        Sampling(n=2),
        Sampling(),
        Sampling(top_logprobs=2),
        Sampling(prompt_logprobs=1),
        Sampling(stop=["END"]),
    ]
    async with scripted_sidecar(*calls) as running:
        expected = [await running.client.generate(sampling=sampling) for sampling in samplings]
    async with scripted_sidecar(*calls) as running, calling(running) as many:
        for sampling, one in zip(samplings, expected, strict=True):
            other = await read(many.begin(request(sampling=sampling)))
            for choice in range(sampling.n or 1):
                assert other.token_ids(choice) == one.token_ids(choice) != []
                assert other.logprobs(choice) == one.logprobs(choice)
                assert other.weight_versions(choice) == one.weight_versions(choice)
            assert other.finished == one.finished
            assert sum(map(len, (ids for ids, _ in top_of(other)))) == sum(map(len, (ids for ids, _ in top_of(one))))
            assert [v for _, vs in top_of(other) for v in vs] == [v for _, vs in top_of(one) for v in vs]
            other.started.call_id = one.started.call_id
            assert other.started == one.started


async def test_many_whole_calls_at_once_have_their_own_tokens() -> None:
    engine, count = ManualEngine(), 100
    async with sidecar_on(engine) as running, calling(running) as many:
        calls = [many.begin(request(prompt_token_ids=[number + 1])) for number in range(count)]
        reading = asyncio.gather(*(each.whole() for each in calls))
        await eventually(lambda: len(engine.sinks) == count)
        for step in range(3):
            for submitted in engine.submitted:
                engine.emit(submitted.call_id, 100 * step + submitted.prompt_token_ids[0])
        for call_id in list(engine.sinks):
            engine.finish(call_id)
        await reading
    for number, each in enumerate(calls, 1):
        assert each.started is not None
        assert each.first.token_ids == array("I", [number, 100 + number, 200 + number])
        assert each.first.logprobs == array("f", [-0.5] * 3)
        assert each.first.versions == [(0, "")]


async def test_what_a_slow_reader_did_not_read_comes_together() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running, calling(running) as many:
        slow = many.begin(request())
        await slow.accepted()
        for token_id in range(50):
            engine.emit(engine.submitted[0].call_id, token_id)
            await asyncio.sleep(0)
        await eventually(lambda: len(slow.first.token_ids) == 50)
        [news] = await slow.read()
        assert list(getattr(news, "token_ids", ())) == list(range(50))
        engine.finish(engine.submitted[0].call_id)
        [completion] = await slow.read()
        assert isinstance(completion, types_pb2.Completion)
        assert await slow.read() == []


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"prompt_token_ids": [1, 5000]}, Status.INVALID_ARGUMENT, r"prompt_token_ids\[1\]"),
        ({"prompt_token_ids": [1] * 2000}, Status.OUT_OF_RANGE, "maximum context length"),
        ({"tape_id": "main." + "0" * 32}, Status.NOT_FOUND, "tape_id"),
        ({"anchor": "x" * MAX_MESSAGE_BYTES}, Status.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
async def test_a_call_that_is_refused_ends_alone(fields: dict[str, Any], status: Status, words: str) -> None:
    async with scripted_sidecar(ANSWER, max_model_len=1000, vocab_size=1000) as running, calling(running) as many:
        wrong, right = many.begin(request(**fields)), many.begin(request())
        with refused(status, words):
            await wrong.whole()
        with refused(status, words):
            await read(wrong)
        assert (await read(right)).token_ids() == [10, 11]


async def test_what_came_before_a_failure_is_read_first() -> None:
    nan = call(tokens(41), tokens(42, finish="stop", logprobs=[{"42": "NaN"}]))
    async with scripted_sidecar(nan) as running, calling(running) as many:
        failing = many.begin(request())
        events = failing.events()
        assert (await anext(events)).HasField("started")
        assert list((await anext(events)).delta.token_ids) == [41]
        with refused(Status.INTERNAL, "log-probability"):
            await anext(events)


@pytest.mark.parametrize("how", ["closed", "cancelled", "left"])
async def test_a_call_that_is_left_is_aborted_alone_D03(how: str) -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running, calling(running) as many:
        left, other = many.begin(request()), many.begin(request())
        await asyncio.gather(left.accepted(), other.accepted())
        if how == "closed":
            async with aclosing(left.events()) as events:
                await anext(events)
        elif how == "cancelled":
            reading = asyncio.create_task(left.whole())
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        else:
            left.leave()
        first, second = (submitted.call_id for submitted in engine.submitted)
        await eventually(lambda: engine.aborted == [first])
        with refused(Status.CANCELLED, "left this call"):
            await left.whole()
        engine.finish(second, 6)
        await other.whole()
        assert list(other.first.token_ids) == [6]


async def test_the_sidecar_ends_a_call_that_is_late_D03() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running, calling(running) as many:
        late, other = many.begin(request(), timeout=0.2), many.begin(request(), timeout=60)
        with refused(Status.DEADLINE_EXCEEDED, "timeout"):
            await late.whole()
        await eventually(lambda: len(engine.aborted) == 1)
        engine.finish(engine.submitted[1].call_id, 6)
        await other.whole()
        with refused(Status.DEADLINE_EXCEEDED, "timeout"):
            await many.begin(request(), timeout=0).whole()
    assert len(engine.submitted) == 2


async def test_nothing_there_is_said_at_once() -> None:
    channel = dial("127.0.0.1:1")
    many = ManyCalls(channel)
    for _ in range(2):
        with refused(Status.UNAVAILABLE, ""):
            await many.begin(request()).whole()
    await many.close()
    await channel.close()


async def test_closing_ends_calls_and_does_not_wait_for_the_sidecar() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        many = ManyCalls(running.client.channel)
        open_call = many.begin(request())
        await open_call.accepted()
        async with asyncio.timeout(5):
            await many.close()
        with refused(Status.CANCELLED, "closed"):
            await open_call.whole()
        with refused(Status.CANCELLED, "closed"):
            await many.begin(request()).whole()
        await eventually(lambda: len(engine.aborted) == 1)


async def test_closing_right_away_ends_the_call() -> None:
    async with sidecar_on(ManualEngine()) as running:
        many = ManyCalls(running.client.channel)
        begun = many.begin(request())
        await many.close()
        with refused(Status.CANCELLED, "closed"):
            await begun.whole()


async def test_a_token_that_is_replaced_takes_another_stream_and_ends_no_call(tmp_path: Path) -> None:
    engine, tokens_file = ManualEngine(), secret_file(tmp_path / "data", "the-first-token")
    own = secret_file(tmp_path / "own", "the-first-token")
    async with (
        guarded_sidecar(engine, token_file=tokens_file) as sidecar,
        SidecarClient(sidecar.address, access=Access(token_file=own)) as client,
    ):
        many = ManyCalls(client.channel)
        before = many.begin(request())
        await before.accepted()
        secret_file(tokens_file, "the-second-token")
        with refused(Status.UNAUTHENTICATED, ""):
            await many.begin(request()).whole()
        secret_file(own, "the-second-token")
        after = [many.begin(request()) for _ in range(3)]
        await asyncio.gather(*(each.accepted() for each in after))
        for submitted in engine.submitted:
            engine.finish(submitted.call_id, 5)
        for each in (before, *after):
            await each.whole()
            assert list(each.first.token_ids) == [5]
        await many.close()
    assert len(engine.submitted) == 4


async def test_a_stream_that_is_refused_while_it_is_written_tells_why(tmp_path: Path) -> None:
    """Begins of several messages: the refusal of the stream comes in the middle of a write."""
    taken, own = secret_file(tmp_path / "data", "the-token"), secret_file(tmp_path / "own", "another-token")
    async with (
        guarded_sidecar(ManualEngine(), token_file=taken) as sidecar,
        SidecarClient(sidecar.address, access=Access(token_file=own)) as client,
    ):
        for _ in range(5):
            many = ManyCalls(client.channel)
            calls = [many.begin(request(prompt_token_ids=[1] * 100_000)) for _ in range(40)]
            for begun in calls:
                with refused(Status.UNAUTHENTICATED, "wrong"):
                    await begun.whole()
            await many.close()


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
