"""A node with real NeMo Gym, a real bridge and a scripted sidecar: shared, killed and back, attached to, and gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.nodes import is_alive, keepers, member_process, own_temporary_directory, processes_of, words_of
from support.roles import GYM_SERVERS, NODE, roles_of
from support.scripted import RunningSidecar, call, scripted_sidecar
from support.waiting import eventually
from tokentape_executor.errors import AgentUnavailable, StartFailed
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import AttachedGym, GymSpec, NodeMember, NodeSpec
from tokentape_executor.node.gym import GymPlan
from tokentape_executor.settings import GYM_AGENT, ExecutorSettings

pytestmark = pytest.mark.timeout(300)

ROW = {
    "agent_ref": {"type": "responses_api_agents", "name": GYM_AGENT},
    "responses_create_params": {"input": [{"role": "user", "content": "What is 2 + 3?"}]},
    "question": "What is 2 + 3?",
    "expected_answer": "5",
}


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    tmp_path_factory.getbasetemp()  # which would else be made in there
    with own_temporary_directory(monkeypatch) as directory:
        yield directory


@pytest.fixture
async def sidecar(model_directory: Path) -> AsyncGenerator[RunningSidecar]:
    answer = call({"text": "It is \\boxed{5}."}, {"token_ids": [2], "finish_reason": "stop"})
    async with scripted_sidecar(
        answer, repeat=True, tokenizer=model_directory, vocab_size=49152, max_model_len=1024, eos_token_ids=[2]
    ) as running:
        yield running


def gym_spec() -> GymSpec:
    settings = ExecutorSettings.from_environment()
    return GymSpec(settings.gym_venv, settings.gym_configs, (), "toy")


async def reward(member: NodeMember) -> float:
    agents = GymAgents(member.gym_agents)
    try:
        return (await agents.run(ROW))["reward"]
    finally:
        await agents.close()


async def reward_in_spite_of_a_kill(member: NodeMember) -> float:
    """As a rollout does it: what a dying server drops is run again."""
    for _ in range(2):
        try:
            return await reward(member)
        except AgentUnavailable:
            continue
    return await reward(member)


def gyms(root: Path) -> list[psutil.Process]:
    """The processes `gym env start`, without their leashes."""
    return [
        process
        for process in processes_of(root)
        if "/bin/gym env start" in words_of(process) and "_leash.py" not in words_of(process)
    ]


async def test_two_processes_share_a_gym_that_is_killed_and_comes_back(
    root: Path, sidecar: RunningSidecar, tmp_path: Path
) -> None:
    spec = NodeSpec("real", (), gym_spec(), tmp_path / "logs", 120.0)
    names = {"main": sidecar.sidecar.address}
    async with member_process(spec, names) as other:
        member = await NodeMember.join(spec, names)
        agents = await member.gym_agents()
        assert await other.ask("gym_agents") == agents
        assert len(keepers(root)) == len(gyms(root)) == 1
        assert await reward(member) == 1.0

        (gym,) = gyms(root)
        family = gym.children(recursive=True)
        assert roles_of(map(words_of, family)) == GYM_SERVERS
        gym.kill()
        # At once: whoever runs a rollout meanwhile waits, unless it met a server that was about to die.
        assert await reward_in_spite_of_a_kill(member) == 1.0
        await eventually(lambda: not any(map(is_alive, family)), seconds=30)
        assert await other.ask("gym_agents") == await member.gym_agents()

        other.process.kill()
        await other.process.wait()
        assert await reward(member) == 1.0
        (keeper,) = keepers(root)
        family = [keeper, *keeper.children(recursive=True)]
        assert roles_of(map(words_of, family)) == NODE
        await asyncio.to_thread(member.leave)
        assert [process for process in family if is_alive(process)] == []
        assert not processes_of(root)


async def test_leaving_while_a_real_gym_starts_takes_seconds(
    root: Path, sidecar: RunningSidecar, tmp_path: Path
) -> None:
    spec = NodeSpec("real", (), gym_spec(), tmp_path / "logs", 120.0)
    member = await NodeMember.join(spec, {"main": sidecar.sidecar.address})
    log = tmp_path / "logs" / "nemo_gym.log"
    await eventually(lambda: "Started a local Ray instance" in _text(log), seconds=120)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.to_thread(member.leave)
    assert loop.time() - began < 5.0
    await eventually(lambda: not processes_of(root))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


async def test_a_running_gym_is_attached_to_and_left_running(
    root: Path, sidecar: RunningSidecar, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        policy = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    plan = GymPlan(gym_spec(), policy, tmp_path / "gym.log", 120.0)
    async with plan.running() as service:
        assert service.process is not None
        (gym,) = gyms(root)
        (port,) = (word.partition("=")[2] for word in gym.cmdline() if word.startswith("+head_server.port="))
        spec = NodeSpec("real", (), AttachedGym(f"http://127.0.0.1:{port}", "toy"), None, 60.0)
        member = await NodeMember.join(spec, {"main": sidecar.sidecar.address})
        assert await member.bridge_url() == policy
        assert await member.gym_agents() == service.value
        assert await reward(member) == 1.0
        await asyncio.to_thread(member.leave)
        await service.check()
        assert service.process.running


async def test_a_gym_that_cannot_start_says_why(root: Path, sidecar: RunningSidecar) -> None:
    wrong = replace(gym_spec(), configs=("no_such_file.yaml",))
    member = await NodeMember.join(NodeSpec("real", (), wrong, None, 60.0), {"main": sidecar.sidecar.address})
    with pytest.raises(StartFailed, match=r"(?s)NeMo Gym ended with status 1.*no_such_file\.yaml"):
        await member.gym_agents()
    await eventually(lambda: not processes_of(root), seconds=10)
