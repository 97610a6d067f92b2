"""An engine that stalls or dies, and a sidecar that is killed, with eight requests running: what their clients see."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2

import tokentape_sidecar
from support.engines import ManualEngine, toy_model
from support.refusals import refused
from support.scripted import (
    RunningSidecar,
    call,
    run_sidecar,
    script,
    scripted_arguments,
    sidecar_on,
    sidecar_process,
    tokens,
)
from support.sidecar_client import SidecarClient
from support.waiting import eventually
from tokentape_sidecar.errors import EngineDead

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

LIMIT_SECONDS = 0.5
STALLED = "the engine has stalled: it has emitted nothing for 0.5 s"
STREAMS = 8
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CHAT = {"messages": [{"role": "user", "content": "What is 2+3?"}]}
PROMPT_TEXT_ID = 34


@dataclass(frozen=True, slots=True)
class Rig:
    """An engine moved by hand, its sidecar, and a bridge process in front of it."""

    engine: ManualEngine
    sidecar: RunningSidecar
    http: httpx.AsyncClient

    async def status_of(self, path: str, body: dict[str, Any] | None = None) -> int:
        """Of an answer that comes at once."""
        asked = time.monotonic()
        answer = await (self.http.get(path) if body is None else self.http.post(path, json=body))
        assert time.monotonic() - asked < 3
        return answer.status_code

    async def running_chats(self) -> list[asyncio.Task[httpx.Response]]:
        """Make eight requests; each has sampled a token when this returns."""
        chats = [asyncio.create_task(self.http.post("/v1/chat/completions", json=CHAT)) for _ in range(STREAMS)]
        await eventually(lambda: len(self.engine.sinks) == STREAMS, 20)
        for call_id in self.engine.sinks:
            self.engine.emit(call_id, PROMPT_TEXT_ID)
        return chats

    async def until_health(self, status: int) -> None:
        async with asyncio.timeout(10):
            while True:
                if (await self.http.get("/health")).status_code == status:
                    return
                await asyncio.sleep(0.02)


@asynccontextmanager
async def rig(start_bridge: StartBridge, model_directory: Path) -> AsyncGenerator[Rig]:
    model = replace(toy_model(vocabulary_size=49152), tokenizer_directory=model_directory)
    engine = ManualEngine(model)
    async with sidecar_on(engine, stall_limit_seconds=LIMIT_SECONDS) as sidecar:
        bridge = start_bridge(main=sidecar.sidecar.address)
        async with httpx.AsyncClient(base_url=f"http://{bridge.address}", timeout=20) as http:
            made = Rig(engine, sidecar, http)
            await made.until_health(200)
            yield made
        await asyncio.to_thread(bridge.__exit__)


def assert_retry_later(answers: list[httpx.Response], words: str) -> None:
    """All of `answers` are errors of which a client knows that trying again may help."""
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (
            503,
            "service_unavailable",
            "sidecar_unavailable",
        )
        assert words in error["message"]


async def test_a_stalled_engine_ends_its_streams_and_serves_again_when_it_answers_E13(
    start_bridge: StartBridge, model_directory: Path
) -> None:
    async with rig(start_bridge, model_directory) as it:
        it.engine.answers.clear()
        chats = await it.running_chats()
        assert_retry_later(await asyncio.wait_for(asyncio.gather(*chats), 10), STALLED)
        assert await it.sidecar.client.health_of() == NOT_SERVING
        assert len(it.engine.aborted) == STREAMS

        await it.until_health(503)
        assert await it.status_of("/v1/chat/completions", CHAT) == 503
        assert await it.status_of("/v1/chat/completions", {"messages": "hi"}) == 400
        with refused(grpc.StatusCode.UNAVAILABLE, STALLED):
            await it.sidecar.client.generate()
        assert len(it.engine.submitted) == STREAMS

        it.engine.answers.set()
        await it.until_health(200)
        again = asyncio.create_task(it.http.post("/v1/chat/completions", json=CHAT))
        await eventually(lambda: it.engine.sinks)
        it.engine.finish(next(iter(it.engine.sinks)), PROMPT_TEXT_ID)
        assert (await again).status_code == 200


async def test_a_dead_engine_ends_its_streams_and_refuses_what_comes_E13(
    start_bridge: StartBridge, model_directory: Path
) -> None:
    async with rig(start_bridge, model_directory) as it:
        chats = await it.running_chats()
        it.engine.die(EngineDead("the engine died while it sampled this call"))
        assert_retry_later(await asyncio.wait_for(asyncio.gather(*chats), 10), "the engine died")
        await it.until_health(503)
        assert await it.status_of("/v1/chat/completions", CHAT) == 503
        assert await it.status_of("/v1/chat/completions", {"messages": "hi"}) == 400


async def test_an_engine_that_dies_while_it_is_stalled_stays_dead_E13() -> None:
    engine = ManualEngine()
    engine.answers.clear()
    async with sidecar_on(engine, stall_limit_seconds=0.1) as running:
        with refused(grpc.StatusCode.UNAVAILABLE, "the engine has stalled"):
            await running.client.generate()
        engine.die(EngineDead("the engine died"))
        engine.refusal = EngineDead("the engine is dead")
        await asyncio.sleep(0.1)
        with refused(grpc.StatusCode.UNAVAILABLE, "the engine is dead"):
            await running.client.generate()
        engine.answers.set()
        await asyncio.sleep(0.1)
        assert await running.client.health_of() == NOT_SERVING


async def test_a_tape_keeps_what_a_stalled_engine_had_sampled_and_can_be_sealed_E13() -> None:
    engine = ManualEngine()
    engine.answers.clear()
    engine.hands_over.clear()
    async with sidecar_on(engine, stall_limit_seconds=0.2) as running:
        tape = await running.client.open_tape()
        generating = asyncio.create_task(running.client.generate(tape_id=tape.tape_id))
        await eventually(lambda: engine.sinks)
        engine.emit(engine.submitted[0].call_id, 7, 8)
        with refused(grpc.StatusCode.UNAVAILABLE, "the engine has stalled"):
            await generating
        watching = asyncio.create_task(running.client.watch(tape))
        await running.client.seal(tape)
        entries = await watching
        engine.hands_over.set()
    [sampled] = [entry.tokens_sampled for entry in entries if entry.HasField("tokens_sampled")]
    assert list(sampled.token_ids) == [7, 8]
    assert [entry.WhichOneof("entry") for entry in entries][-2:] == ["call_failed", "tape_sealed"]


async def test_a_client_that_leaves_a_stalled_engine_is_no_sign_of_life_D03() -> None:
    engine = ManualEngine()
    engine.answers.clear()
    async with sidecar_on(engine, stall_limit_seconds=LIMIT_SECONDS) as running:
        staying = asyncio.create_task(running.client.generate())
        await eventually(lambda: engine.sinks)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(running.client.generate(), LIMIT_SECONDS / 5)
        await eventually(lambda: len(engine.aborted) == 3)
        with refused(grpc.StatusCode.UNAVAILABLE, STALLED):
            await asyncio.wait_for(staying, 10)


async def test_without_a_limit_an_engine_may_be_silent() -> None:
    engine = ManualEngine()
    async with sidecar_on(engine, stall_limit_seconds=0) as running:
        generating = asyncio.create_task(running.client.generate())
        await eventually(lambda: engine.sinks)
        await asyncio.sleep(0.2)
        engine.finish(engine.submitted[0].call_id, 7)
        assert (await generating).token_ids() == [7]


async def test_the_process_takes_the_limit_as_an_option_E13(tmp_path: Path) -> None:
    slow, quick = call(tokens(10), tokens(11, delay_ms=60_000, finish="stop")), call(tokens(12, finish="stop"))
    arguments = scripted_arguments(script(slow, quick), tmp_path)
    async with (
        sidecar_process("--stall-limit", "0.5", *arguments, directory=tmp_path) as process,
        SidecarClient(process.address) as client,
    ):
        with refused(grpc.StatusCode.UNAVAILABLE, STALLED):
            await asyncio.wait_for(client.generate(), 20)
        await eventually(lambda: "the engine answers again" in process.output)
        assert (await client.generate()).token_ids() == [12]


@pytest.mark.parametrize("limit", ["-1", "nan", "inf", "soon"])
def test_a_limit_that_is_none_is_a_wrong_command_line(limit: str) -> None:
    done = run_sidecar(f"--stall-limit={limit}", "--model", "./nope")
    assert done.returncode == 2
    assert "argument --stall-limit" in done.stderr


def sidecar_script(name: str, delay_ms: int) -> dict[str, Any]:
    model = {"name": name, "max_model_len": 256, "vocab_size": 49152, "eos_token_ids": [2]}
    steps = [{"token_ids": [34]}, {"token_ids": [2], "delay_ms": delay_ms, "finish_reason": "stop"}]
    return {"model": model, "calls": [{"steps": steps}], "repeat": True}


async def test_a_killed_sidecar_ends_its_streams_and_one_at_its_place_serves_them_again_E13(
    start_bridge: StartBridge, start_sidecar: StartSidecar
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    first = start_sidecar(sidecar_script("first", 60_000), listen=address)
    assert first.address == address
    bridge: Bridge = start_bridge(a=address).wait_healthy()
    async with openai.AsyncOpenAI(base_url=f"http://{bridge.address}/v1", api_key="-", max_retries=0) as client:

        async def ask() -> str:
            answer = await client.chat.completions.create(
                model="second" if first.process.poll() is not None else "first",
                messages=[{"role": "user", "content": "What is 2+3?"}],
            )
            return answer.model

        chats = [asyncio.create_task(ask()) for _ in range(STREAMS)]
        await asyncio.sleep(1)
        first.kill()
        ended = await asyncio.wait_for(asyncio.gather(*chats, return_exceptions=True), 10)
        assert [type(error) for error in ended] == [openai.InternalServerError] * STREAMS
        assert {error.status_code for error in ended if isinstance(error, openai.APIStatusError)} == {503}
        assert (await asyncio.to_thread(bridge.client.get, "/health")).status_code == 503
        with pytest.raises(openai.InternalServerError, match="sidecar"):
            await asyncio.wait_for(ask(), 3)
        start_sidecar(sidecar_script("second", 0), listen=address)
        await asyncio.to_thread(bridge.wait_healthy)
        assert await ask() == "second"


GUARD = Path(tokentape_sidecar.__file__).parent / "vllm_engine" / "guard.py"
"""Run by its path, as it runs itself: importing it from its package would import vLLM."""

GUARDED = """
import runpy, subprocess, sys, time
child = subprocess.Popen(["sleep", "100"])
stubborn = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"])
guard = runpy.run_path(sys.argv[1])["Guard"]()
if sys.argv[2] == "close":
    guard.close()
later = subprocess.Popen(["sleep", "100"])
print(child.pid, stubborn.pid, later.pid, guard._process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(("how", "survivors"), [("keep", 1), ("close", 3)])
async def test_an_engines_processes_end_with_a_killed_sidecar_E13(how: str, survivors: int) -> None:
    """The guard alone, around processes that would go on for ever; one was started later and is none of its own."""
    command = [sys.executable, "-c", GUARDED, str(GUARD), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:  # noqa: ASYNC220 - starts at once
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        children = [psutil.Process(pid) for pid in pids[:3]]
        parent.kill()
    try:
        await eventually(lambda: sum(map(_lives, children)) == survivors, 10)
        await asyncio.sleep(0.3)
        assert sum(map(_lives, children)) == survivors
        await eventually(lambda: not psutil.pid_exists(pids[3]) or psutil.Process(pids[3]).status() == "zombie")
    finally:
        for child in filter(_lives, children):
            child.kill()


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
