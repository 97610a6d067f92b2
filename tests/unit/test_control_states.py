"""Every operation of the controls in every state of the engine: done, needless or refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from support.control_rig import KEEP, LOADED, Rig, opened_rig
from support.waiting import eventually
from tokentape_sidecar.control import Control
from tokentape_sidecar.control_states import Operation, State
from tokentape_sidecar.engine_controls import Phase
from tokentape_sidecar.errors import (
    ControlFailed,
    EngineDead,
    EngineStalled,
    InvalidArgument,
    NotFound,
    StateForbids,
    WeightsBroken,
)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with opened_rig(tmp_path) as made:
        yield made


REFUSED, NEEDLESS = "refused", "needless"
IN_STATE = {
    (State.RUNNING, Operation.PAUSE): ([("pause", KEEP, True)], State.PAUSED),
    (State.RUNNING, Operation.RESUME): NEEDLESS,
    (State.RUNNING, Operation.UPDATE_WEIGHTS): (LOADED, State.RUNNING),
    (State.RUNNING, Operation.SET_WEIGHT_VERSION): ([("set_weight_version", "2")], State.RUNNING),
    (State.RUNNING, Operation.RESET_PREFIX_CACHE): ([("reset_prefix_cache", False)], State.RUNNING),
    (State.RUNNING, Operation.SLEEP): ([("sleep", 1, KEEP)], State.ASLEEP),
    (State.RUNNING, Operation.WAKE_UP): NEEDLESS,
    (State.PAUSED, Operation.PAUSE): ([("pause", KEEP, True)], State.PAUSED),
    (State.PAUSED, Operation.RESUME): ([("resume",)], State.RUNNING),
    (State.PAUSED, Operation.UPDATE_WEIGHTS): (LOADED[1:3], State.PAUSED),
    (State.PAUSED, Operation.SET_WEIGHT_VERSION): ([("set_weight_version", "2")], State.PAUSED),
    (State.PAUSED, Operation.RESET_PREFIX_CACHE): ([("reset_prefix_cache", True)], State.PAUSED),
    (State.PAUSED, Operation.SLEEP): ([("sleep", 1, KEEP)], State.ASLEEP),
    (State.PAUSED, Operation.WAKE_UP): NEEDLESS,
    (State.ASLEEP, Operation.SET_WEIGHT_VERSION): ([("set_weight_version", "2")], State.ASLEEP),
    (State.ASLEEP, Operation.SLEEP): NEEDLESS,
    (State.ASLEEP, Operation.WAKE_UP): ([("wake_up",)], State.RUNNING),
    (State.WEIGHTS_BROKEN, Operation.PAUSE): ([("pause", KEEP, True)], State.WEIGHTS_BROKEN),
    (State.WEIGHTS_BROKEN, Operation.UPDATE_WEIGHTS): (LOADED[1:], State.RUNNING),
}
"""What the engine is asked, and its state after it. What is not here is refused."""


@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.name)
@pytest.mark.parametrize("state", [state for state in State if state not in {State.STALLED, State.DEAD}])
async def test_each_operation_in_each_state(rig: Rig, state: State, operation: Operation) -> None:
    await rig.be(state)
    outcome = IN_STATE.get((state, operation), REFUSED)
    if outcome == REFUSED:
        with pytest.raises(StateForbids, match=f"cannot {operation.value} while the engine {state.value}"):
            await rig.do(operation)
    else:
        await rig.do(operation)
    done, after = ([], state) if isinstance(outcome, str) else outcome
    assert (rig.did, rig.control.state) == (done, after)


@pytest.mark.parametrize(("state", "error"), [(State.STALLED, EngineStalled), (State.DEAD, EngineDead)])
@pytest.mark.parametrize("operation", Operation, ids=lambda operation: operation.name)
async def test_an_engine_that_gives_nothing_is_asked_nothing(
    rig: Rig, state: State, error: type[Exception], operation: Operation
) -> None:
    await rig.be(state)
    with pytest.raises(error, match="the engine "):
        await rig.do(operation)
    assert rig.did == []
    assert not rig.control.serves


async def test_what_somebody_else_does_to_the_engine_is_its_state(rig: Rig) -> None:
    rig.engine.controls.phase = Phase.PAUSED
    assert rig.control.state is State.PAUSED
    await rig.control.resume()
    rig.engine.controls.phase = Phase.ASLEEP
    with pytest.raises(StateForbids, match="cannot resume generation while the engine sleeps"):
        await rig.control.resume()


async def test_an_update_that_fails_half_way_stops_serving_until_one_succeeds(rig: Rig) -> None:
    records = await rig.start(3)
    rig.engine.emit(records[0].call_id, 7)
    await rig.break_weights()
    assert rig.control.state is State.WEIGHTS_BROKEN
    assert rig.control.problem == f"the update to '2' from {rig.root / 'step-2'} failed half way: shapes differ"
    assert [str(record.error) for record in records] == [str(WeightsBroken())] * 3
    assert list(records[0].choices[0].token_ids) == [7]
    await eventually(lambda: len(rig.engine.aborted) == 3)
    with pytest.raises(WeightsBroken):
        await rig.start()
    assert rig.engine.controls.phase is Phase.PAUSED

    await rig.control.update_weights("step-1", "1")
    assert (rig.control.state, rig.control.problem, rig.told) == (State.RUNNING, "", [False, True])
    await rig.start()


async def test_an_engine_that_was_paused_stays_so_when_its_weights_are_mended(rig: Rig) -> None:
    await rig.be(State.PAUSED)
    await rig.break_weights()
    await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.PAUSED


async def test_a_pause_of_broken_weights_outlives_their_mending(rig: Rig) -> None:
    """A trainer that tries again what it does every time: pause, update, resume."""
    await rig.break_weights()
    await rig.do(Operation.PAUSE)
    await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.PAUSED
    await rig.do(Operation.RESUME)
    assert rig.control.state is State.RUNNING


async def test_a_version_that_could_not_be_set_leaves_the_weights_broken(rig: Rig) -> None:
    rig.engine.controls.failures["set_weight_version"] = RuntimeError("no")
    with pytest.raises(ControlFailed):
        await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.WEIGHTS_BROKEN


async def test_an_engine_that_dies_of_an_update_is_dead_not_broken(rig: Rig) -> None:
    rig.engine.controls.failures["update_weights"] = EngineDead("the engine is dead")
    with pytest.raises(EngineDead):
        await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.problem == ""


@pytest.mark.parametrize(
    ("directory", "version", "problem"),
    [
        ("", "2", "directory: must be the path"),
        (".", "2", "directory: must be the path"),
        ("/etc", "2", "directory: must be the path"),
        ("step-1/../../x", "2", "directory: must be the path"),
        ("a\0b", "2", "directory: must be the path"),
        ("out", "2", "directory: .* leads out of the weights root"),
        ("half-out", "2", "directory: weights is a link that leads out"),
        ("step-1", "", "weight_version: must have 1 to 256 characters"),
        ("step-1", "x" * 257, "weight_version: must have 1 to 256 characters"),
        ("step-1", "default", "weight_version: is taken"),
    ],
)
async def test_a_directory_outside_the_root_is_refused_before_the_engine_is_touched(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory, directory: str, version: str, problem: str
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "weights").touch()
    (rig.root / "out").symlink_to(elsewhere)
    (rig.root / "half-out").mkdir()
    (rig.root / "half-out" / "weights").symlink_to(elsewhere / "weights")
    with pytest.raises(InvalidArgument, match=problem):
        await rig.control.update_weights(directory, version)
    assert rig.engine.controls.begun == []


async def test_links_within_the_root_are_followed(rig: Rig) -> None:
    (rig.root / "latest").symlink_to("step-2")
    await rig.control.update_weights("latest", "2")
    assert ("update_weights", "step-2") in rig.did


@pytest.mark.parametrize("directory", ["step-3", "empty", "step-1/weights"])
async def test_without_a_checkpoint_nothing_changes(rig: Rig, directory: str) -> None:
    (rig.root / "empty").mkdir()
    with pytest.raises(NotFound):
        await rig.control.update_weights(directory, "3")
    assert (rig.engine.controls.begun, rig.control.state) == ([], State.RUNNING)


@pytest.mark.parametrize(
    ("directory", "problem"),
    [
        ("loop", "'loop' cannot be looked at: its links go round in circles"),
        ("loop-in", "'loop-in' cannot be looked at: its links go round in circles"),
        ("x" * 300, "cannot be looked at: File name too long"),
        ("piped", "weights is neither a file nor a directory"),
    ],
)
async def test_what_cannot_be_read_is_no_checkpoint(rig: Rig, directory: str, problem: str) -> None:
    """A pipe would be waited for, for ever, and with it every later operation."""
    (rig.root / "loop").symlink_to("loop")
    (rig.root / "loop-in").mkdir()
    (rig.root / "loop-in" / "weights").symlink_to("weights")
    (rig.root / "piped").mkdir()
    os.mkfifo(rig.root / "piped" / "weights")
    with pytest.raises(NotFound, match=rf"^directory: .*{problem}$"):
        await rig.control.update_weights(directory, "2")
    assert rig.engine.controls.begun == []
    await rig.do(Operation.UPDATE_WEIGHTS)


async def test_without_a_root_no_weights_are_loaded(rig: Rig) -> None:
    control = Control(rig.engine, rig.calls, weights_root=None, on_change=lambda: asyncio.sleep(0))
    with pytest.raises(StateForbids, match="--weights-root"):
        await control.update_weights("step-1", "1")


async def test_a_cache_that_running_calls_hold_is_not_forgotten(rig: Rig) -> None:
    rig.engine.controls.cache_is_held = True
    with pytest.raises(StateForbids, match="running calls hold cached prefixes: pause first"):
        await rig.control.reset_prefix_cache()
    await rig.be(State.PAUSED)
    await rig.control.reset_prefix_cache()


async def test_waking_part_by_part_and_weights_in_between(rig: Rig) -> None:
    await rig.control.sleep(1, KEEP)
    with pytest.raises(StateForbids):
        await rig.do(Operation.UPDATE_WEIGHTS)
    await rig.control.wake_up(["weights"])
    assert rig.control.state is State.ASLEEP
    await rig.do(Operation.UPDATE_WEIGHTS)
    await rig.control.wake_up(["kv_cache"])
    assert rig.control.state is State.RUNNING
    assert [step[0] for step in rig.did] == ["sleep", "wake_up", "update_weights", "set_weight_version", "wake_up"]


@pytest.mark.parametrize("tags", [[], ["weights", "kv_cache"], ["kv_cache"]])
async def test_after_discarding_the_weights_nothing_is_sampled_until_there_are_others(
    rig: Rig, tags: list[str]
) -> None:
    await rig.control.sleep(2, KEEP)
    await rig.control.wake_up(tags)
    assert rig.engine.controls.asleep == {"kv_cache"}
    await rig.control.wake_up([])
    assert rig.control.state is State.ASLEEP
    await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.RUNNING
    await rig.do(Operation.SLEEP)
    await rig.do(Operation.WAKE_UP)
    assert rig.control.state is State.RUNNING


async def test_who_wakes_only_the_weights_wakes_the_rest_too(rig: Rig) -> None:
    await rig.control.sleep(2, KEEP)
    await rig.control.wake_up(["weights"])
    await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.ASLEEP
    await rig.control.wake_up(["kv_cache"])
    assert rig.control.state is State.RUNNING


async def test_weights_that_a_trainer_sends_itself_end_the_wait_for_them(rig: Rig) -> None:
    await rig.control.sleep(2, KEEP)
    await rig.control.wake_up([])
    rig.engine.controls.change_weights()
    await rig.control.wake_up([])
    assert rig.control.state is State.RUNNING


async def test_a_failed_update_in_sleep_can_be_mended(rig: Rig) -> None:
    await rig.control.sleep(2, KEEP)
    await rig.control.wake_up([])
    await rig.break_weights()
    with pytest.raises(StateForbids):
        await rig.do(Operation.WAKE_UP)
    with pytest.raises(StateForbids):
        await rig.do(Operation.PAUSE)
    await rig.do(Operation.UPDATE_WEIGHTS)
    assert rig.control.state is State.RUNNING


async def test_levels_and_tags_are_those_that_there_are(rig: Rig) -> None:
    for level in (0, 3):
        with pytest.raises(InvalidArgument, match=f"level: must be 1 or 2, got {level}"):
            await rig.control.sleep(level, KEEP)
    with pytest.raises(InvalidArgument, match="tags: there is no 'all'; there are: weights, kv_cache"):
        await rig.control.wake_up(["weights", "all"])
