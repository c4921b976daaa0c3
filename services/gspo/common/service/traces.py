"""Traces of rollouts through the services: a span for each stage, exported by OTLP.

Off unless an endpoint is set; OpenTelemetry is then not imported. The ids of a trace and its root span follow from
run, group and number, so that every service adds its own spans without a context from the others.
"""

import os
import threading
from hashlib import blake2b
from typing import Any, cast

from gspo.common.errors import InputError
from gspo.common.streams.keys import rollout_key

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
# A share of the rollouts, by their ids: the same ones in every service.
SHARE_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"
# The rollouts of a step come at once, each with several spans; more than fit are dropped.
_QUEUE = 65_536
_EXPORT_S = 5.0
_NANO = 1_000_000_000


class Traces:
    """The spans that one service adds.

    Attributes:
        on: Whether spans are exported; else values for spans alone need not be computed.

    Args:
        endpoint: Address of a collector, as http://host:4317; the standard variable where it is None.

    Raises:
        InputError: OTEL_TRACES_SAMPLER_ARG is not a number from 0 to 1.
    """

    def __init__(self, service: str, *, name: str, run: str, endpoint: str | None) -> None:
        endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE)
        self.on = bool(endpoint)
        self._run = run
        if endpoint:
            self._start(endpoint, {"service.name": f"gspo-{service}", "service.instance.id": name, "gspo.run": run})

    def _start(self, endpoint: str, resource: dict[str, str]) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, TraceIdRatioBased

        self._ids = _SpanIds()
        self._provider = TracerProvider(
            resource=Resource.create(resource),
            sampler=ALWAYS_ON,
            id_generator=cast("Any", self._ids),  # the SDK's types ask for a subclass
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S, insecure=endpoint.startswith("http://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_QUEUE))
        self._tracer = self._provider.get_tracer("gspo")
        share = TraceIdRatioBased(_share())

        def is_sampled(trace_id: int) -> bool:
            return share.should_sample(None, trace_id, "").decision is Decision.RECORD_AND_SAMPLE

        self._is_sampled = is_sampled

    def add(
        self,
        name: str,
        group: int,
        number: int,
        start_unix_s: float,
        end_unix_s: float,
        *,
        is_root: bool = False,
        **attributes: Any,
    ) -> None:
        """One stage of a rollout, below the rollout's root span, or that span itself: from its issue to its end."""
        if not self.on:
            return
        from opentelemetry import trace

        rollout = rollout_key(group, number)
        trace_id, root_id = ids_of(self._run, rollout)
        if not self._is_sampled(trace_id):
            return
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if is_root:
            self._ids.next = (trace_id, root_id)
        else:
            parent = trace.SpanContext(trace_id, root_id, is_remote=True, trace_flags=trace.TraceFlags(1))
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        span = self._tracer.start_span(
            name,
            context=context,
            start_time=round(start_unix_s * _NANO),
            attributes={"gspo.rollout": rollout, **{f"gspo.{key}": value for key, value in attributes.items()}},
        )
        span.end(round(max(start_unix_s, end_unix_s) * _NANO))

    def close(self) -> None:
        """Export the remaining spans; a collector that does not answer is given up."""
        if self.on:
            self.on = False
            # A thread that may be left behind: shutting an exporter down waits for its last attempt.
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            closing.join(2 * _EXPORT_S)


def _share() -> float:
    text = os.environ.get(SHARE_VARIABLE, "1")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(SHARE_VARIABLE, f"{text!r} is not a share of the rollouts", "Set it to a number from 0 to 1")
    return share


def ids_of(run: str, rollout: str) -> tuple[int, int]:
    """(trace id, root span id) of a rollout: 128 and 64 bits that follow from its name and are never 0."""
    digest = blake2b(f"{run}/{rollout}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


class _SpanIds:
    """Random ids for the SDK, except the ids of a root span, which follow from the rollout."""

    next: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.next[0] if self.next else int.from_bytes(os.urandom(16)) or 1

    def generate_span_id(self) -> int:
        root, self.next = self.next, None
        return root[1] if root else int.from_bytes(os.urandom(8)) or 1

    def is_trace_id_random(self) -> bool:
        return False
