"""What an engine was last told to do, and whether it is held, learnt from what is done to the engine object."""

import asyncio

import pytest

from support.driven import Driven
from tokentape_sidecar.engine_controls import Phase
from tokentape_sidecar.weights import WeightObserver


async def test_an_engine_is_held_while_it_is_paused_asleep_or_waits_for_its_workers_E13(
    driven: Driven, observer: WeightObserver
) -> None:
    assert not observer.held
    await driven.pause_generation(mode="keep")
    assert observer.held
    await driven.resume_generation()
    assert not observer.held
    await driven.sleep()
    await driven.wake_up(["weights"])
    assert observer.held
    await driven.wake_up(["kv_cache"])
    assert not observer.held
    driven.workers_answer.clear()
    calls = [asyncio.create_task(driven.collective_rpc(method)) for method in ("update_weight", "init_process_group")]
    await asyncio.sleep(0)
    assert observer.held
    calls[0].cancel()
    await asyncio.sleep(0)
    assert observer.held
    driven.workers_answer.set()
    await calls[1]
    # The weights' update is still open, but nobody keeps the engine from sampling.
    assert not observer.held


async def test_a_worker_call_that_fails_holds_nothing(driven: Driven, observer: WeightObserver) -> None:
    with pytest.raises(RuntimeError, match="update_weights_badly"):
        await driven.collective_rpc("update_weights_badly")
    assert not observer.held


async def test_the_phase_is_what_the_engine_was_last_told(driven: Driven, observer: WeightObserver) -> None:
    assert observer.phase is Phase.RUNNING
    await driven.pause_generation(mode="keep")
    assert observer.phase is Phase.PAUSED
    await driven.sleep()
    assert observer.phase is Phase.ASLEEP
    await driven.wake_up(["weights"])
    assert observer.phase is Phase.ASLEEP
    await driven.wake_up(["kv_cache"])
    assert observer.phase is Phase.RUNNING
    await driven.sleep(0)
    assert observer.phase is Phase.PAUSED


async def test_an_engine_that_does_not_answer_its_driver_is_not_held_E13() -> None:
    """It answers between two steps, so that its silence is no pause's."""
    answers = asyncio.Event()

    class Silent(Driven):
        async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
            await answers.wait()

        async def resume_generation(self) -> None:
            await answers.wait()

    silent = Silent()
    observer = WeightObserver(silent)
    for ask, held_then in ((lambda: silent.pause_generation(mode="keep"), True), (silent.resume_generation, False)):
        answers.clear()
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0)
        assert not observer.held
        answers.set()
        await asking
        assert observer.held is held_then


async def test_an_engine_that_waits_for_its_requests_samples() -> None:
    waits = asyncio.Event()

    class Waiting(Driven):
        async def sleep(self, level: int = 1, *, mode: str = "abort") -> None:
            await waits.wait()

    waiting = Waiting()
    observer = WeightObserver(waiting)
    for mode, held in (("wait", False), ("keep", True)):
        waits.clear()
        sleeping = asyncio.create_task(waiting.sleep(mode=mode))
        await asyncio.sleep(0)
        assert observer.held is held
        waits.set()
        await sleeping
        await waiting.wake_up()


async def test_a_change_in_progress_is_known(driven: Driven, observer: WeightObserver) -> None:
    driven.workers_answer.clear()
    calls = [asyncio.create_task(driven.collective_rpc(method)) for method in ("init_process_group", "update_weight")]
    await asyncio.sleep(0)
    assert observer.updating
    driven.workers_answer.set()
    await asyncio.gather(*calls)
    assert not observer.updating
