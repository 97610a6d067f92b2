"""OpenTelemetry traces of tokentape's processes: W3C trace context in, spans out over OTLP.

Spans are made with OpenTelemetry's API, which does nothing until the process has a tracer provider: that of `tracing`,
or one of the process's owner. No span has a prompt, a completion, a tape's id, or an error's words, which may name one.
That is why OpenTelemetry's own instrumentation of gRPC and ASGI is not used: it records paths and messages of errors.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokentape.logs import bind

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_SERVICE_NAME = "OTEL_SERVICE_NAME"
_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_FLUSH_SECONDS = 2.0
"""How long the end of a process may wait for a receiver that does not answer."""

PARENT_HEADER = "traceparent"
"""The header by which a request says of which trace it is part."""

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("tokentape")


class TracingUnavailable(RuntimeError):
    """Traces were asked for and cannot be made; the message says what to do."""


def name_service(service: str, instance: str = "") -> None:
    """Call this process `service` in its traces, and those of its children, unless the environment names it.

    `instance` tells it from others that are called so.
    """
    os.environ.setdefault(_SERVICE_NAME, service)
    if instance:
        os.environ.setdefault(_RESOURCE, f"service.instance.id={instance}")
    # vLLM reads the one, and OpenTelemetry's rule is that the other stands for it.
    os.environ.setdefault(_TRACES_PROTOCOL, os.environ.get(_PROTOCOL, "grpc"))


@contextmanager
def tracing(endpoint: str | None, service: str, instance: str = "") -> Generator[None]:
    """Send the spans that are made within to `endpoint`, and the last of them before it returns; `None`: make none.

    `service` and `instance` are those of `name_service`. Where the process has a tracer provider already, that one has
    them. Raises `TracingUnavailable`.
    """
    if endpoint is None:
        yield
        return
    name_service(service, instance)
    try:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - only where traces are made
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        if not isinstance(trace.get_tracer_provider(), TracerProvider):
            provider = TracerProvider(shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
            trace.set_tracer_provider(provider)
    except ModuleNotFoundError as missing:
        raise TracingUnavailable(
            f"--otlp-traces-endpoint: the module {missing.name!r} is missing; install it with: "
            "pip install 'tokentape[tracing]'"
        ) from None
    try:
        yield
    finally:
        used = trace.get_tracer_provider()
        assert isinstance(used, TracerProvider)
        # Its own time limit is not kept by the SDK.
        flush = threading.Thread(target=used.force_flush, daemon=True)
        flush.start()
        flush.join(_FLUSH_SECONDS)


def begin(name: str, kind: SpanKind, headers: Mapping[str, str] | None = None) -> Span:
    """Begin a span: below the one that `headers` (in lower case) name, else below the task's. `end` it.

    Without a tracer provider it is none, but stands for the span that the headers name.
    """
    above = _propagator.extract(headers) if headers is not None and PARENT_HEADER in headers else None
    return _tracer.start_span(name, above, kind)


def enter(span: Span) -> None:
    """Work below `span` in this task from now on, and in those that it starts; the log names its trace."""
    context.attach(trace.set_span_in_context(span))
    if span.is_recording():
        bind(trace_id=trace.format_trace_id(span.get_span_context().trace_id))


def headers_of(span: Span | None = None) -> dict[str, str]:
    """Return the headers that let somebody else work below `span`, or below the task's; none where there is none."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, None if span is None else trace.set_span_in_context(span))
    return headers


def end(span: Span, problem: str = "") -> None:
    """End a span; `problem` is a word for what it failed of, with nothing of the request in it."""
    if problem:
        span.set_status(Status(StatusCode.ERROR, problem))
    span.end()


def _exporter(endpoint: str) -> SpanExporter:
    """Return what sends spans by the protocol that the environment names. Raises `TracingUnavailable`."""
    protocol = os.environ[_TRACES_PROTOCOL]
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        return OTLPSpanExporter(endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415

        return trace_exporter.OTLPSpanExporter(endpoint)
    raise TracingUnavailable(f"{_TRACES_PROTOCOL} is {protocol!r}; it can be grpc or http/protobuf")
