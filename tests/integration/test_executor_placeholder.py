"""What stands for a rollout that failed: one token, really sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.rollouts import FAILS, Batch, Played, ask, fails, policies, says
from support.scripted import call, tokens
from tokentape.v1 import types_pb2
from tokentape_executor.errors import (
    AgentFailed,
)
from tokentape_executor.executor import (
    OnFailure,
    Outcome,
    Rollout,
    RolloutClient,
    Row,
)

if TYPE_CHECKING:
    from support.rollouts import Policies

__all__ = ["policies"]


def assert_samples_one(rollout: Rollout, prompt: list[int], token_id: int) -> None:
    """Its one sample is the prompt, and one sampled token."""
    (sample,) = rollout.trajectory.samples
    assert (sample.tokens, sample.action_ranges) == ([*prompt, token_id], [(len(prompt), len(prompt) + 1)])


async def test_e08_placeholders_keep_the_batch_whole(policies: Policies) -> None:
    async with policies.serve(*Batch.SCRIPT, *(call(tokens(40 + i, 50)) for i in range(3))) as policy:
        results = await Played(policy, Batch().play, on_failure=OnFailure.PLACEHOLDER).rollouts(Batch.TASKS)
    assert [isinstance(result, Rollout) for result in results] == [True] * 8
    told = {index: result.failure for index, result in enumerate(results) if isinstance(result, Rollout)}
    assert {index for index, failure in told.items() if failure is not None} == {3, 5, 6}
    assert told[3] == "AgentFailed: ValueError: no such tool"
    for index in (3, 5, 6):
        placeholder = results[index]
        assert isinstance(placeholder, Rollout)
        assert (placeholder.outcome, placeholder.attempts) == (Outcome(0.0), 1)
        (sample,) = placeholder.trajectory.samples
        prompt = policies.prompt_ids({"role": "user", "content": f"task {index}"})
        assert sample.tokens[:-1] == prompt
        assert sample.tokens[-1] in {40, 41, 42}
        assert sample.action_ranges == [(len(prompt), len(prompt) + 1)]


POLICY = types_pb2.SamplingParameters(temperature=0.5, max_tokens=30, min_tokens=5, stop=["fine"])


async def test_a_placeholder_is_sampled_from_the_first_prompt_of_the_last_attempt_at_the_engine(
    policies: Policies,
) -> None:
    attempts = 0

    async def play(_task: Row, client: RolloutClient) -> float:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            first = await ask(client, f"attempt {attempts}", max_tokens=30)
            await ask(client, f"attempt {attempts}", first, "And?", max_tokens=30)
        raise ValueError("no")

    prompt = policies.prompt_ids({"role": "user", "content": "attempt 2"})
    script = [*(says("I say nothing more") for _ in range(4)), call(tokens(77, 78, 79, finish="stop"), expect=prompt)]
    async with policies.serve(*script) as policy:
        executor = Played(policy, play, retries=2, on_failure=OnFailure.PLACEHOLDER)
        rollout = await executor.rollout({}, sampling_policy=POLICY)
        assert rollout.tape_id not in executor.tapes
        assert "sealed" in await policy.refuses(rollout.tape_id)
    assert_samples_one(rollout, prompt, 77)
    (action,) = rollout.trajectory.samples[0].actions
    assert (action.sampling.temperature, action.sampling.max_tokens, action.sampling.min_tokens) == (0.5, 1, 1)
    assert (rollout.outcome, rollout.attempts) == (Outcome(0.0), 3)
    assert rollout.failure == "AgentFailed: ValueError: no"
    assert (POLICY.max_tokens, POLICY.min_tokens) == (30, 5)


@pytest.mark.parametrize(
    "task",
    [
        {"responses_create_params": {"input": [{"role": "user", "content": "Add."}]}, "prompt": "not this"},
        {"responses_create_params": {"input": "Add."}},
        {"messages": [{"role": "user", "content": "Add."}]},
        {"prompt": "Add."},
        {"question": "Add."},
    ],
)
async def test_a_placeholder_is_sampled_from_the_tasks_chat_where_no_attempt_reached_the_engine(
    policies: Policies, task: Row
) -> None:
    prompt = policies.prompt_ids({"role": "user", "content": "Add."})
    async with policies.serve(call(tokens(77, 78, 79, finish="stop"), expect=prompt)) as policy:
        executor = Played(policy, fails, on_failure=OnFailure.PLACEHOLDER)
        rollout = await executor.rollout(task, sampling_policy=POLICY)
    assert_samples_one(rollout, prompt, 77)


@pytest.mark.parametrize(
    ("task", "answer", "told"),
    [
        ({}, says("fine"), "NothingSampled: the task has no chat to sample from"),
        ({"prompt": "Add."}, FAILS, "SidecarFailed: .*out of memory"),
        ({"prompt": "Add."}, call(tokens(finish="stop")), "NothingSampled: no token to train on in 1 calls"),
        ({"messages": 5}, says("fine"), "TypeError|RolloutRefused"),
    ],
)
async def test_without_a_placeholder_the_first_error_is_raised(
    policies: Policies, task: Row, answer: Any, told: str
) -> None:
    async with policies.serve(answer, repeat=True) as policy:
        executor = Played(policy, fails, on_failure=OnFailure.PLACEHOLDER)
        with pytest.raises(AgentFailed, match=rf"^ValueError: no; no placeholder: ({told})"):
            await executor.rollout(task)
