"""D07: processes started by one that talks to a sidecar."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path

import httpx
import pytest

from support.scripted import Json, call, script, scripted_arguments, sidecar_process, tokens
from support.sidecar_client import SidecarClient
from tokentape.v1 import generation_pb2

LIMIT_SECONDS = 10.0
"""Far from the case's 5 s, for a busy machine that imports gRPC once more."""
CHILDREN = 200
STEPS = 400


def script_of_a_stream() -> Json:
    steps = [tokens(i, delay_ms=5) for i in range(STEPS)]
    return script(call(*steps, tokens(finish="stop")), repeat=True, vocab_size=49152, max_model_len=1024)


def generate(address: str) -> list[int]:
    """Make a call with a channel of one's own; for a process of its own."""

    async def run() -> list[int]:
        async with SidecarClient(address) as client:
            events = client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1]))
            return [token_id async for event in events for token_id in event.delta.token_ids]

    return asyncio.run(run())


async def in_child(context: BaseContext, address: str) -> list[int]:
    with ProcessPoolExecutor(1, mp_context=context) as children:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await asyncio.wrap_future(children.submit(generate, address))


@pytest.fixture
async def address(tmp_path: Path) -> AsyncGenerator[str]:
    arguments = scripted_arguments(script_of_a_stream(), tmp_path)
    async with sidecar_process(*arguments, directory=tmp_path) as process:
        yield process.address


@pytest.fixture
async def stream(address: str) -> AsyncGenerator[AsyncIterator[generation_pb2.GenerateResponse]]:
    async with SidecarClient(address) as client:
        await client.open_tape()
        yield aiter(client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1])))


def echo() -> None:
    for _ in range(CHILDREN):
        ended = subprocess.run(["echo", "hello"], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
        assert ended.stdout == "hello\n"


async def test_200_subprocesses_during_a_stream_harm_neither_D07(
    stream: AsyncIterator[generation_pb2.GenerateResponse],
) -> None:
    echoing = asyncio.create_task(asyncio.to_thread(echo))
    assert [token_id async for event in stream for token_id in event.delta.token_ids] == list(range(STEPS))
    await echoing


async def test_a_spawned_child_talks_to_the_sidecar_D07(
    stream: AsyncIterator[generation_pb2.GenerateResponse], address: str
) -> None:
    assert await in_child(multiprocessing.get_context("spawn"), address) == list(range(STEPS))
    assert [token_id async for event in stream for token_id in event.delta.token_ids] == list(range(STEPS))


FORKS_FIRST = """
    import multiprocessing, sys
    from integration.test_d07_forks import generate

    child = multiprocessing.get_context("fork").Process(target=generate, args=(sys.argv[1],))
    child.start()
    child.join()
    print(child.exitcode, len(generate(sys.argv[1])))
"""


FORKS_LATER = """
    import asyncio, multiprocessing, sys, time
    from support.sidecar_client import SidecarClient
    from tokentape.v1 import generation_pb2
    from integration.test_d07_forks import generate

    def child(address):
        try:
            generate(address)
        except RuntimeError as error:
            print(type(error).__name__, error)

    async def main(address):
        async with SidecarClient(address) as client:
            events = aiter(client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[1])))
            await anext(events)
            began = time.monotonic()
            process = multiprocessing.get_context("fork").Process(target=child, args=(address,))
            process.start()
            await asyncio.to_thread(process.join, 20)
            assert time.monotonic() - began < 5
            print(process.exitcode, len([id_ async for event in events for id_ in event.delta.token_ids]))

    asyncio.run(main(sys.argv[1]))
"""


async def run_program(source: str, address: str, checkout: Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-u", "-c", textwrap.dedent(source), address],
        env={**os.environ, "PYTHONPATH": str(checkout / "tests")},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


async def test_a_child_forked_before_any_call_talks_to_the_sidecar_D07(address: str, checkout: Path) -> None:
    ended = await run_program(FORKS_FIRST, address, checkout)
    assert ended.stdout == f"0 {STEPS}\n", ended.stderr


async def test_a_child_forked_during_a_stream_is_told_of_spawn_at_once_and_its_parent_goes_on_D07(
    address: str, checkout: Path
) -> None:
    """It would crash, or wait for ever for threads that it does not have."""
    ended = await run_program(FORKS_LATER, address, checkout)
    told, parents = ended.stdout.splitlines()
    assert told.startswith("UsedBeforeForkError this process was forked from ")
    assert 'multiprocessing.get_context("spawn")' in told
    assert parents == f"0 {STEPS}", ended.stderr


APP = """
    import os
    from contextlib import asynccontextmanager

    from fastapi import FastAPI, Request

    from tokentape.channel import dial
    from tokentape.v1 import generation_pb2, generation_pb2_grpc


    @asynccontextmanager
    async def lifespan(_app):
        async with dial(os.environ["SIDECAR"]) as channel:
            yield {"generation": generation_pb2_grpc.GenerationServiceStub(channel)}


    app = FastAPI(lifespan=lifespan)


    @app.get("/model")
    async def model(request: Request):
        answer = await request.state.generation.GetModel(generation_pb2.GetModelRequest())
        return {"name": answer.name, "pid": os.getpid()}
"""


@contextmanager
def uvicorn_serving(directory: Path, sidecar: str) -> Generator[str]:
    """Serve `APP` with two workers; yield its URL."""
    (directory / "app.py").write_text(textwrap.dedent(APP))
    log = directory / "uvicorn.log"
    command = [sys.executable, "-m", "uvicorn", "app:app", "--workers", "2", "--port", "0"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=directory, env={**os.environ, "SIDECAR": sidecar}, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 40
        while log.read_text().count("Application startup complete") < 2:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        found = re.search(r"http://[\d.:]+", log.read_text())
        assert found
        yield found.group()
    finally:
        server.terminate()
        server.wait(20)
    assert "Traceback" not in log.read_text()
    assert "ERROR" not in log.read_text()


async def test_uvicorn_s_workers_each_talk_to_the_sidecar_D07(address: str, tmp_path: Path) -> None:
    with uvicorn_serving(tmp_path, address) as url:
        workers: set[int] = set()
        async with asyncio.timeout(30):
            while len(workers) < 2:
                # Each on a connection of its own, which either worker may accept.
                async with httpx.AsyncClient(base_url=url) as client:
                    answers = await asyncio.gather(*(client.get("/model", timeout=LIMIT_SECONDS) for _ in range(10)))
                assert {answer.json()["name"] for answer in answers} == {"toy"}
                workers |= {answer.json()["pid"] for answer in answers}
