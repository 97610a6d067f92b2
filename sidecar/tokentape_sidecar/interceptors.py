"""What the interceptors of the sidecar's servers have in common: reading a call's details, replacing its method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

OUR_METHODS = "/tokentape.v1."
"""What the names of tokentape's methods begin with."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
"""What an interceptor asks for a method's handler; `None`: there is no such method, and gRPC answers UNIMPLEMENTED."""


def metadata_of(details: grpc.HandlerCallDetails) -> list[tuple[str, str | bytes]]:
    """Return the metadata of a call; keys are in lower case, and may come more than once."""
    return list(cast("Iterable[tuple[str, str | bytes]]", details.invocation_metadata or ()))


def rewrap(
    handler: Handler,
    *,
    unary: Callable[[Any], Any],
    stream: Callable[[Any], Any],
    decodes: bool = True,
) -> Handler:
    """Return `handler` with its method replaced by what `unary` makes of it, or `stream` if it answers by a stream.

    A method that takes a stream of requests answers by one. Without `decodes`, the new method gets requests' bytes.
    """
    if handler.request_streaming and handler.response_streaming:
        wrap, make, method = stream, grpc.stream_stream_rpc_method_handler, handler.stream_stream
    elif handler.response_streaming:
        wrap, make, method = stream, grpc.unary_stream_rpc_method_handler, handler.unary_stream
    else:
        wrap, make, method = unary, grpc.unary_unary_rpc_method_handler, handler.unary_unary
    return make(
        # grpc's stubs describe the methods of synchronous servers here.
        wrap(cast("Any", method)),
        request_deserializer=handler.request_deserializer if decodes else None,
        response_serializer=handler.response_serializer,
    )
