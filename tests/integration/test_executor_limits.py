"""Rollouts that take too long, or too much, and environments that hang."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import openai
import pytest

from support.rollouts import END, Batch, Played, ask, policies, says, slow
from support.scripted import call, tokens
from tokentape_executor import loop_watch
from tokentape_executor.errors import (
    RolloutRefused,
    RolloutTimeout,
)
from tokentape_executor.executor import (
    FailedRollout,
    Outcome,
    Rollout,
    RolloutClient,
    RolloutLimits,
    Row,
)
from tokentape_executor.tape_client import TapeOptions

if TYPE_CHECKING:
    from support.rollouts import Policies

__all__ = ["policies"]

TURNS = RolloutLimits(turn_seconds=0.6)


async def test_e09_an_environment_that_hangs_frees_its_slot_and_leaves_the_others_alone(policies: Policies) -> None:
    async def play(task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.")
        if task["number"] in {2, 5}:
            await asyncio.Event().wait()
        return 1.0

    async with policies.serve(says("fine"), repeat=True) as policy:
        executor = Played(policy, play, limits=TURNS)
        results = await executor.rollouts([{"number": number} for number in range(8)], concurrency=2)
        for tape_id in executor.tapes:
            assert "sealed" in await policy.refuses(tape_id)
    errors = {result.task_index: result.error for result in results if isinstance(result, FailedRollout)}
    assert [*errors] == [2, 5]
    for error in errors.values():
        assert type(error) is RolloutTimeout
        assert str(error) == "turn 2 took longer than the limit of 0.6 s (turn_seconds)"


async def test_e09_an_environment_that_blocks_the_loop_is_reported_and_the_others_complete(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_watch, "STALL_SECONDS", 0.3)

    async def play(task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.")
        if task["blocks"]:
            time.sleep(1.5)  # noqa: ASYNC251 - the fault  # the blocking line
        return 1.0

    async with policies.serve(says("fine", delay_ms=50), repeat=True) as policy:
        results = await Played(policy, play).rollouts([{"blocks": number == 1} for number in range(4)])
    assert all(isinstance(result, Rollout) for result in results)
    warnings = [record for record in caplog.records if record.name == "tokentape_executor.loop_watch"]
    assert len(warnings) == 1
    assert "the blocking line" in warnings[0].getMessage()
    assert f"{__file__}:" in warnings[0].getMessage().partition("\n")[0]


@pytest.mark.parametrize("limits", [RolloutLimits(rollout_seconds=0.6), TURNS])
async def test_a_limit_in_mid_call_aborts_it_at_the_engine(policies: Policies, limits: RolloutLimits) -> None:
    async def play(_task: Row, client: RolloutClient) -> float:
        await ask(client, "Go.")
        return 1.0

    which = "turn 1" if limits.turn_seconds else "the rollout"
    async with policies.serve(slow()) as policy:
        executor = Played(policy, play, limits=limits)
        with pytest.raises(RolloutTimeout, match=rf"^{which} took longer than the limit of 0\.6 s"):
            await executor.rollout({})
        assert policy.engine.running == 0
        assert "sealed" in await policy.refuses(executor.tapes[0])


async def test_each_turn_has_the_whole_of_its_limit(policies: Policies) -> None:
    async def play(_task: Row, client: RolloutClient) -> float:
        for _ in range(3):
            await asyncio.sleep(0.4)
            await ask(client, "Go.")
        await asyncio.sleep(0.4)
        return 1.0

    async with policies.serve(says("fine"), repeat=True) as policy:
        rollout = await Played(policy, play, limits=RolloutLimits(turn_seconds=1.2)).rollout({})
    assert rollout.trajectory.receipt.calls == 3


async def test_an_agent_that_ignores_its_cancelling_does_not_hold_its_slot(
    policies: Policies, caplog: pytest.LogCaptureFixture
) -> None:
    released = asyncio.Event()

    async def play(_task: Row, _client: RolloutClient) -> float:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    async with policies.serve() as policy:
        with pytest.raises(RolloutTimeout):
            await Played(policy, play, limits=TURNS).rollout({})
        assert "an agent goes on although it was cancelled" in caplog.text
        released.set()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("limits", "options", "refused"),
    [
        (RolloutLimits(max_turns=2), TapeOptions(), "max_calls"),
        (RolloutLimits(max_turns=2), TapeOptions(max_calls=5), "max_calls"),
        (RolloutLimits(max_turns=5), TapeOptions(max_calls=2), "max_calls"),
        (RolloutLimits(max_sampled_tokens=4), TapeOptions(), "max_sampled_tokens"),
    ],
)
async def test_calls_and_tokens_have_limits_that_an_agent_may_handle(
    policies: Policies, limits: RolloutLimits, options: TapeOptions, refused: str
) -> None:
    async def play(task: Row, client: RolloutClient) -> Outcome:
        try:
            for _ in range(5):
                await ask(client, "Go.")
        except openai.BadRequestError as error:
            if not task["handles"] or error.code != "limit_reached":
                raise
        return Outcome(0.5, truncated=True)

    async with policies.serve(call(tokens(40, END, finish="stop")), repeat=True) as policy:
        executor = Played(policy, play, limits=limits, retries=2)
        rollout = await executor.rollout({"handles": True}, options=options)
        assert (rollout.trajectory.receipt.calls, rollout.outcome.truncated) == (2, True)
        with pytest.raises(RolloutRefused, match=rf"the bridge answered 400 \(limit_reached\): .*\({refused}\)"):
            await executor.rollout({"handles": False}, options=options)
    assert len(executor.tapes) == 2


@pytest.mark.parametrize("number", [0, -1])
async def test_limits_and_retries_that_make_no_sense_are_refused(number: int) -> None:
    for name in ("rollout_seconds", "turn_seconds", "max_turns", "max_sampled_tokens"):
        with pytest.raises(ValueError, match=rf"^{name}: must be above 0 \(None: no limit\), not {number}$"):
            RolloutLimits(**{name: number})
    with pytest.raises(ValueError, match=r"^max_weight_changes: must be 0 or more \(None: no limit\), not -1$"):
        RolloutLimits(max_weight_changes=-1)
    with pytest.raises(ValueError, match="retries: must be 0 or more, not -1"):
        Played(None, Batch().play, retries=-1)
