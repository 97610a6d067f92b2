"""ControlService over its socket, with eight calls in flight: the scripted engine, or one moved by hand."""

from __future__ import annotations

import asyncio
from itertools import groupby

import grpc
import pytest
from grpc_health.v1 import health_pb2

from support.controlled import (
    ABORT,
    KEEP,
    STEPS,
    WAIT,
    Controlled,
    Controller,
    controlled,
    controlled_script,
    long_call,
)
from support.engines import ManualEngine
from support.refusals import refused
from support.scripted import call, tokens
from support.waiting import eventually
from tokentape.v1 import control_pb2, tape_pb2, types_pb2
from tokentape_sidecar.errors import EngineDead

COUNT = 8
Status = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
BROKEN = "an update of the weights failed half way"
EXPECTED = [*range(10, 10 + STEPS - 1), 9]


async def assert_silent(it: Controlled, calls: list[object] | None = None) -> None:
    """Nothing is sampled for some steps."""
    before = await it.controller.stub.ListTapes(control_pb2.ListTapesRequest())
    await asyncio.sleep(0.1)
    after = await it.controller.stub.ListTapes(control_pb2.ListTapesRequest())
    assert [tape.sampled_token_count for tape in before.tapes] == [tape.sampled_token_count for tape in after.tapes]


async def test_a_pause_keeps_calls_in_flight_and_they_sample_on() -> None:
    async with controlled_script() as it:
        calls = await it.start_sampling(COUNT)
        assert await it.controller.phase() == "RUNNING"
        await it.controller.pause(KEEP)
        late = await it.start(1)
        await assert_silent(it)
        state = await it.controller.state()
        assert (state.state, state.running_calls) == (control_pb2.ENGINE_STATE_PAUSED, COUNT + 1)
        assert await it.client.health_of() == SERVING
        await it.controller.pause(KEEP)
        await it.controller.resume()
        await it.controller.resume()
        for one in [*calls, *late]:
            assert (await one.generating).token_ids() == EXPECTED
        assert await it.controller.phase() == "RUNNING"


async def test_a_pause_waits_for_calls_in_flight_and_new_ones_wait_for_its_end() -> None:
    async with controlled_script() as it:
        calls = await it.start_sampling(COUNT)
        pausing = asyncio.create_task(it.controller.pause(WAIT))
        await asyncio.sleep(0.05)
        late = await it.start(1)
        await pausing
        assert [(await one.generating).token_ids() for one in calls] == [EXPECTED] * COUNT
        assert await it.controller.phase() == "PAUSED"
        assert await it.sampled(late) == [0]
        await it.controller.resume()
        assert (await late[0].generating).token_ids() == EXPECTED


async def test_a_pause_that_waits_is_called_off_when_its_asker_leaves() -> None:
    async with controlled_script() as it:
        calls = await it.start_sampling(COUNT)
        request = control_pb2.PauseGenerationRequest(mode=WAIT)
        with refused(Status.DEADLINE_EXCEEDED, ""):
            await it.controller.stub.PauseGeneration(request, timeout=0.1)
        late = await it.start(1)
        for one in [*calls, *late]:
            assert (await one.generating).token_ids() == EXPECTED
        assert await it.controller.phase() == "RUNNING"


async def test_a_pause_aborts_calls_in_flight_and_keeps_what_they_sampled() -> None:
    async with controlled_script() as it:
        calls = await it.start_sampling(COUNT)
        await it.controller.pause(ABORT)
        for one in calls:
            generated = await one.generating
            assert generated.finish_reason() == types_pb2.FINISH_REASON_ABORT
            assert EXPECTED[: len(generated.token_ids())] == generated.token_ids() != EXPECTED
        late = await it.start(1)
        await assert_silent(it)
        await it.controller.pause(ABORT)
        assert (await late[0].generating).token_ids() == []
        await it.controller.resume()


async def test_weights_updated_in_mid_flight_begin_at_a_token_that_each_tape_names() -> None:
    async with controlled_script() as it:
        it.checkpoint("step-2", delay_ms=30)
        await it.controller.stub.SetWeightVersion(control_pb2.SetWeightVersionRequest(weight_version="1"))
        calls = await it.start_sampling(COUNT)
        await it.controller.pause()
        before = await it.sampled(calls)
        await it.controller.update("step-2", "2")
        assert (await it.controller.state()).weight_version == "2"
        assert await it.controller.phase() == "PAUSED"
        assert await it.sampled(calls) == before
        await it.controller.resume()
        for one, count in zip(calls, before, strict=True):
            assert (await one.generating).token_ids() == EXPECTED
            runs = await it.runs(one)
            assert [(run.weight_version, len(run.token_ids)) for run in merged(runs)] == [
                ("1", count),
                ("2", STEPS - count),
            ]
            assert not any(run.boundary_uncertain or run.stale_cache for run in runs)


def merged(runs: list[tape_pb2.TapeEntry.TokensSampled]) -> list[tape_pb2.TapeEntry.TokensSampled]:
    """One run per version."""
    joined: list[tape_pb2.TapeEntry.TokensSampled] = []
    for _, group in groupby(runs, key=lambda run: run.weight_version):
        first = tape_pb2.TapeEntry.TokensSampled()
        for run in group:
            first.MergeFrom(run)
        joined.append(first)
    return joined


async def test_an_engine_that_samples_is_paused_for_an_update_and_goes_on() -> None:
    async with controlled_script() as it:
        it.checkpoint("step-2", delay_ms=50)
        calls = await it.start_sampling(COUNT)
        await it.controller.update("step-2", "2")
        assert await it.controller.phase() == "RUNNING"
        for one in calls:
            assert (await one.generating).token_ids() == EXPECTED
            runs = merged(await it.runs(one))
            assert [run.weight_version for run in runs] == ["", "2"]
            assert not any(run.boundary_uncertain or run.stale_cache for run in runs)


async def test_a_kept_cache_is_told_of_until_it_is_forgotten() -> None:
    async with controlled_script() as it:
        for name in ("step-2", "step-3"):
            it.checkpoint(name)
        calls = await it.start_sampling(COUNT)
        with refused(Status.FAILED_PRECONDITION, "running calls hold cached prefixes: pause first"):
            await it.controller.stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
        await it.controller.pause(keep_prefix_cache=True)
        await it.controller.update("step-2", "2")
        await it.controller.resume()
        before = await it.sampled(calls)
        await it.until_sampled(calls, max(before) + 2)
        await it.controller.pause(keep_prefix_cache=True)
        await it.controller.update("step-3", "3")
        await it.controller.stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())
        await it.controller.resume()
        for one in calls:
            await one.generating
            stale = [(run.weight_version, run.stale_cache) for run in merged(await it.runs(one))]
            assert stale == [("", False), ("2", True), ("3", False)]


async def test_an_update_that_fails_half_way_fails_what_runs_until_one_succeeds() -> None:
    async with controlled_script() as it:
        it.checkpoint("bad", fail="shapes differ")
        it.checkpoint("good")
        calls = await it.start_sampling(COUNT)
        with refused(Status.INTERNAL, "the engine failed to update the weights: shapes differ"):
            await it.controller.update("bad", "2")
        for one in calls:
            with refused(Status.UNAVAILABLE, BROKEN):
                await one.generating
            last = (await it.client.entries(one.tape))[-1]
            assert BROKEN in last.call_failed.message
        state = await it.controller.state()
        assert state.state == control_pb2.ENGINE_STATE_WEIGHTS_BROKEN
        assert state.problem.endswith("bad failed half way: shapes differ")
        for service in ("", "tokentape.v1.GenerationService", "tokentape.v1.TapeService"):
            assert await it.client.health_of(service) == NOT_SERVING
        assert await it.controller.health() == SERVING
        with refused(Status.UNAVAILABLE, BROKEN):
            await it.client.generate()
        with refused(Status.FAILED_PRECONDITION, "cannot resume generation while the engine has weights of an update"):
            await it.controller.resume()
        with refused(Status.INTERNAL, "shapes differ"):
            await it.controller.update("bad", "2")

        await it.controller.update("good", "2")
        assert await it.client.health_of() == SERVING
        assert (await it.controller.state()).problem == ""
        generated = await it.client.generate()
        assert (generated.token_ids(), set(generated.weight_versions())) == (EXPECTED, {"2"})
        await it.client.seal(calls[0].tape)


async def test_what_is_wrong_with_a_request_changes_nothing() -> None:
    async with controlled_script() as it:
        it.checkpoint("good")
        (it.root / "empty").mkdir()
        calls = await it.start_sampling(1)
        for directory, version, status, words in (
            ("../etc", "2", Status.INVALID_ARGUMENT, "^directory: "),
            ("/etc", "2", Status.INVALID_ARGUMENT, "^directory: "),
            ("good", "", Status.INVALID_ARGUMENT, "^weight_version: "),
            ("empty", "2", Status.NOT_FOUND, "^directory: .*weights.json"),
            ("absent", "2", Status.NOT_FOUND, "^directory: "),
        ):
            with refused(status, words):
                await it.controller.update(directory, version)
        with refused(Status.INVALID_ARGUMENT, "^mode: must be PAUSE_MODE_KEEP"):
            await it.controller.pause(control_pb2.PAUSE_MODE_UNSPECIFIED)
        with refused(Status.INVALID_ARGUMENT, "^level: must be 1 or 2"):
            await it.controller.stub.Sleep(control_pb2.SleepRequest(level=3))
        with refused(Status.INVALID_ARGUMENT, "^tags: there is no 'cache'"):
            await it.controller.stub.WakeUp(control_pb2.WakeUpRequest(tags=["cache"]))
        with refused(Status.INVALID_ARGUMENT, "^weight_version: "):
            await it.controller.stub.SetWeightVersion(control_pb2.SetWeightVersionRequest())
        assert (await calls[0].generating).token_ids() == EXPECTED


async def test_a_second_controller_waits_its_turn_and_sees_what_goes_on() -> None:
    async with controlled_script() as it:
        it.checkpoint("slow", delay_ms=300)
        it.checkpoint("quick")
        second = Controller(it.address)
        calls = await it.start_sampling(COUNT)
        updating = asyncio.create_task(it.controller.update("slow", "2"))
        await second.until_phase("UPDATING_WEIGHTS")
        await asyncio.gather(second.update("quick", "3"), updating)
        assert updating.done()
        assert (await second.state()).weight_version == "3"
        await asyncio.gather(*(each.pause() for each in (it.controller, second)), it.controller.resume())
        await second.channel.close()
        await it.controller.resume()
        for one in calls:
            assert (await one.generating).token_ids() == EXPECTED


@pytest.mark.parametrize("how", ["deadline", "cancel", "close"])
async def test_an_update_ends_though_its_client_has_gone(how: str) -> None:
    async with controlled_script() as it:
        it.checkpoint("slow", delay_ms=300)
        calls = await it.start_sampling(COUNT)
        leaving = Controller(it.address)
        updating = asyncio.create_task(leaving.update("slow", "2", deadline_seconds=0.1 if how == "deadline" else None))
        await asyncio.sleep(0.1)
        if how == "cancel":
            updating.cancel()
        if how != "deadline":
            await leaving.channel.close()
        await asyncio.wait({updating})
        # The next operation waits for it.
        await it.controller.resume()
        state = await it.controller.state()
        assert (state.weight_version, state.state) == ("2", control_pb2.ENGINE_STATE_RUNNING)
        for one in calls:
            assert (await one.generating).token_ids() == EXPECTED
        await leaving.channel.close()


async def test_calls_wait_while_the_engine_sleeps() -> None:
    async with controlled_script() as it:
        it.checkpoint("step-2")
        calls = await it.start_sampling(COUNT)
        await it.controller.stub.Sleep(control_pb2.SleepRequest())
        await it.controller.stub.Sleep(control_pb2.SleepRequest())
        assert await it.controller.phase() == "ASLEEP"
        assert await it.client.health_of() == SERVING
        calls += await it.start(1)
        await assert_silent(it)
        with refused(Status.FAILED_PRECONDITION, "cannot resume generation while the engine sleeps"):
            await it.controller.resume()
        with refused(Status.FAILED_PRECONDITION, "cannot update the weights while the engine sleeps"):
            await it.controller.update("step-2", "2")
        await it.controller.stub.WakeUp(control_pb2.WakeUpRequest(tags=["weights"]))
        await it.controller.update("step-2", "2")
        await assert_silent(it)
        await it.controller.stub.WakeUp(control_pb2.WakeUpRequest(tags=["kv_cache"]))
        await it.controller.stub.WakeUp(control_pb2.WakeUpRequest())
        for one in calls:
            assert (await one.generating).token_ids() == EXPECTED
            assert not any(run.stale_cache for run in await it.runs(one))


async def test_after_weights_were_discarded_an_update_wakes_the_rest() -> None:
    async with controlled_script() as it:
        it.checkpoint("step-2")
        calls = await it.start_sampling(COUNT)
        await it.controller.stub.Sleep(control_pb2.SleepRequest(level=2, mode=KEEP))
        before = await it.sampled(calls)
        await it.controller.stub.WakeUp(control_pb2.WakeUpRequest())
        await assert_silent(it)
        await it.controller.update("step-2", "2")
        for one, count in zip(calls, before, strict=True):
            await one.generating
            assert [len(run.token_ids) for run in merged(await it.runs(one))] == [count, STEPS - count]


async def test_a_dead_engine_is_told_of_and_takes_nothing() -> None:
    engine = ManualEngine()
    async with controlled(engine) as it:
        (it.root / "step-2").mkdir()
        (it.root / "step-2" / "weights").touch()
        calls = await it.start(COUNT)
        await eventually(lambda: len(engine.sinks) == COUNT)
        engine.controls.failures["update_weights"] = EngineDead("the engine is dead")
        with refused(Status.UNAVAILABLE, "the engine is dead"):
            await it.controller.update("step-2", "2")
        engine.die(EngineDead("the engine died while it sampled this call"))
        for one in calls:
            with refused(Status.UNAVAILABLE, "the engine died"):
                await one.generating
        await it.controller.until_phase("DEAD")
        with refused(Status.UNAVAILABLE, "the engine is dead"):
            await it.controller.resume()
        assert await it.client.health_of() == NOT_SERVING
        assert await it.controller.health() == SERVING


async def test_what_the_engine_cannot_do_is_told_so() -> None:
    engine = ManualEngine()
    engine.controls.failures["sleep"] = NotImplementedError("no such device")
    async with controlled(engine) as it:
        with refused(Status.INTERNAL, "the engine failed to sleep: no such device"):
            await it.controller.stub.Sleep(control_pb2.SleepRequest())
        assert await it.controller.phase() == "RUNNING"


async def test_tapes_are_listed_by_hashes() -> None:
    async with controlled_script(call(tokens(10, 11, finish="stop")), long_call()) as it:
        assert not (await it.controller.stub.ListTapes(control_pb2.ListTapesRequest())).tapes
        tape = await it.client.open_tape()
        await it.client.generate(tape_id=tape.tape_id)
        await it.client.seal(tape)
        await it.start_sampling(1)
        first, second = (await it.controller.stub.ListTapes(control_pb2.ListTapesRequest())).tapes
        assert (first.call_count, first.sampled_token_count, first.sealed) == (1, 2, True)
        assert first.size_bytes > 0
        assert (first.running_call_count, first.watcher_count) == (0, 0)
        assert (second.call_count, second.running_call_count, second.sealed) == (1, 1, False)
        assert tape.tape_id not in str(first)


async def test_a_sidecar_that_stops_lets_an_update_end_and_begins_no_other() -> None:
    async with controlled_script() as it:
        it.checkpoint("slow", delay_ms=500)
        calls = await it.start_sampling(1)
        updating = asyncio.create_task(it.controller.update("slow", "2"))
        await it.controller.until_phase("UPDATING_WEIGHTS")
        waiting = asyncio.create_task(it.controller.pause())
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(it.running.sidecar.stop(grace_seconds=10))
        await updating
        with refused(Status.UNAVAILABLE, "the sidecar is shutting down"):
            await waiting
        assert (await calls[0].generating).token_ids() == EXPECTED
        await stopping
