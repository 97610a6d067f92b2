"""What watchers of tapes are promised holds, whatever happens to writers, watchers and the network between."""

from __future__ import annotations

import asyncio

import pytest

from support.effort import times
from support.engines import ManualEngine, toy_model
from support.relay import relay_to
from support.scripted import sidecar_on
from support.sidecar_client import SidecarClient, positions
from support.waiting import eventually
from support.watch_checks import violations
from support.watch_world import Shape, run_world
from tokentape.v1.generation_pb2 import GenerateRequest
from tokentape_sidecar import tape_servicer


@pytest.mark.parametrize("seed", range(times(30)))
async def test_writers_and_watchers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # From one position a response to all in one.
    monkeypatch.setattr(tape_servicer, "_MAX_POSITIONS_PER_RESPONSE", [1, 3, 7, 50, 65_536][seed % 5])
    for observed in await run_world(seed):
        assert violations(observed) == {}, f"seed {seed}"


@pytest.mark.parametrize("seed", range(times(6)))
async def test_a_network_that_stalls_and_breaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_servicer, "_MAX_POSITIONS_PER_RESPONSE", [3, 50, 65_536][seed % 3])
    shape = Shape(direct_watchers=1, relayed_watchers=4, step_seconds=0.004)
    for observed in await run_world(seed, shape):
        assert violations(observed) == {}, f"seed {seed}"


@pytest.mark.parametrize("seed", range(times(2)))
async def test_watchers_that_are_killed(seed: int) -> None:
    shape = Shape(tapes=1, calls=6, direct_watchers=1, killed_watchers=2, step_seconds=0.03, deletes=0)
    for observed in await run_world(seed, shape):
        assert violations(observed) == {}, f"seed {seed}"
        assert max(len(watch.connections) for watch in observed.watches) > 1


async def test_a_watcher_that_stands_still_holds_up_nobody_and_misses_nothing() -> None:
    """It has far more before it than all the buffers between hold."""
    engine = ManualEngine(toy_model(max_context_tokens=1_000_000))
    async with (
        sidecar_on(engine) as running,
        relay_to(running.sidecar.address) as relay,
        SidecarClient(relay.address) as standing_client,
    ):
        client = running.client
        tape = await client.open_tape()
        call = client.generation.Generate(GenerateRequest(prompt_token_ids=[1], tape_id=tape.tape_id))
        call_id = (await anext(aiter(call))).started.call_id
        standing = asyncio.create_task(standing_client.watch(tape))
        await eventually(lambda: relay.relayed_bytes)
        relay.stall()
        for step in range(200):
            engine.emit(call_id, *(i % 1000 for i in range(step, step + 1000)))
            await asyncio.sleep(0)
        engine.finish(call_id)
        await client.seal(tape)
        others = positions(await client.watch(tape))
        assert len(others) == 200_003
        assert not standing.done()
        relay.flow()
        assert positions(await standing) == others
