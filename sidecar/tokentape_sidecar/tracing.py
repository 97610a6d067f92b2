"""The sidecar's part of a trace: a span for every call of tokentape's services, those of a `GenerateMany` included.

It continues the client's trace, whose request id and trace are on the log's lines too. Without a tracer provider in the
process nothing is made, and handlers are left as they are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, cast

import grpc
import grpc.aio
from opentelemetry.trace import Span, SpanKind

from tokentape import tracing
from tokentape.call_status import status_code
from tokentape.logs import REQUEST_ID_HEADER, bind
from tokentape_sidecar.interceptors import OUR_METHODS, Context, Continuation, Handler, metadata_of, rewrap

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NOT_THE_CLIENTS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN})
"""Statuses that are not the client's fault, and so are errors of a server's span."""


GENERATE_MANY = "tokentape.v1.GenerationService/GenerateMany"
"""The method whose streams have no span, but each of their calls has."""


def begin_call(method: str, headers: Mapping[str, str]) -> Span:
    """Begin the span of a call of `method`, and work below it, and for the request that `headers` name, from now on."""
    if _REQUEST_ID.fullmatch(request_id := headers.get(REQUEST_ID_HEADER, "")):
        bind(request_id=request_id)
    span = tracing.begin(method, SpanKind.SERVER, headers)
    tracing.enter(span)
    service, _, name = method.partition("/")
    span.set_attributes({"rpc.system": "grpc", "rpc.service": service, "rpc.method": name})
    return span


def end_call(span: Span, code: grpc.StatusCode) -> None:
    """End the span of a call that ended with `code`."""
    span.set_attribute("rpc.grpc.status_code", cast("int", code.value[0]))
    tracing.end(span, code.name if code in _NOT_THE_CLIENTS else "")


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Makes the spans."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the method's handler within a span (see `grpc.aio.ServerInterceptor`)."""
        method = handler_call_details.method.removeprefix("/")
        if not handler_call_details.method.startswith(OUR_METHODS) or method == GENERATE_MANY:
            return await continuation(handler_call_details)
        headers = {key: value for key, value in metadata_of(handler_call_details) if isinstance(value, str)}
        span = begin_call(method, headers)
        handler = await continuation(handler_call_details)
        if handler is None or not span.is_recording():
            return handler
        return rewrap(handler, unary=lambda it: _in_span(it, span), stream=lambda it: _in_span_streaming(it, span))


def _in_span(method: Callable[[Any, Context], Awaitable[Any]], span: Span) -> Callable[..., Any]:
    async def answer(request: object, context: Context) -> object:
        with _ending(span, context):
            return await method(request, context)

    return answer


def _in_span_streaming(method: Callable[[Any, Context], AsyncGenerator[Any, None]], span: Span) -> Callable[..., Any]:
    async def answer(request: object, context: Context) -> AsyncIterator[object]:
        with _ending(span, context):
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response

    return answer


@contextmanager
def _ending(span: Span, context: Context) -> Generator[None]:
    """End `span` with the status that the call has on leaving."""
    left = False
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        left = True
        raise
    finally:
        end_call(span, _left(context) if left else status_code(cast("int", context.code() or 0)))


def _left(context: Context) -> grpc.StatusCode:
    """Return why a call ended before its answer: its deadline has passed, or the client has gone."""
    seconds = cast("float | None", context.time_remaining())
    is_late = seconds is not None and seconds <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
