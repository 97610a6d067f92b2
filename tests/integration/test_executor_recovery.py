"""Rollouts over the death of what serves them: a sidecar that is killed and comes back, a bridge that does."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.rollouts import MODEL, Played, ask, refusal, says, slow
from support.scripted import script
from support.sidecar_client import SidecarClient
from tokentape_executor import retries
from tokentape_executor.errors import RolloutRefused, SidecarUnavailable
from tokentape_executor.executor import FailedRollout, Rollout, RolloutClient, Row
from tokentape_executor.served_policy import open_policy
from tokentape_executor.settings import ExecutorSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.conftest import Bridge, ServerProcess, StartBridge, StartSidecar

SLOW = script(slow(), repeat=True, **MODEL)
QUICK = script(says("fine"), repeat=True, **MODEL)
RESTART_SECONDS = 90.0
"""How long a server may take to start again on a machine that is busy with other tests."""


async def kill_and_serve_again(server: ServerProcess, start: Callable[[], object]) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(1)
    await asyncio.to_thread(start)


async def started_calls(rollouts: asyncio.Event, count: list[int], many: int) -> None:
    """Wait until so many calls were made, and a moment more."""
    async with asyncio.timeout(60):
        while len(count) < many:
            rollouts.clear()
            await rollouts.wait()
    await asyncio.sleep(0.3)


class Asks:
    """An agent that asks once, and tells that it has begun."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.calls: list[int] = []

    async def __call__(self, task: Row, client: RolloutClient) -> float:
        self.calls.append(task["number"])
        self.begun.set()
        await ask(client, "Go.")
        return task["number"]


TASKS: list[dict[str, Any]] = [{"number": number} for number in range(4)]


async def test_e13_rollouts_whose_sidecar_dies_are_run_again_when_it_is_back(
    start_sidecar: StartSidecar, start_bridge: StartBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RECOVERY_SECONDS", RESTART_SECONDS)
    sidecar = start_sidecar(SLOW)
    address = sidecar.address
    bridge = start_bridge(a=address).wait_healthy()
    agent = Asks()
    async with open_policy(address, bridge=f"http://{bridge.address}/v1") as policy:
        executor = Played(policy, agent, retries=2)
        running = asyncio.create_task(executor.rollouts(TASKS))
        await started_calls(agent.begun, agent.calls, 4)
        await kill_and_serve_again(sidecar, lambda: start_sidecar(QUICK, listen=address).address)
        results = await running
    assert [result.outcome.reward for result in results if isinstance(result, Rollout)] == [0, 1, 2, 3]
    assert all(2 <= result.attempts <= 3 for result in results)


async def test_e13_a_sidecar_that_stays_away_ends_its_rollouts_in_bounded_time(
    start_sidecar: StartSidecar, start_bridge: StartBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RECOVERY_SECONDS", 1.0)
    sidecar = start_sidecar(SLOW)
    bridge = start_bridge(a=sidecar.address).wait_healthy()
    agent = Asks()
    async with open_policy(sidecar.address, bridge=f"http://{bridge.address}/v1") as policy:
        running = asyncio.create_task(Played(policy, agent, retries=1).rollouts(TASKS))
        await started_calls(agent.begun, agent.calls, 4)
        await asyncio.to_thread(sidecar.kill)
        async with asyncio.timeout(15):
            results = await running
    assert [result.task_index for result in results if isinstance(result, FailedRollout)] == [0, 1, 2, 3]
    for result in results:
        assert isinstance(result, FailedRollout)
        assert isinstance(result.error, SidecarUnavailable)
        assert result.attempts == 2


async def test_rollouts_whose_bridge_dies_are_run_again_when_it_is_back(
    start_sidecar: StartSidecar, start_bridge: StartBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RECOVERY_SECONDS", RESTART_SECONDS)
    sidecar = start_sidecar(script(*(slow() for _ in TASKS), *(says("fine") for _ in TASKS), **MODEL))
    bridge: Bridge = start_bridge(a=sidecar.address).wait_healthy()
    address = bridge.address
    agent = Asks()
    async with open_policy(sidecar.address, bridge=f"http://{address}/v1") as policy:
        executor = Played(policy, agent, retries=2)
        running = asyncio.create_task(executor.rollouts(TASKS))
        await started_calls(agent.begun, agent.calls, 4)
        await kill_and_serve_again(bridge, lambda: start_bridge(listen=address, a=sidecar.address).wait_healthy())
        results = await running
        assert [result.outcome.reward for result in results if isinstance(result, Rollout)] == [0, 1, 2, 3]
    async with SidecarClient(sidecar.address, "a") as client:
        assert len(executor.tapes) == 8
        for tape_id in executor.tapes:
            assert "sealed" in await refusal(client, tape_id)


async def test_what_answers_in_a_bridges_place_serves_nothing_and_breaks_nothing(
    start_sidecar: StartSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RECOVERY_SECONDS", 0.3)
    sidecar = start_sidecar(QUICK)
    bodies = itertools.cycle([b"<html>", b"[]", b'{"sidecars": []}', b"{}"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = next(bodies)
        writer.write(f"HTTP/1.1 200 X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, open_policy(sidecar.address, bridge=url) as policy:
        results = await Played(policy, Asks(), retries=4).rollouts(TASKS[:2])
    assert [result.attempts for result in results if isinstance(result, FailedRollout)] == [5, 5]


async def test_a_bridge_that_asks_for_a_key_serves_whoever_has_it(
    start_sidecar: StartSidecar, start_bridge: StartBridge, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("the-key\n")
    sidecar = start_sidecar(QUICK)
    bridge = start_bridge("--api-key-file", str(tmp_path / "keys"), a=sidecar.address).wait_healthy()
    url = f"http://{bridge.address}/v1"
    async with open_policy(sidecar.address, bridge=url, api_key="the-key") as policy:
        assert "the-key" not in repr(policy)
        rollout = await Played(policy, Asks(), retries=1).rollout({"number": 1})
        assert rollout.trajectory.receipt.calls == 1
    async with open_policy(sidecar.address, bridge=url) as policy:
        with pytest.raises(RolloutRefused, match=r"401 \(invalid_api_key\): no API key, or a wrong one"):
            await Played(policy, Asks()).rollout({"number": 1})


async def test_a_bridge_that_is_no_url_is_told() -> None:
    with pytest.raises(ValueError, match=r"bridge: '127\.0\.0\.1:8000' is not a URL"):
        async with open_policy("127.0.0.1:9", bridge="127.0.0.1:8000"):
            pass


async def test_an_attempt_without_a_sampled_token_is_made_again_where_one_is_needed(
    start_sidecar: StartSidecar, start_bridge: StartBridge
) -> None:
    sidecar = start_sidecar(QUICK)
    bridge = start_bridge(a=sidecar.address).wait_healthy()

    async def play(_task: Row, client: RolloutClient) -> float:
        if len(executor.tapes) > 1:
            await ask(client, "Go.")
        return 1.0

    async with open_policy(sidecar.address, bridge=f"http://{bridge.address}/v1") as policy:
        executor = Played(policy, play, retries=2)
        assert (await executor.rollout({})).trajectory.samples == []
        executor.tapes.clear()
        rollout = await executor.rollout({}, must_sample=True)
        assert (rollout.attempts, len(rollout.trajectory.samples)) == (2, 1)


async def test_a_sidecar_that_is_not_there_is_told(start_sidecar: StartSidecar) -> None:
    with pytest.raises(SidecarUnavailable, match=r"asking the sidecar at 127\.0\.0\.1:9 for its model failed"):
        async with open_policy("127.0.0.1:9", bridge="http://127.0.0.1:9/v1"):
            pass


async def test_without_a_bridge_one_is_started_and_stopped(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    sidecar = start_sidecar(QUICK, name="alone")
    settings = ExecutorSettings(log_directory=tmp_path)
    async with open_policy(sidecar.address, settings=settings) as policy:
        url = await policy.bridge_url()
        (rollout,) = await Played(policy, Asks()).rollouts([{"number": 1}])
    assert isinstance(rollout, Rollout), rollout
    assert rollout.outcome.reward == 1
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{url}/models")
