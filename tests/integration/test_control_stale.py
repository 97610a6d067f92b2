"""Tapes that bound how many changes of the weights a call may live through."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from support.controlled import STEPS, Controlled, controlled, controlled_script
from support.engines import ManualEngine
from support.refusals import refused
from support.rollouts import Played, asks_once, policies, says, slow
from support.waiting import eventually
from tokentape.v1 import tape_pb2
from tokentape_executor.errors import WeightsChanged
from tokentape_executor.executor import RolloutLimits

if TYPE_CHECKING:
    from support.rollouts import Policies, Served

__all__ = ["policies"]

Status = grpc.StatusCode
COUNT = 8


def at_most(changes: int) -> tape_pb2.TapeLimits:
    return tape_pb2.TapeLimits(max_weight_changes=changes)


def said(changes: int, allowed: int) -> str:
    return (
        rf"^tape_id: the weights have changed {changes} times since this call's first token, and the tape lets a call "
        rf"live through {allowed} \(max_weight_changes\)$"
    )


async def swap(it: Controlled, number: int) -> None:
    it.checkpoint(f"step-{number}")
    await it.controller.update(f"step-{number}", str(number))


@pytest.mark.parametrize("allowed", [0, 1])
async def test_calls_fail_at_the_change_that_is_one_too_many(allowed: int) -> None:
    async with controlled_script() as it:
        bound = await it.start_sampling(COUNT, at_most(allowed))
        free = await it.start_sampling(1)
        for number in range(1, allowed + 1):
            await swap(it, number)
        await it.until_sampled(bound, 2 + max(await it.sampled(bound)))
        await it.controller.pause()
        before = await it.sampled(bound)
        late = await it.start(1, at_most(0))
        await swap(it, allowed + 1)
        await it.controller.resume()
        for one, count in zip(bound, before, strict=True):
            with refused(Status.ABORTED, said(allowed + 1, allowed)):
                await one.generating
            runs = await it.runs(one)
            assert sum(len(run.token_ids) for run in runs) == count
            assert {run.weight_version for run in runs} <= {"", *map(str, range(1, allowed + 1))}
            last = (await it.client.entries(one.tape))[-1].call_failed
            assert "max_weight_changes" in last.message
        # What is not bound, and what had sampled nothing, lives.
        for one in (*free, *late):
            assert len((await one.generating).token_ids()) == STEPS


async def test_a_tape_whose_call_failed_so_takes_another() -> None:
    async with controlled_script() as it:
        [one] = await it.start_sampling(1, at_most(0))
        await swap(it, 1)
        with refused(Status.ABORTED, said(1, 0)):
            await one.generating
        again = await it.client.generate(tape_id=one.tape.tape_id)
        assert set(again.weight_versions()) == {"1"}


async def test_changes_by_a_trainer_that_has_the_engine_itself_count_too() -> None:
    engine = ManualEngine()
    async with controlled(engine) as it:
        calls = await it.start(2, at_most(0))
        await eventually(lambda: len(engine.sinks) == 2)
        sampled, waiting = list(engine.sinks)
        engine.emit(sampled, 7, 8)
        engine.controls.change_weights()
        await eventually(lambda: engine.aborted == [sampled])
        engine.finish(waiting, 9)
        ended = [await one.generating for one in calls if await it.sampled([one]) == [1]]
        assert [one.token_ids() for one in ended] == [[9]]
        [failed] = [one for one in calls if await it.sampled([one]) == [2]]
        with refused(Status.ABORTED, said(1, 0)):
            await failed.generating


async def change_weights_in_mid_call(policy: Served, checkpoint: Path) -> None:
    tapes = policy.running.sidecar.measured.tapes
    await eventually(lambda: any(tape.sampled_token_count for tape in tapes.held()), 20)
    await policy.engine.controls.update_weights(checkpoint)


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_rollout_fails_of_it_by_name_and_may_be_run_again(
    policies: Policies, tmp_path: Path, retries: int
) -> None:
    (tmp_path / "weights.json").write_text("{}")
    async with policies.serve(slow(), says("fine")) as policy:
        executor = Played(policy, asks_once, limits=RolloutLimits(max_weight_changes=0), retries=retries)
        changing = asyncio.create_task(change_weights_in_mid_call(policy, tmp_path))
        if retries:
            rollout = await executor.rollout({})
            assert (rollout.attempts, rollout.trajectory.receipt.weight_versions) == (2, ("1",))
        else:
            with pytest.raises(WeightsChanged, match=r"400 \(stale_weights\): .*through 0 \(max_weight_changes\)"):
                await executor.rollout({})
        await changing
