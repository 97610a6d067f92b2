from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tokentape_bridge.merged import merged


class Source:
    """Gives numbers, and notes whether it was closed."""

    def __init__(self, *numbers: int, then: Exception | None = None, waits: bool = False) -> None:
        self.closed = False
        self._numbers = numbers
        self._then = then
        self._waits = waits

    async def items(self) -> AsyncGenerator[int]:
        try:
            for number in self._numbers:
                await asyncio.sleep(0)
                yield number
            if self._then is not None:
                raise self._then
            if self._waits:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def read(*sources: Source, limit: int = 100) -> list[tuple[int, int]]:
    taken: list[tuple[int, int]] = []
    async with merged([source.items() for source in sources]) as items:
        async for item in items:
            taken.append(item)
            if len(taken) == limit:
                break
    return taken


async def test_every_item_comes_once_and_each_source_in_its_order() -> None:
    sources = Source(1, 2, 3), Source(), Source(4, 5)
    taken = await read(*sources)
    assert sorted(taken) == [(0, 1), (0, 2), (0, 3), (2, 4), (2, 5)]
    assert [number for source, number in taken if source == 0] == [1, 2, 3]
    assert all(source.closed for source in sources)


async def test_one_failure_is_raised_itself_and_closes_the_others() -> None:
    waiting = Source(1, waits=True)
    with pytest.raises(ValueError, match="broken"):
        await read(Source(then=ValueError("broken")), waiting)
    assert waiting.closed


async def test_leaving_early_closes_all() -> None:
    sources = Source(1, waits=True), Source(2, waits=True)
    assert len(await read(*sources, limit=2)) == 2
    assert all(source.closed for source in sources)


async def test_a_cancelled_reader_closes_all() -> None:
    source = Source(1, waits=True)
    reading = asyncio.create_task(read(source))
    await asyncio.sleep(0.05)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert source.closed


async def test_a_failure_reaches_a_reader_that_is_busy_elsewhere() -> None:
    async def items() -> AsyncGenerator[object]:
        try:
            async with merged([Source(1, then=ValueError("broken")).items(), Source(waits=True).items()]) as numbered:
                async for item in numbered:
                    yield item
        except ValueError as error:
            yield str(error)

    seen: list[object] = []
    # As a response that waits, outside of the generator, for a client that reads slowly.
    async for item in items():
        seen.append(item)
        await asyncio.sleep(0.05)
    assert seen == [(0, 1), "broken"]
