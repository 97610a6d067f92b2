"""Rollouts of several turns: real vLLM (CPU, SmolLM2-135M in bfloat16), a real bridge, real NeMo Gym.

Eight rollouts at once, of three required tool calls each, under two chat templates: the model's own, which leaves tool
calls out of the history, and one that writes them into it in its own way. Each comes back as one sample. A recorder
below the adapter keeps what the engine's core was given and what it emitted; the oracle scores the samples anew.

The engine's log-probabilities are of the distribution that it samples from, that is after the grammar's mask. vLLM
masks before it takes log-probabilities of any mode, so `raw` would be no different; the oracle computes the masks.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support import rerender, tool_rollouts
from support.real_engine import Emitted, load_engine, record_emitted, requests_of, shut_down
from support.scripted import sidecar_on
from tokentape.channel import dial
from tokentape.v1 import tape_pb2, types_pb2
from tokentape_executor.gym_executor import NemoGymExecutor
from tokentape_executor.nemo_gym import GymAgents
from tokentape_executor.node import NodeMember, NodePolicy, NodeSpec
from tokentape_executor.oracle import LogprobsMode, verify
from tokentape_executor.receipt import SplitCause
from tokentape_executor.rollout import Rollout
from tokentape_executor.settings import ExecutorSettings
from tokentape_executor.tape_client import OpenedTape, TapeClient
from tokentape_executor.trajectory import FinishReason

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    # vLLM's and torch's own, on import and on start; not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

TEMPLATES = ("own", "tools")
"""Names of the sidecars: the model's own template, and `tool_rollouts.TOOL_TEMPLATE`."""


class KeepingTapes(TapeClient):
    """A tape client that remembers what it opened."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.opened: dict[str, OpenedTape] = {}

    async def open(self, **limits: Any) -> OpenedTape:
        tape = await super().open(**limits)
        self.opened[tape.tape_id] = tape
        return tape

    async def calls(self, rollout: Rollout) -> list[tape_pb2.TapeEntry.CallStarted]:
        tape = self.opened[rollout.tape_id]
        return [entry.call_started async for entry in self.watch(tape) if entry.HasField("call_started")]


@dataclass(frozen=True)
class Stack:
    """Everything that rollouts run on, and what is below it."""

    member: NodeMember
    model_name: str
    settings: ExecutorSettings
    sidecars: dict[str, str]
    tokenizers: dict[str, Any]
    emitted: Emitted
    given: dict[str, list[int]]
    """vLLM's request id to the prompt that its core was given."""


def record_given(engine: AsyncLLM) -> dict[str, list[int]]:
    given: dict[str, list[int]] = {}
    add_request = engine.engine_core.add_request_async

    async def recording(request: Any) -> None:
        given[request.request_id] = list(request.prompt_token_ids)
        await add_request(request)

    engine.engine_core.add_request_async = recording
    return given


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stack]:
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

    from tokentape_sidecar.vllm_engine import VllmEngine  # noqa: PLC0415 - imports vLLM

    tokenizers: Any = AutoTokenizer
    with_tools = tool_rollouts.model_with_tools(model_directory, tmp_path_factory.mktemp("model"))
    directories = dict(zip(TEMPLATES, (model_directory, with_tools), strict=True))
    llm = load_engine(model_directory, max_model_len=tool_rollouts.MAX_CONTEXT_TOKENS)
    emitted, given = record_emitted(llm), record_given(llm)
    settings = ExecutorSettings.from_environment()
    settings = replace(
        settings,
        gym_configs=tool_rollouts.GYM_CONFIGS,
        gym_overrides=tool_rollouts.GYM_OVERRIDES,
        gym_agent=tool_rollouts.GYM_AGENT,
    )
    async with AsyncExitStack() as services:
        services.push_async_callback(shut_down, llm)
        sidecars: dict[str, str] = {}
        for name, directory in directories.items():
            engine = VllmEngine.attach(llm, tokenizer_directory=directory)
            running = await services.enter_async_context(sidecar_on(engine, name=name))
            sidecars[name] = running.sidecar.address
        name = str(model_directory)
        spec = NodeSpec.from_settings(settings, group=f"test {secrets.token_hex(8)}", policy_model_name=name)
        member = await NodeMember.join(spec, sidecars)
        services.push_async_callback(asyncio.to_thread, member.leave)
        await member.gym_agents()
        loaded = {name: tokenizers.from_pretrained(str(directory)) for name, directory in directories.items()}
        yield Stack(member, name, settings, sidecars, loaded, emitted, given)


@pytest.fixture(scope="module")
def model(model_directory: Path) -> Any:
    """The same weights in transformers."""
    import torch  # noqa: PLC0415 - seconds
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(str(model_directory), dtype=torch.bfloat16)


@pytest.mark.parametrize("template", TEMPLATES)
async def test_eight_rollouts_of_three_calls_are_eight_exact_samples(stack: Stack, model: Any, template: str) -> None:
    async with dial(stack.sidecars[template]) as channel:
        tapes = KeepingTapes(channel, template)
        gym = GymAgents(stack.member.gym_agents)
        executor = NemoGymExecutor(NodePolicy(tapes, stack.model_name, stack.member), gym)
        rollouts = await asyncio.gather(*(executor.rollout(row) for row in tool_rollouts.rows(stack.settings.gym_venv)))
        await gym.close()
        calls = [await tapes.calls(rollout) for rollout in rollouts]

    assert len(rollouts) == 8
    for rollout, started in zip(rollouts, calls, strict=True):
        check_one_sample(rollout, started)
        check_against_the_core(rollout, stack)
    samples = [rollout.trajectory.samples[0] for rollout in rollouts]
    report = verify(
        samples, model, logprobs_mode=LogprobsMode.PROCESSED, tokenizer=stack.tokenizers[template], stop_token_ids=[2]
    )
    assert report.compared == sum(rollout.trajectory.receipt.sampled for rollout in rollouts)
    drifts = [drift(rollout, stack.tokenizers[template]) for rollout in rollouts]
    figures = {
        "rollouts": len(rollouts),
        "calls": sum(len(started) for started in calls),
        "sampled": report.compared,
        "tokens": sum(len(sample.tokens) for sample in samples),
        "splits": sum(rollout.trajectory.receipt.split_total for rollout in rollouts),
        "largest difference": report.largest,
        "mean difference": report.mean,
        "re-renders that change ids": sum(not each.exact for each in drifts),
        "missing there": sum(each.missing for each in drifts),
        "misplaced there": sum(each.misplaced for each in drifts),
        "invented there": sum(each.invented for each in drifts),
    }
    print(template, figures)  # noqa: T201 - pytest -s shows them
    # What all this is for: no text of the conversation would have given these ids.
    assert figures["re-renders that change ids"]


def check_one_sample(rollout: Rollout, calls: list[tape_pb2.TapeEntry.CallStarted]) -> None:
    """One sample, in which every call extends the one before it and every sampled token stands once."""
    trajectory = rollout.trajectory
    receipt = trajectory.receipt
    (sample,) = trajectory.samples
    assert len(calls) == receipt.calls == len(sample.actions) >= tool_rollouts.CALLS_PER_ROLLOUT
    assert not calls[0].HasField("parent")
    assert [call.parent.call_id for call in calls[1:]] == [call.call_id for call in calls[:-1]]
    assert [call.split_cause for call in calls] == [
        types_pb2.SPLIT_CAUSE_NEW_CONVERSATION,
        *[types_pb2.SPLIT_CAUSE_UNSPECIFIED] * (len(calls) - 1),
    ]
    assert receipt.splits == {SplitCause.NEW_CONVERSATION: 1}
    assert receipt.split_total == receipt.dropped_total == 0
    assert receipt.sampled == receipt.kept == sum(end - start for start, end in sample.action_ranges)
    assert {action.finish_reason for action in sample.actions} == {FinishReason.STOP}
    assert len(sample.tokens) == len(sample.logprobs) == sample.action_ranges[-1][1]


def check_against_the_core(rollout: Rollout, stack: Stack) -> None:
    """What stands before and in each action is what the engine's core was given and emitted for that call."""
    (sample,) = rollout.trajectory.samples
    for action in sample.actions:
        call_id = rollout.trajectory.call_ids[action.call_index]
        ((request_id, emitted),) = requests_of(stack.emitted, call_id).items()
        assert sample.tokens[action.start : action.end] == emitted
        assert sample.tokens[: action.start] == stack.given[request_id]


def drift(rollout: Rollout, tokenizer: Any) -> rerender.Drift:
    """How far the conversation that Gym reports, rendered anew, is from what was sampled."""
    (sample,) = rollout.trajectory.samples
    rerendered = rerender.rerender(tokenizer, *rerender.conversation(rollout.outcome.report))
    start, _ = sample.action_ranges[0]
    # Otherwise the comparison would be of something else.
    assert rerendered.token_ids[:start] == sample.tokens[:start]
    return rerender.compare(sample, rerendered)
