"""D06: clients and executors on several event loops, one after the other and at once; in programs of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.scripted import call, script, scripted_arguments, sidecar_process, tokens
from support.sidecar_client import SidecarClient
from tokentape.channel import dial

ANSWER = call(tokens(10, 11, finish="stop"))

CLIENT = """
    import asyncio, logging, sys, threading
    from tokentape.channel import dial
    from tokentape.v1 import generation_pb2, generation_pb2_grpc
    from tokentape_executor.tape_client import TapeClient

    logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s")
    ADDRESS = sys.argv[1]

    async def generate(channel):
        request = generation_pb2.GenerateRequest(prompt_token_ids=[1])
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return [i async for event in stub.Generate(request) for i in event.delta.token_ids]

    async def use(calls):
        async with dial(ADDRESS) as channel:
            tapes = TapeClient(channel, "main")
            tape = await tapes.open()
            for _ in range(calls):
                assert await generate(channel) == [10, 11]
            await tapes.seal(tape)
            return [entry async for entry in tapes.watch(tape)]
"""

IN_TURN = """
    for _ in range(3):
        asyncio.run(use(5))
"""

IN_THREADS = """
    failed = []

    def run():
        try:
            asyncio.run(use(50))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
"""

ON_UVLOOP = """
    import uvloop

    for _ in range(2):
        uvloop.run(use(50))
"""

LEFT_OPEN = """
    async def leave():
        channel = dial(ADDRESS)
        assert await generate(channel) == [10, 11]
        # As a program does that ends on an error.
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            generation_pb2.GenerateRequest(prompt_token_ids=[1])
        )
        await call.read()

    for _ in range(2):
        asyncio.run(leave())
"""

NOISE = (
    "Error",
    "ERROR",
    "Traceback",
    "never awaited",
    "was destroyed",
    "never retrieved",
    "different loop",
    "Warning",
)


@pytest.fixture
async def address(tmp_path: Path) -> AsyncGenerator[str]:
    arguments = scripted_arguments(script(ANSWER, repeat=True), tmp_path)
    async with sidecar_process(*arguments, directory=tmp_path) as process:
        yield process.address
        assert "ERROR" not in process.output
        assert "Traceback" not in process.output


async def run_program(*parts: str, address: str) -> None:
    """Run a program that must say nothing, with all of Python's warnings on."""
    source = "".join(map(textwrap.dedent, parts))
    command = [sys.executable, "-X", "dev", "-W", "always", "-c", source, address]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 0, ended.stderr
    noise = [line for line in ended.stderr.splitlines() if any(word in line for word in NOISE)]
    assert not noise, ended.stderr


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(IN_TURN, id="one after the other"),
        pytest.param(IN_THREADS, id="in two threads at once"),
        pytest.param(ON_UVLOOP, id="uvloop"),
        pytest.param(LEFT_OPEN, id="left open"),
    ],
)
async def test_every_event_loop_has_a_client_of_its_own_D06(program: str, address: str) -> None:
    await run_program(CLIENT, program, address=address)


@pytest.mark.parametrize("_again", range(3))
async def test_a_fresh_loop_per_test_has_a_fresh_client_D06(_again: int, address: str) -> None:
    async with SidecarClient(address) as client:
        assert (await client.generate()).token_ids() == [10, 11]


def test_a_channel_is_not_made_where_no_loop_runs_D06() -> None:
    with pytest.raises(RuntimeError, match="dial a sidecar inside a coroutine"):
        dial("127.0.0.1:1")
