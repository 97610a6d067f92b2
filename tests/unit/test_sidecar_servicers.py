"""What happens while a message is on its way to a client is not missed by the stream that sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar, cast

from support.engines import ManualEngine
from support.sidecar_client import new_tape_id
from tokentape.v1 import generation_pb2, tape_pb2
from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import FinishReason
from tokentape_sidecar.generation_servicer import GenerationServicer
from tokentape_sidecar.interceptors import Context
from tokentape_sidecar.tape import TapeLimits, TapePolicy
from tokentape_sidecar.tape_servicer import TapeServicer
from tokentape_sidecar.tape_store import TapeStore

T = TypeVar("T")

NO_CONTEXT = cast("Context", None)  # the servicers' methods do not use it


async def next_of(stream: AsyncIterator[T]) -> T:
    async with asyncio.timeout(1):
        return await anext(stream)


async def test_a_generate_stream_misses_nothing_that_comes_while_it_sends() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    tapes = TapeStore("main", engine.model, calls)
    servicer = GenerationServicer(engine=engine, calls=calls, tapes=tapes, sidecar_name="main", tokenizer_archive=b"")
    stream = servicer.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1]), NO_CONTEXT)
    await next_of(stream)
    call_id = engine.submitted[0].call_id
    sampled: list[int] = []
    # At each step the stream hangs in its `yield` and waits for nothing that could wake it.
    for token_id in (10, 11, 12):
        engine.sinks[call_id].append(0, [token_id], [-1.0])
        sampled += (await next_of(stream)).delta.token_ids
    engine.sinks[call_id].append(0, [13], [-1.0])
    sampled += (await next_of(stream)).delta.token_ids
    engine.sinks[call_id].finish(0, FinishReason.STOP)
    assert (await next_of(stream)).finished.token_count == 4
    assert sampled == [10, 11, 12, 13]
    assert [event async for event in stream] == []


async def test_a_watch_misses_nothing_that_comes_while_it_sends() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    tapes = TapeStore("main", engine.model, calls)
    tape = tapes.open(new_tape_id(), TapeLimits(), TapePolicy())
    stream = TapeServicer(tapes=tapes, calls=calls).WatchTape(
        tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token), NO_CONTEXT
    )
    first = await next_of(stream)
    # It comes at once although there is nothing yet, so that the watcher knows that it is heard.
    assert (list(first.entries), first.caught_up_to, first.HasField("caught_up_to")) == ([], 0, True)
    await calls.start(CallRequest([1]), tape)
    assert (await next_of(stream)).entries[0].call_started.call_index == 0
    engine.finish(engine.submitted[0].call_id, 10)
    finished = await next_of(stream)
    assert [entry.sequence for entry in finished.entries] == [1, 2]
    await calls.seal(tape)
    sealed = await next_of(stream)
    assert (sealed.entries[0].WhichOneof("entry"), sealed.caught_up_to) == ("tape_sealed", 4)
    assert [response async for response in stream] == []


async def test_watchers_are_counted_so_that_their_tape_is_kept() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    tapes = TapeStore("main", engine.model, calls)
    tape = tapes.open(new_tape_id(), TapeLimits(), TapePolicy())
    request = tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
    servicer = TapeServicer(tapes=tapes, calls=calls)
    streams: list[Any] = [servicer.WatchTape(request, NO_CONTEXT) for _ in range(2)]
    for stream in streams:
        await next_of(stream)
    assert tape.watcher_count == 2
    for stream in streams:
        await stream.aclose()
    assert tape.watcher_count == 0
