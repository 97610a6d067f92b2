"""Cases from the field about HTTP, under their ids; the streamed halves are with the streams."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

from support.metrics import samples_of
from support.sidecar_client import SidecarClient
from tokentape.v1.types_pb2 import FINISH_REASON_ABORT

if TYPE_CHECKING:
    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

CHAT = "/v1/chat/completions"
ANSWER = [34, 35, 36, 2]
STARTS, ENDS = {"token_ids": ANSWER[:2]}, {"token_ids": ANSWER[2:], "finish_reason": "stop"}
LONG_MS = 9_000
"""How long the first token of a long request takes; it stands for the minutes of a long prefill."""


def script(*steps: dict[str, Any], max_model_len: int = 256) -> dict[str, Any]:
    model = {"name": "toy", "max_model_len": max_model_len, "vocab_size": 49152, "eos_token_ids": [2]}
    return {"model": model, "calls": [{"steps": steps}], "repeat": True}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, **fields}


@asynccontextmanager
async def gym_client(bridge: Bridge) -> AsyncGenerator[aiohttp.ClientSession]:
    """A client as NeMo Gym's: no timeouts, 1024 connections, idle ones kept for 15 s."""
    connector = aiohttp.TCPConnector(limit=1024, keepalive_timeout=15)
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None)
    async with aiohttp.ClientSession(str(bridge.client.base_url), connector=connector, timeout=timeout) as session:
        yield session


async def sampled(session: aiohttp.ClientSession, **fields: Any) -> list[int]:
    async with session.post(CHAT, json=body(**fields)) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]["token_ids"]


async def streamed(session: aiohttp.ClientSession, **fields: Any) -> list[int]:
    async with session.post(CHAT, json=body(stream=True, **fields)) as response:
        assert response.status == 200, await response.text()
        *frames, done = [line.removeprefix(b"data: ") async for line in response.content if line != b"\n"]
    assert done == b"[DONE]\n"
    return [id_ for frame in frames for choice in json.loads(frame)["choices"] for id_ in choice.get("token_ids", ())]


def in_flight(bridge: Bridge) -> float:
    return samples_of(bridge.client.get("/metrics"))["tokentape:http_requests_in_flight",]


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_do_not_hurt_the_others_C03(
    start_bridge: StartBridge, start_sidecar: StartSidecar, stream: bool
) -> None:
    seconds = 0.6
    sidecar = start_sidecar(script(STARTS, ENDS | {"delay_ms": int(seconds * 1000)}))
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    # Half of them leave: at random moments, and as close to the answer as can be.
    moments = [random.Random(3).uniform(0, seconds) for _ in range(4)] + [seconds] * 4
    async with SidecarClient(sidecar.address, "a") as client, gym_client(bridge) as session:
        tapes = [await client.open_tape() for _ in range(16)]
        requests = [
            asyncio.create_task((streamed if stream else sampled)(session, metadata={"tape_id": tape.tape_id}))
            for tape in tapes  # each on a tape of its own, which tells how its call ended
        ]
        for leaver, moment in zip(requests, moments, strict=False):
            asyncio.get_running_loop().call_later(moment, leaver.cancel)
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert results[8:] == [ANSWER] * 8
        await _eventually(lambda: in_flight(bridge) == 1)
        for tape in tapes:
            finished = [it.choice_finished for it in await client.entries(tape) if it.HasField("choice_finished")]
            assert len(finished) <= 1
            assert tape in tapes[:8] or finished[0].completion.token_count == len(ANSWER)
    assert bridge.client.get("/health").status_code == 200
    assert "ERROR" not in bridge.log
    assert "Traceback" not in bridge.log


async def test_a_client_behind_the_middleware_that_leaves_aborts_its_call_within_a_second(
    start_bridge: StartBridge, start_sidecar: StartSidecar, tmp_path_factory: pytest.TempPathFactory
) -> None:
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text("key")
    sidecar = start_sidecar(script(STARTS, ENDS | {"delay_ms": 60_000}))
    bridge = start_bridge("--api-key-file", str(key_file), a=sidecar.address).wait_healthy()
    async with SidecarClient(sidecar.address, "a") as client, gym_client(bridge) as session:
        tape = await client.open_tape()

        async def finished() -> list[Any]:
            return [it.choice_finished for it in await client.entries(tape) if it.HasField("choice_finished")]

        asked = body(metadata={"tape_id": tape.tape_id})
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.7):
                await session.post(CHAT, json=asked, headers={"authorization": "Bearer key"})
        left = time.monotonic()
        while not (ended := await finished()):
            assert time.monotonic() < left + 5
            await asyncio.sleep(0.02)
    assert ended[0].completion.finish_reason == FINISH_REASON_ABORT
    assert ended[0].completion.token_count == 2


@pytest.mark.parametrize("dies", [False, True])
async def test_an_engine_that_fails_on_the_way_is_an_error_and_no_answer_C04(
    start_bridge: StartBridge, start_sidecar: StartSidecar, dies: bool
) -> None:
    last = ENDS | {"delay_ms": 60_000} if dies else {"error": "out of memory", "delay_ms": 300}
    sidecar = start_sidecar(script(STARTS, last))
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    async with gym_client(bridge) as session:
        if dies:
            asyncio.get_running_loop().call_later(0.5, sidecar.kill)
        response = await session.post(CHAT, json=body())
        answer = await response.json()
    assert response.status == (503 if dies else 500)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def small(start_bridge: StartBridge, start_sidecar: StartSidecar) -> Bridge:
    sidecar = start_sidecar(script(STARTS, ENDS, max_model_len=64))
    return start_bridge(a=sidecar.address).wait_healthy()


OVERFLOW = {"messages": [{"role": "user", "content": "word " * 100}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status"), [({"model": "other"}, 404), (OVERFLOW, 400), ({"tool_choice": "always"}, 400)]
)
def test_errors_before_the_first_token_keep_their_status_C05(
    small: Bridge, fields: dict[str, Any], status: int, stream: bool
) -> None:
    response = small.client.post(CHAT, json=body(stream=stream, **fields) if fields is not OVERFLOW else fields)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    # Without a model there is no wrong one.
    assert small.client.post(CHAT, json=body()).json()["model"] == "toy"
    [model] = small.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("toy", 64)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_s_client_raises_errors_before_the_first_token_C05(small: Bridge, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{small.client.base_url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="toy"):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "hi"}], stream=stream)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "word " * 100}], stream=stream
            )


def test_a_full_context_is_a_400_with_both_numbers_and_tokenize_still_answers_C06(small: Bridge) -> None:
    tokens = small.client.post("/tokenize", json=OVERFLOW).json()
    refused = small.client.post(CHAT, json=OVERFLOW)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    message = refused.json()["error"]["message"]
    assert "maximum context length" in message
    assert "64" in message
    assert str(tokens["count"]) in message
    assert len(tokens["tokens"]) == tokens["count"] > 64 == tokens["max_model_len"]


async def test_idle_connections_outlive_a_client_s_pool_C12(start_bridge: StartBridge, small: Bridge) -> None:
    async with gym_client(small) as session:

        async def ask_twice(pause: float) -> None:
            await sampled(session)
            await asyncio.sleep(pause)
            await sampled(session)

        await asyncio.gather(*(ask_twice(pause) for pause in (6, 10, 14) for _ in range(17)))


@pytest.fixture(scope="module")
def long_sidecar(start_sidecar: StartSidecar) -> ServerProcess:
    return start_sidecar(script(STARTS | {"delay_ms": LONG_MS}, ENDS))


PROBER = """
import statistics, sys, threading, time, httpx

done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
seconds, served = [], []
with httpx.Client(timeout=20) as client:
    while not done.wait(0.3):
        began = time.monotonic()
        served.append(client.get(sys.argv[1]).status_code == 200)
        seconds.append(time.monotonic() - began)
print(statistics.median(seconds), max(seconds), statistics.mean(served))
"""
"""A probe in a process of its own: 512 requests keep the one that makes them busy."""


@asynccontextmanager
async def probed(url: str) -> AsyncGenerator[list[float]]:
    """Probe `url` meanwhile; then the list has the median and the longest time, in seconds, and the share of 200s."""
    prober = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROBER, url), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    times: list[float] = []
    try:
        yield times
    finally:
        said, _ = await prober.communicate(b"")
    assert prober.returncode == 0
    times += map(float, said.split())


@pytest.mark.parametrize("workers", [1, 2])
async def test_512_long_requests_at_once_are_answered_and_so_is_health_C12_C14(
    start_bridge: StartBridge, long_sidecar: ServerProcess, workers: int
) -> None:
    bridge = start_bridge("--workers", str(workers), a=long_sidecar.address).wait_healthy()
    async with gym_client(bridge) as session, probed(f"{bridge.client.base_url}/health") as times:
        assert await asyncio.gather(*(sampled(session) for _ in range(512))) == [ANSWER] * 512
    median, longest, served = times
    assert median < 1
    # A machine that is busy with other things may take longer now and then.
    assert longest < 10
    assert served == 1
    assert in_flight(bridge) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_in_a_long_silence_is_an_error_C14(
    start_bridge: StartBridge, start_sidecar: StartSidecar, stream: bool
) -> None:
    bridge = start_bridge(a=start_sidecar(script({"error": "it broke", "delay_ms": LONG_MS})).address).wait_healthy()
    response = bridge.client.post(CHAT, json=body(stream=stream), timeout=30)
    if stream:
        assert response.status_code == 200
        last = response.text.removesuffix("\n\n").rpartition("\n\n")[2].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "engine_error"
    else:
        assert response.status_code == 500


async def _eventually(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
