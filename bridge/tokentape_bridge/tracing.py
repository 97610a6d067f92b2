"""The bridge's part of a trace: a span for every HTTP request, and one below it for each call to a sidecar.

The request's own `traceparent` is continued. Probes have no spans. What spans may hold is said in `tokentape.tracing`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import grpc.aio
from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers
from starlette.types import Scope

from tokentape import tracing
from tokentape.logs import REQUEST_ID_HEADER, bound
from tokentape_bridge.account import Account

_SERVER_ERROR = 500

Metadata = tuple[tuple[str, str], ...]
"""What a gRPC call carries beside its message."""


def begin_request(scope: Scope) -> Span:
    """Begin the span of a request, and work below it from now on."""
    span = tracing.begin("request", SpanKind.SERVER, Headers(scope=scope))
    tracing.enter(span)
    return span


def end_request(span: Span, *, method: str, route: str, status: int, account: Account) -> None:
    """End it; `route` is the route's template, never the path, which may have a tape's id."""
    if span.is_recording():
        span.update_name(f"{method} {route}")
        span.set_attributes(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "tokentape.sidecar": account.sidecar,
                "gen_ai.usage.input_tokens": account.prompt_tokens,
                "gen_ai.usage.output_tokens": account.completion_tokens,
            }
        )
    tracing.end(span, str(status) if status >= _SERVER_ERROR else "")


@contextmanager
def call_span(method: str, sidecar: str) -> Generator[Metadata]:
    """Give the metadata of a call to a sidecar, and make its span, with the status that it has on leaving.

    `method` is the full name, `sidecar` the sidecar's.
    """
    span = tracing.begin(method, SpanKind.CLIENT)
    service, _, name = method.partition("/")
    span.set_attributes(
        {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name, "tokentape.sidecar": sidecar}
    )
    headers = tracing.headers_of(span)
    if request_id := bound().get("request_id"):
        headers[REQUEST_ID_HEADER] = request_id
    problem = ""
    try:
        yield tuple(headers.items())
    except grpc.aio.AioRpcError as error:
        problem = error.code().name
        span.set_attribute("rpc.grpc.status_code", error.code().value[0])
        raise
    finally:
        tracing.end(span, problem)
