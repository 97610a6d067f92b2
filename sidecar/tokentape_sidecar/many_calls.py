"""The calls of one `GenerateMany` stream.

Invariants:

1. A call ends once for the client: with its record, refused at its start, left, or out of time. Nothing is said of it
   after that, and its key is free.
2. A call that ends for the client before its record does is aborted at the engine; so are all when the stream ends.
3. All that has changed since the last message is in the next ones: a slow client costs its own lag, and an engine's
   step is a message or a few, not one for each call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator
from contextlib import suppress

import grpc
from opentelemetry.trace import Span

from tokentape.call_status import LATE, LEFT, Status
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateManyResponse, GenerateRequest
from tokentape_sidecar.auth import check_still_let_in
from tokentape_sidecar.call_columns import MAX_EVENTS, Cursor, end_of, new_of, outcome_of
from tokentape_sidecar.errors import InvalidArgument
from tokentape_sidecar.record import CallRecord
from tokentape_sidecar.rpc_errors import status_of
from tokentape_sidecar.tracing import GENERATE_MANY, begin_call, end_call


class ManyCalls:
    """Begins the calls of a stream, and tells what becomes of them."""

    def __init__(
        self, start: Callable[[GenerateRequest], Awaitable[CallRecord]], abandon: Callable[[CallRecord], None]
    ) -> None:
        """`start` gives a call to the engine, or raises; `abandon` ends one that nobody reads any more."""
        self._start = start
        self._abandon = abandon
        self._calls: dict[int, _Call] = {}
        self._changed: list[_Call] = []
        """Those of which there may be something new, each once."""
        self._ended: list[GenerateManyResponse.CallEnded] = []
        """Ends that are no record's, still to be told."""
        self._wake = asyncio.Event()
        self._is_half_closed = False
        self._failure: Exception | None = None

    async def run(self, requests: AsyncIterable[GenerateManyRequest]) -> AsyncGenerator[GenerateManyResponse]:
        """Yield what is new as long as there are `requests` or calls. Raises what is wrong with a request."""
        taking = asyncio.create_task(self._take_all(requests))
        try:
            while self._calls or self._ended or not self._is_half_closed:
                await self._wake.wait()
                self._wake.clear()
                if self._failure is not None:
                    raise self._failure
                for message in self._news():
                    yield message
        finally:
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking
            for call in list(self._calls.values()):
                self._stop(call, LEFT)
            for call in list(self._calls.values()):
                # Its end was on its way.
                self._forget(call, LEFT[0])

    def note_change(self, call: _Call) -> None:
        """Note that there may be something new of a call that is not noted yet."""
        self._changed.append(call)
        self._wake.set()

    def _news(self) -> Iterator[GenerateManyResponse]:
        changed, self._changed = self._changed, []
        ended, self._ended = self._ended, []
        for call in changed:
            call.is_noted = False
        # First: the key of such a call may have another one, which has begun.
        for start in range(0, len(ended), MAX_EVENTS):
            yield GenerateManyResponse(ended=ended[start : start + MAX_EVENTS])
        for message in new_of([call.cursor for call in changed if call.cursor is not None]):
            for end in message.ended:
                # Before it is sent: the client may begin another call under its key meanwhile.
                self._forget_ended(self._calls[end.key])
            yield message

    async def _take_all(self, requests: AsyncIterable[GenerateManyRequest]) -> None:
        try:
            async for request in requests:
                self._take(request)
            self._is_half_closed = True
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the stream, where it is raised
            self._failure = error
        self._wake.set()

    def _take(self, request: GenerateManyRequest) -> None:
        for key in request.leave:
            if (left := self._calls.get(key)) is not None:
                self._stop(left, LEFT)
        for begin in request.begin:
            if begin.key in self._calls:
                raise InvalidArgument("begin.key", f"the call {begin.key} of this stream has not ended")
            self._calls[begin.key] = call = _Call(begin.key, self)
            call.starting = asyncio.create_task(self._begin(call, begin))

    async def _begin(self, call: _Call, begin: GenerateManyRequest.Begin) -> None:
        call.span = begin_call(GENERATE_MANY, begin.metadata)
        try:
            check_still_let_in()
            if (seconds := _timeout_of(begin)) is not None:
                call.timer = asyncio.get_running_loop().call_later(seconds, self._stop, call, LATE)
            record = await self._start(begin.request)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this call's end
            self._drop(call, status_of(error))
        else:
            call.follow(record)

    def _stop(self, call: _Call, status: Status) -> None:
        """End a call for the client, and at the engine; not one whose end is on its way."""
        if call.cursor is not None and call.cursor.has_ended:
            return
        self._drop(call, status)
        if call.cursor is not None:
            call.cursor.has_ended = True
            self._abandon(call.cursor.record)
        elif call.starting is not None:
            call.starting.cancel()

    def _drop(self, call: _Call, status: Status) -> None:
        self._forget(call, status[0])
        self._ended.append(end_of(call.key, *status))
        self._wake.set()

    def _forget_ended(self, call: _Call) -> None:
        assert call.cursor is not None, "whose record has not been read has not ended by it"
        self._forget(call, outcome_of(call.cursor.record)[0])

    def _forget(self, call: _Call, code: grpc.StatusCode) -> None:
        del self._calls[call.key]
        if call.cursor is not None:
            # A record lives as long as its tape, and would keep all that is known of the call here.
            call.cursor.record.on_change(None)
        if call.timer is not None:
            call.timer.cancel()
        if call.span is not None:
            end_call(call.span, code)


class _Call:
    """One call of a stream: starting until it has a cursor."""

    __slots__ = ("_stream", "cursor", "is_noted", "key", "span", "starting", "timer")

    def __init__(self, key: int, stream: ManyCalls) -> None:
        self.key = key
        self.cursor: Cursor | None = None
        self.starting: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.span: Span | None = None
        self.is_noted = False
        """Whether it is among those that changed."""
        self._stream = stream

    def follow(self, record: CallRecord) -> None:
        """Tell of `record` from now on, and of what it has already."""
        self.cursor = Cursor(self.key, record)
        record.on_change(self._note)
        self._note()

    def _note(self) -> None:
        if not self.is_noted:
            self.is_noted = True
            self._stream.note_change(self)


def _timeout_of(begin: GenerateManyRequest.Begin) -> float | None:
    """Return the seconds that a call may take; `None`: as many as it needs."""
    if not begin.HasField("timeout"):
        return None
    # Plain arithmetic: a Duration can hold what a timedelta cannot.
    seconds = begin.timeout.seconds + begin.timeout.nanos / 1e9
    if seconds <= 0:
        raise InvalidArgument("timeout", "must be above 0")
    return seconds
