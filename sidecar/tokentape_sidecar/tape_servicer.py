"""TapeService: from request to tape, from tape to response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

from tokentape.v1 import tape_pb2, tape_pb2_grpc
from tokentape_sidecar import convert
from tokentape_sidecar.calls import Calls
from tokentape_sidecar.errors import InvalidArgument, TextUnavailable
from tokentape_sidecar.interceptors import Context
from tokentape_sidecar.limits import MAX_ANCHORS
from tokentape_sidecar.tape import SCHEMA_VERSION, Entry, Tape
from tokentape_sidecar.tape_store import TapeStore
from tokentape_sidecar.tape_text import TapeText

# At 8 bytes a token, a response of as many positions passes a client with gRPC's default limit of 4 MiB; with top
# log-probabilities or a long prompt it may be larger.
_MAX_POSITIONS_PER_RESPONSE = 65_536

_Write: TypeAlias = Callable[[Sequence[Entry]], Awaitable[list[tape_pb2.TapeEntry]]]


class TapeServicer(tape_pb2_grpc.TapeServiceServicer):
    """Serves `tokentape.v1.TapeService`."""

    def __init__(self, *, tapes: TapeStore, calls: Calls, text: TapeText | None = None) -> None:
        """`text`: for readers who want it; `None`: there is none."""
        self._tapes = tapes
        self._calls = calls
        self._text = text

    async def OpenTape(self, request: tape_pb2.OpenTapeRequest, context: Context) -> tape_pb2.OpenTapeResponse:
        """Start a tape."""
        del context
        tape = self._tapes.open(
            request.tape_id, convert.limits_from_proto(request.limits), convert.policy_from_proto(request)
        )
        return tape_pb2.OpenTapeResponse(reader_token=tape.reader_token, schema_version=SCHEMA_VERSION)

    async def WatchTape(
        self, request: tape_pb2.WatchTapeRequest, context: Context
    ) -> AsyncIterator[tape_pb2.WatchTapeResponse]:
        """Follow a tape from a position on."""
        del context
        tape = self._tapes.readable(request.tape_id, request.reader_token)
        with self._tapes.watched(tape):
            async for response in _follow(tape, request.from_sequence, self._writer(request.include_text)):
                yield response

    async def GetTape(self, request: tape_pb2.GetTapeRequest, context: Context) -> tape_pb2.GetTapeResponse:
        """Return a page of a tape."""
        del context
        tape = self._tapes.readable(request.tape_id, request.reader_token)
        entries, position = tape.read(request.from_sequence, _MAX_POSITIONS_PER_RESPONSE)
        end_sequence, sealed = tape.end_sequence, tape.sealed
        return tape_pb2.GetTapeResponse(
            schema_version=SCHEMA_VERSION,
            entries=await self._writer(request.include_text)(entries),
            next_sequence=position,
            end_sequence=end_sequence,
            sealed=sealed,
            size_bytes=tape.size_bytes,
        )

    async def FindCalls(self, request: tape_pb2.FindCallsRequest, context: Context) -> tape_pb2.FindCallsResponse:
        """Return the calls with given anchors or ids."""
        del context
        tape = self._tapes.writable(request.tape_id)
        if len(request.anchors) > MAX_ANCHORS:
            raise InvalidArgument("anchors", f"must be at most {MAX_ANCHORS}, are {len(request.anchors)}")
        found = tape.find_calls(request.anchors, request.exact_token_ids)
        return tape_pb2.FindCallsResponse(
            calls=[convert.found_call_to_proto(call, include_prompt=request.include_prompts) for call in found],
            keep_reasoning=tape.policy.keep_reasoning,
        )

    async def SealTape(self, request: tape_pb2.SealTapeRequest, context: Context) -> tape_pb2.SealTapeResponse:
        """End a tape."""
        del context
        tape = self._tapes.readable(request.tape_id, request.reader_token)
        await self._calls.seal(tape)
        return tape_pb2.SealTapeResponse(
            end_sequence=tape.end_sequence,
            sampled_token_count=tape.sampled_token_count,
            size_bytes=tape.size_bytes,
        )

    async def DeleteTape(self, request: tape_pb2.DeleteTapeRequest, context: Context) -> tape_pb2.DeleteTapeResponse:
        """Forget a tape."""
        del context
        await self._tapes.delete(self._tapes.readable(request.tape_id, request.reader_token))
        return tape_pb2.DeleteTapeResponse()

    def _writer(self, include_text: bool) -> _Write:
        return self._write_with_text if include_text else _write

    async def _write_with_text(self, entries: Sequence[Entry]) -> list[tape_pb2.TapeEntry]:
        if self._text is None:
            raise TextUnavailable("include_text: the sidecar has no tokenizer; leave it out to get the ids")
        pieces = await self._text.of(entries)
        return [convert.entry_to_proto(entry, pieces) for entry in entries]


async def _write(entries: Sequence[Entry]) -> list[tape_pb2.TapeEntry]:
    return [convert.entry_to_proto(entry) for entry in entries]


async def _follow(tape: Tape, position: int, write: _Write) -> AsyncIterator[tape_pb2.WatchTapeResponse]:
    """Yield a tape from `position` on; the first response comes at once, so that the watcher knows it is heard."""
    first = True
    while True:
        entries, position = tape.read(position, _MAX_POSITIONS_PER_RESPONSE)
        caught_up = position == tape.end_sequence
        if entries or first:
            yield tape_pb2.WatchTapeResponse(entries=await write(entries), caught_up_to=position if caught_up else None)
        first = False
        if position < tape.end_sequence:
            continue
        if tape.sealed:
            return
        await tape.wait_changed()
