"""The rollouts of a soak: well behaved or not, each checks every token that it gets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypedDict

import grpc
from bench.soak_script import Script, Soaked

from tokentape.channel import dial
from tokentape.v1 import generation_pb2, generation_pb2_grpc, tape_pb2, tape_pb2_grpc, types_pb2

_CONNECTIONS = 40
_ROLLOUTS_THAT_NOBODY_ENDS = 0.02
_SHORT_TIME_TO_LIVE_SECONDS = 5


@dataclass(slots=True)
class Sampled:
    """One call, as a reader has it."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    completion: types_pb2.Completion | None = None

    def take(self, token_ids: list[int], logprobs: list[float]) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs


class Ended(TypedDict):
    """A tape that its reader ends."""

    tape_id: str
    reader_token: str


@dataclass(slots=True)
class Followed:
    """A tape, as one watcher has it, over all of its connections."""

    next_sequence: int = 0
    calls: dict[str, Sampled] = field(default_factory=dict[str, Sampled])
    sealed: bool = False

    def take(self, entry: tape_pb2.TapeEntry) -> None:
        if entry.sequence != self.next_sequence:
            raise Soaked(f"position {entry.sequence} came where {self.next_sequence} was due")
        self.next_sequence += max(1, len(entry.tokens_sampled.token_ids))
        match entry.WhichOneof("entry"):
            case "call_started":
                self.calls[entry.call_started.call_id] = Sampled()
            case "tokens_sampled":
                run = entry.tokens_sampled
                self.calls[run.call_id].take(list(run.token_ids), list(run.logprobs))
            case "choice_finished":
                self.calls[entry.choice_finished.call_id].completion = entry.choice_finished.completion
            case "tape_sealed":
                self.sealed = True
            case other:
                raise Soaked(f"an entry {other}: {entry}")


class Rollouts:
    """Rollouts against one sidecar, on some connections."""

    def __init__(self, address: str, script: Script, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._address = address
        self._script = script
        self._seed = seed
        self._channels: list[grpc.aio.Channel] = []

    async def run(self, count: int, seconds: float) -> None:
        """Keep `count` rollouts going for so long; then let each end by itself. Raises `Soaked`."""
        self._channels = [dial(self._address) for _ in range(min(_CONNECTIONS, count))]
        ends = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(count):
                    group.create_task(self._one_after_the_other(number, ends))
        finally:
            for channel in self._channels:
                await channel.close()

    async def _one_after_the_other(self, number: int, ends: float) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        # Not all at one moment.
        await asyncio.sleep(chance.random() * 5)
        while asyncio.get_running_loop().time() < ends:
            channel = self._channels[number % len(self._channels)]
            await _Rollout(channel, self._address, self._script, chance, self.counts).run()
            self.counts["rollouts"] += 1


class _Rollout:
    """One tape: its calls, its watcher, its end."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, script: Script, chance: random.Random, counts: Counter[str]
    ) -> None:
        self._tapes = tape_pb2_grpc.TapeServiceStub(channel)
        self._generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self._address = address
        self._script = script
        self._chance = chance
        self._counts = counts
        self._tape_id = f"soak.{secrets.token_hex(16)}"
        self._reader_token = ""
        self._followed = Followed()
        self._gone = False
        """Whether nobody has watched the tape to its end."""
        self._streams: dict[str, Sampled] = {}

    async def run(self) -> None:
        forgotten = self._chance.random() < _ROLLOUTS_THAT_NOBODY_ENDS
        request = tape_pb2.OpenTapeRequest(tape_id=self._tape_id)
        if forgotten:
            request.limits.time_to_live.seconds = _SHORT_TIME_TO_LIVE_SECONDS
        self._reader_token = (await self._tapes.OpenTape(request)).reader_token
        self._counts["tapes opened"] += 1
        if forgotten:
            await self._calls()
            self._gone = True
            self._counts["tapes left to their time to live"] += 1
            for call_id, stream in self._streams.items():
                self._check_stream(call_id, stream)
            return
        async with asyncio.TaskGroup() as group:
            following = group.create_task(self._follow())
            idle = group.create_task(self._watch_without_reading()) if self._chance.random() < 0.1 else None
            calls = group.create_task(self._calls())
            # Some are ended while they sample.
            await asyncio.wait([calls], timeout=self._chance.uniform(1, 10) if self._chance.random() < 0.15 else None)
            await self._end(following)
            if idle is not None:
                idle.cancel()
        self._check()

    async def _end(self, following: asyncio.Task[None]) -> None:
        ended = Ended(tape_id=self._tape_id, reader_token=self._reader_token)
        if self._chance.random() < 0.9:
            await self._tapes.SealTape(tape_pb2.SealTapeRequest(**ended))
            self._counts["tapes sealed"] += 1
            page = await self._tapes.GetTape(tape_pb2.GetTapeRequest(**ended))
            paged = Followed()
            for entry in page.entries:
                paged.take(entry)
            # Its watcher may be away just now: a deleted tape would not be there when it comes back.
            await following
            if paged != self._followed:
                raise Soaked(f"GetTape and the watch of {self._tape_id} differ")
        else:
            self._counts["tapes deleted as they are"] += 1
        await self._tapes.DeleteTape(tape_pb2.DeleteTapeRequest(**ended))

    async def _calls(self) -> None:
        parent = ""
        for _ in range(self._chance.randint(1, 3)):
            request = generation_pb2.GenerateRequest(
                prompt_token_ids=[self._chance.randint(1, 1000) for _ in range(self._chance.randint(1, 50))],
                tape_id=self._tape_id,
            )
            if parent and self._chance.random() < 0.7:
                request.parent.call_id = parent
            try:
                parent = await self._call(request)
                while parent not in self._streams or self._streams[parent].completion is None:
                    self._counts["calls retried"] += 1
                    parent = await self._call(request)
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}:
                    raise
                # The tape has ended.
                self._counts["calls refused by an ended tape"] += 1
                return

    async def _call(self, request: generation_pb2.GenerateRequest) -> str:
        """Make a call and read it: to its end, or until it is left, or after it was aborted."""
        most = self._chance.randint(1, 12) if self._chance.random() < 0.2 else None
        fate = self._chance.choice(["left", "aborted"])
        deadline = self._chance.uniform(1, 5) if self._chance.random() < 0.05 else None
        stream = self._generation.Generate(request, timeout=deadline)
        call_id, responses = "", 0
        try:
            async for response in stream:
                responses += 1
                call_id = call_id or response.started.call_id
                self._take(call_id, response)
                if responses == most and fate == "left":
                    stream.cancel()
                    self._counts["calls left"] += 1
                    break
                if responses == most:
                    await self._generation.Abort(generation_pb2.AbortRequest(call_id=call_id))
                    self._counts["calls aborted"] += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            self._counts["calls out of time" if call_id else "calls out of time before they began"] += 1
        self._counts["calls made"] += 1
        return call_id

    def _take(self, call_id: str, response: generation_pb2.GenerateResponse) -> None:
        sampled = self._streams.setdefault(call_id, Sampled())
        sampled.take(list(response.delta.token_ids), list(response.delta.logprobs))
        self._counts["tokens streamed"] += len(response.delta.token_ids)
        if response.HasField("finished"):
            sampled.completion = response.finished

    async def _follow(self) -> None:
        """Watch to the tape's end; leave and come back now and then, on a connection of its own or not; read slowly."""
        slow = self._chance.random() < 0.1
        while not (self._followed.sealed or self._gone):
            most = self._chance.randint(1, 30) if self._chance.random() < 0.5 else None
            own = self._chance.random() < 0.05
            async with self._stub(own=own) as stub, aclosing(self._watch(stub)) as responses:
                count = 0
                async for response in responses:
                    count += 1
                    for entry in response.entries:
                        self._followed.take(entry)
                    self._counts["tokens watched"] += sum(len(e.tokens_sampled.token_ids) for e in response.entries)
                    if slow:
                        await asyncio.sleep(self._chance.uniform(0, 3))
                    if count == most and not self._followed.sealed:
                        self._counts["watchers disconnected"] += 1
                        break

    @contextlib.asynccontextmanager
    async def _stub(self, *, own: bool) -> AsyncGenerator[tape_pb2_grpc.TapeServiceAsyncStub]:
        if not own:
            yield self._tapes
            return
        async with dial(self._address) as channel:
            yield tape_pb2_grpc.TapeServiceStub(channel)

    async def _watch(self, stub: tape_pb2_grpc.TapeServiceAsyncStub) -> AsyncGenerator[tape_pb2.WatchTapeResponse]:
        stream = stub.WatchTape(
            tape_pb2.WatchTapeRequest(
                tape_id=self._tape_id, reader_token=self._reader_token, from_sequence=self._followed.next_sequence
            )
        )
        try:
            async for response in stream:
                yield response
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            # Deleted while this watcher was away.
            self._gone = True
        finally:
            stream.cancel()

    async def _watch_without_reading(self) -> None:
        async with aclosing(self._watch(self._tapes)) as responses:
            await anext(responses, None)
            self._counts["watchers that do not read"] += 1
            await asyncio.Event().wait()

    def _check(self) -> None:
        """Every call on the tape is what the script must have produced, and what its own stream said of it."""
        for call_id, sampled in self._followed.calls.items():
            completion = sampled.completion
            whole = completion is not None and completion.finish_reason == types_pb2.FINISH_REASON_STOP
            self._script.check(sampled.token_ids, sampled.logprobs, whole=whole)
            if completion is not None and completion.token_count != len(sampled.token_ids):
                raise Soaked(f"{call_id} says {completion.token_count} tokens and has {len(sampled.token_ids)}")
            self._counts["tokens checked"] += len(sampled.token_ids)
        for call_id, stream in self._streams.items():
            self._check_stream(call_id, stream)

    def _check_stream(self, call_id: str, stream: Sampled) -> None:
        if self._gone:
            self._script.check(stream.token_ids, stream.logprobs, whole=False)
            return
        on_tape = self._followed.calls[call_id]
        length = len(stream.token_ids) if stream.completion is None else None
        if stream.token_ids != on_tape.token_ids[:length] or stream.logprobs != on_tape.logprobs[:length]:
            raise Soaked(f"the stream of {call_id} and its tape differ")
