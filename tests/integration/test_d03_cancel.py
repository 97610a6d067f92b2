"""D03: cancels and deadlines in real processes; what they leave in the record is in `test_sidecar_cancel`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import httpx
import pytest

from support.refusals import refused
from support.scripted import SidecarProcess, call, script, scripted_arguments, sidecar_process, tokens
from support.sidecar_client import OpenedTape, SidecarClient
from tokentape.v1 import generation_pb2, tape_pb2, types_pb2

if TYPE_CHECKING:
    from integration.conftest import Bridge, StartBridge, StartSidecar

NOTICED_SECONDS = 3.0
"""Far from the case's half second, for a busy machine."""
FOREVER = 600_000
ENDLESS = call(tokens(34), tokens(35), tokens(36), tokens(37, delay_ms=FOREVER))
LATE = call(tokens(34, delay_ms=FOREVER))


@contextlib.asynccontextmanager
async def quiet_sidecar(directory: Path, *calls: Any) -> AsyncGenerator[tuple[SidecarProcess, SidecarClient]]:
    """A sidecar process that may have nothing to complain of."""
    arguments = scripted_arguments(script(*calls, repeat=True), directory)
    async with sidecar_process(*arguments, directory=directory) as process, SidecarClient(process.address) as client:
        yield process, client
        for complaint in ("ERROR", "Traceback", "GeneratorExit", "never retrieved", "pending"):
            assert complaint not in process.output


async def ends_by_abort(client: SidecarClient, tape: OpenedTape, sampled: int) -> None:
    """The only call of the tape ends by the engine's abort, soon."""
    async with asyncio.timeout(NOTICED_SECONDS):
        request = tape_pb2.WatchTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token)
        async for response in client.tapes.WatchTape(request):
            for entry in response.entries:
                if entry.HasField("choice_finished"):
                    assert entry.choice_finished.completion.finish_reason == types_pb2.FINISH_REASON_ABORT
                    assert entry.choice_finished.completion.token_count == sampled
                    return


def left(how: str) -> AbstractContextManager[object]:
    """What the client itself sees of leaving."""
    if how == "deadline":
        return refused(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    return pytest.raises(asyncio.CancelledError)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_stream_that_is_left_after_three_messages_ends_at_the_engine_D03(tmp_path: Path, how: str) -> None:
    async with quiet_sidecar(tmp_path, ENDLESS) as (_, client):
        for _ in range(5):
            tape = await client.open_tape()
            request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id)
            stream = client.generation.Generate(request, timeout=0.3 if how == "deadline" else None)
            count = 0
            with left(how):
                async for response in stream:
                    count += len(response.delta.token_ids)
                    if count == 3 and how == "cancel":
                        stream.cancel()
            assert count == 3
            await ends_by_abort(client, tape, 3)


async def test_a_stream_that_is_left_before_its_first_message_ends_at_the_engine_D03(tmp_path: Path) -> None:
    async with quiet_sidecar(tmp_path, LATE) as (_, client):
        for timeout in (0.2, None):
            tape = await client.open_tape()
            request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id)
            stream = client.generation.Generate(request, timeout=timeout)
            await stream.wait_for_connection()
            while not await client.entries(tape):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.01)
            if timeout is None:
                stream.cancel()
            await ends_by_abort(client, tape, 0)


async def test_a_seal_that_nobody_waits_for_any_more_is_done_all_the_same_D03(tmp_path: Path) -> None:
    async with quiet_sidecar(tmp_path, LATE) as (_, client):
        tape = await client.open_tape()
        request = generation_pb2.GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id)
        stream = client.generation.Generate(request)
        await stream.read()
        sealing = client.tapes.SealTape(
            tape_pb2.SealTapeRequest(tape_id=tape.tape_id, reader_token=tape.reader_token), timeout=0.05
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await sealing
        async with asyncio.timeout(NOTICED_SECONDS):
            entries = await client.watch(tape)
        assert entries[-1].HasField("tape_sealed")


@pytest.fixture(scope="module")
def endless(start_sidecar: StartSidecar) -> str:
    return start_sidecar(script(ENDLESS, repeat=True, vocab_size=49152, max_model_len=256)).address


@pytest.fixture(scope="module")
def bridge(start_bridge: StartBridge, endless: str) -> Bridge:
    return start_bridge(a=endless).wait_healthy()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bridge_hands_on_a_deadline_and_maps_it_to_504_D03(
    bridge: Bridge, endless: str, stream: bool
) -> None:
    async with SidecarClient(endless, "a") as client:
        tape = await client.open_tape()
        answer = await asyncio.to_thread(ask, bridge, tape, stream, {"x-request-timeout": "0.5"}, 20)
        await ends_by_abort(client, tape, 3)
    if stream:
        # Its status has been sent by then.
        assert '"code":"deadline_exceeded"' in answer.text.replace(" ", "")
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bridge_makes_nothing_of_a_client_that_leaves_but_the_abort_D03(
    bridge: Bridge, endless: str, stream: bool
) -> None:
    async with SidecarClient(endless, "a") as client:
        tape = await client.open_tape()
        with pytest.raises(httpx.ReadTimeout):
            await asyncio.to_thread(ask, bridge, tape, stream, {}, 0.5)
        await ends_by_abort(client, tape, 3)
    assert "ERROR" not in bridge.log
    assert "Traceback" not in bridge.log


def ask(bridge: Bridge, tape: OpenedTape, stream: bool, headers: dict[str, str], timeout: float) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "metadata": {"tape_id": tape.tape_id},
        "stream": stream,
    }
    return bridge.client.post("/v1/chat/completions", json=body, headers=headers, timeout=timeout)
