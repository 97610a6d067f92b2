"""A receiver of OpenTelemetry's traces: its gRPC service, which keeps the spans that it gets."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span, ids in hex."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, object]
    status: str
    text: str
    """All that was sent of it."""


@dataclass
class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """What came, in order."""

    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list[ReceivedSpan])

    def Export(self, request: Any, context: object) -> Any:
        for resource in request.resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            self.spans += [_read(span, service) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace."""
        return [span for span in self.spans if span.trace_id == trace_id]


def _read(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes={each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes},
        status=span.status.message,
        text=str(span),
    )


@contextmanager
def otlp_receiver() -> Generator[OtlpReceiver]:
    """Receive traces on a free port."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
