"""What holds for every call over a socket: sizes of messages, proxies, and each error's status."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from support.engines import ManualEngine
from support.refusals import refused
from support.scripted import TOY_TOKENIZER, RunningSidecar, call, scripted_sidecar, sidecar_on, tokens
from support.sidecar_client import read_to_end
from support.waiting import eventually
from tokentape.channel import MAX_MESSAGE_BYTES
from tokentape.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from tokentape_sidecar import errors
from tokentape_sidecar.rpc_errors import STATUS_OF

Sampling = types_pb2.SamplingParameters

ANSWER = call(tokens(10, 11, finish="stop"))


async def test_a_prompt_of_one_and_a_half_million_ids_passes_D01() -> None:
    count = 1_500_000
    async with scripted_sidecar(ANSWER, max_model_len=count + 10, vocab_size=150_000) as running:
        request = generation_pb2.GenerateRequest(prompt_token_ids=[149_999] * count)
        assert request.ByteSize() > 4 * 1024 * 1024
        generated = await read_to_end(running.client.generation.Generate(request))
    assert generated.started.prompt_token_count == count
    assert generated.token_ids() == [10, 11]


async def test_an_answer_above_grpcs_default_limit_passes_D01() -> None:
    count = 450_000
    async with scripted_sidecar(ANSWER, max_model_len=count + 10, vocab_size=150_000) as running:
        sampling = Sampling(prompt_logprobs=1)
        generated = await running.client.generate([149_999] * count, sampling)
    assert generated.started.ByteSize() > 4 * 1024 * 1024
    assert len(generated.started.prompt_logprobs) == count - 1


async def test_a_message_above_the_limit_is_refused_and_the_channel_stays_usable_D01() -> None:
    async with scripted_sidecar(ANSWER) as running:
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
            await running.client.generation.Generate(
                generation_pb2.GenerateRequest(cache_salt="x" * (MAX_MESSAGE_BYTES + 1))
            ).read()
        assert (await running.client.generate()).token_ids() == [10, 11]


async def test_an_http_proxy_of_the_environment_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with scripted_sidecar(ANSWER) as running:
        assert (await running.client.generate()).token_ids() == [10, 11]
        # What dial is there for: gRPC's own channel goes to the proxy.
        async with grpc.aio.insecure_channel(running.sidecar.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with refused(grpc.StatusCode.UNAVAILABLE, ""):
                await stub.GetModel(generation_pb2.GetModelRequest())


EXAMPLES: dict[type[errors.TokentapeError], errors.TokentapeError] = {
    errors.InvalidArgument: errors.InvalidArgument("sampling.top_p", "is wrong"),
    errors.ContextOverflow: errors.ContextOverflow(5, 4),
    errors.EngineStalled: errors.EngineStalled(3),
    errors.StaleWeights: errors.StaleWeights(2, 1),
    errors.WeightsBroken: errors.WeightsBroken(),
}
"""Of errors that are not made from a message."""


async def refuse_next(engine: ManualEngine, error: Exception, status: grpc.StatusCode, message: str) -> RunningSidecar:
    async with sidecar_on(engine) as running:
        engine.refusal = error
        with refused(status, message):
            await running.client.generate()
        engine.refusal = None
        stream = asyncio.create_task(running.client.generate())
        await eventually(lambda: engine.sinks)
        engine.finish(engine.submitted[-1].call_id, 5)
        assert (await stream).token_ids() == [5]
    return running


@pytest.mark.parametrize("error", STATUS_OF, ids=lambda error: error.__name__)
async def test_every_error_arrives_as_its_status_with_its_message(error: type[errors.TokentapeError]) -> None:
    example = EXAMPLES.get(error) or error("the message")
    await refuse_next(ManualEngine(), example, STATUS_OF[error], f"^{re.escape(str(example))}$")


async def test_an_unexpected_error_is_logged_in_full_and_sent_generic(caplog: pytest.LogCaptureFixture) -> None:
    message = "^internal error; the sidecar's log has the details$"
    await refuse_next(ManualEngine(), RuntimeError("secret detail"), grpc.StatusCode.INTERNAL, message)
    assert "secret detail" in caplog.text


async def test_a_very_long_message_keeps_its_status() -> None:
    error = errors.CallError("x" * 100_000)
    await refuse_next(ManualEngine(), error, grpc.StatusCode.INTERNAL, "^x{1000}$")


async def test_an_exhausted_script_is_an_error_of_that_call() -> None:
    async with scripted_sidecar(ANSWER) as running:
        await running.client.generate()
        with refused(grpc.StatusCode.INTERNAL, "the script is exhausted: it has 1 calls, and this is call 2"):
            await running.client.generate()


async def test_an_unknown_method_is_unimplemented() -> None:
    async with scripted_sidecar(tokenizer=TOY_TOKENIZER) as running:
        method = cast("Any", running.client.channel).unary_unary("/tokentape.v1.NoService/Nothing")
        with refused(grpc.StatusCode.UNIMPLEMENTED, ""):
            await method(b"")
