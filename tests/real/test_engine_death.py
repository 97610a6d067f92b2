"""A `tokentape-sidecar` with real vLLM behind a real bridge: its processes are stopped, continued and killed, each time
with eight requests running. In the order of the file: the second sidecar takes the place of the first, killed one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2

from support.real_engine import CPU_ENVIRONMENT
from support.refusals import refused
from support.scripted import SidecarProcess, sidecar_process
from support.sidecar_client import OpenedTape, SidecarClient, sampled_on
from support.waiting import eventually

if TYPE_CHECKING:
    from integration.conftest import Bridge

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

STREAMS = 8
LIMIT_SECONDS = 5
START_SECONDS = 180
MESSAGES = [{"role": "user", "content": "Tell me a long story."}]
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(slots=True)
class Rig:
    """A bridge, and the sidecar process behind it, which can be started anew at the same address."""

    directory: Path
    model_directory: Path
    stack: AsyncExitStack
    sidecars: list[SidecarProcess] = field(default_factory=list[SidecarProcess])
    engine_processes: list[psutil.Process] = field(default_factory=list[psutil.Process])
    """Of all sidecars so far."""
    http: httpx.AsyncClient = field(default_factory=httpx.AsyncClient)

    @property
    def sidecar(self) -> SidecarProcess:
        return self.sidecars[-1]

    async def start_sidecar(self) -> None:
        own = ["--model", str(self.model_directory), "--stall-limit", str(LIMIT_SECONDS), "--grace-seconds", "5"]
        place = ["--listen", self.sidecar.address] if self.sidecars else []
        vllm = ["--", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"]
        process = await self.stack.enter_async_context(
            sidecar_process(*own, *place, *vllm, directory=self.directory, seconds=START_SECONDS)
        )
        self.sidecars.append(process)
        self.engine_processes += psutil.Process(process.process.pid).children(recursive=True)

    def end_engines(self) -> None:
        """Leave nothing behind, whatever a test did not end."""
        for process in filter(lives, self.engine_processes):
            process.kill()

    def process_named(self, name: str) -> psutil.Process:
        children = psutil.Process(self.sidecar.process.pid).children(recursive=True)
        return next(child for child in children if name in f"{child.name()} {child.cmdline()}")

    async def chat(self, tape: OpenedTape | None = None, max_tokens: int = 900) -> httpx.Response:
        body = {"messages": MESSAGES, "max_completion_tokens": max_tokens, "ignore_eos": True}
        headers = {"x-tape-id": tape.tape_id} if tape else {}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def running_chats(
        self, client: SidecarClient
    ) -> tuple[list[OpenedTape], asyncio.Future[list[httpx.Response]]]:
        """Make eight requests, each on a tape; each has sampled when this returns."""
        tapes = [await client.open_tape() for _ in range(STREAMS)]
        chats = asyncio.gather(*(self.chat(tape) for tape in tapes))
        async with asyncio.timeout(30):
            while not all([await sampled(client, tape) for tape in tapes]):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.05)
        assert not chats.done()
        return tapes, chats

    async def until_health(self, status: int) -> None:
        async with asyncio.timeout(20):
            while True:
                if (await self.http.get("/health")).status_code == status:
                    return
                await asyncio.sleep(0.05)

    async def assert_refuses(self) -> None:
        """At once, and as something that may be tried again."""
        async with asyncio.timeout(5):
            await self.until_health(503)
            assert_retry_later([await self.chat()])

    async def assert_serves(self) -> None:
        answer = await asyncio.wait_for(self.chat(max_tokens=5), 30)
        assert answer.json()["usage"]["completion_tokens"] == 5


async def sampled(client: SidecarClient, tape: OpenedTape) -> list[int]:
    """The ids that the one call on `tape` has sampled so far."""
    entries = await client.entries(tape)
    started = [entry.call_started.call_id for entry in entries if entry.HasField("call_started")]
    return sampled_on(entries, started[0]) if started else []


def assert_retry_later(answers: list[httpx.Response], words: str = "") -> None:
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (503, "service_unavailable"), answer.text
        assert words in error["message"]


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Rig]:
    from integration.conftest import Bridge  # noqa: PLC0415 - a conftest

    os.environ |= CPU_ENVIRONMENT
    async with AsyncExitStack() as stack:
        made = Rig(tmp_path_factory.mktemp("sidecar"), model_directory, stack)
        stack.callback(made.end_engines)
        await made.start_sidecar()
        command = ["tokentape-bridge", "--listen", "127.0.0.1:0", "--sidecar", f"main={made.sidecar.address}"]
        bridge: Bridge = stack.enter_context(Bridge(command, tmp_path_factory.mktemp("bridge")))
        made.http = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://{bridge.address}", timeout=60))
        await made.until_health(200)
        yield made


@pytest.mark.parametrize("stopped", ["EngineCore", "Worker"])
async def test_a_stopped_engine_ends_its_streams_after_the_limit_and_serves_when_it_goes_on_E13(
    rig: Rig, stopped: str
) -> None:
    process = rig.process_named(stopped)
    async with SidecarClient(rig.sidecar.address) as client:
        tapes, chats = await rig.running_chats(client)
        process.suspend()
        try:
            answers = await asyncio.wait_for(chats, LIMIT_SECONDS + 15)
            assert_retry_later(answers, "the engine has stalled: it has emitted nothing for 5 s")
            await rig.assert_refuses()
            assert await client.health_of() == NOT_SERVING
            kept = [await sampled(client, tape) for tape in tapes]
            assert all(kept)
        finally:
            process.resume()
        await rig.until_health(200)
        await rig.assert_serves()
        assert "Traceback" not in rig.sidecar.output
        # What the engine brought late is of ended calls.
        assert [await sampled(client, tape) for tape in tapes] == kept


async def test_a_killed_sidecar_takes_its_engine_with_it_and_one_at_its_place_serves_E13(rig: Rig) -> None:
    async with SidecarClient(rig.sidecar.address) as client:
        _, chats = await rig.running_chats(client)
        rig.sidecar.kill()
        assert_retry_later(await asyncio.wait_for(chats, 10))
    await rig.assert_refuses()
    await eventually(lambda: not any(map(lives, rig.engine_processes)), 10)
    await rig.start_sidecar()
    await rig.until_health(200)
    await rig.assert_serves()


async def test_a_killed_engine_ends_its_streams_and_refuses_what_comes_E13(rig: Rig) -> None:
    """Last of all: there is no engine afterwards."""
    async with SidecarClient(rig.sidecar.address) as client:
        _, chats = await rig.running_chats(client)
        rig.process_named("EngineCore").kill()
        assert_retry_later(await asyncio.wait_for(chats, 10), "the engine died while it sampled this call")
        await rig.assert_refuses()
        assert await client.health_of() == NOT_SERVING
        with refused(grpc.StatusCode.UNAVAILABLE, "the engine is dead"):
            await client.generate()
    rig.sidecar.signal(signal.SIGTERM)
    assert await rig.sidecar.wait(30) == 0
    await eventually(lambda: not any(map(lives, rig.engine_processes)), 10)
