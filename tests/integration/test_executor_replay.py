"""A rollout, recorded by one sidecar, stored in a file, made a script and replayed by another: the same samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import pytest

from support.scripted import call, script, scripted_arguments, sidecar_process, tokens
from support.sidecar_client import OpenedTape, SidecarClient, positions, read_to_end
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2
from tokentape_executor import tape_client
from tokentape_executor.cli.main import main
from tokentape_executor.errors import TapeLost
from tokentape_executor.tape_file import StoredTape, append_tape, download, read_tapes

Sampling = types_pb2.SamplingParameters

SCRIPT = script(
    call(tokens(10, 11, logprobs=[{"10": -0.5, "12": -1.0}, {"11": -4.25, "13": -0.25}], weight_version="1"),
         tokens(12, finish="stop", logprobs=[{"12": -0.125, "9": "-Infinity"}], stop_reason=12)),
    call(tokens(20, 21, weight_version="2"), tokens(choice=1, finish="length"), tokens(22, finish="stop")),
    call(tokens(30, 31, 32, delay_ms=5), {"token_ids": [33], "delay_ms": 60_000}),
    call(tokens(40, finish="stop")),
    call(tokens(50), {"error": "out of memory"}),
    call(tokens(60, 2), tokens(99)),
    call(tokens(70, finish="repetition")),
    eos_token_ids=[2],
    max_model_len=64,
)  # fmt: skip


async def record(client: SidecarClient, tape: OpenedTape) -> None:
    """A rollout with top log-probabilities, choices, a client that leaves and retries, a failure, a fork, a split."""
    first = await client.generate(
        [1, 2], Sampling(top_logprobs=2, stop_token_ids=[12], temperature=0.7), tape_id=tape.tape_id
    )
    continued = types_pb2.CallReference(call_id=first.started.call_id)
    await client.generate([3], Sampling(n=2, top_p=0.9), tape_id=tape.tape_id, parent=continued)
    await leave(client, tape, continued)
    retried = await client.generate([4], tape_id=tape.tape_id, parent=continued)
    with pytest.raises(grpc.aio.AioRpcError, match="out of memory"):
        await client.generate(
            [5], tape_id=tape.tape_id, parent=types_pb2.CallReference(call_id=retried.started.call_id)
        )
    fork = types_pb2.CallReference(call_id=first.started.call_id, offset=2)
    await client.generate([6], tape_id=tape.tape_id, parent=fork)
    request = generation_pb2.GenerateRequest(
        prompt_token_ids=[7], tape_id=tape.tape_id, split_cause=types_pb2.SPLIT_CAUSE_HISTORY_EDITED
    )
    await read_to_end(client.generation.Generate(request))


async def leave(client: SidecarClient, tape: OpenedTape, parent: types_pb2.CallReference) -> None:
    """Make a call and drop it after its third token."""
    stream = client.generation.Generate(
        generation_pb2.GenerateRequest(prompt_token_ids=[4], tape_id=tape.tape_id, parent=parent)
    )
    came = 0
    async for response in stream:
        came += len(response.delta.token_ids)
        if came == 3:
            break
    stream.cancel()
    async with asyncio.timeout(5):
        while not any(_is_abort(entry) for entry in await client.entries(tape)):  # noqa: ASYNC110 - in another process
            await asyncio.sleep(0.01)


def _is_abort(entry: tape_pb2.TapeEntry) -> bool:
    return entry.choice_finished.completion.finish_reason == types_pb2.FINISH_REASON_ABORT


async def replay(client: SidecarClient, tape: OpenedTape, entries: Sequence[tape_pb2.TapeEntry]) -> None:
    """Make the calls of a tape again, one after the other, with their parameters, on another tape."""
    call_ids: dict[str, str] = {}
    for started in (entry.call_started for entry in entries if entry.HasField("call_started")):
        request = generation_pb2.GenerateRequest(
            prompt_token_ids=started.prompt_token_ids,
            sampling=started.sampling,
            tape_id=tape.tape_id,
            split_cause=started.split_cause,
        )
        if started.HasField("parent"):
            request.parent.CopyFrom(started.parent)
            request.parent.call_id = call_ids[started.parent.call_id]
        stream = client.generation.Generate(request)
        try:
            async for response in stream:
                if response.HasField("started"):
                    call_ids[started.call_id] = response.started.call_id
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.INTERNAL, error.details()  # noqa: PT017


async def stored(client: SidecarClient, tape: OpenedTape) -> StoredTape:
    await client.seal(tape)
    return await download(client.channel, tape_client.OpenedTape(tape.tape_id, tape.reader_token))


async def test_a_recorded_rollout_replays_to_the_same_samples_and_hash(tmp_path: Path) -> None:
    async with (
        sidecar_process(*scripted_arguments(SCRIPT, tmp_path), directory=tmp_path) as sidecar,
        SidecarClient(sidecar.address) as client,
    ):
        tape = await client.open_tape()
        await record(client, tape)
        recorded = await stored(client, tape)
        assert positions(recorded.entries) == positions(await client.watch(tape))
    append_tape(tmp_path / "tapes.jsonl", recorded)
    (read,) = read_tapes(tmp_path / "tapes.jsonl")
    assert read == recorded

    script_file = tmp_path / "again.json"
    assert main(["--script", str(tmp_path / "tapes.jsonl"), "--tape", "0", "-o", str(script_file)]) == 0
    again = scripted_arguments(json.loads(script_file.read_text()), tmp_path)
    async with (
        sidecar_process(*again, directory=tmp_path) as sidecar,
        SidecarClient(sidecar.address) as client,
    ):
        tape = await client.open_tape()
        await replay(client, tape, read.entries)
        replayed = await stored(client, tape)

    expected, got = recorded.trajectory(), replayed.trajectory()
    assert got.samples == expected.samples
    assert got.receipt == expected.receipt
    assert got.call_ids != expected.call_ids
    assert expected.receipt.as_dict() | {"ledger_sha256": ""} == {
        "sampled": 14,
        "kept": 10,
        "dropped": {"superseded": 3, "abandoned": 0, "failed": 1},
        "samples": 4,
        "splits": {"unspecified": 1, "fork": 2, "history_edited": 1},
        "calls": 7,
        "weight_versions": ["1", "2"],
        "ledger_sha256": "",
    }


async def test_a_replay_with_another_prompt_fails_that_call(tmp_path: Path) -> None:
    file, script_file = tmp_path / "tapes.jsonl", tmp_path / "again.json"
    async with (
        sidecar_process(
            *scripted_arguments(script(call(tokens(10, finish="stop"))), tmp_path), directory=tmp_path
        ) as sidecar,
        SidecarClient(sidecar.address) as client,
    ):
        tape = await client.open_tape()
        await client.generate([1, 2], tape_id=tape.tape_id)
        append_tape(file, await stored(client, tape))
    assert main(["--script", str(file), "-o", str(script_file)]) == 0
    async with (
        sidecar_process(
            *scripted_arguments(json.loads(script_file.read_text()), tmp_path), directory=tmp_path
        ) as sidecar,
        SidecarClient(sidecar.address) as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"expects the prompt \[1, 2\]"):
            await client.generate([1, 3])


async def test_a_tape_that_is_gone_cannot_be_downloaded(tmp_path: Path) -> None:
    async with (
        sidecar_process(*scripted_arguments(script(), tmp_path), directory=tmp_path) as sidecar,
        SidecarClient(sidecar.address) as client,
    ):
        with pytest.raises(TapeLost, match="reading a tape failed with NOT_FOUND"):
            await download(client.channel, tape_client.OpenedTape(f"main.{'0' * 32}", "secret"))
