"""The weights that a call's tokens carry, learnt from what is done to the engine object."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape_sidecar.engine import Weights
from tokentape_sidecar.engine_controls import Phase
from tokentape_sidecar.weights import CallWeights, WeightObserver


class Driven:
    """What a trainer drives: the engine's control methods, which here do nothing else."""

    __slots__ = ("__dict__", "blocks_in_use", "workers_answer")

    def __init__(self) -> None:
        self.blocks_in_use = False
        self.workers_answer = asyncio.Event()
        self.workers_answer.set()

    async def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> str:
        del args, kwargs
        await self.workers_answer.wait()
        if method == "update_weights_badly":
            raise RuntimeError(method)
        return method

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None: ...
    async def resume_generation(self) -> None: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return tags is None or "kv_cache" in tags

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return reset_running_requests or not self.blocks_in_use


@pytest.fixture
def engine() -> Driven:
    return Driven()


@pytest.fixture
def observer(engine: Driven) -> WeightObserver:
    return WeightObserver(engine)


async def test_before_any_update_a_version_is_empty(observer: WeightObserver) -> None:
    assert CallWeights(observer).of_step(None) == Weights()
    assert CallWeights(observer).of_step("default") == Weights()


async def test_openrlhfs_order_gives_the_next_version_from_the_next_step_on(
    engine: Driven, observer: WeightObserver
) -> None:
    running = CallWeights(observer)
    assert running.of_step(None) == Weights()
    await engine.pause_generation(mode="keep")
    for _ in range(3):  # one call per parameter
        await engine.collective_rpc("update_weight", args=("name",))
    await engine.reset_prefix_cache()
    await engine.resume_generation()
    assert observer.version == "1"
    assert running.of_step(None) == Weights("1")
    assert CallWeights(observer).of_step(None) == Weights("1")
    await engine.sleep()
    await engine.wake_up()
    await engine.pause_generation(mode="keep")
    await engine.collective_rpc("update_weight")
    await engine.resume_generation()
    assert CallWeights(observer).of_step(None) == Weights("2")


async def test_worker_calls_that_change_no_weights_open_no_update(engine: Driven, observer: WeightObserver) -> None:
    for method in ("init_process_group", "compute_weight_checksums", "get_weights", "offload_weights"):
        await engine.collective_rpc(method)
    assert observer.version == ""


@pytest.mark.parametrize(
    "method", ["update_weight", "update_weights", "reload_weights", "update_weight_cuda_ipc", "start_weight_update"]
)
async def test_worker_calls_that_change_weights_are_known(
    method: str, engine: Driven, observer: WeightObserver
) -> None:
    assert await engine.collective_rpc(method) == method
    assert observer.version == "1"


async def test_an_update_while_sampling_is_uncertain(engine: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await engine.collective_rpc("reload_weights")
    assert running.of_step(None) == Weights("1", boundary_uncertain=True, stale_cache=True)


async def test_a_kept_cache_is_stale_until_it_is_cleared(engine: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("reload_weights")
    await engine.resume_generation()
    assert running.of_step(None) == Weights("1", stale_cache=True)
    born_on_old_prefixes = CallWeights(observer)
    assert born_on_old_prefixes.of_step(None) == Weights("1", stale_cache=True)
    await engine.reset_prefix_cache()
    assert CallWeights(observer).of_step(None) == Weights("1")
    assert born_on_old_prefixes.of_step(None) == Weights("1", stale_cache=True)
    await engine.reset_prefix_cache(reset_running_requests=True)
    assert running.of_step(None) == Weights("1")
    assert born_on_old_prefixes.of_step(None) == Weights("1")


async def test_a_stamp_names_the_version_and_later_updates_count_from_it(
    engine: Driven, observer: WeightObserver
) -> None:
    running = CallWeights(observer)
    assert running.of_step("default") == Weights()
    await engine.pause_generation(mode="keep")
    await engine.collective_rpc("reload_weights")
    await engine.resume_generation()
    assert running.of_step("v2") == Weights("v2")
    await engine.pause_generation(mode="keep")
    await engine.collective_rpc("reload_weights")
    await engine.resume_generation()
    assert running.of_step("v2") == Weights("v2+1")
    assert running.of_step("v3") == Weights("v3")


async def test_a_failing_worker_call_still_raises_and_opens_an_update(engine: Driven, observer: WeightObserver) -> None:
    with pytest.raises(RuntimeError):
        await engine.collective_rpc("update_weights_badly")
    assert observer.version == "1"


async def test_a_detached_observer_hears_nothing(engine: Driven, observer: WeightObserver) -> None:
    observer.detach()
    assert await engine.collective_rpc("update_weight") == "update_weight"
    assert observer.version == ""
    assert not vars(engine)


async def test_a_step_that_comes_late_is_of_the_old_weights(engine: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await engine.pause_generation(mode="keep")
    assert running.of_step(None) == Weights()
    await engine.collective_rpc("update_weight")
    assert running.of_step(None) == Weights()
    await engine.collective_rpc("update_weight")
    await engine.resume_generation()
    assert running.of_step(None) == Weights("1")


async def test_a_cache_reset_that_failed_cleared_nothing(engine: Driven, observer: WeightObserver) -> None:
    CallWeights(observer).of_step(None)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("update_weight")
    engine.blocks_in_use = True
    assert not await engine.reset_prefix_cache()
    await engine.resume_generation()
    CallWeights(observer).of_step(None)
    assert CallWeights(observer).of_step(None) == Weights("1", stale_cache=True)


async def test_the_lightest_sleep_keeps_the_cache(engine: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await engine.sleep(0)
    await engine.collective_rpc("update_weight")
    await engine.wake_up()
    assert running.of_step(None) == Weights("1", stale_cache=True)


async def test_an_engine_samples_again_when_all_of_it_is_awake(engine: Driven, observer: WeightObserver) -> None:
    await engine.sleep(level=2)
    await engine.wake_up(["weights"])
    await engine.collective_rpc("update_weight")
    await engine.wake_up(["kv_cache"])
    assert CallWeights(observer).of_step(None) == Weights("1")


async def test_only_calls_that_ran_across_an_update_have_an_uncertain_boundary(
    engine: Driven, observer: WeightObserver
) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await engine.collective_rpc("update_weight")
    assert running.of_step(None).boundary_uncertain
    assert not CallWeights(observer).of_step(None).boundary_uncertain


async def test_a_worker_call_by_a_function_is_known_by_its_name(engine: Driven, observer: WeightObserver) -> None:
    def update_weights(worker: object) -> None:
        del worker

    driven: Any = engine
    await driven.collective_rpc(update_weights)
    assert observer.version == "1"


async def test_an_engine_is_held_while_it_is_paused_asleep_or_waits_for_its_workers_E13(
    engine: Driven, observer: WeightObserver
) -> None:
    assert not observer.held
    await engine.pause_generation(mode="keep")
    assert observer.held
    await engine.resume_generation()
    assert not observer.held
    await engine.sleep()
    await engine.wake_up(["weights"])
    assert observer.held
    await engine.wake_up(["kv_cache"])
    assert not observer.held
    engine.workers_answer.clear()
    calls = [asyncio.create_task(engine.collective_rpc(method)) for method in ("update_weight", "init_process_group")]
    await asyncio.sleep(0)
    assert observer.held
    calls[0].cancel()
    await asyncio.sleep(0)
    assert observer.held
    engine.workers_answer.set()
    await calls[1]
    # The weights' update is still open, but nobody keeps the engine from sampling.
    assert not observer.held


async def test_a_worker_call_that_fails_holds_nothing(engine: Driven, observer: WeightObserver) -> None:
    with pytest.raises(RuntimeError, match="update_weights_badly"):
        await engine.collective_rpc("update_weights_badly")
    assert not observer.held


class Named(Driven):
    """As vLLM from 0.32 on, which takes names."""

    __slots__ = ()

    async def update_weight_version(self, new_version: str) -> None: ...


async def test_a_name_holds_from_the_next_step_on(engine: Driven) -> None:
    named = Named()
    observer = WeightObserver(named)
    running = CallWeights(observer)
    running.of_step("default")
    await named.pause_generation(mode="keep")
    await named.collective_rpc("reload_weights")
    assert observer.version == "1"
    await named.update_weight_version("v2")
    assert observer.version == "v2"
    # From before the pause.
    assert running.of_step("default") == Weights()
    await named.resume_generation()
    assert running.of_step("v2") == Weights("v2")
    await named.pause_generation(mode="keep")
    await named.collective_rpc("reload_weights")
    await named.update_weight_version("v2")
    await named.resume_generation()
    assert observer.version == "v2"
    assert running.of_step("v2") == Weights("v2")
    await named.collective_rpc("reload_weights")
    assert observer.version == "v2+1"


async def test_a_name_of_an_engine_that_takes_none_is_kept_here(engine: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await engine.pause_generation(mode="keep")
    await engine.collective_rpc("reload_weights")
    observer.name_weights("v2")
    assert running.of_step(None) == Weights()
    await engine.resume_generation()
    assert running.of_step(None) == Weights("v2")
    observer.name_weights("v3")
    # It may have been sampled before.
    assert running.of_step(None) == Weights("v3", boundary_uncertain=True)
    assert CallWeights(observer).of_step(None) == Weights("v3")


async def test_each_update_is_told_of_once_as_it_begins(engine: Driven, observer: WeightObserver) -> None:
    versions: list[str] = []
    observer.on_change(lambda: versions.append(observer.version))
    for _ in range(2):  # without a step in between
        await engine.pause_generation(mode="keep")
        for _ in range(3):
            await engine.collective_rpc("update_weight")
        await engine.resume_generation()
    assert versions == ["1", "2"]
    observer.end_update()
    await engine.collective_rpc("reload_weights")
    observer.end_update()
    await engine.collective_rpc("reload_weights")
    assert versions == ["1", "2", "3", "4"]


async def test_the_phase_is_what_the_engine_was_last_told(engine: Driven, observer: WeightObserver) -> None:
    assert observer.phase is Phase.RUNNING
    await engine.pause_generation(mode="keep")
    assert observer.phase is Phase.PAUSED
    await engine.sleep()
    assert observer.phase is Phase.ASLEEP
    await engine.wake_up(["weights"])
    assert observer.phase is Phase.ASLEEP
    await engine.wake_up(["kv_cache"])
    assert observer.phase is Phase.RUNNING
    await engine.sleep(0)
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


async def test_a_change_in_progress_is_known(engine: Driven, observer: WeightObserver) -> None:
    engine.workers_answer.clear()
    calls = [asyncio.create_task(engine.collective_rpc(method)) for method in ("init_process_group", "update_weight")]
    await asyncio.sleep(0)
    assert observer.updating
    engine.workers_answer.set()
    await asyncio.gather(*calls)
    assert not observer.updating


OPERATIONS: dict[str, Callable[[Driven], Awaitable[object]]] = {
    "an update": lambda engine: engine.collective_rpc("update_weights"),
    "another call": lambda engine: engine.collective_rpc("check_health"),
    "pause": lambda engine: engine.pause_generation(),
    "pause, cache kept": lambda engine: engine.pause_generation(clear_cache=False),
    "resume": lambda engine: engine.resume_generation(),
    "sleep": lambda engine: engine.sleep(),
    "wake": lambda engine: engine.wake_up(),
    "reset": lambda engine: engine.reset_prefix_cache(),
    "full reset": lambda engine: engine.reset_prefix_cache(reset_running_requests=True),
}


@given(
    st.lists(
        st.one_of(
            st.sampled_from(sorted(OPERATIONS)),
            st.tuples(st.integers(0, 2), st.sampled_from([None, "default", "v1", "v2"])),
            st.sampled_from([("name", "v1"), ("name", "v2")]),
        ),
        max_size=40,
    )
)
def test_what_a_step_repeats_is_remembered_only_while_nothing_changes(
    events: list[str | tuple[int | str, str | None]],
) -> None:
    async def told(*, remember: bool) -> list[Weights]:
        engine = Driven()
        observer = WeightObserver(engine)
        calls = [CallWeights(observer) for _ in range(3)]
        weights: list[Weights] = []
        for event in events:
            match event:
                case str():
                    await OPERATIONS[event](engine)
                    calls.append(CallWeights(observer))
                case "name", str(version):
                    observer.name_weights(version)
                case int(which), stamp:
                    # Whatever it has seen is then of another state.
                    observer.changes += not remember
                    weights.append(calls[-1 - which].of_step(stamp))
                case _:
                    raise AssertionError(event)
        return weights

    assert asyncio.run(told(remember=True)) == asyncio.run(told(remember=False))
