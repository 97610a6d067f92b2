"""Tapes with writers and watchers, all moved by one seed, over real gRPC sockets; see `watch_checks` for what holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc

from support.scripted import RunningSidecar, sidecar_on
from support.sidecar_client import Generated, OpenedTape
from support.waiting import eventually
from support.watch_checks import Observed
from support.watch_engine import SeededEngine, TapeAccount
from support.watch_watchers import Watcher
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2

_REFUSALS = {
    grpc.StatusCode.INTERNAL,  # the engine failed the call
    grpc.StatusCode.INVALID_ARGUMENT,  # the engine refused it
    grpc.StatusCode.FAILED_PRECONDITION,  # the tape was sealed meanwhile
    grpc.StatusCode.NOT_FOUND,  # it was deleted
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a world is."""

    tapes: int = 2
    writers: int = 3
    calls: int = 4
    direct_watchers: int = 4
    relayed_watchers: int = 0
    killed_watchers: int = 0
    step_seconds: float = 0.0
    early_ends: float = 0.3
    """The probability that a tape ends while its writers still write."""
    deletes: float = 0.25
    """The probability that a tape is deleted rather than sealed."""


_SMALL = Shape()


@dataclass(slots=True)
class _Scene:
    """One tape, with what happens to it."""

    name: str
    tape: OpenedTape
    account: TapeAccount
    watchers: list[Watcher]
    streams: list[Generated] = field(default_factory=list[Generated])


async def run_world(seed: int, shape: Shape = _SMALL) -> list[Observed]:
    """Let a world run to its end and return what was observed of each tape."""
    engine = SeededEngine(seed, step_seconds=shape.step_seconds)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(sidecar_on(engine))
        playing = asyncio.create_task(engine.play())
        stack.callback(playing.cancel)
        async with asyncio.TaskGroup() as group:
            scenes = [group.create_task(_run_tape(seed, str(n), engine, running, shape)) for n in range(shape.tapes)]
        await eventually(lambda: engine.idle)
        return [scene.result() for scene in scenes]


async def _run_tape(seed: int, name: str, engine: SeededEngine, running: RunningSidecar, shape: Shape) -> Observed:
    account = engine.accounts[name] = TapeAccount()
    tape = await running.client.open_tape()
    address = running.sidecar.address
    count = shape.direct_watchers + shape.relayed_watchers + shape.killed_watchers
    watchers = [Watcher(address, tape, lambda: account.end, f"watcher {seed}/{name}/{n}") for n in range(count)]
    scene = _Scene(name, tape, account, watchers)
    chance = random.Random(f"tape {seed}/{name}")
    async with asyncio.TaskGroup() as group:
        for watching in _watching(watchers, shape):
            group.create_task(watching)
        writers = [
            asyncio.create_task(_write(scene, running, random.Random(f"writer {seed}/{name}/{n}"), shape.calls))
            for n in range(shape.writers)
        ]
        if chance.random() < shape.early_ends:
            await eventually(lambda: account.end > 60 or all(writer.done() for writer in writers), seconds=30)
        else:
            await asyncio.wait(writers)
        pages = await _end(scene, running, deletes=chance.random() < shape.deletes)
        await asyncio.gather(*writers)
    return Observed(account.sealed(), [watcher.watch for watcher in watchers], pages, scene.streams)


def _watching(watchers: list[Watcher], shape: Shape) -> list[Coroutine[Any, Any, None]]:
    relayed = shape.direct_watchers + shape.relayed_watchers
    return [
        *(watcher.direct() for watcher in watchers[: shape.direct_watchers]),
        *(watcher.relayed() for watcher in watchers[shape.direct_watchers : relayed]),
        *(watcher.killed(kills=3) for watcher in watchers[relayed:]),
    ]


async def _end(scene: _Scene, running: RunningSidecar, *, deletes: bool) -> list[tape_pb2.GetTapeResponse]:
    """Seal the tape and return its pages; or delete it, which leaves none."""
    tape, stub = scene.tape, running.client.tapes
    if deletes:
        await stub.DeleteTape(tape_pb2.DeleteTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token))
        return []
    await running.client.seal(tape)
    pages: list[tape_pb2.GetTapeResponse] = []
    request = tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
    while not pages or pages[-1].next_sequence < pages[-1].end_sequence:
        pages.append(await stub.GetTape(request))
        request.from_sequence = pages[-1].next_sequence
    return pages


async def _write(scene: _Scene, running: RunningSidecar, chance: random.Random, calls: int) -> None:
    """Make calls on a tape, one after the other."""
    for _ in range(calls):
        stream = Generated()
        try:
            await _generate(scene, running, chance, stream)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                raise
        if stream.started.call_id:
            scene.streams.append(stream)


async def _generate(scene: _Scene, running: RunningSidecar, chance: random.Random, stream: Generated) -> None:
    """Make a call; read it to its end, or leave it, or have it aborted."""
    client = running.client
    most = chance.randint(1, 8) if chance.random() < 0.4 else None
    leaves = chance.random() < 0.5
    call = client.generation.Generate(_request(scene, chance))
    count = 0
    async for response in call:
        stream.take(response)
        count += 1
        if count == most and leaves:
            call.cancel()
            return
        if count == most:
            await client.generation.Abort(generation_pb2.AbortRequest(call_id=stream.started.call_id))


def _request(scene: _Scene, chance: random.Random) -> generation_pb2.GenerateRequest:
    account = scene.account
    sampling = types_pb2.SamplingParameters(
        n=chance.choice([1, 1, 2, 3]), max_tokens=chance.randint(1, 40), top_logprobs=chance.choice([0, 0, 1, 2])
    )
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=[chance.randrange(1000) for _ in range(chance.randint(1, 12))],
        sampling=sampling,
        tape_id=scene.tape.tape_id,
        anchor=f"anchor {chance.randrange(3)}",
        split_cause=types_pb2.SplitCause.ValueType(chance.randrange(15)),
        cache_salt=f"{scene.name}/{len(account.requests)}",
    )
    if account.call_ids and chance.random() < 0.6:
        _continue_a_call(request, account, chance)
    account.requests[request.cache_salt] = request
    return request


def _continue_a_call(request: generation_pb2.GenerateRequest, account: TapeAccount, chance: random.Random) -> None:
    """Make the request the child of a call that may still be running, from any of its tokens on."""
    request.parent.call_id = chance.choice(account.call_ids)
    sampled = account.sampled.get((request.parent.call_id, 0), 0)
    if chance.random() < 0.5:
        request.parent.offset = chance.randint(0, sampled)
