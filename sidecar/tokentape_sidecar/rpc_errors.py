"""The sidecar's edge for errors: domain error to gRPC status, in one table, for every method at once."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tokentape.call_status import Status
from tokentape_sidecar import errors
from tokentape_sidecar.interceptors import OUR_METHODS, Context, Continuation, Handler, rewrap

logger = logging.getLogger(__name__)

STATUS_OF: dict[type[errors.TokentapeError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextOverflow: grpc.StatusCode.OUT_OF_RANGE,
    errors.SequenceOutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.TapeSealed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TextUnavailable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.EngineDead: grpc.StatusCode.UNAVAILABLE,
    errors.EngineStalled: grpc.StatusCode.UNAVAILABLE,
    errors.WeightsBroken: grpc.StatusCode.UNAVAILABLE,
    errors.StaleWeights: grpc.StatusCode.ABORTED,
    errors.StateForbids: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.ControlFailed: grpc.StatusCode.INTERNAL,
    errors.EngineBusy: grpc.StatusCode.UNAVAILABLE,
    errors.ShuttingDown: grpc.StatusCode.UNAVAILABLE,
    errors.CallError: grpc.StatusCode.INTERNAL,
}
"""Every domain error and its status."""

# A status travels in HTTP headers, and headers over 8 KiB turn it into RESOURCE_EXHAUSTED.
_MAX_MESSAGE_CHARACTERS = 1000

Decode: TypeAlias = Callable[[bytes], object]
"""Makes a message of its bytes, or raises `DecodeError`."""


def status_of(error: Exception) -> Status:
    """Return the status that `error` means; an unexpected one is logged in full and sent generic."""
    if isinstance(error, errors.TokentapeError):
        status = STATUS_OF.get(type(error), grpc.StatusCode.INTERNAL)
        # Other characters than ASCII would take up to twelve bytes in a header.
        return status, str(error).encode("ascii", "backslashreplace").decode()[:_MAX_MESSAGE_CHARACTERS]
    logger.error("a call failed unexpectedly", exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error; the sidecar's log has the details"


async def answer_error(error: BaseException, context: Context) -> NoReturn:
    """End the call with the status that `error` means (see `status_of`)."""
    if not isinstance(error, Exception) or isinstance(error, grpc.aio.AbortError):
        # The client has gone, and nobody is left to answer; or it has its answer.
        raise error
    await context.abort(*status_of(error))


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of tokentape's services, so that servicers just raise domain errors."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler with errors answered (see `grpc.aio.ServerInterceptor`)."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OUR_METHODS):
            return handler
        decode: Decode = cast("Any", handler.request_deserializer)
        return rewrap(
            handler,
            unary=lambda method: _answering_unary(method, decode),
            stream=lambda method: _answering_stream(method, _decoder(handler, decode)),
            decodes=False,
        )


def _decoder(handler: Handler, decode: Decode) -> Callable[[Any], object]:
    """Return what decodes that which the handler's method takes: a request, or a stream of them."""
    if not handler.request_streaming:
        return lambda request: _decoded(request, decode)
    return lambda requests: _decoded_each(requests, decode)


async def _decoded_each(requests: AsyncIterable[bytes], decode: Decode) -> AsyncIterator[object]:
    async for request in requests:
        yield _decoded(request, decode)


def _decoded(request: bytes, decode: Decode) -> object:
    # gRPC itself answers UNKNOWN to what it cannot decode, as if that were our failure, and logs a traceback.
    try:
        return decode(request)
    except DecodeError:
        raise errors.InvalidArgument(
            "the request", "its bytes are no message of the kind that this method takes"
        ) from None


def _answering_unary(method: Callable[[Any, Context], Awaitable[Any]], decode: Decode) -> Callable[..., Any]:
    async def answer(request: bytes, context: Context) -> object:
        try:
            return await method(_decoded(request, decode), context)
        except BaseException as error:  # noqa: BLE001 - answer_error re-raises what is not an answer
            await answer_error(error, context)

    return answer


def _answering_stream(
    method: Callable[[Any, Context], AsyncGenerator[Any, None]], decoded: Callable[[Any], object]
) -> Callable[..., Any]:
    async def answer(request: Any, context: Context) -> AsyncIterator[object]:
        try:
            # Closing ends the servicer's own `finally` now, not when the garbage collector comes by.
            async with aclosing(method(decoded(request), context)) as responses:
                async for response in responses:
                    yield response
        except BaseException as error:  # noqa: BLE001 - answer_error re-raises what is not an answer
            await answer_error(error, context)

    return answer
