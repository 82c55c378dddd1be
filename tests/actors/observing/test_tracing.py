"""Spans: one a request, with what happened to it, from a real Batcher to an exporter in memory."""

from collections.abc import Callable

import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from genbatch.actors.batcher.batcher import Batcher
from genbatch.actors.batcher.messages import Generate
from genbatch.actors.batcher.options import BatcherOptions
from genbatch.actors.observing.tracing import RequestSpans, open_provider, trace_requests
from genbatch.actors.runtime.actor import start
from genbatch.actors.runtime.telemetry import Telemetry
from genbatch.nif.context import Context
from genbatch.nif.models.loaded_model import Model
from genbatch.nif.runners.torch_runner import TorchRunner
from genbatch.proto.errors import InvalidRequest
from genbatch.proto.messages import GenerateRequest, Message


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.mark.trio
async def test_each_request_has_a_span_with_its_events_and_tokens(
    tiny_model: Callable[[str], Model], exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    model, options, telemetry = tiny_model("llama"), BatcherOptions(n_parallel=1, batch_timeout=0.0), Telemetry()
    detach = trace_requests(telemetry, provider)

    def open_context() -> Context:
        return Context(model, TorchRunner(model), n_ctx=256, n_parallel=1, n_held=4, block_size=4, n_batch=32)

    async with trio.open_nursery() as nursery:
        ref = await start(nursery, Batcher(open_context, options), name="batcher", telemetry=telemetry)
        asked = GenerateRequest(
            messages=[Message(role="user", content="a secret")], max_tokens=4, ignore_eos=True, tenant="acme"
        )
        result = await ref.call(Generate(asked, client="http", request_id="chatcmpl-7"), timeout=None)
        with pytest.raises(InvalidRequest):
            await ref.call(Generate(GenerateRequest(prompt="x", temperature=-1.0)), timeout=None)
        detach()
        await ref.call(Generate(GenerateRequest(prompt="unseen", max_tokens=1)), timeout=None)
        await ref.stop()

    span, refused = exporter.get_finished_spans()
    assert (span.name, span.kind) == (f"chat {model.name}", SpanKind.SERVER)
    assert [event.name for event in span.events] == ["queued", "prefill", "first_token", "end"]
    assert span.attributes is not None and span.start_time is not None and span.end_time is not None
    assert span.start_time <= span.events[0].timestamp <= span.end_time
    attributes = dict(span.attributes)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == model.name
    assert attributes["gen_ai.request.max_tokens"] == 4
    assert attributes["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["genbatch.request_id"] == "chatcmpl-7" and attributes["genbatch.tenant"] == "acme"
    assert {"gen_ai.latency.time_in_queue", "gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"} <= set(
        attributes
    )
    assert span.status.status_code is StatusCode.UNSET
    assert "secret" not in span.to_json()
    assert refused.status.status_code is StatusCode.ERROR
    assert refused.attributes is not None and refused.attributes["error.type"] == "invalid_request"


def test_a_failed_request_s_span_is_an_error_and_nothing_stays_open(
    exporter: InMemorySpanExporter, provider: TracerProvider
) -> None:
    spans = RequestSpans(provider)
    names = {"request_id": "1", "client": "", "tenant": "", "model": "m"}
    accepted = {"tokenize_s": 0.5, "prompt_tokens": 3, "max_tokens": 4, "n": 1, "temperature": 0.0}
    ended = {"e2e_s": 1.0, "prompt_tokens": 3, "cached_tokens": 0, "generation_tokens": 2}
    spans.handle("request.accepted", accepted, {**names, "kind": "text_completion"})
    spans.handle("request.preempted", {"generated_tokens": 1}, {"request_id": "1", "swapped": False})
    spans.handle("request.finished", ended, {**names, "reason": "error", "code": "engine_error"})
    spans.handle("request.finished", ended, {**names, "reason": "error", "code": "engine_error"})
    spans.handle("request.started", {"queue_s": 0.0, "cached_tokens": 0}, {"request_id": "unknown"})
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["queued", "preempted", "end"]
    assert span.start_time is not None and span.events[0].timestamp - span.start_time >= 500_000_000


def test_the_exporter_goes_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9/x")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    provider = open_provider()
    try:
        assert provider.resource.attributes["service.name"] == "mine"
    finally:
        provider.shutdown()
