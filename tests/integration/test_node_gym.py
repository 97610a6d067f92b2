"""How a node keeps NeMo Gym, with another program in Gym's place: its end, its failures, and attaching to one."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import httpx
import pytest

from support.gym_program import gym_processes, gym_spec, make_gym, running_gym
from support.nodes import own_temporary_directory, processes_of
from support.scripted import RunningSidecar, call, scripted_sidecar, tokens
from support.waiting import eventually
from tokentape_executor.errors import AgentFailed, AgentUnavailable, StartFailed
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import AttachedGym, GymSpec, NodeMember, NodeSpec

ROW = {"agent_ref": {"name": "echo"}, "responses_create_params": {"input": "x"}}


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    tmp_path_factory.getbasetemp()  # which would else be made in there
    with own_temporary_directory(monkeypatch) as directory:
        yield directory


@pytest.fixture
async def sidecar() -> AsyncGenerator[RunningSidecar]:
    async with scripted_sidecar(call(tokens(1, finish="stop")), repeat=True) as running:
        yield running


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return make_gym(tmp_path / "venv")


def spec(gym: GymSpec | AttachedGym | None, *, seconds: float = 20.0) -> NodeSpec:
    return NodeSpec("gym", (), gym, None, seconds)


async def join(gym: GymSpec | AttachedGym | None, sidecar: RunningSidecar, *, seconds: float = 20.0) -> NodeMember:
    return await NodeMember.join(spec(gym, seconds=seconds), {"main": sidecar.sidecar.address})


async def leave(*members: NodeMember) -> None:
    await asyncio.gather(*(asyncio.to_thread(member.leave) for member in members))


async def run(member: NodeMember) -> int:
    """Run a row and return which process answered."""
    agents = GymAgents(member.gym_agents)
    try:
        return (await agents.run(ROW))["by"]
    finally:
        await agents.close()


@pytest.mark.parametrize(("victim", "number"), [("gym", 9), ("agent", 9), ("gym", signal.SIGSTOP)])
async def test_a_gym_that_dies_or_hangs_is_started_again_as_a_whole(
    root: Path, sidecar: RunningSidecar, venv: Path, victim: str, number: int
) -> None:
    member = await join(gym_spec(venv), sidecar)
    first = await run(member)
    before = gym_processes(venv)
    assert first == before["agent"].pid
    before[victim].send_signal(number)
    if number == signal.SIGSTOP:
        await eventually(lambda: "gym" in gym_processes(venv) and gym_processes(venv) != before, seconds=50)
    # A rollout that comes in between waits, whether or not Gym has been seen to end; one that a dying server takes,
    # and drops, is run again.
    try:
        second = await run(member)
    except AgentUnavailable:
        second = await run(member)
    if victim == "agent" or number == signal.SIGSTOP:
        assert second != first
    await eventually(lambda: set(before.values()).isdisjoint(gym_processes(venv).values()), seconds=10)
    assert await run(member) == gym_processes(venv)["agent"].pid
    await leave(member)
    assert gym_processes(venv) == {}


async def test_a_gym_that_does_not_start_is_told_with_its_log_and_the_next_join_starts_anew(
    root: Path, sidecar: RunningSidecar, venv: Path
) -> None:
    for _ in range(2):
        member = await join(gym_spec(venv, "failing"), sidecar)
        with pytest.raises(StartFailed, match=r"(?s)NeMo Gym ended with status 1 .*environment has no such server$"):
            await member.gym_agents()
        with pytest.raises(StartFailed, match="NeMo Gym ended with status 1"):
            await member.bridge_url()
        await eventually(lambda: not processes_of(root), seconds=10)
        await leave(member)


async def test_a_gym_that_does_not_come_back_fails_rollouts_and_not_the_node(
    root: Path, sidecar: RunningSidecar, venv: Path
) -> None:
    member = await join(gym_spec(venv, "only_once"), sidecar, seconds=12.0)
    await member.gym_agents()
    gym_processes(venv)["gym"].kill()
    await eventually(lambda: not gym_processes(venv), seconds=10)
    with pytest.raises(AgentUnavailable, match=r"(?s)does not run after 12 s: .*ended with status 1.*once was enough"):
        await run(member)
    assert (await member.bridge_url()).endswith("/v1")
    await leave(member)


async def test_leaving_while_gym_starts_takes_seconds(root: Path, sidecar: RunningSidecar, venv: Path) -> None:
    member = await join(gym_spec(venv, "slow"), sidecar)
    waiting = asyncio.create_task(member.gym_agents())
    await eventually(lambda: gym_processes(venv), seconds=20)
    began = time.monotonic()
    await leave(member)
    assert time.monotonic() - began < 5.0
    assert gym_processes(venv) == {}
    with pytest.raises(AgentUnavailable, match="was shut down"):
        await waiting


async def test_a_port_that_was_taken_between_is_no_failure(root: Path, sidecar: RunningSidecar, venv: Path) -> None:
    member = await join(gym_spec(venv, "port_taken"), sidecar)
    assert await run(member) == gym_processes(venv)["agent"].pid
    assert (venv / "bin" / "tries").read_text() == "xx"
    await leave(member)


async def test_an_unknown_agent_is_refused_with_the_known_ones(root: Path, sidecar: RunningSidecar, venv: Path) -> None:
    member = await join(gym_spec(venv), sidecar)
    agents = GymAgents(member.gym_agents)
    with pytest.raises(AgentFailed, match=r"NeMo Gym has no agent 'nobody'; it has \['echo'\]"):
        await agents.run({"agent_ref": {"name": "nobody"}})
    with pytest.raises(AgentFailed, match=r"names no agent \(agent_ref.name\); NeMo Gym has \['echo'\]"):
        await agents.run({})
    await agents.close()
    await leave(member)


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "there is no virtual environment with NeMo Gym"),
        ("; exit 1", "nemo-gym is not installed there"),
        ("0.3.1", r"nemo-gym 0\.3\.1 is too old"),
    ],
    ids=["no-venv", "no-gym", "old-gym"],
)
async def test_a_gym_environment_that_will_not_do_is_told(
    root: Path, sidecar: RunningSidecar, tmp_path: Path, version: str | None, problem: str
) -> None:
    if version is not None:
        make_gym(tmp_path / "other", version=version)
    member = await join(gym_spec(tmp_path / "other"), sidecar)
    with pytest.raises(StartFailed, match=f"{problem}; set TOKENTAPE_GYM_VENV to a virtual environment"):
        await member.gym_agents()
    await leave(member)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_running_gym_is_used_and_left_running(root: Path, sidecar: RunningSidecar, venv: Path) -> None:
    policy = f"http://127.0.0.1:{free_port()}/v1"
    with running_gym(venv, free_port(), policy_base_url=policy, policy_model_name="toy") as url:
        member = await join(AttachedGym(url, "toy"), sidecar)
        assert await member.bridge_url() == policy
        agent = await run(member)
        assert agent == gym_processes(venv)["agent"].pid
        await leave(member)
        assert gym_processes(venv)["agent"].pid == agent
        with pytest.raises(httpx.ConnectError):
            await asyncio.to_thread(httpx.get, policy.removesuffix("/v1") + "/version", trust_env=False)


async def test_a_gym_that_was_attached_may_go_and_come_back(root: Path, sidecar: RunningSidecar, venv: Path) -> None:
    port, policy = free_port(), f"http://127.0.0.1:{free_port()}/v1"
    with running_gym(venv, port, policy_base_url=policy, policy_model_name="toy") as url:
        member = await join(AttachedGym(url, "toy"), sidecar)
        first = await run(member)
    again = asyncio.create_task(run(member))
    await asyncio.sleep(4)
    with running_gym(venv, port, policy_base_url=policy, policy_model_name="toy"):
        assert await again != first
        await leave(member)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, r"calls the policy None, the sidecar 'toy'; start it with \+policy_model_name=toy"),
        ({"policy_model_name": "toy"}, r"has not one policy_base_url but None"),
        ({"policy_model_name": "t2", "policy_base_url": "http://127.0.0.1:1/v1"}, r"calls the policy 't2'"),
        (
            {"policy_model_name": "toy", "policy_base_url": "https://h/v1"},
            r"calls the policy at https://h/v1, where no",
        ),
        (
            {"policy_model_name": "toy", "policy_base_url": "http://192.0.2.1:7777/v1"},
            r"cannot listen at 192\.0\.2\.1:7",
        ),
    ],
)
async def test_a_running_gym_that_will_not_do_is_told(
    root: Path, sidecar: RunningSidecar, venv: Path, options: dict[str, str], problem: str
) -> None:
    with running_gym(venv, free_port(), **options) as url:
        member = await join(AttachedGym(url, "toy"), sidecar)
        with pytest.raises(StartFailed, match=problem):
            await member.bridge_url()
        await leave(member)


async def test_a_policy_address_that_is_taken_is_told(root: Path, sidecar: RunningSidecar, venv: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        policy = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with running_gym(venv, free_port(), policy_base_url=policy, policy_model_name="toy") as url:
            member = await join(AttachedGym(url, "toy"), sidecar)
            with pytest.raises(StartFailed, match="Address already in use; stop what listens there, or start Gym on"):
                await member.bridge_url()
            await leave(member)


async def test_a_gym_that_is_not_there_is_told(root: Path, sidecar: RunningSidecar) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    member = await join(AttachedGym(url, "toy"), sidecar)
    with pytest.raises(StartFailed, match=f"no NeMo Gym answers at {url} .TOKENTAPE_GYM_URL.: ConnectError"):
        await member.gym_agents()
    await leave(member)


async def test_a_server_that_is_no_gym_is_told(root: Path, sidecar: RunningSidecar) -> None:
    member = await join(None, sidecar)
    bridge = (await member.bridge_url()).removesuffix("/v1")
    other = await join(AttachedGym(bridge, "toy"), sidecar)
    with pytest.raises(StartFailed, match=r"is no head server of NeMo Gym 0\.4 or newer: .*404"):
        await other.gym_agents()
    await leave(member, other)
