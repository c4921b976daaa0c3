"""A collector of traces for tests: takes OTLP over gRPC as a real one does, and keeps every span."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """One span as it came."""

    service: str
    name: str
    trace: int
    span: int
    parent: int
    start_unix_s: float
    end_unix_s: float
    attributes: dict[str, Any]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What has come, and where to send it."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> Any:
        """Keep the spans of one request."""
        for resource in request.resource_spans:
            service = _plain(resource.resource.attributes)["service.name"]
            self.spans += [_span(service, span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    server, found = grpc.server(ThreadPoolExecutor(max_workers=4)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    found.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(None).wait()


def _span(service: str, span: Any) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace=int.from_bytes(span.trace_id),
        span=int.from_bytes(span.span_id),
        parent=int.from_bytes(span.parent_span_id),
        start_unix_s=span.start_time_unix_nano / 1e9,
        end_unix_s=span.end_time_unix_nano / 1e9,
        attributes=_plain(span.attributes),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}
