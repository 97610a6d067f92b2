"""What is told of an event loop that stands still."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from support.waiting import eventually
from tokentape_executor import loop_watch
from tokentape_executor.loop_watch import watching_loop

STALL_SECONDS = 0.2


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "STALL_SECONDS", STALL_SECONDS)


def block(seconds: float) -> None:
    time.sleep(seconds)  # the sleep


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tokentape loop watch"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == loop_watch.__name__]


async def test_each_stall_is_told_once_with_its_line_and_stack(caplog: pytest.LogCaptureFixture) -> None:
    with watching_loop():
        for _ in range(2):
            await asyncio.sleep(STALL_SECONDS)
            block(6 * STALL_SECONDS)
    messages = told(caplog)
    assert len(messages) == 2
    for message in messages:
        first = message.partition("\n")[0]
        assert f"{__file__}:" in first
        assert "in block, does not return" in first
        assert "# the sleep" in message
        assert "test_each_stall_is_told_once" in message


async def test_a_computation_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    with watching_loop():
        compute(6 * STALL_SECONDS)
    (message,) = told(caplog)
    assert "in compute, does not return" in message


async def test_a_loop_that_waits_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with watching_loop():
        await asyncio.sleep(5 * STALL_SECONDS)
        await asyncio.to_thread(block, 5 * STALL_SECONDS)
    assert told(caplog) == []


async def test_one_thread_watches_as_long_as_anybody_wants() -> None:
    first, second = watching_loop(), watching_loop()
    first.__enter__()
    second.__enter__()
    assert len(threads()) == 1
    first.__exit__(None, None, None)
    assert len(threads()) == 1
    second.__exit__(None, None, None)
    await eventually(lambda: not threads())


async def test_nothing_is_watched_outside(caplog: pytest.LogCaptureFixture) -> None:
    with watching_loop():
        pass
    block(4 * STALL_SECONDS)
    assert told(caplog) == []
