"""A watcher that loses its connection again and again assembles what one that never does assembles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable
from pathlib import Path

import pytest

from support.scripted import Json, call, script, scripted_arguments, sidecar_process
from support.sidecar_client import SidecarClient
from tokentape.channel import dial
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.assembler import Assembler, positions
from tokentape_executor.tape_client import OpenedTape, TapeClient
from tokentape_executor.trajectory import Trajectory

pytestmark = pytest.mark.timeout(120)

KILLS = 100
TURNS, TOKENS = 4, 60


def turn(index: int) -> Json:
    """A turn, one token a step, with a change of weights in the middle."""
    return call(*(step(index, position) for position in range(TOKENS)))


def step(index: int, position: int) -> Json:
    token_id = 100 + (index * TOKENS + position) % 900
    return {
        "token_ids": [token_id],
        "logprobs": [{str(token_id): -(position + 1) / 64}],
        "delay_ms": 10,
        "weight_version": str(index + (position > TOKENS // 2)),
        "finish_reason": "stop" if position == TOKENS - 1 else None,
    }


async def roll_out(client: SidecarClient, tape: OpenedTape) -> None:
    """A conversation of some seconds."""
    parent: types_pb2.CallReference | None = None
    for index in range(TURNS):
        generated = await client.generate([index + 1, index + 2], tape_id=tape.tape_id, parent=parent)
        parent = types_pb2.CallReference(call_id=generated.started.call_id)


async def take(entries: AsyncIterable[tape_pb2.TapeEntry], assembler: Assembler, tokens: int) -> None:
    """Feed entries until this many positions have come, or all."""
    taken = 0
    async for entry in entries:
        assembler.feed(entry)
        taken += positions(entry)
        if taken >= tokens:
            return


async def watch_killed(address: str, tape: OpenedTape) -> tuple[Trajectory, int]:
    """Watch with a connection that is thrown away after every position or two; return how often that was."""
    assembler = Assembler()
    kills = 0
    while not assembler.sealed:
        async with dial(address) as channel:
            watching = TapeClient(channel, "main").watch(tape, from_sequence=assembler.next_sequence)
            async with contextlib.aclosing(watching) as entries:
                await take(entries, assembler, 1 + kills % 2)
        kills += 1
    return assembler.trajectory(), kills


async def watch_whole(client: SidecarClient, tape: OpenedTape) -> Trajectory:
    assembler = Assembler()
    async for entry in TapeClient(client.channel, "main").watch(tape):
        assembler.feed(entry)
    return assembler.trajectory()


async def test_a_watcher_killed_100_times_assembles_the_identical_sample(tmp_path: Path) -> None:
    arguments = scripted_arguments(script(*(turn(index) for index in range(TURNS)), max_model_len=4096), tmp_path)
    async with (
        sidecar_process(*arguments, directory=tmp_path) as sidecar,
        SidecarClient(sidecar.address) as client,
    ):
        tape = await TapeClient(client.channel, "main").open()
        killed = asyncio.create_task(watch_killed(sidecar.address, tape))
        whole = asyncio.create_task(watch_whole(client, tape))
        await roll_out(client, tape)
        await TapeClient(client.channel, "main").seal(tape)
        trajectory, kills = await killed
        unbroken = await whole

    assert kills >= KILLS
    assert trajectory == unbroken
    (sample,) = trajectory.samples
    assert sample.action_token_count == TURNS * TOKENS == trajectory.receipt.kept
    assert len(sample.actions) == TURNS
    assert [span.weight_version for span in sample.version_spans] == ["0", "1", "1", "2", "2", "3", "3", "4"]
