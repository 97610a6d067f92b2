"""GenerateMany where things go wrong at a bad moment: each call ends once, and none by the end of another."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

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
from tokentape_sidecar.call_columns import MAX_EVENTS, Cursor
from tokentape_sidecar.limits import Limits

LONG = [7] * 2_000_000
"""More than the connection takes while nobody reads."""


async def two_calls(running: RunningSidecar, engine: ManualEngine, *, seconds: float | None = None) -> Any:
    """Return a stream with the calls 0, for so many seconds, and 1. 0 has ended: that is in what is being sent."""
    stream = running.client.generation.GenerateMany()
    await stream.write(GenerateManyRequest(begin=[*begin(0, timeout=seconds).begin, *begin(1).begin]))
    await eventually(lambda: len(engine.sinks) == 2)
    first, second = engine.sinks
    engine.finish(first)
    engine.emit(second, *LONG)
    return stream


@asynccontextmanager
async def unread(running: RunningSidecar, engine: ManualEngine) -> AsyncGenerator[Any]:
    """Give such a stream while it is not read; then end its calls."""
    stream = await two_calls(running, engine)
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
        stream = await two_calls(running, engine, seconds=0.3)
        await asyncio.sleep(0.6)
        engine.finish(engine.submitted[1].call_id)
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
        stream = await two_calls(running, engine)
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
        small = many.begin(request())
        await small.accepted()
        large = many.begin(request(prompt_token_ids=[1] * 1_500_000))
        await large.accepted()
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
            await many.begin(request(prompt_token_ids=[1] * 3_000_000)).whole()
        large.leave()
        await eventually(lambda: len(engine.aborted) == 1)
        engine.finish(engine.submitted[0].call_id, 6)
        await small.whole()
        assert list(small.first.token_ids) == [6]


class NotingChannel:
    """A channel that keeps the streams that are opened on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.opened: list[Any] = []

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        method: Any = self._channel.stream_stream(*args, **options)

        def open_stream() -> Any:
            self.opened.append(method())
            return self.opened[-1]

        return open_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


async def test_a_call_that_begins_as_a_stream_ends_has_another_stream() -> None:
    """From the end of a stream until its reader has come to it, it takes no call any more."""
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        channel: Any = NotingChannel(running.client.channel)
        many = ManyCalls(channel)
        first = many.begin(request())
        await first.accepted()
        channel.opened[0].cancel()
        second = many.begin(request())
        with refused(grpc.StatusCode.CANCELLED, ""):
            await first.whole()
        await second.accepted()
        engine.finish(engine.submitted[1].call_id, 6)
        await second.whole()
        assert list(second.first.token_ids) == [6]
        await many.close()


async def test_ends_of_many_calls_are_of_several_messages() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine, limits=Limits(max_running_calls=1)) as running:
        stream = running.client.generation.GenerateMany()
        await stream.write(GenerateManyRequest(begin=[each for key in range(3000) for each in begin(key).begin]))
        await eventually(lambda: len(engine.sinks) == 1)
        engine.finish(engine.submitted[0].call_id)
        await stream.done_writing()
        messages = [message async for message in stream]
    assert sum(len(message.ended) for message in messages) == 3000
    assert max(len(message.ended) for message in messages) <= MAX_EVENTS


def cursor_count() -> int:
    gc.collect()
    # Not isinstance: that asks objects that warn of it.
    return sum(type(each) is Cursor for each in gc.get_objects())


async def test_a_tape_keeps_nothing_of_the_stream_that_its_call_was_on() -> None:
    engine = ManualEngine()
    before = cursor_count()
    async with sidecar_on(engine) as running:
        tape = await running.client.open_tape()
        stream = running.client.generation.GenerateMany()
        await stream.write(begin(0, tape_id=tape.tape_id))
        await eventually(lambda: len(engine.sinks) == 1)
        assert cursor_count() == before + 1
        engine.finish(engine.submitted[0].call_id)
        await stream.done_writing()
        assert await read(stream) == [("started", 0, 0), ("ended", 0, 0)]
        assert cursor_count() == before
