"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """The end of a source that raised."""

    error: Exception


@asynccontextmanager
async def merged(sources: Sequence[AsyncGenerator[_T]]) -> AsyncGenerator[AsyncIterator[tuple[int, _T]]]:
    """Give the items of all `sources` as they come, each with the number of its source; then close the sources.

    An item is taken from its source when the reader has taken the one before. What one source raises, reading raises,
    and the others are closed.
    """
    if len(sources) == 1:
        # What almost all requests have; a task and a hand-over for each item would cost more than the items.
        async with aclosing(sources[0]) as source:
            yield ((0, item) async for item in source)
        return
    send, receive = anyio.create_memory_object_stream[tuple[int, _T] | _Failure]()
    # No task group: one that is entered in a generator would cancel whoever reads that, wherever it is by then.
    pumps = [asyncio.create_task(_pump(number, source, send.clone())) for number, source in enumerate(sources)]
    send.close()
    try:
        with receive:
            yield _items(receive)
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _items(receive: MemoryObjectReceiveStream[tuple[int, _T] | _Failure]) -> AsyncGenerator[tuple[int, _T]]:
    async for item in receive:
        if isinstance(item, _Failure):
            raise item.error
        yield item


async def _pump(
    number: int, source: AsyncGenerator[_T], send: MemoryObjectSendStream[tuple[int, _T] | _Failure]
) -> None:
    with send:
        try:
            async with aclosing(source):
                async for item in source:
                    await send.send((number, item))
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader raises it
            await send.send(_Failure(error))
