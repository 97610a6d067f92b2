"""A client that leaves, or whose time is up, ends its call at the engine; nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
import pytest

from support.engines import ManualEngine
from support.refusals import refused
from support.scripted import RunningSidecar, call, scripted_sidecar, sidecar_on, tokens
from support.sidecar_client import OpenedTape, sampled_on
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2
from tokentape_sidecar.errors import EngineDead

ABORT = types_pb2.FINISH_REASON_ABORT
FOREVER = 60_000
NOTICED_SECONDS = 2.0

ENDLESS = call(tokens(10), tokens(11), tokens(12), tokens(13, delay_ms=FOREVER))

GenerateStream = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]
Leave = Callable[[GenerateStream], Awaitable[None]]


def generate(running: RunningSidecar, tape: OpenedTape | None = None, timeout: float | None = None) -> GenerateStream:
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id if tape else "")
    return running.client.generation.Generate(request, timeout=timeout)


async def read_tokens(stream: AsyncIterator[generation_pb2.GenerateResponse], count: int) -> list[int]:
    token_ids: list[int] = []
    async for response in stream:
        token_ids += response.delta.token_ids
        if len(token_ids) >= count:
            break
    return token_ids


async def nothing_runs(running: RunningSidecar) -> None:
    await eventually(lambda: not running.sidecar.running_call_count, NOTICED_SECONDS)


async def ends_by_abort(running: RunningSidecar, tape: OpenedTape, expected: list[int]) -> None:
    """The tape says: aborted, with all that was sampled until then."""
    await nothing_runs(running)
    entries = await running.client.entries(tape)
    call_id = entries[0].call_started.call_id
    assert entries[-1].choice_finished.completion.finish_reason == ABORT
    assert sampled_on(entries, call_id) == expected


async def test_cancelling_after_some_tokens_reaches_the_engine_D03() -> None:
    async with scripted_sidecar(ENDLESS) as running:
        tape = await running.client.open_tape()
        stream = generate(running, tape)
        assert await read_tokens(aiter(stream), 3) == [10, 11, 12]
        stream.cancel()
        await ends_by_abort(running, tape, [10, 11, 12])


async def test_cancelling_before_the_first_message_reaches_the_engine_D03() -> None:
    async with scripted_sidecar(call(tokens(10, delay_ms=FOREVER))) as running:
        tape = await running.client.open_tape()
        stream = generate(running, tape)
        await stream.wait_for_connection()
        await eventually(lambda: running.sidecar.running_call_count)
        stream.cancel()
        await ends_by_abort(running, tape, [])


async def test_a_deadline_reaches_the_engine_D03() -> None:
    async with scripted_sidecar(ENDLESS) as running:
        tape = await running.client.open_tape()
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED, ""):
            await read_tokens(aiter(generate(running, tape, timeout=0.3)), 4)
        await ends_by_abort(running, tape, [10, 11, 12])


async def test_a_connection_that_is_gone_reaches_the_engine_D03() -> None:
    async with scripted_sidecar(ENDLESS) as running:
        tape = await running.client.open_tape()
        async with type(running.client)(running.sidecar.address) as other:
            request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id)
            await read_tokens(aiter(other.generation.Generate(request)), 3)
        await ends_by_abort(running, tape, [10, 11, 12])


async def test_the_engines_own_abort_is_what_ends_a_left_call_and_its_last_tokens_are_kept() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        tape = await running.client.open_tape()
        stream = generate(running, tape)
        assert (await anext(aiter(stream))).WhichOneof("event") == "started"
        call_id = engine.submitted[0].call_id
        engine.hands_over.clear()
        stream.cancel()
        await eventually(lambda: engine.aborted == [call_id], NOTICED_SECONDS)
        # Sampled after the client had left, and before the engine stopped.
        engine.sinks[call_id].append(0, [20, 21], [-1.0, -1.0])
        engine.hands_over.set()
        await ends_by_abort(running, tape, [20, 21])


async def test_streams_that_are_dropped_do_not_hurt_the_others_C03() -> None:
    count = 16
    steps = [tokens(10 + i, delay_ms=3) for i in range(20)] + [tokens(finish="stop")]
    async with scripted_sidecar(call(*steps), repeat=True) as running:

        async def one(index: int) -> list[int]:
            stream = generate(running)
            if index % 2:
                # At different moments; the last ones at about the finish.
                await read_tokens(aiter(stream), 1 + index * 19 // count)
                stream.cancel()
                return []
            return await read_tokens(aiter(stream), 100)

        results = await asyncio.gather(*(one(index) for index in range(count)))
        assert results[::2] == [list(range(10, 30))] * (count // 2)
        await nothing_runs(running)
        assert (await running.client.generate()).token_ids() == list(range(10, 30))


async def test_a_dead_engine_ends_every_stream_with_unavailable_and_keeps_what_was_sampled() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine) as running:
        tape = await running.client.open_tape()
        streams = [generate(running, tape) for _ in range(3)]
        for stream in streams:
            assert (await anext(aiter(stream))).WhichOneof("event") == "started"
        for sink in engine.sinks.values():
            sink.append(0, [5], [-1.0])
        error = EngineDead("the engine died while it sampled this call")
        engine.die(error)
        engine.refusal = error
        for stream in streams:
            with refused(grpc.StatusCode.UNAVAILABLE, "the engine died"):
                await read_tokens(aiter(stream), 100)
        entries = await running.client.entries(tape)
        assert [sampled_on(entries, sampled.call_id) for sampled in engine.submitted] == [[5]] * 3
        assert [entry.WhichOneof("entry") for entry in entries].count("call_failed") == 3
        with refused(grpc.StatusCode.UNAVAILABLE, "the engine died"):
            await running.client.generate()


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004, 0.008])
async def test_cancelling_at_any_moment_leaves_nothing_running(delay: float) -> None:
    async with scripted_sidecar(ENDLESS, repeat=True) as running:
        for _ in range(10):
            stream = generate(running)
            await asyncio.sleep(delay)
            stream.cancel()
        await nothing_runs(running)
        stream = generate(running)
        assert await read_tokens(aiter(stream), 3) == [10, 11, 12]
