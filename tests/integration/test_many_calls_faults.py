"""GenerateMany where things go wrong at a bad moment: each call ends once, and none by the end of another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from support.certificates import secret_file
from support.engines import ManualEngine, toy_model
from support.guarded import guarded_sidecar
from support.many import OK, Calls, begin, code_of, leave
from support.many_client import calling, request
from support.refusals import refused
from support.scripted import RunningSidecar, sidecar_on
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape.access import Access
from tokentape.many_calls import ManyCalls
from tokentape.v1.generation_pb2 import GenerateManyRequest
from tokentape_sidecar.limits import Limits

LONG = [7] * 2_000_000
"""More than the connection takes while nobody reads."""


@asynccontextmanager
async def unread(running: RunningSidecar, engine: ManualEngine) -> AsyncGenerator[Any]:
    """Give a stream that does not read, with the calls 0 and 1. 0 has ended, which is said in what is being sent."""
    stream = running.client.generation.GenerateMany()
    await stream.write(GenerateManyRequest(begin=[*begin(0).begin, *begin(1).begin]))
    await eventually(lambda: len(engine.sinks) == 2)
    first, second = engine.sinks
    engine.finish(first)
    engine.emit(second, *LONG)
    await asyncio.sleep(0.2)
    yield stream
    await asyncio.sleep(0.2)
    for call_id in list(engine.sinks):
        engine.finish(call_id)
    await stream.done_writing()


async def read(stream: Any) -> list[tuple[str, int, int]]:
    """Read to the end; what was said of calls, in order: that they started or ended, the key, and the status."""
    said: list[tuple[str, int, int]] = []
    async for message in stream:
        said += [("started", started.key, 0) for started in message.started]
        said += [("ended", ended.key, ended.code) for ended in message.ended]
    return said


async def test_a_call_that_is_left_when_its_end_is_on_its_way_ends_once_D03() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        async with unread(running, engine) as stream:
            await stream.write(leave(0))
        calls = Calls()
        async for message in stream:
            calls.take(message)
    assert calls.ended == {0: OK, 1: OK}


async def test_a_call_whose_time_is_over_when_its_end_is_on_its_way_ends_once_D03() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = running.client.generation.GenerateMany()
        await stream.write(GenerateManyRequest(begin=[*begin(0, timeout=0.3).begin, *begin(1).begin]))
        await eventually(lambda: len(engine.sinks) == 2)
        first, second = engine.sinks
        engine.finish(first)
        engine.emit(second, *LONG)
        await asyncio.sleep(0.6)
        engine.finish(second)
        await stream.done_writing()
        assert await read(stream) == [("started", 0, 0), ("started", 1, 0), ("ended", 0, 0), ("ended", 1, 0)]


async def test_the_key_of_a_call_that_is_left_has_its_end_before_it_has_another_call() -> None:
    engine = ManualEngine()
    cancelled = code_of(grpc.StatusCode.CANCELLED)
    async with sidecar_on(engine) as running:
        async with unread(running, engine) as stream:
            again = begin(1)
            again.leave.append(1)
            await stream.write(again)
            await eventually(lambda: len(engine.submitted) == 3)
        said = await read(stream)
    assert [each for each in said if each[1] == 1] == [
        ("started", 1, 0),
        ("ended", 1, cancelled),
        ("started", 1, 0),
        ("ended", 1, 0),
    ]
    assert engine.aborted == [engine.submitted[1].call_id]


async def test_a_key_is_free_when_its_end_was_read_and_not_all_that_was_sent_with_it() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        stream = running.client.generation.GenerateMany()
        await stream.write(GenerateManyRequest(begin=[*begin(0).begin, *begin(1).begin]))
        await eventually(lambda: len(engine.sinks) == 2)
        first, second = engine.sinks
        engine.finish(first)
        engine.emit(second, *LONG)
        responses = aiter(stream)
        while not any(ended.key == 0 for ended in (await anext(responses)).ended):
            pass
        await stream.write(begin(0))
        await eventually(lambda: len(engine.submitted) == 3)
        for call_id in list(engine.sinks):
            engine.finish(call_id)
        await stream.done_writing()
        assert [each for each in await read(responses) if each[1] == 0] == [("started", 0, 0), ("ended", 0, 0)]


async def test_a_call_begun_with_a_token_that_was_replaced_can_still_be_left_D03(tmp_path: Path) -> None:
    engine, taken = ManualEngine(), secret_file(tmp_path / "data", "the-first-token")
    own = secret_file(tmp_path / "own", "the-first-token")
    async with (
        guarded_sidecar(engine, token_file=taken) as sidecar,
        SidecarClient(sidecar.address, access=Access(token_file=own)) as client,
    ):
        many = ManyCalls(client.channel)
        before = many.begin(request())
        await before.accepted()
        for file in (own, taken):
            secret_file(file, "the-second-token")
        after = many.begin(request())
        await after.accepted()
        before.leave()
        await eventually(lambda: engine.aborted == [engine.submitted[0].call_id])
        engine.finish(engine.submitted[1].call_id)
        await after.whole()
        await many.close()


async def test_a_call_that_is_more_than_the_sidecar_takes_ends_alone_D01() -> None:
    engine = ManualEngine(toy_model(max_context_tokens=10_000_000))
    async with sidecar_on(engine, limits=Limits(max_message_bytes=2_000_000)) as running, calling(running) as many:
        small, large = many.begin(request()), many.begin(request(prompt_token_ids=[1] * 1_500_000))
        await asyncio.gather(small.accepted(), large.accepted())
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
            await many.begin(request(prompt_token_ids=[1] * 3_000_000)).whole()
        large.leave()
        await eventually(lambda: len(engine.aborted) == 1)
        engine.finish(engine.submitted[0].call_id, 6)
        await small.whole()
        assert list(small.first.token_ids) == [6]
