"""The clock of an attempt, where entries of the tape and the end of its time come together."""

from __future__ import annotations

import asyncio
import time

import pytest

from tokentape.v1 import tape_pb2
from tokentape_executor.errors import RolloutTimeout
from tokentape_executor.limits import RolloutClock, RolloutLimits


async def test_a_call_that_ends_as_the_turn_expires_is_too_late_and_no_error() -> None:
    clock = RolloutClock(RolloutLimits(turn_seconds=0.1))
    loop = asyncio.get_running_loop()
    fed: list[asyncio.Task[None]] = []

    async def follow() -> None:
        clock.feed(tape_pb2.TapeEntry(call_failed=tape_pb2.TapeEntry.CallFailed(call_id="a")))

    async def attempt() -> None:
        async with clock.running():
            loop.call_later(0.09, lambda: fed.append(loop.create_task(follow())))
            time.sleep(0.3)  # noqa: ASYNC251 - so that both are due at once
            await asyncio.Event().wait()

    with pytest.raises(RolloutTimeout, match=r"longer than the limit of 0\.1 s"):
        await attempt()
    await asyncio.gather(*fed)
    assert len(fed) == 1
