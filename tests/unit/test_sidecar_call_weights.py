"""Where a call's weights are uncertain, and where what was computed by earlier ones is still used."""

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st

from support.driven import Driven
from tokentape_sidecar.call_weights import CallWeights
from tokentape_sidecar.engine import Weights
from tokentape_sidecar.weights import WeightObserver


async def test_an_update_while_sampling_is_uncertain(driven: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await driven.collective_rpc("reload_weights")
    assert running.of_step(None) == Weights("1", boundary_uncertain=True, stale_cache=True)


async def test_a_kept_cache_is_stale_until_it_is_cleared(driven: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await driven.pause_generation(mode="keep", clear_cache=False)
    await driven.collective_rpc("reload_weights")
    await driven.resume_generation()
    assert running.of_step(None) == Weights("1", stale_cache=True)
    born_on_old_prefixes = CallWeights(observer)
    assert born_on_old_prefixes.of_step(None) == Weights("1", stale_cache=True)
    await driven.reset_prefix_cache()
    assert CallWeights(observer).of_step(None) == Weights("1")
    assert born_on_old_prefixes.of_step(None) == Weights("1", stale_cache=True)
    await driven.reset_prefix_cache(reset_running_requests=True)
    assert running.of_step(None) == Weights("1")
    assert born_on_old_prefixes.of_step(None) == Weights("1")


async def test_a_cache_reset_that_failed_cleared_nothing(driven: Driven, observer: WeightObserver) -> None:
    CallWeights(observer).of_step(None)
    await driven.pause_generation(mode="keep", clear_cache=False)
    await driven.collective_rpc("update_weight")
    driven.blocks_in_use = True
    assert not await driven.reset_prefix_cache()
    await driven.resume_generation()
    CallWeights(observer).of_step(None)
    assert CallWeights(observer).of_step(None) == Weights("1", stale_cache=True)


async def test_the_lightest_sleep_keeps_the_cache(driven: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await driven.sleep(0)
    await driven.collective_rpc("update_weight")
    await driven.wake_up()
    assert running.of_step(None) == Weights("1", stale_cache=True)


async def test_only_calls_that_ran_across_an_update_have_an_uncertain_boundary(
    driven: Driven, observer: WeightObserver
) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await driven.collective_rpc("update_weight")
    assert running.of_step(None).boundary_uncertain
    assert not CallWeights(observer).of_step(None).boundary_uncertain


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
