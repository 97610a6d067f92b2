"""Watchers of a tape that lose their connection, stall, and are killed, each at a seed's whim."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from support.relay import relay_to
from support.sidecar_client import OpenedTape
from support.watch_checks import Connection, Watch
from support.watch_positions import positions_of
from tokentape.channel import dial
from tokentape.v1 import tape_pb2, tape_pb2_grpc

_PROGRAM = Path(__file__).with_name("watch_process.py")
_MOST_LEAVES = 6


class Watcher:
    """Follows one tape to its end, over as many connections as it takes."""

    def __init__(self, address: str, tape: OpenedTape, end: Callable[[], int], seed: str) -> None:
        """`end` tells how many positions the tape has by now, or had a moment ago."""
        self.watch = Watch()
        self._address = address
        self._tape = tape
        self._end = end
        self._random = random.Random(seed)
        self._position = 0
        self._gone = False
        """Whether the tape was deleted while nothing watched it."""

    @property
    def _at_end(self) -> bool:
        connections = self.watch.connections
        return self._gone or self.watch.ended or (len(connections) > 0 and bool(connections[-1].error))

    async def direct(self) -> None:
        """Watch over one channel; leave and resume now and then."""
        await asyncio.sleep(self._random.random() * 0.03)
        if self._random.random() < 0.5:
            self._position = self._random.randint(0, self._end())
        async with dial(self._address) as channel:
            stub = tape_pb2_grpc.TapeServiceStub(channel)
            while not self._at_end:
                await self._connect(stub)

    async def relayed(self) -> None:
        """Watch through a network that stands still now and then, and breaks."""
        while not self._at_end:
            async with relay_to(self._address) as relay, dial(relay.address) as channel:
                connecting = asyncio.create_task(self._connect(tape_pb2_grpc.TapeServiceStub(channel)))
                await asyncio.sleep(self._random.random() * 0.02)
                relay.stall()
                await asyncio.sleep(self._random.random() * 0.05)
                if len(self.watch.connections) < _MOST_LEAVES and self._random.random() < 0.7:
                    relay.cut()
                relay.flow()
                await connecting

    async def killed(self, kills: int) -> None:
        """Watch in a process of its own, which dies `kills` times of SIGKILL and is started anew."""
        while not self.watch.ended:
            connection = self._new_connection()
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(_PROGRAM), self._address, self._tape.tape_id, self._tape.reader_token,
                str(self._position), stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            dies = len(self.watch.connections) <= kills
            most = self._random.randint(1, 5) if dies else sys.maxsize
            async for response in _responses(process.stdout):
                self._take(connection, response)
                if len(connection.responses) == most:
                    process.kill()
                    break
            await process.communicate()
            connection.ended = process.returncode == 0

    async def _connect(self, stub: tape_pb2_grpc.TapeServiceAsyncStub) -> None:
        connection = self._new_connection()
        connection.include_text = self._random.random() < 0.2
        leaves = len(self.watch.connections) <= _MOST_LEAVES and self._random.random() < 0.7
        most = self._random.randint(1, 6) if leaves else sys.maxsize
        stream = stub.WatchTape(
            tape_pb2.WatchTapeRequest(
                tape_id=self._tape.tape_id,
                reader_token=self._tape.reader_token,
                from_sequence=self._position,
                include_text=connection.include_text,
            )
        )
        try:
            async for response in stream:
                self._take(connection, response)
                if len(connection.responses) == most:
                    stream.cancel()
                    self._lose_some(connection)
                    return
                if self._random.random() < 0.1:
                    await asyncio.sleep(self._random.random() * 0.01)
        except grpc.aio.AioRpcError as error:
            self._gone = error.code() is grpc.StatusCode.NOT_FOUND
            # What a broken network brings is an error that the client sees, never a wrong stretch.
            if not self._gone and error.code() is not grpc.StatusCode.UNAVAILABLE:
                connection.error = str(error.details())
        else:
            connection.ended = True

    def _new_connection(self) -> Connection:
        connection = Connection(from_sequence=self._position, known_end=self._end())
        self.watch.connections.append(connection)
        return connection

    def _take(self, connection: Connection, response: tape_pb2.WatchTapeResponse) -> None:
        connection.responses.append(response)
        for position in positions_of(response.entries):
            self._position = position.sequence + 1

    def _lose_some(self, connection: Connection) -> None:
        """Forget the end of what came last, as a watcher does that dies over it."""
        last = [position.sequence for position in positions_of(connection.responses[-1].entries)]
        if last and self._random.random() < 0.5:
            connection.kept_until = self._position = self._random.choice(last)


async def _responses(pipe: asyncio.StreamReader) -> AsyncIterator[tape_pb2.WatchTapeResponse]:
    """Yield the whole messages that a watching process writes."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            size = int.from_bytes(await pipe.readexactly(4), "big")
            yield tape_pb2.WatchTapeResponse.FromString(await pipe.readexactly(size))
