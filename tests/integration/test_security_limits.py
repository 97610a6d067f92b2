"""What a client may take at most: each limit is told by the name of its field, and the engine sees nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import pytest

from support.engines import ManualEngine, toy_model
from support.guarded import guarded_sidecar
from support.refusals import refused
from support.sidecar_client import OpenedTape, SidecarClient
from support.waiting import eventually
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_sidecar.limits import Limits
from tokentape_sidecar.settings import parse_settings

Status = grpc.StatusCode
Sampling = types_pb2.SamplingParameters

LIMITS = Limits(
    max_message_bytes=1024 * 1024,
    max_running_calls=2,
    max_tapes=2,
    max_tape_bytes=4096,
    max_watchers_per_tape=2,
    max_choices=4,
    max_top_logprobs=3,
)


@pytest.fixture
def engine() -> ManualEngine:
    return ManualEngine(toy_model(max_context_tokens=2048, vocabulary_size=1000))


@pytest.fixture
async def client(engine: ManualEngine) -> AsyncGenerator[SidecarClient]:
    async with guarded_sidecar(engine, limits=LIMITS) as sidecar, SidecarClient(sidecar.address) as client:
        yield client


async def begin(client: SidecarClient, engine: ManualEngine, **more: object) -> asyncio.Task[object]:
    """Make a call that runs until the test ends it."""
    before = len(engine.submitted)
    task: asyncio.Task[object] = asyncio.create_task(client.generate([1, 2, 3], **more))  # pyright: ignore[reportArgumentType]
    await eventually(lambda: len(engine.submitted) > before)
    return task


LONG = "x" * 1025
TOO_MUCH: list[tuple[Sampling, str, str]] = [
    (Sampling(n=5), "n", "at most 4, got 5"),
    (Sampling(top_logprobs=4), "top_logprobs", "at most 3, got 4"),
    (Sampling(prompt_logprobs=4), "prompt_logprobs", "at most 3, got 4"),
    (Sampling(stop=["a"] * 257), "stop", "at most 256 entries, has 257"),
    (Sampling(stop=["a", LONG]), r"stop\[1\]", "at most 1024 characters, has 1025"),
    (Sampling(bad_words=["a"] * 257), "bad_words", "at most 256 entries, has 257"),
    (Sampling(bad_words=[LONG]), r"bad_words\[0\]", "at most 1024 characters, has 1025"),
    (Sampling(stop_token_ids=[1] * 1025), "stop_token_ids", "at most 1024 entries, has 1025"),
    (Sampling(allowed_token_ids=[1] * 1001), "allowed_token_ids", "at most 1000 entries, has 1001"),
    (Sampling(logit_bias=dict.fromkeys(range(4097), 1.0)), "logit_bias", "at most 4096 entries, has 4097"),
]
_STRUCTURE_LIMIT = 1024 * 1024


@pytest.mark.parametrize(
    ("sampling", "field", "problem"), TOO_MUCH, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_sampling_has_limits(
    client: SidecarClient, engine: ManualEngine, sampling: Sampling, field: str, problem: str
) -> None:
    with refused(Status.INVALID_ARGUMENT, f"^sampling.{field}: must .*{problem}$"):
        await client.generate(sampling=sampling)
    with refused(Status.INVALID_ARGUMENT, f"^sampling_policy.{field}: must .*{problem}$"):
        await client.open_tape(sampling_policy=sampling)
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (types_pb2.StructuredOutput(regex="x" * (_STRUCTURE_LIMIT + 1)), "regex: must have at most 1048576 characters"),
        (
            types_pb2.StructuredOutput(choices=types_pb2.StructuredOutput.Choices(values=["x" * 1024] * 1025)),
            "choices: must have at most 1048576 characters",
        ),
        (types_pb2.StructuredOutput(json_schema="[" * 200_000), "json_schema: is nested too deeply"),
    ],
    ids=["regex", "choices", "nested"],
)
async def test_structured_output_has_limits(
    engine: ManualEngine, output: types_pb2.StructuredOutput, problem: str
) -> None:
    async with guarded_sidecar(engine) as sidecar, SidecarClient(sidecar.address) as client:
        with refused(Status.INVALID_ARGUMENT, f"^sampling.structured_output.{problem}"):
            await client.generate(sampling=Sampling(structured_output=output))
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("field", "most"), [("anchor", 256), ("context_fingerprint", 65_536), ("cache_salt", 256), ("lora_name", 256)]
)
async def test_what_is_kept_as_it_is_given_has_a_limit(
    client: SidecarClient, engine: ManualEngine, field: str, most: int
) -> None:
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], **{field: "x" * (most + 1)})  # pyright: ignore[reportArgumentType]
    with refused(Status.INVALID_ARGUMENT, f"^{field}: must have at most {most} characters, has {most + 1}$"):
        await client.generation.Generate(request).read()
    assert engine.submitted == []


async def test_a_prompt_longer_than_the_context_is_refused_before_its_ids_are_read(
    client: SidecarClient, engine: ManualEngine
) -> None:
    # The last id is none of the vocabulary: that would be told, had anybody looked.
    with refused(Status.OUT_OF_RANGE, "the maximum context length is 2048 tokens, but the prompt has 2049"):
        await client.generate([*[1] * 2048, 5000])
    assert engine.submitted == []


async def test_a_message_above_the_limit_is_refused_and_the_channel_serves_on_D01(
    client: SidecarClient, engine: ManualEngine
) -> None:
    with refused(Status.RESOURCE_EXHAUSTED, r"larger than max \(\d+ vs\. 1048576\)"):
        await client.generate([300] * 600_000)
    assert engine.submitted == []
    running = await begin(client, engine)
    engine.finish(engine.submitted[0].call_id, 7)
    await running


async def test_metadata_above_the_limit_is_refused(client: SidecarClient, engine: ManualEngine) -> None:
    with refused(Status.RESOURCE_EXHAUSTED, "metadata size exceeds"):
        await client.generation.GetModel(generation_pb2.GetModelRequest(), metadata=[("x-long", "x" * 40_000)])
    assert (await client.generation.GetModel(generation_pb2.GetModelRequest())).name


async def test_as_many_calls_run_as_may_and_one_more_when_one_has_ended(
    client: SidecarClient, engine: ManualEngine
) -> None:
    running = [await begin(client, engine) for _ in range(2)]
    with refused(Status.UNAVAILABLE, r"the sidecar runs as many calls as it may \(2\)"):
        await client.generate()
    engine.finish(engine.submitted[0].call_id, 7)
    await running[0]
    third = await begin(client, engine)
    for call in engine.submitted[1:]:
        engine.finish(call.call_id, 7)
    await asyncio.gather(running[1], third)


async def test_as_many_tapes_are_held_as_may(client: SidecarClient) -> None:
    first = await client.open_tape()
    await client.open_tape()
    with refused(Status.RESOURCE_EXHAUSTED, "the sidecar holds 2 tapes, as many as it may"):
        await client.open_tape()
    await client.tapes.DeleteTape(tape_pb2.DeleteTapeRequest(tape_id=first.tape_id, reader_token=first.reader_token))
    await client.open_tape()


async def test_a_tape_takes_as_many_bytes_as_it_may(client: SidecarClient, engine: ManualEngine) -> None:
    tape = await client.open_tape()
    for index in range(2):
        assert index == len(engine.submitted)
        running = asyncio.create_task(client.generate([5] * 700, tape_id=tape.tape_id))
        await eventually(lambda: len(engine.submitted) > index)  # noqa: B023 - waited for here
        engine.finish(engine.submitted[index].call_id, 7)
        await running
    with refused(
        Status.RESOURCE_EXHAUSTED, r"^tape_id: the tape takes \d+ bytes, and may take 4096 \(max_tape_bytes\)"
    ):
        await client.generate(tape_id=tape.tape_id)
    assert len(engine.submitted) == 2


async def test_fingerprints_count_as_the_tapes_bytes(client: SidecarClient, engine: ManualEngine) -> None:
    tape = await client.open_tape()
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id, context_fingerprint="x" * 5000)
    call = client.generation.Generate(request)
    await eventually(lambda: bool(engine.submitted))
    with refused(Status.RESOURCE_EXHAUSTED, "max_tape_bytes"):
        await client.generate(tape_id=tape.tape_id)
    call.cancel()


async def watch_status(client: SidecarClient, tape: OpenedTape, watchers: list[Any]) -> grpc.StatusCode:
    """Begin to watch; OK where the first response comes. The stream goes to `watchers`."""
    request = tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
    call = client.tapes.WatchTape(request)
    watchers.append(call)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Status.OK


async def test_a_tape_has_as_many_watchers_as_it_may(client: SidecarClient) -> None:
    tape = await client.open_tape()
    watchers: list[Any] = []
    for expected in (Status.OK, Status.OK, Status.RESOURCE_EXHAUSTED):
        assert await watch_status(client, tape, watchers) is expected
    with refused(Status.RESOURCE_EXHAUSTED, "the tape has 2 watchers, as many as it may"):
        await client.watch(tape)
    watchers[0].cancel()
    async with asyncio.timeout(5):
        while await watch_status(client, tape, watchers) is Status.RESOURCE_EXHAUSTED:  # noqa: ASYNC110 - a stream
            await asyncio.sleep(0.01)
    assert await watch_status(client, tape, watchers) is Status.RESOURCE_EXHAUSTED
    for watcher in watchers:
        watcher.cancel()


async def test_find_calls_takes_as_many_anchors_as_it_may(client: SidecarClient) -> None:
    tape = await client.open_tape()
    with refused(Status.INVALID_ARGUMENT, "^anchors: must be at most 16384, are 16385$"):
        await client.tapes.FindCalls(tape_pb2.FindCallsRequest(tape_id=tape.tape_id, anchors=["a"] * 16_385))


async def test_a_long_foreign_word_in_an_error_does_not_break_the_answer(client: SidecarClient) -> None:
    """A status travels in a header; characters beyond ASCII take twelve bytes each there."""
    tape = await client.open_tape()
    parent = types_pb2.CallReference(call_id="漢" * 5000)
    with refused(Status.NOT_FOUND, r"^parent\.call_id: no call '\\u6f22"):
        await client.generate(tape_id=tape.tape_id, parent=parent)
    request = generation_pb2.GenerateRequest(prompt_token_ids=[1], lora_name="漢" * 200)
    with refused(Status.NOT_FOUND, "lora_name: no LoRA adapter"):
        await client.generation.Generate(request).read()


def test_the_command_line_sets_them_all() -> None:
    names = list(Limits.__dataclass_fields__)
    numbers = range(2_097_152, 2_097_152 + len(names))
    options = [
        word
        for name, number in zip(names, numbers, strict=True)
        for word in (f"--{name.replace('_', '-')}", f"{number}")
    ]
    settings = parse_settings(["--engine", "scripted", "--script", "s", "--tokenizer", "t", *options])
    assert settings.limits == Limits(*numbers)
