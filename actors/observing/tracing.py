"""OpenTelemetry spans: a span for each request, from its acceptance to its end, with the events in between.

    provider = open_provider()              # OTLP over HTTP, to OTEL_EXPORTER_OTLP_ENDPOINT
    detach = trace_requests(telemetry, provider)
    ...
    provider.shutdown()                     # sends the last spans

This needs `genbatch[otel]`. Names of attributes follow the semantic conventions of generative AI, and vLLM's names for
latencies; our own start with "genbatch.". Spans hold no text of prompts or answers.
"""

import time
from collections.abc import Callable, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace import TracerProvider as AnyTracerProvider

from genbatch.actors.runtime.telemetry import Telemetry

_NANOSECONDS = 1_000_000_000
# Event -> event of the span.
_EVENTS = {
    "request.started": "prefill",
    "request.first_token": "first_token",
    "request.preempted": "preempted",
}
# Measurement of an event -> attribute of the span.
_ATTRIBUTES = {
    "queue_s": "gen_ai.latency.time_in_queue",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}


def open_provider() -> TracerProvider:
    """Return a provider that sends spans to the address in the standard OTEL_ variables of the environment."""
    ours = Resource({"service.name": "genbatch"})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def trace_requests(telemetry: Telemetry, provider: AnyTracerProvider) -> Callable[[], None]:
    """Make a span of each request with events in `telemetry`, until the returned function is called."""
    return telemetry.attach(RequestSpans(provider).handle)


class RequestSpans:
    """The spans of open requests."""

    def __init__(self, provider: AnyTracerProvider) -> None:
        self._tracer = provider.get_tracer("genbatch")
        self._open: dict[str, Span] = {}

    def handle(self, event: str, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> None:
        """Handle an event of Telemetry."""
        request_id = str(metadata.get("request_id"))
        if event == "request.accepted":
            span = self._open[request_id] = self._start(measurements, metadata)
            span.add_event("queued")
        elif event == "request.refused":
            self._refuse(metadata)
        elif event == "request.finished":
            ended = self._open.pop(request_id, None)
            if ended is not None:
                _end(ended, measurements, metadata)
        elif event in _EVENTS and request_id in self._open:
            span = self._open[request_id]
            span.add_event(_EVENTS[event])
            for name, attribute in _ATTRIBUTES.items():
                if name in measurements:
                    span.set_attribute(attribute, measurements[name])

    def _start(self, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> Span:
        """Return a span that begins when the request arrived, before its prompt was tokenized."""
        span = self._tracer.start_span(
            f"{metadata['kind']} {metadata['model']}",
            kind=SpanKind.SERVER,
            start_time=time.time_ns() - int(measurements["tokenize_s"] * _NANOSECONDS),
        )
        _name(span, metadata)
        span.set_attributes(
            {
                "gen_ai.operation.name": str(metadata["kind"]),
                "gen_ai.request.max_tokens": int(measurements["max_tokens"]),
                "gen_ai.request.temperature": measurements["temperature"],
                "gen_ai.request.choice.count": int(measurements["n"]),
                "gen_ai.usage.input_tokens": int(measurements["prompt_tokens"]),
            }
        )
        return span

    def _refuse(self, metadata: Mapping[str, object]) -> None:
        span = self._tracer.start_span(f"refused {metadata['model']}", kind=SpanKind.SERVER)
        _name(span, metadata)
        _fail(span, str(metadata["code"]))
        span.end()


def _name(span: Span, metadata: Mapping[str, object]) -> None:
    span.set_attributes(
        {
            "gen_ai.provider.name": "genbatch",
            "gen_ai.request.model": str(metadata["model"]),
            "gen_ai.response.model": str(metadata["model"]),
            "genbatch.request_id": str(metadata["request_id"]),
            "genbatch.client": str(metadata["client"]),
            "genbatch.tenant": str(metadata["tenant"]),
        }
    )


def _end(span: Span, measurements: Mapping[str, float], metadata: Mapping[str, object]) -> None:
    span.add_event("end")
    span.set_attributes(
        {
            "gen_ai.usage.output_tokens": int(measurements["generation_tokens"]),
            "gen_ai.response.finish_reasons": [str(metadata["reason"])],
            "gen_ai.latency.e2e": measurements["e2e_s"],
        }
    )
    if metadata["code"]:
        _fail(span, str(metadata["code"]))
    span.end()


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR, code)
