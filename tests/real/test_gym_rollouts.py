"""Real NeMo Gym and a real bridge on scripted sidecars: what Gym's agents sample comes back, id for id.

One node, with one Gym and one bridge, serves the module; every test that samples has a sidecar, and so a script, of its
own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from support.nodes import is_alive, words_of
from support.roles import NODE, roles_of
from tokentape.channel import dial
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.errors import AgentFailed, RolloutTimeout
from tokentape_executor.executor import NO_LIMITS, RolloutLimits
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember, NodePolicy, NodeSpec
from tokentape_executor.node.places import Place
from tokentape_executor.prepare import prepare_data
from tokentape_executor.processes import ChildProcess
from tokentape_executor.rollout import Rollout
from tokentape_executor.sampling_policy import sampling_policy
from tokentape_executor.services import ServiceGroup
from tokentape_executor.settings import GYM_AGENT, ExecutorSettings
from tokentape_executor.tape_client import OpenedTape, TapeClient
from tokentape_executor.trajectory import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "What is 2 + 3?"
END = 2
"""<|im_end|> of SmolLM2."""

ANSWERS = {"It is \\boxed{5}.": 1.0, "So we get \\boxed{6}.": 0.0, "2 + 3 = \\boxed{5}": 1.0}
"""Completions to the reward that math-verify gives each for the answer 5."""


@dataclass(frozen=True)
class Sampling:
    """The trainer's sampling parameters."""

    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 64


SAMPLING = Sampling()


class KeepingTapes(TapeClient):
    """A tape client that remembers what it opened."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.opened: list[OpenedTape] = []
        self.opening = asyncio.Event()

    async def open(self, **limits: Any) -> OpenedTape:
        self.opened.append(await super().open(**limits))
        self.opening.set()
        return self.opened[-1]

    async def entries(self) -> list[tape_pb2.TapeEntry]:
        """All entries of the latest tape, to its seal."""
        return [entry async for entry in self.watch(self.opened[-1])]


class Stack:
    """Scripted sidecars, one for each script, and a node with a bridge in front of them all and NeMo Gym."""

    def __init__(self, group: ServiceGroup, member: NodeMember, sidecars: dict[str, str]) -> None:
        self.group = group
        self.member = member
        self.gym = GymAgents(member.gym_agents)
        self.sidecars = sidecars

    @contextlib.asynccontextmanager
    async def rollouts(
        self, sidecar: str, limits: RolloutLimits = NO_LIMITS
    ) -> AsyncGenerator[tuple[NemoGymExecutor, KeepingTapes]]:
        async with dial(self.sidecars[sidecar]) as channel:
            tapes = KeepingTapes(channel, sidecar)
            policy = NodePolicy(tapes, "toy", self.member)
            yield NemoGymExecutor(policy, self.gym, default_agent=GYM_AGENT, limits=limits), tapes


async def roll_out(executor: NemoGymExecutor, *, max_context_tokens: int = 512) -> Rollout:
    return await executor.rollout(
        prepare_data(QUESTION, "5", SAMPLING),
        sampling_policy=sampling_policy(SAMPLING),
        max_context_tokens=max_context_tokens,
    )


def completion_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False).ids, END]


def scripts(tokenizer: Tokenizer) -> dict[str, list[dict[str, Any]]]:
    """Sidecar name to the calls of its script."""
    answers = [completion_ids(tokenizer, text) for text in ANSWERS]
    one_by_one: list[list[dict[str, Any]]] = [
        [
            {"token_ids": [token_id], "logprobs": [{str(token_id): -0.5 - i / 8}], "delay_ms": 20}
            for i, token_id in enumerate(ids)
        ]
        for ids in answers
    ]
    for steps in one_by_one:
        steps[-1]["finish_reason"] = "stop"
    return {
        "three": [{"steps": steps} for steps in one_by_one],
        "endless": [{"steps": [{"token_ids": [answers[0][0]] * 10}] * 10}],
        "failing": [{"steps": [{"token_ids": answers[0][:3]}, {"error": "the script says so"}]}] * 20,
        "slow": [{"steps": [{"token_ids": [answers[0][0]], "delay_ms": 100}] * 64}],
        "unused": [{"steps": one_by_one[0]}],
    }


async def start_sidecar(name: str, calls: list[dict[str, Any]], model_directory: Path, group: ServiceGroup) -> str:
    """Start a scripted sidecar; return its address."""
    script = group.directory / f"{name}.json"
    model = {"name": "toy", "max_model_len": 1024, "vocab_size": 49152, "eos_token_ids": [END]}
    script.write_text(json.dumps({"model": model, "calls": calls}))
    ready_file = group.directory / f"{name}.ready"
    sidecar = ChildProcess.start(
        f"sidecar {name}",
        [
            *(sys.executable, "-P", "-c", "from tokentape.console import sidecar; sidecar()"),
            *("--engine", "scripted", "--script", str(script), "--tokenizer", str(model_directory)),
            *("--name", name, "--listen", "127.0.0.1:0", "--ready-file", str(ready_file)),
        ],
        log_file=group.log_file(name),
    )
    group.add(sidecar)
    return await sidecar.wait_for_ready_file(ready_file, timeout_seconds=60)


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_directory: Path, tokenizer: Tokenizer) -> AsyncGenerator[Stack]:
    settings = ExecutorSettings.from_environment()
    group = ServiceGroup(settings.log_directory)
    try:
        sidecars = {
            name: await start_sidecar(name, calls, model_directory, group) for name, calls in scripts(tokenizer).items()
        }
        spec = NodeSpec.from_settings(settings, group=f"test {secrets.token_hex(8)}", policy_model_name="toy")
        member = await NodeMember.join(spec, sidecars)
        group.add_stop(member.leave)
        await member.gym_agents()
        stack = Stack(group, member, sidecars)
        yield stack
        await stack.gym.close()
    finally:
        await asyncio.to_thread(group.stop)


async def test_concurrent_rollouts_return_the_scripted_ids_and_their_rewards(
    stack: Stack, tokenizer: Tokenizer
) -> None:
    async with stack.rollouts("three") as (executor, _):
        rollouts = await asyncio.gather(*(roll_out(executor) for _ in ANSWERS))

    expected = {tuple(completion_ids(tokenizer, text)): reward for text, reward in ANSWERS.items()}
    got: dict[tuple[int, ...], float] = {}
    for rollout in rollouts:
        (sample,) = rollout.trajectory.samples
        ((start, end),) = sample.action_ranges
        assert end == len(sample.tokens) == len(sample.logprobs)
        got[tuple(sample.tokens[start:end])] = rollout.outcome.reward
        assert sample.logprobs[:start] == [0.0] * start
        assert sample.logprobs[start:] == [-0.5 - i / 8 for i in range(end - start)]
        assert sample.finish_reason is FinishReason.STOP
        assert QUESTION in tokenizer.decode(sample.tokens[:start], skip_special_tokens=False)
        assert not rollout.outcome.truncated
    assert got == expected


async def test_the_policy_and_the_limits_reach_the_engine(stack: Stack) -> None:
    async with stack.rollouts("endless") as (executor, tapes):
        rollout = await roll_out(executor, max_context_tokens=100)
        started = (await tapes.entries())[0].call_started

    (sample,) = rollout.trajectory.samples
    assert len(sample.tokens) == 100
    assert sample.finish_reason is FinishReason.LENGTH
    assert rollout.outcome.truncated
    assert rollout.outcome.reward == 0.0
    assert (started.sampling.temperature, started.sampling.top_p) == (0.7, 0.9)
    assert started.sampling.max_tokens == 100 - started.prompt_token_count


async def test_a_prompt_that_fills_the_context_leaves_an_empty_trajectory(stack: Stack) -> None:
    async with stack.rollouts("unused") as (executor, _):
        rollout = await roll_out(executor, max_context_tokens=8)

    assert rollout.trajectory.samples == []
    assert rollout.outcome.truncated


async def test_an_engine_error_fails_the_rollout_and_seals_its_tape(stack: Stack) -> None:
    async with stack.rollouts("failing") as (executor, tapes):
        with pytest.raises(AgentFailed):
            await roll_out(executor)
        entries = await tapes.entries()

    assert entries[-1].HasField("tape_sealed")
    assert any(entry.HasField("call_failed") for entry in entries)


async def test_a_cancelled_rollout_aborts_what_runs_for_it(stack: Stack) -> None:
    async with stack.rollouts("slow") as (executor, tapes):
        rollout = asyncio.create_task(roll_out(executor))
        await tapes.opening.wait()
        async with contextlib.aclosing(tapes.watch(tapes.opened[-1])) as entries:
            async for entry in entries:
                if entry.HasField("tokens_sampled"):
                    break
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        recorded = await tapes.entries()

    finished, sealed = recorded[-2:]
    assert finished.choice_finished.completion.finish_reason == types_pb2.FINISH_REASON_ABORT
    assert 0 < sealed.tape_sealed.sampled_token_count < 64


async def test_a_rollout_that_takes_too_long_fails(stack: Stack) -> None:
    async with stack.rollouts("unused", RolloutLimits(rollout_seconds=0.05)) as (executor, tapes):
        with pytest.raises(RolloutTimeout, match=r"0\.05 s"):
            await roll_out(executor)
        assert (await tapes.entries())[-1].HasField("tape_sealed")


async def test_a_row_for_an_unknown_agent_is_refused_with_the_known_ones(stack: Stack) -> None:
    row = prepare_data(QUESTION, "5", SAMPLING) | {"agent_ref": {"name": "nobody"}}
    with pytest.raises(AgentFailed, match=r"no agent 'nobody'; it has \['math_with_judge_simple_agent'\]"):
        await stack.gym.run(row)


def supervised(process: psutil.Process) -> list[psutil.Process]:
    """All processes of a process's services; other tests' engines may be running, or be zombies, beside them."""
    children = [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]
    leashes = [child for child in children if any("_leash.py" in word for word in child.cmdline())]
    return [process for leash in leashes for process in (leash, *leash.children(recursive=True))]


async def test_stopping_leaves_no_process_and_no_file(stack: Stack) -> None:
    everything = supervised(psutil.Process())
    place = Place.of(stack.member.spec.key)
    (keeper,) = (each for each in psutil.process_iter() if words_of(each).endswith(f"node.keeper {place.directory}"))
    everything += [keeper, *supervised(keeper)]
    assert roles_of(map(words_of, everything)) == NODE + Counter(sidecar=len(stack.sidecars))
    scratch = next(
        Path(value) for child in everything if (value := child.environ().get("TMPDIR", "")).startswith("/tmp/tt-")
    )
    started = time.monotonic()
    await asyncio.to_thread(stack.group.stop)

    assert time.monotonic() - started < 5.0
    assert [process for process in everything if is_alive(process)] == []
    assert not place.directory.exists()
    assert not stack.group.directory.exists()
    assert not scratch.parent.exists()
