"""D13: readers that stop reading: the others notice nothing, memory stays bounded, and what they missed is there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from support.flood import BYTES_PER_TOKEN, TOP_IDS, Flood, K, flood, logprob, token_id
from support.sidecar_client import Generated, OpenedTape, SidecarClient
from support.waiting import eventually
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge

SLOW, NORMAL = 20, 5
TOKENS = 50_000
ENDLESS = 5_000_000
LATE_SECONDS = 20.0
"""How long after it was sampled a token may come on a busy machine, where this process reads all the streams."""
TRANSPORT_BYTES = 5_000_000
"""What a stalled stream may take beside its record: a message and the transport's windows; less than what it missed."""
MISSED_BYTES = 40_000 * 1000
"""What a stalled HTTP client has missed of 40,000 tokens, at the least: each takes more than 1000 bytes of JSON."""

Events = AsyncIterator[generation_pb2.GenerateResponse]


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncGenerator[Flood]:
    async with flood(tmp_path) as running:
        yield running


def generate(client: SidecarClient, tape_id: str = "", max_tokens: int = TOKENS) -> Events:
    sampling = types_pb2.SamplingParameters(max_tokens=max_tokens, top_logprobs=K)
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], sampling=sampling, tape_id=tape_id)
    return aiter(client.generation.Generate(request))


async def begin(client: SidecarClient, tape_id: str = "") -> tuple[Generated, Events]:
    """A call of which one message with tokens was read."""
    generated, events = Generated(), generate(client, tape_id)
    for _ in range(2):
        generated.take(await anext(events))
    return generated, events


async def read_on(generated: Generated, events: Events) -> float:
    """Read the rest; return when it came, by the clock."""
    async for event in events:
        generated.take(event)
    return time.monotonic()


def check_whole(generated: Generated) -> None:
    """Each token once, in order, with its own values."""
    assert generated.token_ids() == [token_id(i) for i in range(TOKENS)]
    assert generated.logprobs() == [logprob(i) for i in range(TOKENS)]
    for delta in generated.deltas:
        assert delta.top_logprobs.k == K
        assert list(delta.top_logprobs.token_ids) == TOP_IDS * len(delta.token_ids)
    assert generated.finish_reason() == types_pb2.FINISH_REASON_LENGTH


@pytest.mark.timeout(180)
async def test_readers_that_stall_hold_up_nobody_and_lose_nothing_D13(sidecar: Flood) -> None:
    async with SidecarClient(sidecar.address) as client, SidecarClient(sidecar.address) as other:
        before = sidecar.memory_bytes
        # Half of the slow ones share a connection with those that are not.
        slow = [await begin(client if i % 2 else other) for i in range(SLOW)]
        normal = [await begin(client) for _ in range(NORMAL)]
        ends = await asyncio.gather(*(read_on(*each) for each in normal))
        for (generated, _), end in zip(normal, ends, strict=True):
            check_whole(generated)
            assert end - sidecar.ends[generated.started.call_id] < LATE_SECONDS
        await eventually(lambda: len(sidecar.ends) == SLOW + NORMAL, 60)
        records = SLOW * TOKENS * BYTES_PER_TOKEN
        # A column that grows has room to spare.
        assert sidecar.memory_bytes - before < 1.2 * records + SLOW * TRANSPORT_BYTES
        for generated, events in slow:
            assert len(generated.deltas) == 1
            await read_on(generated, events)
            check_whole(generated)
            generated.deltas.clear()


async def ended_by_abort(client: SidecarClient, tape: OpenedTape) -> bool:
    """Whether the tape's only call has ended; it must be by the engine's abort."""
    page = await client.tapes.GetTape(
        tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=0)
    )
    end = await client.tapes.GetTape(
        tape_pb2.GetTapeRequest(
            tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=page.end_sequence - 1
        )
    )
    finished = [entry.choice_finished for entry in end.entries if entry.HasField("choice_finished")]
    assert all(it.completion.finish_reason == types_pb2.FINISH_REASON_ABORT for it in finished)
    return bool(finished)


async def until_aborted(client: SidecarClient, tape: OpenedTape) -> None:
    async with asyncio.timeout(10):
        while not await ended_by_abort(client, tape):  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)


async def stalled_at(client: SidecarClient, tape: OpenedTape, tokens: int) -> None:
    """Return when as many tokens were sampled on the tape."""
    async with asyncio.timeout(90):
        while await end_of(client, tape) < tokens:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)


async def end_of(client: SidecarClient, tape: OpenedTape) -> int:
    request = tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=0)
    return (await client.tapes.GetTape(request)).end_sequence


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_stalled_reader_that_vanishes_is_aborted_D13(sidecar: Flood, how: str) -> None:
    async with SidecarClient(sidecar.address) as client:
        tape = await client.open_tape()
        async with SidecarClient(sidecar.address) as slow:
            sampling = types_pb2.SamplingParameters(max_tokens=ENDLESS, top_logprobs=K)
            request = generation_pb2.GenerateRequest(prompt_token_ids=[1], sampling=sampling, tape_id=tape.tape_id)
            stream = slow.generation.Generate(request)
            await anext(aiter(stream))
            await stalled_at(client, tape, 20_000)
            if how == "cancel":
                stream.cancel()
                await until_aborted(client, tape)
        await until_aborted(client, tape)


def ask_in_full(bridge: Bridge) -> list[int]:
    """What a client that reads gets meanwhile."""
    body = {"prompt": "hi", "max_tokens": 200, "return_token_ids": True, "logprobs": K}
    answer = bridge.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def streamed_request(tape: OpenedTape) -> bytes:
    """A streamed request with top log-probabilities, as it stands on the wire."""
    body = json.dumps(
        {
            "prompt": "hi",
            "stream": True,
            "max_tokens": ENDLESS,
            "logprobs": K,
            "return_token_ids": True,
            "metadata": {"tape_id": tape.tape_id},
        }
    )
    headers = f"host: bridge\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode()


@pytest.mark.timeout(150)
async def test_a_stalled_http_client_takes_no_memory_holds_up_nobody_and_is_aborted_when_it_leaves_D13(
    sidecar: Flood, start_bridge: StartBridge
) -> None:
    bridge = await asyncio.to_thread(lambda: start_bridge(main=sidecar.address).wait_healthy())
    async with SidecarClient(sidecar.address) as client:
        tape = await client.open_tape()
        host, _, port = bridge.address.rpartition(":")
        warm = await asyncio.to_thread(ask_in_full, bridge)
        before = psutil.Process(bridge.process.pid).memory_info().rss
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(streamed_request(tape))
        await writer.drain()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for tokens in (20_000, 40_000):
            await stalled_at(client, tape, tokens)
            assert await asyncio.to_thread(ask_in_full, bridge) == warm
        assert psutil.Process(bridge.process.pid).memory_info().rss - before < MISSED_BYTES / 2
        writer.transport.abort()
        await until_aborted(client, tape)
    assert "ERROR" not in bridge.log
    assert "Traceback" not in bridge.log
