"""One `GenerateMany` stream of a client: which calls it has, and what its messages say of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, repeat
from typing import TypeAlias

import grpc
import grpc.aio

from tokentape.call_status import status_code
from tokentape.choice_columns import BrokenContract, broken
from tokentape.running_call import RunningCall
from tokentape.stream_status import StreamStatus
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateManyResponse, GenerateResponse
from tokentape.v1.types_pb2 import TopLogprobs

_logger = logging.getLogger(__name__)

REQUEST_BYTES = 1024 * 1024
"""How many bytes of calls are put into a message together. A larger call goes alone."""

_CLOSED = grpc.StatusCode.CANCELLED, "the client of this sidecar was closed"

Rpc: TypeAlias = "grpc.aio.StreamStreamCall[GenerateManyRequest, GenerateManyResponse]"


class CallStream:
    """A stream that was opened. It ends by itself, with its sidecar, or with `close`."""

    def __init__(self, rpc: Rpc, forget: Callable[[CallStream], None]) -> None:
        """`rpc` is a call of `GenerateMany` that was just made; `forget` is told when this takes no more calls."""
        self._rpc = rpc
        self._status = StreamStatus(rpc)
        self._forget = forget
        self._keys = count()
        self._calls: dict[int, RunningCall] = {}
        """Those that have not ended at the sidecar."""
        self._started: dict[int, RunningCall] = {}
        """Those of them that were accepted."""
        self._version = ""
        """That of the last tokens."""
        self._begins: dict[int, GenerateManyRequest.Begin] = {}
        """What is still to be sent, by key."""
        self._leaves: list[int] = []
        """Keys still to be sent, of calls that were begun by an earlier message."""
        self._wake = asyncio.Event()
        self._takes_more = True
        """Whether more calls may be begun here."""
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    @property
    def takes_calls(self) -> bool:
        """Whether calls may be begun here: it has not ended, and is not about to."""
        return self._takes_more and not self._rpc.done()

    def begin(self, call: RunningCall, begin: GenerateManyRequest.Begin) -> None:
        """Begin a call here, by `begin`."""
        key = next(self._keys) & 0xFFFF_FFFF
        while key in self._calls:
            key = next(self._keys) & 0xFFFF_FFFF
        begin.key = key
        self._calls[key] = call
        call.stream, call.key = self, key
        self._begins[key] = begin
        self._wake.set()

    def leave(self, key: int) -> None:
        """Leave a call, which has not ended at the sidecar as far as is known."""
        if self._begins.pop(key, None) is not None:
            # The sidecar never hears of it.
            self._forget_call(key)
        elif key in self._calls:
            self._leaves.append(key)
            self._wake.set()

    def end_writing(self) -> None:
        """Take no more calls; the stream ends with those that it has."""
        self._takes_more = False
        self._wake.set()

    async def close(self) -> None:
        """End the stream, and its calls."""
        # Not by the reader alone: one that is cancelled before its first step takes none.
        self._end(*_CLOSED)
        self._reading.cancel()
        await asyncio.gather(self._reading, self._writing, return_exceptions=True)

    async def _write(self) -> None:
        """Write what is to be sent, one message after the other, as grpc.aio wants it.

        As long as there is a call it may be left, so our side is open until then.
        """
        # The stream has ended: whoever reads it learns how.
        with suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            while self._calls or self._takes_more:
                await self._wake.wait()
                self._wake.clear()
                while self._begins or self._leaves:
                    await self._rpc.write(self._next_request())
            await self._rpc.done_writing()

    def _next_request(self) -> GenerateManyRequest:
        """Return what is to be sent, or as much of it as a message should have."""
        leaves, self._leaves = self._leaves, []
        begins: list[GenerateManyRequest.Begin] = []
        size = 0
        for key, begin in list(self._begins.items()):
            size += begin.ByteSize()
            if begins and size > REQUEST_BYTES:
                break
            begins.append(begin)
            del self._begins[key]
        return GenerateManyRequest(begin=begins, leave=leaves)

    async def _read(self) -> None:
        end = _CLOSED
        try:
            async for message in self._rpc:
                self._take(message)
            end = grpc.StatusCode.INTERNAL, "the sidecar ended a stream before the calls on it"
        except grpc.aio.AioRpcError:
            end = await self._status.of_peer()
        except BrokenContract as error:
            end = grpc.StatusCode.INTERNAL, broken(error)
        except Exception as error:
            _logger.exception("a stream of calls cannot be read")
            end = grpc.StatusCode.INTERNAL, f"the stream of calls cannot be read: {error}"
        finally:
            self._end(*end)

    def _end(self, code: grpc.StatusCode, message: str) -> None:
        self._forget(self)
        self._rpc.cancel()
        self._writing.cancel()
        calls, self._calls, self._started = self._calls, {}, {}
        for call in calls.values():
            call.end(code, message)

    def _take(self, message: GenerateManyResponse) -> None:
        for started in message.started:
            if started.key in self._started:
                raise BrokenContract(f"the call {started.key} started twice")
            call = self._call(started.key)
            _check_prompt(started.started)
            call.start(started.started)
            self._started[started.key] = call
        if message.keys or message.token_ids:
            self._take_tokens(message)
        for finished in message.finished:
            completion = finished.completion
            self._accepted(finished.key).columns_of(completion.choice).finish(completion)
            self._accepted(finished.key).wake()
        for ended in message.ended:
            # Forgotten after that: to begin it again may fail, and then the end of the stream is its end.
            self._call(ended.key).end_at_sidecar(status_code(ended.code), ended.message)
            self._forget_call(ended.key)

    def _forget_call(self, key: int) -> None:
        del self._calls[key]
        self._started.pop(key, None)
        if not self._calls and not self._takes_more:
            self._wake.set()

    def _take_tokens(self, message: GenerateManyResponse) -> None:
        keys, token_ids, logprobs = message.keys, message.token_ids, message.logprobs
        if message.weight_version != self._version:
            self._version = message.weight_version
        version = self._version
        if not math.isfinite(sum(logprobs)):
            raise BrokenContract("a log-probability that is no finite number")
        if message.choices or message.token_counts or message.HasField("top_logprobs"):
            self._take_runs(message, version)
            return
        if not len(keys) == len(token_ids) == len(logprobs):
            raise BrokenContract(f"{len(keys)} runs of one, {len(token_ids)} tokens, {len(logprobs)} log-probabilities")
        started, key = self._started, 0
        try:
            # A token of each call is almost all that messages are: nothing is made here, and nothing called but append.
            for key, token_id, logprob in zip(keys, token_ids, logprobs, strict=True):
                call = started[key]
                columns = call.first
                columns.token_ids.append(token_id)
                columns.logprobs.append(logprob)
                if columns.version is not version:
                    columns.begin_version(version, 1)
                if call.waiter is not None:
                    call.wake()
        except KeyError:
            raise _unknown(key) from None

    def _take_runs(self, message: GenerateManyResponse, version: str) -> None:
        runs, tokens, top = len(message.keys), len(message.token_ids), message.top_logprobs
        counts: Sequence[int] = message.token_counts or [1] * runs
        lengths = len(message.choices or message.keys), len(counts), sum(counts), len(message.logprobs)
        if lengths != (runs, runs, tokens, tokens) or 0 in counts:
            raise BrokenContract(f"{runs} runs of {tokens} tokens, with columns of {lengths}")
        if not len(top.token_ids) == len(top.logprobs) == top.k * tokens:
            raise BrokenContract(f"{len(top.token_ids)} most probable tokens for {tokens} positions of {top.k}")
        _check_best(top)
        # A list's slices cost no look at each value.
        ids, logprobs, k, start = list(message.token_ids), list(message.logprobs), top.k, 0
        for key, choice, size in zip(message.keys, message.choices or repeat(0), counts, strict=False):
            call, end = self._accepted(key), start + size
            columns = call.columns_of(choice)
            columns.token_ids.extend(ids[start:end])
            columns.logprobs.extend(logprobs[start:end])
            if columns.version is not version:
                columns.begin_version(version, size)
            if k:
                columns.add_top(k, top.token_ids[start * k : end * k], top.logprobs[start * k : end * k])
            call.wake()
            start = end

    def _call(self, key: int) -> RunningCall:
        call = self._calls.get(key)
        if call is None:
            raise _unknown(key)
        return call

    def _accepted(self, key: int) -> RunningCall:
        call = self._started.get(key)
        if call is None:
            raise _unknown(key)
        return call


def _check_prompt(started: GenerateResponse.Started) -> None:
    if started.prompt_logprobs and not sum(started.prompt_logprobs) < math.inf:
        raise BrokenContract("a log-probability of a prompt's token that is none")
    _check_best(started.prompt_top_logprobs)


def _check_best(top: TopLogprobs) -> None:
    # -infinity is that of a token that was ruled out. NaN is below nothing, and a sum with it, or with both infinities,
    # is NaN.
    if not sum(top.logprobs) < math.inf:
        raise BrokenContract("a log-probability of a most probable token that is none")


def _unknown(key: int) -> BrokenContract:
    return BrokenContract(f"something of the call {key}, which runs not")
