"""D01: messages above gRPC's 4 MiB pass, both ways, up to the limit; above it they are refused, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import httpx
import pytest

from support.engines import ManualEngine, toy_model
from support.refusals import refused
from support.scripted import RunningSidecar, sidecar_on
from support.sidecar_client import Generated, OpenedTape, prompts_on, read_to_end, sampled_on
from support.waiting import eventually
from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc, types_pb2
from tokentape_sidecar.engine import EngineCall, Sink, TopLogprobs
from tokentape_sidecar.limits import Limits

if TYPE_CHECKING:
    from integration.conftest import StartBridge

GRPC_DEFAULT_BYTES = 4 * 1024 * 1024
VOCABULARY = 200_000
CONTEXT = 2_000_000
THREE_BYTES = 16_384
"""From here on an id takes three bytes in a packed message."""
K = 20
SMALL_LIMIT = 1024 * 1024


class _Engine(ManualEngine):
    """Answers every prompt with its last id; the log-probabilities of the prompt, where asked for, are by position."""

    def __init__(self) -> None:
        super().__init__(toy_model(max_context_tokens=CONTEXT, vocabulary_size=VOCABULARY))

    async def submit(self, call: EngineCall, sink: Sink) -> None:
        await super().submit(call, sink)
        if call.sampling.prompt_logprobs is not None:
            sink.take_prompt_logprobs(*prompt_logprobs(len(call.prompt_token_ids) - 1))
        if call.sampling.max_tokens == 1:
            self.finish(call.call_id, call.prompt_token_ids[-1])
        elif not call.sampling.top_logprobs:
            self.emit(call.call_id, call.prompt_token_ids[-1])


def prompt_of(count: int) -> list[int]:
    return [THREE_BYTES + i % (VOCABULARY - THREE_BYTES) for i in range(count)]


def prompt_logprobs(positions: int) -> tuple[list[float], TopLogprobs]:
    """In halves, which are floats exactly."""
    token_ids = [THREE_BYTES + i % 1000 for i in range(positions * K)]
    return [-i % 64 / 2 - 32 for i in range(positions)], TopLogprobs(
        K, token_ids, [-i % 128 / 2 - 64 for i in range(positions * K)]
    )


def request_of(prompt: list[int], **sampling: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt_token_ids=prompt, sampling=types_pb2.SamplingParameters(max_tokens=1, **sampling)
    )


@pytest.fixture
def engine() -> _Engine:
    return _Engine()


@pytest.fixture
async def running(engine: _Engine) -> AsyncGenerator[RunningSidecar]:
    async with sidecar_on(engine) as sidecar:
        yield sidecar


@pytest.fixture
async def small(engine: _Engine) -> AsyncGenerator[RunningSidecar]:
    async with sidecar_on(engine, limits=Limits(max_message_bytes=SMALL_LIMIT)) as sidecar:
        yield sidecar


async def test_a_prompt_of_1_500_000_ids_passes_and_so_does_its_tape_D01(running: RunningSidecar) -> None:
    prompt = prompt_of(1_500_000)
    tape = await running.client.open_tape()
    request = request_of(prompt)
    request.tape_id = tape.tape_id
    assert request.ByteSize() > GRPC_DEFAULT_BYTES
    assert (await read_to_end(running.client.generation.Generate(request))).token_ids() == prompt[-1:]
    entries = await running.client.entries(tape)
    assert max(entry.ByteSize() for entry in entries) > GRPC_DEFAULT_BYTES
    assert list(prompts_on(entries).values()) == [prompt]


async def test_a_reply_above_4_mib_passes_D01(running: RunningSidecar) -> None:
    prompt = prompt_of(40_000)
    call = running.client.generation.Generate(request_of(prompt, prompt_logprobs=K))
    first = await anext(aiter(call))
    assert first.ByteSize() > GRPC_DEFAULT_BYTES
    own, top = prompt_logprobs(len(prompt) - 1)
    assert list(first.started.prompt_logprobs) == own
    assert list(first.started.prompt_top_logprobs.token_ids) == list(top.token_ids)
    assert list(first.started.prompt_top_logprobs.logprobs) == list(top.logprobs)


async def test_a_request_above_the_limit_is_refused_and_its_channel_goes_on_D01(
    small: RunningSidecar, engine: _Engine
) -> None:
    stream = small.client.generation.Generate(generation_pb2.GenerateRequest(prompt_token_ids=[7]))
    events = aiter(stream)
    await anext(events)
    assert list((await anext(events)).delta.token_ids) == [7]
    for _ in range(3):
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"larger than max.*{SMALL_LIMIT}"):
            await read_to_end(small.client.generation.Generate(request_of(prompt_of(SMALL_LIMIT // 2))))
        assert (await read_to_end(small.client.generation.Generate(request_of([8])))).token_ids() == [8]
    # The stream that ran all the while lost nothing.
    engine.emit(engine.submitted[0].call_id, 9)
    assert list((await anext(events)).delta.token_ids) == [9]
    assert len(engine.submitted) == 1 + 3, "the engine saw a refused request"


async def test_a_reply_above_its_receivers_limit_fails_its_call_alone_D01(
    running: RunningSidecar, engine: _Engine
) -> None:
    """The receiver is a client with gRPC's own limit, which knows nothing of ours."""
    request = request_of(prompt_of(40_000), prompt_logprobs=K)
    request.sampling.max_tokens = 100
    async with grpc.aio.insecure_channel(running.sidecar.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"larger than max.*{GRPC_DEFAULT_BYTES}"):
            await read_to_end(stub.Generate(request))
        await eventually(lambda: not running.sidecar.running_call_count)
        assert engine.aborted
        assert (await read_to_end(stub.Generate(request_of([8])))).token_ids() == [8]


async def test_a_backlog_with_20_top_logprobs_comes_in_pieces_for_any_client_D01(
    running: RunningSidecar, engine: _Engine
) -> None:
    count = 60_000
    tape = await running.client.open_tape()
    request = generation_pb2.GenerateRequest(prompt_token_ids=[7], tape_id=tape.tape_id)
    request.sampling.top_logprobs = K
    async with grpc.aio.insecure_channel(running.sidecar.address) as channel:
        events = aiter(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
        await anext(events)
        own, top = prompt_logprobs(count)
        call_id = engine.submitted[-1].call_id
        engine.sinks[call_id].append(0, prompt_of(count), own, top_logprobs=top)
        engine.finish(call_id)
        generated = Generated(started=generation_pb2.GenerateResponse.Started(call_id=call_id))
        async for event in events:
            generated.take(event)
        pages = [page async for page in _pages(tape_pb2_grpc.TapeServiceStub(channel), tape)]
    assert generated.token_ids() == prompt_of(count)
    assert generated.logprobs() == own
    assert [id_ for delta in generated.deltas for id_ in delta.top_logprobs.token_ids] == list(top.token_ids)
    assert sum(page.ByteSize() for page in pages) > 2 * GRPC_DEFAULT_BYTES
    assert sampled_on([entry for page in pages for entry in page.entries], call_id) == prompt_of(count)


async def _pages(tapes: tape_pb2_grpc.TapeServiceStub, tape: OpenedTape) -> AsyncGenerator[tape_pb2.GetTapeResponse]:
    sequence, end = 0, 1
    while sequence < end:
        request = tape_pb2.GetTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token, from_sequence=sequence)
        page = await cast("Awaitable[tape_pb2.GetTapeResponse]", tapes.GetTape(request))
        yield page
        sequence, end = page.next_sequence, page.end_sequence


@pytest.fixture
async def http(start_bridge: StartBridge, small: RunningSidecar) -> AsyncIterator[httpx.AsyncClient]:
    bridge = await asyncio.to_thread(lambda: start_bridge(main=small.sidecar.address).wait_healthy())
    async with httpx.AsyncClient(base_url=bridge.client.base_url, timeout=30) as client:
        yield client
    assert "Traceback" not in bridge.log


async def test_the_bridge_says_413_which_no_client_retries_and_serves_the_next_D01(http: httpx.AsyncClient) -> None:
    body = {"prompt": prompt_of(SMALL_LIMIT // 2), "max_tokens": 1, "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert str(SMALL_LIMIT) in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(answer.content) < 1000, "the prompt came back"
    fits = await http.post("/v1/completions", json=body | {"prompt": prompt_of(SMALL_LIMIT // 4)})
    assert fits.json()["choices"][0]["token_ids"] == prompt_of(SMALL_LIMIT // 4)[-1:]
