"""The versions that a call's tokens carry, learnt from what is done to the engine object."""

from typing import Any

import pytest

from support.driven import Driven
from tokentape_sidecar.call_weights import CallWeights
from tokentape_sidecar.engine import Weights
from tokentape_sidecar.weights import WeightObserver


async def test_before_any_update_a_version_is_empty(observer: WeightObserver) -> None:
    assert CallWeights(observer).of_step(None) == Weights()
    assert CallWeights(observer).of_step("default") == Weights()


async def test_openrlhfs_order_gives_the_next_version_from_the_next_step_on(
    driven: Driven, observer: WeightObserver
) -> None:
    running = CallWeights(observer)
    assert running.of_step(None) == Weights()
    await driven.pause_generation(mode="keep")
    for _ in range(3):  # one call per parameter
        await driven.collective_rpc("update_weight", args=("name",))
    await driven.reset_prefix_cache()
    await driven.resume_generation()
    assert observer.version == "1"
    assert running.of_step(None) == Weights("1")
    assert CallWeights(observer).of_step(None) == Weights("1")
    await driven.sleep()
    await driven.wake_up()
    await driven.pause_generation(mode="keep")
    await driven.collective_rpc("update_weight")
    await driven.resume_generation()
    assert CallWeights(observer).of_step(None) == Weights("2")


async def test_worker_calls_that_change_no_weights_open_no_update(driven: Driven, observer: WeightObserver) -> None:
    for method in ("init_process_group", "compute_weight_checksums", "get_weights", "offload_weights"):
        await driven.collective_rpc(method)
    assert observer.version == ""


@pytest.mark.parametrize(
    "method", ["update_weight", "update_weights", "reload_weights", "update_weight_cuda_ipc", "start_weight_update"]
)
async def test_worker_calls_that_change_weights_are_known(
    method: str, driven: Driven, observer: WeightObserver
) -> None:
    assert await driven.collective_rpc(method) == method
    assert observer.version == "1"


async def test_a_stamp_names_the_version_and_later_updates_count_from_it(
    driven: Driven, observer: WeightObserver
) -> None:
    running = CallWeights(observer)
    assert running.of_step("default") == Weights()
    await driven.pause_generation(mode="keep")
    await driven.collective_rpc("reload_weights")
    await driven.resume_generation()
    assert running.of_step("v2") == Weights("v2")
    await driven.pause_generation(mode="keep")
    await driven.collective_rpc("reload_weights")
    await driven.resume_generation()
    assert running.of_step("v2") == Weights("v2+1")
    assert running.of_step("v3") == Weights("v3")


async def test_a_failing_worker_call_still_raises_and_opens_an_update(driven: Driven, observer: WeightObserver) -> None:
    with pytest.raises(RuntimeError):
        await driven.collective_rpc("update_weights_badly")
    assert observer.version == "1"


async def test_a_detached_observer_hears_nothing(driven: Driven, observer: WeightObserver) -> None:
    observer.detach()
    assert await driven.collective_rpc("update_weight") == "update_weight"
    assert observer.version == ""
    assert not vars(driven)


async def test_a_step_that_comes_late_is_of_the_old_weights(driven: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await driven.pause_generation(mode="keep")
    assert running.of_step(None) == Weights()
    await driven.collective_rpc("update_weight")
    assert running.of_step(None) == Weights()
    await driven.collective_rpc("update_weight")
    await driven.resume_generation()
    assert running.of_step(None) == Weights("1")


async def test_an_engine_samples_again_when_all_of_it_is_awake(driven: Driven, observer: WeightObserver) -> None:
    await driven.sleep(level=2)
    await driven.wake_up(["weights"])
    await driven.collective_rpc("update_weight")
    await driven.wake_up(["kv_cache"])
    assert CallWeights(observer).of_step(None) == Weights("1")


async def test_a_worker_call_by_a_function_is_known_by_its_name(driven: Driven, observer: WeightObserver) -> None:
    def update_weights(worker: object) -> None:
        del worker

    untyped: Any = driven
    await untyped.collective_rpc(update_weights)
    assert observer.version == "1"


class Named(Driven):
    """As vLLM from 0.32 on, which takes names."""

    __slots__ = ()

    async def update_weight_version(self, new_version: str) -> None: ...


async def test_a_name_holds_from_the_next_step_on() -> None:
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


async def test_a_name_of_an_engine_that_takes_none_is_kept_here(driven: Driven, observer: WeightObserver) -> None:
    running = CallWeights(observer)
    running.of_step(None)
    await driven.pause_generation(mode="keep")
    await driven.collective_rpc("reload_weights")
    observer.name_weights("v2")
    assert running.of_step(None) == Weights()
    await driven.resume_generation()
    assert running.of_step(None) == Weights("v2")
    observer.name_weights("v3")
    # It may have been sampled before.
    assert running.of_step(None) == Weights("v3", boundary_uncertain=True)
    assert CallWeights(observer).of_step(None) == Weights("v3")


async def test_each_update_is_told_of_once_as_it_begins(driven: Driven, observer: WeightObserver) -> None:
    versions: list[str] = []
    observer.on_change(lambda: versions.append(observer.version))
    for _ in range(2):  # without a step in between
        await driven.pause_generation(mode="keep")
        for _ in range(3):
            await driven.collective_rpc("update_weight")
        await driven.resume_generation()
    assert versions == ["1", "2"]
    observer.end_update()
    await driven.collective_rpc("reload_weights")
    observer.end_update()
    await driven.collective_rpc("reload_weights")
    assert versions == ["1", "2", "3", "4"]
