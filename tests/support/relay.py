"""A network between a client and a server that can stand still and break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_PIECE_BYTES = 4096


class Relay:
    """Hands bytes on between its clients and a server, over real sockets."""

    def __init__(self, server_address: str) -> None:
        """`server_address` is `host:port`."""
        self._host, _, port = server_address.rpartition(":")
        self._port = int(port)
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        """Where clients connect."""
        self.relayed_bytes = 0
        """From the server to its clients."""

    def stall(self) -> None:
        """Let nothing through, either way; connections stay."""
        self._flows.clear()

    def flow(self) -> None:
        """Let everything through again."""
        self._flows.set()

    def cut(self) -> None:
        """Break all connections, as a dying machine does: without a word."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one client's connection until either side ends it."""
        async with self._ended(writer):
            back, forth = await asyncio.open_connection(self._host, self._port)
            async with self._ended(forth), asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, forth))
                pumps.create_task(self._pump(back, writer, counts=True))

    @asynccontextmanager
    async def _ended(self, writer: asyncio.StreamWriter) -> AsyncGenerator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counts: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(_PIECE_BYTES):
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
                self.relayed_bytes += counts * len(data)
        sink.transport.abort()


@asynccontextmanager
async def relay_to(server_address: str) -> AsyncGenerator[Relay]:
    """Relay to a server on a port of its own; on leaving, all connections break."""
    relay = Relay(server_address)
    connections: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(relay.serve(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    relay.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield relay
    finally:
        server.close()
        # What has just been accepted is heard of a moment later.
        await asyncio.sleep(0.01)
        relay.flow()
        relay.cut()
        await asyncio.gather(*connections, return_exceptions=True)
