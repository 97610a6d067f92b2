"""D12: what probes, clients and a bridge see of a sidecar that loads, dies and comes back.

What the health and reflection services answer in every state is in `test_sidecar_health`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2

from support.refusals import refused
from support.scripted import SIDECAR_COMMAND, TOY_TOKENIZER, call, script, tokens
from support.sidecar_client import SidecarClient
from support.waiting import eventually

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

SERVING = health_pb2.HealthCheckResponse.SERVING
ANSWER = [34, 35, 2]
SCRIPT = script(call(tokens(*ANSWER, finish="stop")), repeat=True, vocab_size=49152, max_model_len=256)
SERVICES = ["", "tokentape.v1.GenerationService", "tokentape.v1.TapeService"]
DOWN_SECONDS = 12.0
BACK_SECONDS = 8.0
"""How soon after a restart it must be usable: two seconds of back-off, and what a busy machine takes."""
FAST_SECONDS = 2.0
CHAT = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


async def test_nobody_takes_a_sidecar_for_ready_before_its_engine_has_loaded_D12(tmp_path: Path) -> None:
    """Its script is a pipe: reading it takes until somebody writes, and blocks the event loop as vLLM's load does."""
    address, ready, pipe = free_address(), tmp_path / "ready.json", tmp_path / "script.json"
    os.mkfifo(pipe)
    command = [SIDECAR_COMMAND, "--engine", "scripted", "--script", str(pipe), "--tokenizer", str(TOY_TOKENIZER)]
    process = await asyncio.create_subprocess_exec(*command, "--listen", address, "--ready-file", str(ready))
    try:
        async with SidecarClient(address) as client:
            with await asyncio.to_thread(pipe.open, "w") as loading:
                # It is loading: it has opened the pipe.
                for service in [*SERVICES, "tokentape.v1.Nothing"]:
                    with refused(grpc.StatusCode.UNAVAILABLE, ""):
                        await client.health_of(service)
                assert not ready.exists()
                loading.write(json.dumps(SCRIPT))
            await eventually(ready.exists, 20)
            await soon(BACK_SECONDS, lambda: client.health_of(""))
            assert [await client.health_of(service) for service in SERVICES] == [SERVING] * 3
            with refused(grpc.StatusCode.NOT_FOUND, ""):
                await client.health_of("tokentape.v1.Nothing")
            assert (await client.generate()).token_ids() == ANSWER
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0


async def soon(seconds: float, attempt: Callable[[], Awaitable[object]]) -> float:
    """Repeat `attempt` while it is UNAVAILABLE; how long that took, at most `seconds`."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while True:
            try:
                await attempt()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
            else:
                return time.monotonic() - began


def ask(bridge: Bridge) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    answer = bridge.client.post("/v1/chat/completions", json=CHAT)
    return answer, time.monotonic() - began


@pytest.mark.timeout(120)
async def test_a_sidecar_that_was_gone_for_12_seconds_is_usable_soon_and_meanwhile_refused_fast_D12(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    address = free_address()
    first = start_sidecar(SCRIPT, listen=address)
    bridge = await asyncio.to_thread(lambda: start_bridge(a=first.address).wait_healthy())
    async with SidecarClient(address, "a") as client:
        assert (await client.generate()).token_ids() == ANSWER
        first.kill()
        killed = time.monotonic()
        while time.monotonic() - killed < DOWN_SECONDS:
            began = time.monotonic()
            with refused(grpc.StatusCode.UNAVAILABLE, ""):
                await client.generate()
            assert time.monotonic() - began < FAST_SECONDS
            answer, seconds = await asyncio.to_thread(ask, bridge)
            assert answer.status_code == 503, answer.text
            assert seconds < FAST_SECONDS
            health = await asyncio.to_thread(bridge.client.get, "/health")
            assert health.status_code == 503
            await asyncio.sleep(0.4)
        assert start_sidecar(SCRIPT, listen=address).address == address
        came_back = time.monotonic()
        await soon(BACK_SECONDS, client.generate)
        while (answered := await asyncio.to_thread(ask, bridge))[0].status_code == 503:
            assert time.monotonic() - came_back < BACK_SECONDS
            await asyncio.sleep(0.05)
        assert answered[0].json()["choices"][0]["token_ids"] == ANSWER
    assert "Traceback" not in bridge.log
