"""D11: how a sidecar process ends, to the second; what its calls and tapes keep is in `test_sidecar_process`."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from support.refusals import refused
from support.scripted import SidecarProcess, call, script, scripted_arguments, sidecar_process, tokens
from support.sidecar_client import SidecarClient, sampled_on
from support.waiting import eventually
from tokentape.v1 import generation_pb2, types_pb2

GRACE_SECONDS = 5.0
LATE_SECONDS = 2.0
"""How much later than its grace period a sidecar may end."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SIGNALS = [signal.SIGTERM, signal.SIGINT]

Events = AsyncIterator[generation_pb2.GenerateResponse]


def ends_after(seconds: float) -> dict[str, object]:
    return call(tokens(10), tokens(11, delay_ms=round(seconds * 1000), finish="stop"))


@asynccontextmanager
async def sidecar(
    directory: Path, *calls: dict[str, object], grace: float = GRACE_SECONDS
) -> AsyncGenerator[tuple[SidecarProcess, SidecarClient]]:
    arguments = [*scripted_arguments(script(*calls), directory), "--grace-seconds", str(grace)]
    async with sidecar_process(*arguments, directory=directory) as process, SidecarClient(process.address) as client:
        yield process, client
        assert "Traceback" not in process.output
        assert "ERROR" not in process.output


async def begin(client: SidecarClient, tape_id: str = "") -> Events:
    """A call whose first token has come."""
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape_id)
    events = aiter(client.generation.Generate(request))
    assert (await anext(events)).WhichOneof("event") == "started"
    assert list((await anext(events)).delta.token_ids) == [10]
    return events


async def rest(events: Events) -> tuple[list[int], types_pb2.FinishReason.ValueType]:
    """What comes yet: tokens, and how the call ends, by an OK."""
    responses = [event async for event in events]
    return [id_ for event in responses for id_ in event.delta.token_ids], responses[-1].finished.finish_reason


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_grace_period_lets_the_short_finish_and_aborts_the_long_D11(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with sidecar(tmp_path, ends_after(2), ends_after(60), ends_after(60)) as (process, client):
        updates = aiter(client.health.Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(updates)).status == SERVING
        short, long = await begin(client), await begin(client)
        tape = await client.open_tape()
        recorded = await begin(client, tape.tape_id)
        watcher = asyncio.create_task(client.entries_until_lost(tape))
        process.signal(number)
        signalled = time.monotonic()
        async with asyncio.timeout(1):
            assert (await anext(updates)).status == NOT_SERVING
        await asyncio.sleep(0.5)
        with refused(grpc.StatusCode.UNAVAILABLE, "the sidecar is shutting down"):
            await client.generate()
        assert await rest(short) == ([11], types_pb2.FINISH_REASON_STOP)
        assert time.monotonic() - signalled < GRACE_SECONDS
        assert await rest(long) == ([], types_pb2.FINISH_REASON_ABORT)
        assert time.monotonic() - signalled > GRACE_SECONDS - 1
        assert await rest(recorded) == ([], types_pb2.FINISH_REASON_ABORT)
        assert await process.wait(GRACE_SECONDS + LATE_SECONDS) == 0
        assert time.monotonic() - signalled < GRACE_SECONDS + LATE_SECONDS
        entries = await watcher
        assert sampled_on(entries, entries[0].call_started.call_id) == [10]
        assert entries[-1].choice_finished.completion.finish_reason == types_pb2.FINISH_REASON_ABORT


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
async def test_a_second_signal_ends_it_now_D11(first: signal.Signals, second: signal.Signals, tmp_path: Path) -> None:
    async with sidecar(tmp_path, ends_after(60), grace=60) as (process, client):
        events = await begin(client)
        process.signal(first)
        await eventually(lambda: "stopping; 1 calls are running" in process.output)
        process.signal(second)
        signalled = time.monotonic()
        assert await process.wait(5) == -second
        assert time.monotonic() - signalled < 2
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(events)


def half_close_and_vanish(address: str) -> None:
    """Send the whole request, which half-closes its stream, and be gone without a word; for a process of its own."""

    async def run() -> None:
        async with SidecarClient(address) as client:
            await begin(client)
            signal.raise_signal(signal.SIGKILL)

    asyncio.run(run())


async def test_a_client_that_half_closes_and_vanishes_keeps_nothing_from_ending_D11(tmp_path: Path) -> None:
    async with sidecar(tmp_path, ends_after(60), ends_after(0), grace=60) as (process, client):
        vanishing = multiprocessing.get_context("spawn").Process(target=half_close_and_vanish, args=(process.address,))
        vanishing.start()
        await asyncio.to_thread(vanishing.join, 30)
        assert vanishing.exitcode == -signal.SIGKILL
        vanishing.close()
        # Its call is over before there is a grace period to wait out.
        assert (await client.generate()).token_ids() == [10, 11]
        process.signal(signal.SIGTERM)
        signalled = time.monotonic()
        assert await process.wait(10) == 0
        assert time.monotonic() - signalled < 5


async def test_a_client_that_vanishes_while_it_drains_ends_the_wait_D11(tmp_path: Path) -> None:
    async with sidecar(tmp_path, ends_after(60), grace=60) as (process, client):
        await begin(client)
        process.signal(signal.SIGTERM)
        await eventually(lambda: "stopping; 1 calls are running" in process.output)
        await client.channel.close()
        assert await process.wait(10) == 0


async def test_an_open_watch_of_health_keeps_nothing_from_ending_D11(tmp_path: Path) -> None:
    async with sidecar(tmp_path, grace=60) as (process, client):
        updates = aiter(client.health.Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(updates)).status == SERVING
        process.signal(signal.SIGTERM)
        assert (await anext(updates)).status == NOT_SERVING
        assert await process.wait(10) == 0
