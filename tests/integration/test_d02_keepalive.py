"""D02: long silences, in which both ends ping: nobody is thrown out for it, and who is gone is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
import pytest

from support.refusals import refused
from support.scripted import TOY_TOKENIZER, Json, call, script, scripted_arguments, sidecar_on, sidecar_process, tokens
from support.waiting import eventually
from tokentape.channel import dial
from tokentape.keepalive import DEFAULT_KEEPALIVE, Keepalive
from tokentape.v1 import generation_pb2, generation_pb2_grpc
from tokentape_sidecar.script import Script
from tokentape_sidecar.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from integration.conftest import StartBridge, StartSidecar

QUICK = Keepalive(seconds=0.5, timeout_seconds=1.0)
NOTICED_SECONDS = 5.0
"""Time and timeout of `QUICK`, and what a busy machine takes."""
SILENCE_SECONDS = 10 * QUICK.seconds
FOREVER = 600_000


def silent(seconds: float) -> Json:
    return call(tokens(10), tokens(11, delay_ms=round(seconds * 1000), finish="stop"))


def engine_of(*calls: Json) -> ScriptedEngine:
    return ScriptedEngine(Script.model_validate(script(*calls, repeat=True)), TOY_TOKENIZER)


async def begin(channel: grpc.aio.Channel) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """A call whose first token has come; the next is long in coming."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    events = aiter(stub.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1])))
    assert (await anext(events)).WhichOneof("event") == "started"
    assert await next_token(events) == [10]
    return events


async def next_token(events: AsyncIterator[generation_pb2.GenerateResponse]) -> list[int]:
    return list((await anext(events)).delta.token_ids)


@pytest.mark.parametrize("pinging", [QUICK.seconds, 0.1])
async def test_a_stream_lives_through_a_silence_of_ten_intervals_D02(pinging: float) -> None:
    async with sidecar_on(engine_of(silent(SILENCE_SECONDS)), keepalive=QUICK) as running:
        keepalive = Keepalive(pinging, QUICK.timeout_seconds)
        async with dial(running.sidecar.address, keepalive=keepalive) as channel:
            assert await next_token(await begin(channel)) == [11]


async def test_a_foreign_client_that_pings_every_second_is_not_thrown_out_by_the_shipped_sidecar_D02(
    tmp_path: Path,
) -> None:
    """gRPC's server throws out who pings more than every five minutes, three times; ten seconds would be too often."""
    options = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    async with (
        sidecar_process(*scripted_arguments(script(silent(8)), tmp_path), directory=tmp_path) as process,
        grpc.aio.insecure_channel(process.address, options=options) as channel,
    ):
        assert await next_token(await begin(channel)) == [11]


async def test_a_sidecar_that_stands_still_is_noticed_after_a_long_silence_too_D02(tmp_path: Path) -> None:
    async with (
        sidecar_process(*scripted_arguments(script(silent(FOREVER)), tmp_path), directory=tmp_path) as process,
        dial(process.address, keepalive=QUICK) as channel,
    ):
        events = await begin(channel)
        await asyncio.sleep(SILENCE_SECONDS)
        process.signal(signal.SIGSTOP)
        async with asyncio.timeout(NOTICED_SECONDS):
            with refused(grpc.StatusCode.UNAVAILABLE, ""):
                await next_token(events)


def hang_in_a_stream(address: str) -> None:
    """Begin a call and stand still; for a process of its own."""

    async def run() -> None:
        async with dial(address, keepalive=Keepalive(seconds=3600)) as channel:
            await begin(channel)
            os.kill(os.getpid(), signal.SIGSTOP)

    asyncio.run(run())


@contextlib.contextmanager
def standing_still(address: str) -> Generator[None]:
    client = multiprocessing.get_context("spawn").Process(target=hang_in_a_stream, args=(address,))
    client.start()
    try:
        yield
    finally:
        client.kill()
        client.join()
        client.close()


async def test_a_client_that_stands_still_is_noticed_and_its_call_is_aborted_D02() -> None:
    async with sidecar_on(engine_of(silent(FOREVER)), keepalive=QUICK) as running:
        with standing_still(running.sidecar.address):
            await eventually(lambda: running.sidecar.running_call_count == 1, 20)
            await eventually(lambda: running.sidecar.running_call_count == 0, 2 * NOTICED_SECONDS)


@pytest.mark.timeout(120)
def test_a_bridge_notices_a_sidecar_that_stands_still_D02(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    """By the settings that are shipped: half a minute."""
    sidecar = start_sidecar(script(silent(FOREVER), vocab_size=49152, max_model_len=256))
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    limit = DEFAULT_KEEPALIVE.seconds + DEFAULT_KEEPALIVE.timeout_seconds
    answers: list[httpx.Response] = []
    body = {"messages": [{"role": "user", "content": "hi"}]}

    def ask() -> None:
        answers.append(bridge.client.post("/v1/chat/completions", json=body, timeout=limit + 20))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        time.sleep(1)
        sidecar.process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        asking.join(limit + 20)
        assert time.monotonic() - stopped < limit + 10
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "sidecar_unavailable"
        # Whoever comes now does not wait as long.
        began = time.monotonic()
        assert bridge.client.post("/v1/chat/completions", json=body).status_code == 503
        assert time.monotonic() - began < 5
    finally:
        sidecar.process.send_signal(signal.SIGCONT)
        asking.join()
    bridge.wait_healthy()
