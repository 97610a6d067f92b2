"""One call of a `GenerateMany` stream, as its client has it: what has come of it, and reading that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import grpc
import grpc.aio

from tokentape.call_status import LATE, LEFT, Status
from tokentape.choice_columns import BrokenContract, ChoiceColumns, TokenRun, broken
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateResponse
from tokentape.v1.types_pb2 import Completion, TopLogprobs


class Stream(Protocol):
    """What a call needs of the stream that it is on."""

    def leave(self, key: int) -> None:
        """Leave the call of this key."""
        ...


class RunningCall:
    """A call that was begun. One reader reads it: whole, piece by piece, or as `Generate`'s events."""

    __slots__ = (
        "_begin_again",
        "_end",
        "_end_waiter",
        "_may_begin_again",
        "begin",
        "choices",
        "first",
        "has_ended",
        "key",
        "started",
        "stream",
        "timer",
        "waiter",
    )

    def __init__(self, begin: GenerateManyRequest.Begin, begin_again: Callable[[RunningCall], bool]) -> None:
        """`begin_again` begins it on another stream, and says whether it has."""
        self.begin: GenerateManyRequest.Begin | None = begin
        """What begins it; None: it was accepted."""
        self._begin_again = begin_again
        self._may_begin_again = True
        self.stream: Stream | None = None
        self.key = 0
        """Its key on the stream."""
        self.timer: asyncio.TimerHandle | None = None
        """What ends it when its time is over."""
        self.started: GenerateResponse.Started | None = None
        self.first = ChoiceColumns()
        """Choice 0's."""
        self.choices: dict[int, ChoiceColumns] = {0: self.first}
        self.has_ended = False
        self._end: Status = grpc.StatusCode.OK, ""
        self.waiter: asyncio.Future[None] | None = None
        """Who waits for anything new."""
        self._end_waiter: asyncio.Future[None] | None = None

    async def whole(self) -> None:
        """Wait until the call has ended; then `started` and `choices` have all of it. Cancelling leaves it.

        Raises `AioRpcError` with its status where that is not OK.
        """
        await self.until_end()
        self._raise_for_status()

    async def until_end(self) -> None:
        """Wait until the call has ended, well or not; what came until then is to be read. Cancelling leaves it."""
        try:
            if not self.has_ended:
                self._end_waiter = asyncio.get_running_loop().create_future()
                await self._end_waiter
        finally:
            self.leave()

    async def accepted(self) -> GenerateResponse.Started:
        """Wait until the call was accepted, and return how. Cancelling leaves it. Raises `AioRpcError`, as `whole`."""
        while self.started is None:
            if self.has_ended:
                # Not as OK: see `_problem`.
                raise self._error(*self._end)
            await self._news()
        return self.started

    async def read(self) -> list[TokenRun | Completion]:
        """Return what was added to the choices since the last read, at least something; nothing: the call has ended.

        Cancelling leaves it. Raises `AioRpcError`, as `whole`, when all was read that came before.
        """
        while True:
            if news := self._new():
                return news
            if self.has_ended:
                self._raise_for_status()
                return []
            await self._news()

    @property
    def first_token_at(self) -> float | None:
        """When its first token came, on the clock of `time.monotonic`; `None`: none has."""
        return min(
            (at for columns in self.choices.values() if (at := columns.first_token_at) is not None), default=None
        )

    async def events(self) -> AsyncGenerator[GenerateResponse]:
        """Yield the events that `Generate` would; closing the iterator, or cancelling, leaves the call.

        Raises `AioRpcError` in the end where its status is not OK.
        """
        try:
            yield GenerateResponse(started=await self.accepted())
            while news := await self.read():
                for new in news:
                    yield _event(new)
        finally:
            self.leave()

    def leave(self) -> None:
        """End the call, at the engine too, unless it has ended. Reading it then raises its status, CANCELLED."""
        self._stop(LEFT)

    def end_late(self) -> None:
        """End the call because its time is over."""
        self._stop(LATE)

    def start(self, started: GenerateResponse.Started) -> None:
        """Note that it was accepted."""
        self.started, self.begin = started, None
        self.wake()

    def columns_of(self, choice: int) -> ChoiceColumns:
        """Return a choice's columns."""
        columns = self.choices.get(choice)
        if columns is None:
            columns = self.choices[choice] = ChoiceColumns()
        return columns

    def wake(self) -> None:
        """Wake whoever waits for anything new."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end_at_sidecar(self, code: grpc.StatusCode, message: str) -> None:
        """End the call as the sidecar says. Raises `BrokenContract` where that cannot be."""
        if code is grpc.StatusCode.UNAUTHENTICATED and self.started is None and not self.has_ended:
            again, self._may_begin_again = self._may_begin_again, False
            if again and self._begin_again(self):
                return
        if code is grpc.StatusCode.OK and not self.has_ended:
            problem = self._problem()
            if problem:
                self.end(grpc.StatusCode.INTERNAL, broken(problem))
                return
        self.end(code, message)

    def end(self, code: grpc.StatusCode, message: str) -> None:
        """End the call, unless it has ended."""
        if self.has_ended:
            return
        self.has_ended, self._end = True, (code, message)
        if self.timer is not None:
            self.timer.cancel()
        self.wake()
        if self._end_waiter is not None and not self._end_waiter.done():
            self._end_waiter.set_result(None)

    def _problem(self) -> str:
        """Return what is wrong with a call that has ended as OK."""
        if self.started is None:
            return "a call ended well before it was accepted"
        if not all(columns.is_whole for columns in self.choices.values()):
            return "a call ended well before its choices did"
        return ""

    def _stop(self, status: Status) -> None:
        if not self.has_ended:
            self.end(*status)
            if self.stream is not None:
                self.stream.leave(self.key)

    def _new(self) -> list[TokenRun | Completion]:
        try:
            if len(self.choices) == 1:
                return list(self.first.read(0))
            return [new for choice, columns in self.choices.items() for new in columns.read(choice)]
        except BrokenContract as error:
            status = grpc.StatusCode.INTERNAL, broken(error)
            self._stop(status)
            raise self._error(*status) from None

    async def _news(self) -> None:
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        except asyncio.CancelledError:
            self.leave()
            raise

    def _raise_for_status(self) -> None:
        if self._end[0] is not grpc.StatusCode.OK:
            raise self._error(*self._end)

    @staticmethod
    def _error(code: grpc.StatusCode, message: str) -> grpc.aio.AioRpcError:
        nothing = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(code, nothing, nothing, message, message)


def _event(new: TokenRun | Completion) -> GenerateResponse:
    if isinstance(new, Completion):
        return GenerateResponse(finished=new)
    top = None if new.top is None else TopLogprobs(k=new.top.k, token_ids=new.top.token_ids, logprobs=new.top.logprobs)
    return GenerateResponse(
        delta=GenerateResponse.Delta(
            choice=new.choice,
            token_ids=new.token_ids,
            logprobs=new.logprobs,
            weight_version=new.weight_version,
            top_logprobs=top,
        )
    )
