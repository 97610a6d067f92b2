"""The client of GenerateMany over a socket: each call what Generate makes of it, and no call another's concern."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.certificates import secret_file
from support.engines import ManualEngine
from support.every_kind import SAMPLINGS, SCRIPT, by_generate, check_same
from support.guarded import guarded_sidecar
from support.many_client import calling, read, request
from support.refusals import refused
from support.scripted import call, scripted_sidecar, sidecar_on, tokens
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.access import Access
from tokentape.channel import MAX_MESSAGE_BYTES, dial
from tokentape.many_calls import ManyCalls
from tokentape.v1 import types_pb2

Status = grpc.StatusCode

ANSWER = call(tokens(10, 11, finish="stop"))


async def test_every_kind_of_call_gives_the_events_that_generate_does() -> None:
    expected = await by_generate()
    async with scripted_sidecar(*SCRIPT) as running, calling(running) as many:
        for sampling, one in zip(SAMPLINGS, expected, strict=True):
            check_same(await read(many.begin(request(sampling=sampling))), one)


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
