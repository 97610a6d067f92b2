"""When an engine's silence is a stall, and when it is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from support.engines import ManualEngine
from support.waiting import eventually
from tokentape_sidecar.call_request import CallRequest
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.engine import FinishReason
from tokentape_sidecar.errors import CallError, EngineStalled
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.stall import StallWatch
from tokentape_sidecar.tape import CallFailed, Tape, TapeLimits, TapePolicy

LIMIT_SECONDS = 0.2
MESSAGE = r"the engine has stalled: it has emitted nothing for 0\.2 s"


class Watched:
    """An engine, its calls, and the watch on them."""

    def __init__(self) -> None:
        self.engine = ManualEngine()
        self.calls = Calls(self.engine)
        self.changes: list[bool] = []
        """What the watch told, in order."""
        self.watch = StallWatch(self.engine, self.calls, limit_seconds=LIMIT_SECONDS, on_change=self._note)

    async def _note(self) -> None:
        self.changes.append(self.calls.silent_seconds is not None)

    async def start(self, tape: Tape | None = None) -> CallRecord:
        return await self.calls.start(CallRequest([1, 2, 3]), tape)

    async def go_on(self, limits: float, work: Callable[[], object]) -> None:
        """Do `work` again and again, much more often than the limit, for as long as `limits` of them."""
        end = time.monotonic() + limits * LIMIT_SECONDS
        while time.monotonic() < end:
            work()
            await asyncio.sleep(LIMIT_SECONDS / 10)


@asynccontextmanager
async def watched() -> AsyncGenerator[Watched]:
    made = Watched()
    running = asyncio.create_task(made.watch.run())
    yield made
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await made.calls.close()


async def test_a_silent_engines_calls_fail_are_aborted_and_keep_what_they_had_E13() -> None:
    async with watched() as it:
        tape = Tape("main." + "0" * 32, TapeLimits(), TapePolicy())
        records = [await it.start(tape), await it.start()]
        it.engine.emit(records[0].call_id, 7, 8)
        it.engine.hands_over.clear()
        it.engine.answers.clear()
        async with asyncio.timeout(10):
            for record in records:
                await record.wait_ended()
        for record in records:
            with pytest.raises(EngineStalled, match=MESSAGE):
                raise cast("EngineStalled", record.error)
        assert list(records[0].choices[0].token_ids) == [7, 8]
        assert any(isinstance(entry, CallFailed) for entry in tape.read(0, 1000)[0])
        await eventually(lambda: it.engine.aborted == [record.call_id for record in records])
        assert it.calls.running_count == 0


async def test_calls_are_refused_until_the_engine_answers_E13() -> None:
    async with watched() as it:
        it.engine.answers.clear()
        await it.start()
        await eventually(lambda: it.changes == [True])
        submitted = len(it.engine.submitted)
        with pytest.raises(EngineStalled, match=MESSAGE):
            await it.start()
        assert len(it.engine.submitted) == submitted
        it.engine.answers.set()
        await eventually(lambda: it.changes == [True, False])
        record = await it.start()
        it.engine.finish(record.call_id, 7)
        assert record.error is None
        # And what stalls again is noticed again.
        await it.start()
        await eventually(lambda: it.changes == [True, False, True, False])


async def test_an_engine_that_cannot_be_asked_does_not_answer_E13() -> None:
    async with watched() as it:
        asked: list[None] = []

        async def fail() -> None:
            asked.append(None)
            raise RuntimeError("no socket")

        it.engine.ping = fail
        await it.start()
        await eventually(lambda: len(asked) >= 3)
        assert it.changes == [True]


async def test_any_token_of_any_call_is_a_sign_of_life() -> None:
    async with watched() as it:
        waiting, sampling = await it.start(), await it.start()
        await it.go_on(2.5, lambda: it.engine.emit(sampling.call_id, 7))
        assert not it.changes
        assert not waiting.ended


async def test_short_calls_that_end_between_two_looks_are_signs_of_life() -> None:
    async with watched() as it:
        waiting = await it.start()

        async def one() -> None:
            record = await it.start()
            it.engine.finish(record.call_id, reason=FinishReason.STOP)

        for _ in range(25):
            await one()
            await asyncio.sleep(LIMIT_SECONDS / 10)
        assert not it.changes
        assert not waiting.ended


@pytest.mark.parametrize("how", ["held", "idle"])
async def test_the_silence_of_an_engine_that_is_held_or_idle_is_no_stall(how: str) -> None:
    async with watched() as it:
        record = await it.start()
        if how == "held":
            it.engine.held = True
        else:
            it.engine.finish(record.call_id, 7)
        await asyncio.sleep(2.5 * LIMIT_SECONDS)
        assert not it.changes
        if how == "held":
            # From here on it counts.
            it.engine.held = False
            await eventually(lambda: it.changes)


async def test_calls_that_come_and_calls_that_clients_abort_are_no_signs_of_life_E13() -> None:
    async with watched() as it:
        it.engine.answers.clear()
        await it.start()
        started: list[CallRecord] = []

        async def come_and_go() -> None:
            while True:
                started.append(await it.start())
                await it.calls.abort(started[-1].call_id)
                await asyncio.sleep(LIMIT_SECONDS / 20)

        with pytest.raises(EngineStalled):
            await asyncio.wait_for(come_and_go(), 10)
        assert started[0].choices[0].completion is not None
        assert started[0].choices[0].completion.finish_reason is FinishReason.ABORT


async def test_a_blocked_event_loop_is_not_taken_for_the_engines_silence() -> None:
    async with watched() as it:
        record = await it.start()
        await asyncio.sleep(LIMIT_SECONDS / 10)
        time.sleep(3 * LIMIT_SECONDS)  # noqa: ASYNC251 - that is the point
        await asyncio.sleep(LIMIT_SECONDS / 10)
        assert not it.changes
        it.engine.finish(record.call_id, 7)


async def test_a_call_that_the_engine_is_still_taking_is_aborted_when_it_has_it_E13() -> None:
    async with watched() as it:
        it.engine.takes_calls.clear()
        starting = asyncio.create_task(it.start())
        await eventually(lambda: it.changes)
        [submitted] = it.engine.submitted
        await eventually(lambda: it.engine.aborted == [submitted.call_id])
        it.engine.takes_calls.set()
        record = await starting
        assert isinstance(record.error, EngineStalled)
        # The first abort found nothing.
        assert it.engine.aborted == [submitted.call_id] * 2
        assert not it.engine.sinks


async def test_an_engine_that_fails_calls_is_alive() -> None:
    async with watched() as it:
        waiting = await it.start()
        for _ in range(25):
            record = await it.start()
            it.engine.sinks.pop(record.call_id).fail(CallError("out of memory"))
            await asyncio.sleep(LIMIT_SECONDS / 10)
        assert not it.changes
        assert not waiting.ended
