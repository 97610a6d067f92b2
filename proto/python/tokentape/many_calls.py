"""The client of `GenerateMany`: any number of calls to one sidecar on one stream.

Invariants:

1. A call gives what `Generate` would have given it, and ends with the status that it would have had there.
2. A stream that ends, or breaks the contract, ends the calls that it has, and no others: the next call opens another.
3. A call costs its reader nothing until the reader asks; whoever reads late reads all that has come by then together.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from tokentape.many_calls_stream import REQUEST_BYTES, CallStream
from tokentape.running_call import RunningCall
from tokentape.v1.generation_pb2 import GenerateManyRequest, GenerateRequest
from tokentape.v1.generation_pb2_grpc import GenerationServiceStub

_logger = logging.getLogger(__name__)


class ManyCalls:
    """Makes calls on a channel. Belongs to the event loop that runs when it is made; `close` it before the channel.

    It opens a stream with the first call, another one after that has ended, and another one where the sidecar no longer
    takes the token that the stream was opened with.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """`channel` is a sidecar's (see `tokentape.channel.dial`). Nothing is sent before the first call."""
        self._stub = GenerationServiceStub(channel)
        self._stream: CallStream | None = None
        """The one that takes calls."""
        self._streams: set[CallStream] = set()
        """Those that have not ended."""
        self._is_closed = False

    def begin(
        self,
        request: GenerateRequest,
        *,
        timeout: float | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> RunningCall:
        """Begin a call, and return it; `leave` it, or read it to its end.

        `timeout`: seconds after which it ends as DEADLINE_EXCEEDED, at the engine too. `metadata`: what a call of its
        own would have, of which `traceparent`, `tracestate` and `x-request-id` are used. Nothing is raised here but
        what an unusable channel or token raises: what becomes of the call, reading it tells.
        """
        begin = GenerateManyRequest.Begin(request=request, timeout=_duration(timeout), metadata=dict(metadata))
        call = RunningCall(begin, self._begin_again)
        if self._is_closed:
            call.end(grpc.StatusCode.CANCELLED, "the client of this sidecar was closed")
        elif timeout is not None and timeout <= 0:
            call.end_late()
        else:
            if timeout is not None:
                call.timer = asyncio.get_running_loop().call_later(timeout, call.end_late)
            self._begin(call)
        return call

    async def close(self) -> None:
        """End all calls, as CANCELLED, and the streams."""
        self._is_closed = True
        await asyncio.gather(*(stream.close() for stream in list(self._streams)))

    def _begin_again(self, call: RunningCall) -> bool:
        """Begin a call on another stream than its own, whose token is no longer one; whether that was done."""
        refused, call.stream = call.stream, None
        if self._is_closed:
            return False
        if self._stream is not None and self._stream is refused:
            _logger.info("opening another stream: the token of the last one is no longer taken")
            self._stream.end_writing()
            self._stream = None
        self._begin(call)
        return True

    def _begin(self, call: RunningCall) -> None:
        begin = call.begin
        assert begin is not None, "a call that was accepted is not begun again"
        if begin.ByteSize() > REQUEST_BYTES or begin.request.sampling.HasField("prompt_logprobs"):
            # On a stream of its own: it, or what is said of its prompt, may be more than the other end takes in a
            # message, which ends a stream.
            stream = self._open_stream()
            stream.begin(call, begin)
            stream.end_writing()
            return
        if self._stream is None or not self._stream.takes_calls:
            self._stream = self._open_stream()
        self._stream.begin(call, begin)

    def _open_stream(self) -> CallStream:
        stream = CallStream(self._stub.GenerateMany(), self._forget)
        self._streams.add(stream)
        return stream

    def _forget(self, stream: CallStream) -> None:
        self._streams.discard(stream)
        if self._stream is stream:
            self._stream = None


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    # Never 0, which the sidecar would refuse.
    whole, nanos = divmod(math.ceil(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)
