"""The controls do one operation at a time, to its end: whoever leaves, and at the sidecar's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from support.control_rig import KEEP, LOADED, WAIT, Rig, opened_rig
from support.waiting import eventually
from tokentape_sidecar.control_states import Operation, State
from tokentape_sidecar.errors import (
    ShuttingDown,
)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with opened_rig(tmp_path) as made:
        yield made


async def test_operations_run_one_at_a_time_in_their_order(rig: Rig) -> None:
    rig.engine.controls.goes_on.clear()
    orders = [Operation.PAUSE, Operation.SET_WEIGHT_VERSION, Operation.UPDATE_WEIGHTS, Operation.RESUME]
    asked = [asyncio.create_task(rig.do(operation)) for operation in orders]
    await eventually(lambda: rig.engine.controls.begun == ["pause"])
    assert rig.control.state is State.RUNNING
    rig.engine.controls.goes_on.set()
    await asyncio.gather(*asked)
    names = ["pause", "set_weight_version", "update_weights", "set_weight_version", "resume"]
    assert [step[0] for step in rig.did] == names


async def test_an_update_ends_though_its_asker_has_left_and_one_that_waits_is_dropped(rig: Rig) -> None:
    rig.engine.controls.goes_on.clear()
    updating = asyncio.create_task(rig.do(Operation.UPDATE_WEIGHTS))
    await eventually(lambda: rig.engine.controls.begun)
    waiting = [asyncio.create_task(rig.do(Operation.SLEEP)), asyncio.create_task(rig.do(Operation.PAUSE))]
    await asyncio.sleep(0)
    updating.cancel()
    waiting[0].cancel()
    await asyncio.wait({updating, waiting[0]})
    rig.engine.controls.goes_on.set()
    await waiting[1]
    assert rig.did == [*LOADED, ("pause", KEEP, True)]


async def test_an_update_whose_asker_has_left_and_that_fails_is_known_afterwards(rig: Rig) -> None:
    rig.engine.controls.failures["update_weights"] = RuntimeError("shapes differ")
    rig.engine.controls.goes_on.clear()
    updating = asyncio.create_task(rig.do(Operation.UPDATE_WEIGHTS))
    await eventually(lambda: rig.engine.controls.begun)
    updating.cancel()
    await asyncio.wait({updating})
    rig.engine.controls.goes_on.set()
    await eventually(lambda: rig.control.state is State.WEIGHTS_BROKEN)


@pytest.mark.parametrize("before", [State.RUNNING, State.PAUSED])
async def test_a_pause_that_waits_for_calls_is_called_off_with_its_asker(rig: Rig, before: State) -> None:
    await rig.be(before)
    rig.engine.controls.goes_on.clear()
    pausing = asyncio.create_task(rig.control.pause(WAIT, clear_cache=True))
    await eventually(lambda: rig.engine.controls.begun[-1:] == ["pause"])
    pausing.cancel()
    await asyncio.wait({pausing})
    rig.engine.controls.goes_on.set()
    await eventually(lambda: rig.did)
    assert rig.did == ([("resume",)] if before is State.RUNNING else [("pause", KEEP, False)])
    assert rig.control.state is before
    await rig.do(Operation.PAUSE)


async def test_a_sleep_that_waits_for_calls_waits_first_and_then_is_not_called_off(rig: Rig) -> None:
    controls = rig.engine.controls
    controls.goes_on.clear()
    sleeping = asyncio.create_task(rig.control.sleep(1, WAIT))
    await eventually(lambda: controls.begun == ["pause"])
    controls.goes_on.set()
    await sleeping
    assert rig.did == [("pause", WAIT, True), ("sleep", 1, KEEP)]


async def test_weights_that_a_sleep_has_discarded_are_known_to_be_gone_though_its_asker_has_left(rig: Rig) -> None:
    controls = rig.engine.controls
    await rig.be(State.PAUSED)
    controls.goes_on.clear()
    sleeping = asyncio.create_task(rig.control.sleep(2, WAIT))
    await eventually(lambda: controls.begun == ["pause"])
    controls.goes_on.set()
    await eventually(lambda: controls.begun == ["pause", "sleep"])
    sleeping.cancel()
    await asyncio.wait({sleeping})
    await eventually(lambda: rig.control.state is State.ASLEEP)
    await rig.control.wake_up([])
    assert rig.control.state is State.ASLEEP
    await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.RUNNING


async def test_at_the_end_an_update_may_end_within_the_grace_period(rig: Rig) -> None:
    controls = rig.engine.controls
    controls.goes_on.clear()
    updating = asyncio.create_task(rig.do(Operation.UPDATE_WEIGHTS))
    waiting = asyncio.create_task(rig.do(Operation.PAUSE))
    await eventually(lambda: controls.begun)
    closing = asyncio.create_task(rig.control.close(5))
    await asyncio.sleep(0)
    controls.goes_on.set()
    await closing
    await updating
    with pytest.raises(ShuttingDown):
        await waiting
    assert rig.did == LOADED


async def test_at_the_end_an_update_that_takes_too_long_is_cancelled(rig: Rig) -> None:
    rig.engine.controls.goes_on.clear()
    updating = asyncio.create_task(rig.do(Operation.UPDATE_WEIGHTS))
    await eventually(lambda: rig.engine.controls.begun)
    await rig.control.close(0.05)
    with pytest.raises(ShuttingDown, match=r"too soon to update the weights to its end$"):
        await updating
