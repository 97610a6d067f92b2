"""Batches of rollouts of which some fail, retries, and what is left when they are cancelled."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.rollouts import Batch, Played, ask, asks_once, fails, policies, says, slow
from support.waiting import eventually
from tokentape_executor.errors import (
    AgentFailed,
    RewardInvalid,
    RolloutError,
    SidecarFailed,
)
from tokentape_executor.executor import (
    FailedRollout,
    OnFailure,
    Outcome,
    Rollout,
    RolloutClient,
    Row,
)

if TYPE_CHECKING:
    from support.rollouts import Policies

__all__ = ["policies"]


async def test_e08_bad_rollouts_are_named_in_their_places_and_the_others_complete(policies: Policies) -> None:
    async with policies.serve(*Batch.SCRIPT) as policy:
        results = await Played(policy, Batch().play).rollouts(Batch.TASKS)
        assert policy.engine.running == 0
    assert len(results) == 8
    failed = {result.task_index: result.error for result in results if isinstance(result, FailedRollout)}
    assert (
        [index for index, result in enumerate(results) if isinstance(result, FailedRollout)] == [3, 5, 6] == [*failed]
    )
    assert (type(failed[3]), str(failed[3])) == (AgentFailed, "ValueError: no such tool")
    assert isinstance(failed[3].__cause__, ValueError)
    assert type(failed[5]) is SidecarFailed
    assert "out of memory" in str(failed[5])
    assert (type(failed[6]), str(failed[6])) == (
        RewardInvalid,
        "the reward must be one finite number, not NoneType None",
    )
    for number, result in enumerate(results):
        if isinstance(result, Rollout):
            assert result.outcome == Outcome(number / 10)
            assert result.trajectory.receipt.calls == 1


async def test_e08_failing_fast_cancels_the_siblings_cleanly_and_raises_the_root(policies: Policies) -> None:
    async def play(task: Row, client: RolloutClient) -> float:
        if task["number"] == 2:
            await eventually(lambda: policy.engine.running == 3)
            raise ValueError("no such tool")
        await ask(client, "Go.")
        return 1.0

    async with policies.serve(slow(), repeat=True) as policy:
        executor = Played(policy, play)
        with pytest.raises(AgentFailed, match=r"^ValueError: no such tool$") as caught:
            await executor.rollouts([{"number": number} for number in range(4)], fail_fast=True)
        assert isinstance(caught.value.__cause__, ValueError)
        assert policy.engine.running == 0
        for tape_id in executor.tapes:
            assert "sealed" in await policy.refuses(tape_id)


async def test_bugs_are_no_failed_rollouts() -> None:
    class Broken:
        model_name = "toy"
        api_key = "none"

        async def bridge_url(self) -> str:
            raise TypeError("a bug")

    async def play(_task: Row, _client: RolloutClient) -> float:
        return 1.0

    with pytest.raises(TypeError, match="a bug"):
        await Played(Broken(), play, retries=3).rollouts([{}, {}])


async def test_results_come_in_the_order_of_the_tasks_and_few_run_at_once(policies: Policies) -> None:
    running, most = 0, 0

    async def play(task: Row, client: RolloutClient) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await ask(client, "Go.")
        await asyncio.sleep(0.05 * (6 - task["number"]))
        running -= 1
        return task["number"]

    async with policies.serve(says("fine"), repeat=True) as policy:
        executor = Played(policy, play)
        results = await executor.rollouts(({"number": number} for number in range(6)), concurrency=3)
        assert await executor.rollouts([]) == []
    assert [result.outcome.reward for result in results if isinstance(result, Rollout)] == [0, 1, 2, 3, 4, 5]
    assert most == 3
    with pytest.raises(ValueError, match="concurrency: must be 1 or more, not 0"):
        await executor.rollouts([], concurrency=0)


@pytest.mark.parametrize("ends_with", ["error", "reward", "nothing"])
async def test_a_failed_rollout_is_run_again_on_a_new_tape(policies: Policies, ends_with: str) -> None:
    attempts = 0

    async def play(_task: Row, client: RolloutClient) -> Any:
        nonlocal attempts
        attempts += 1
        await ask(client, "Go.")
        if ends_with == "error" or attempts < 3:
            raise ValueError(f"attempt {attempts}")
        return 0.25 if ends_with == "reward" else None

    async with policies.serve(says("fine"), repeat=True) as policy:
        executor = Played(policy, play, retries=2)
        if ends_with == "reward":
            rollout = await executor.rollout({})
            assert (rollout.attempts, rollout.outcome.reward, rollout.failure) == (3, 0.25, None)
            assert (rollout.tape_id, rollout.trajectory.receipt.calls) == (executor.tapes[-1], 1)
        else:
            told = "ValueError: attempt 3" if ends_with == "error" else "the reward must be"
            with pytest.raises(RolloutError, match=rf"^{told}.* \(the last of 3 attempts\)$") as caught:
                await executor.rollout({})
            assert isinstance(caught.value.__cause__, ValueError) or ends_with == "nothing"
        assert len(set(executor.tapes)) == 3
        for tape_id in executor.tapes:
            assert "sealed" in await policy.refuses(tape_id)


async def test_what_would_fail_again_is_not_run_again(policies: Policies) -> None:
    async def play(_task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.", temperature=-1)
        return 1.0

    async with policies.serve() as policy:
        executor = Played(policy, play, retries=5)
        (failed,) = await executor.rollouts([{}])
    assert isinstance(failed, FailedRollout)
    assert (failed.attempts, len(executor.tapes)) == (1, 1)


async def test_cancelling_seals_the_tapes_aborts_the_calls_and_is_not_retried(policies: Policies) -> None:
    async with policies.serve(slow(), repeat=True) as policy:
        executor = Played(policy, asks_once, retries=3, on_failure=OnFailure.PLACEHOLDER)
        running = asyncio.create_task(executor.rollouts([{"prompt": "Go."}] * 4))
        await eventually(lambda: policy.engine.running == 4)
        running.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await running
        assert policy.engine.running == 0
        assert len(executor.tapes) == 4
        for tape_id in executor.tapes:
            assert "sealed" in await policy.refuses(tape_id)


async def test_a_rollout_leaves_no_task_and_no_connection(policies: Policies) -> None:
    async def play(task: Row, client: RolloutClient) -> float:
        clients.append(client)
        await ask(client, "Go.")
        if task["fails"]:
            raise ValueError("no")
        return 1.0

    clients: list[RolloutClient] = []
    async with policies.serve(says("fine"), repeat=True) as policy:
        await Played(policy, play).rollouts([{"fails": False}, {"fails": True}])
        here = asyncio.current_task()
        names = [repr(task) for task in asyncio.all_tasks() if task is not here and "tokentape_executor" in repr(task)]
        assert names == []
    assert [client.is_closed() for client in clients] == [True, True]


async def test_cancelling_is_bounded_where_the_sidecar_is_gone(policies: Policies) -> None:
    async def play(_task: Row, _client: RolloutClient) -> float:
        started.set()
        await asyncio.Event().wait()
        return 1.0

    started = asyncio.Event()
    async with policies.serve() as policy:
        running = asyncio.create_task(Played(policy, play).rollout({}))
        await started.wait()
        await policy.running.sidecar.stop(grace_seconds=0)
        running.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await running


async def test_e09_an_interrupt_ends_a_program_soon_and_leaves_nothing_at_the_engine(
    policies: Policies, checkout: Path
) -> None:
    async with policies.serve(slow(), repeat=True) as policy:
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            str(checkout / "executor/examples/calculator.py"),
            *("--sidecar", policy.running.sidecar.address, "--bridge", policy.url),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await eventually(lambda: policy.engine.running == 3, seconds=60)
            program.send_signal(signal.SIGINT)
            async with asyncio.timeout(20):
                _, errors = await program.communicate()
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        await eventually(lambda: policy.engine.running == 0)
    assert program.returncode == -signal.SIGINT
    assert errors.decode().rstrip().endswith("KeyboardInterrupt")
    for trouble in ("Exception ignored", "never retrieved", "was destroyed", "PollerCompletionQueue"):
        assert trouble not in errors.decode()


async def test_attempts_that_fail_are_logged_with_their_cause(
    policies: Policies, caplog: pytest.LogCaptureFixture
) -> None:
    async with policies.serve() as policy:
        with caplog.at_level(logging.WARNING), pytest.raises(AgentFailed):
            await Played(policy, fails, retries=1).rollout({})
    assert "attempt 1 of a rollout failed and is made again: ValueError: no" in caplog.text
