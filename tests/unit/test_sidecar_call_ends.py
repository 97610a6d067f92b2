"""How calls end early: aborted, abandoned or failed, on a tape that is sealed, at a sidecar that drains."""

from __future__ import annotations

import asyncio

import pytest

from support.calls import finish_reason, new_tape, prompt
from support.engines import ManualEngine
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import FinishReason
from tokentape_sidecar.errors import (
    CallError,
    EngineDead,
    InvalidArgument,
    ShuttingDown,
    TapeSealed,
)
from tokentape_sidecar.tape import CallFailed

# By whoever asked, or by the engine


async def test_abort_goes_to_the_engine_and_leaves_what_was_sampled() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.sinks[record.call_id].append(0, [5, 6], [-1.0, -1.0])
    await calls.abort(record.call_id)
    await calls.abort(record.call_id)
    assert engine.aborted == [record.call_id]
    assert list(record.choices[0].token_ids) == [5, 6]
    assert finish_reason(record) is FinishReason.ABORT
    assert calls.running_count == 0


async def test_aborting_an_unknown_or_finished_call_does_nothing_C03() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.finish(record.call_id, 5)
    await calls.abort(record.call_id)
    await calls.abort("call-unknown")
    assert engine.aborted == []


async def test_an_abort_that_comes_before_the_engine_took_the_call_still_ends_it() -> None:
    engine = ManualEngine()
    engine.takes_calls.clear()
    calls = Calls(engine)
    start = asyncio.create_task(calls.start(prompt(2), None))
    await asyncio.sleep(0)
    await calls.abort(engine.submitted[0].call_id)
    engine.takes_calls.set()
    record = await start
    assert finish_reason(record) is FinishReason.ABORT
    assert calls.running_count == 0


async def test_a_client_that_leaves_while_the_engine_takes_its_call_leaves_nothing_running() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    calls = Calls(engine)
    start = asyncio.create_task(calls.start(prompt(2), tape))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.sleep(0)
    assert engine.aborted == [engine.submitted[0].call_id]
    assert tape.calls[0].ended
    assert calls.running_count == 0


async def test_a_client_that_leaves_while_the_engine_takes_its_call_has_abandoned_it() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    starting = asyncio.create_task(Calls(engine).start(prompt(3), tape))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    (record,) = tape.calls
    assert (record.error, finish_reason(record)) == (None, FinishReason.ABORT)
    await asyncio.sleep(0)
    assert engine.aborted == [record.call_id]


async def test_a_call_that_the_engine_refuses_is_a_failed_call_on_the_tape() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.refusal = InvalidArgument("sampling.structured_output.regex", "does not compile")
    calls = Calls(engine)
    with pytest.raises(InvalidArgument, match="does not compile"):
        await calls.start(prompt(2), tape)
    assert isinstance(tape.read(0, 10)[0][-1], CallFailed)
    assert calls.running_count == 0
    engine.refusal = None
    await calls.start(prompt(2), tape)


async def test_a_call_that_fails_by_what_the_engine_gave_is_ended_at_the_engine() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.sinks[record.call_id].append(0, [5], [])
    await asyncio.sleep(0)
    assert isinstance(record.error, CallError)
    assert engine.aborted == [record.call_id]


async def test_an_abandoned_call_is_aborted_and_a_finished_one_left_alone() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    left, done = await calls.start(prompt(2), None), await calls.start(prompt(2), None)
    engine.finish(done.call_id, 5)
    calls.abandon(left)
    calls.abandon(done)
    await left.wait_ended()
    assert engine.aborted == [left.call_id]


async def test_an_engine_that_dies_ends_all_calls_with_its_error() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    records = [await calls.start(prompt(2), None) for _ in range(2)]
    engine.sinks[records[0].call_id].append(0, [5], [-1.0])
    engine.die(EngineDead("the engine died"))
    assert [str(record.error) for record in records] == ["the engine died"] * 2
    assert list(records[0].choices[0].token_ids) == [5]
    assert calls.running_count == 0


# Sealing


async def test_sealing_aborts_what_runs_and_refuses_later_calls_for_good() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    running = await calls.start(prompt(2, n=2), tape)
    done = await calls.start(prompt(2), tape)
    engine.sinks[running.call_id].append(1, [5], [-1.0])
    engine.finish(done.call_id, 6)
    await calls.seal(tape)
    assert tape.sealed
    assert [finish_reason(running, choice) for choice in range(2)] == [FinishReason.ABORT] * 2
    assert finish_reason(done) is FinishReason.STOP
    assert tape.sampled_token_count == 2
    end = tape.end_sequence
    await calls.seal(tape)
    assert tape.end_sequence == end
    with pytest.raises(TapeSealed):
        await calls.start(prompt(2), tape)


async def test_a_call_cannot_slip_onto_a_tape_that_is_being_sealed() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    await calls.start(prompt(2), tape)
    engine.hands_over.clear()
    seal = asyncio.create_task(calls.seal(tape))
    await asyncio.sleep(0)
    with pytest.raises(TapeSealed):
        await calls.start(prompt(2), tape)
    assert not tape.sealed
    engine.hands_over.set()
    await seal
    assert tape.sealed


async def test_sealing_waits_for_a_call_that_the_engine_is_still_taking() -> None:
    engine, tape = ManualEngine(), new_tape()
    engine.takes_calls.clear()
    calls = Calls(engine)
    start = asyncio.create_task(calls.start(prompt(2), tape))
    await asyncio.sleep(0)
    seal = asyncio.create_task(calls.seal(tape))
    await asyncio.sleep(0)
    assert not tape.sealed
    engine.takes_calls.set()
    assert finish_reason(await start) is FinishReason.ABORT
    await seal
    assert tape.sealed


async def test_a_tape_is_sealed_even_when_whoever_asked_for_it_has_gone() -> None:
    engine, tape = ManualEngine(), new_tape()
    calls = Calls(engine)
    await calls.start(prompt(2), tape)
    engine.hands_over.clear()
    seal = asyncio.create_task(calls.seal(tape))
    await asyncio.sleep(0)
    seal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await seal
    engine.hands_over.set()
    async with asyncio.timeout(1):
        while not tape.sealed:
            await tape.wait_changed()


# Draining


async def test_draining_refuses_new_calls_and_lets_running_ones_finish() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    drain = asyncio.create_task(calls.drain(grace_seconds=30))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDown):
        await calls.start(prompt(2), None)
    assert not drain.done()
    engine.finish(record.call_id, 5)
    await drain
    assert finish_reason(record) is FinishReason.STOP
    assert engine.aborted == []


async def test_draining_aborts_what_outlives_the_grace_period() -> None:
    engine = ManualEngine()
    calls = Calls(engine)
    records = [await calls.start(prompt(2), None) for _ in range(2)]
    await calls.drain(grace_seconds=0.01)
    assert [finish_reason(record) for record in records] == [FinishReason.ABORT] * 2


async def test_draining_ends_even_when_the_engine_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape_sidecar.calls.ABORT_SECONDS", 0.01)
    engine = ManualEngine()
    calls = Calls(engine)
    record = await calls.start(prompt(2), None)
    engine.hands_over.clear()
    async with asyncio.timeout(1):
        await calls.drain(grace_seconds=0)
    assert isinstance(record.error, ShuttingDown)
    await calls.close()
