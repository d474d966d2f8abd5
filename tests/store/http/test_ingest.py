"""Spans of the real OpenTelemetry SDK over OTLP/HTTP."""

from __future__ import annotations

import gzip
import threading

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from agentrl.store.http import server

ROLLOUT = {"id": "g/0", "run": "run", "group": "g", "index": 0, "task": {}}


@pytest.fixture
def attempt(admin: httpx.Client) -> str:
    admin.post("/v1/enqueue", json={"rollouts": [ROLLOUT]})
    return admin.post("/v1/claim", json={"n": 1, "runner": "r", "lease": 60}).json()[0]["id"]


def finished(attempt: str, *names: str):
    """Spans that an SDK finished in the trace of an attempt."""
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    outer = SpanContext(int(attempt, 16), 1, is_remote=True, trace_flags=TraceFlags(1))
    context = trace.set_span_in_context(NonRecordingSpan(outer))
    for name in names:
        provider.get_tracer("test").start_span(name, context, attributes={"n": 1}).end()
    provider.shutdown()
    return memory.get_finished_spans()


def names(admin: httpx.Client) -> set[str]:
    return {
        span["name"] for span in admin.post("/v1/trace", json={"rollout": "g/0"}).json()["spans"]
    }


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_an_exporter_of_a_runner(runner, admin, attempt, compression):
    exporter = OTLPSpanExporter(
        endpoint=f"{runner.base_url}/v1/traces",
        headers={"authorization": runner.headers["authorization"]},
        compression=compression,
    )
    assert exporter.export(finished(attempt, "search", "answer")) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert names(admin) == {"search", "answer"}


def body(*attempts: str) -> bytes:
    request = ExportTraceServiceRequest()
    for number, attempt in enumerate(attempts):
        spans = request.resource_spans.add().scope_spans.add().spans
        spans.add(
            trace_id=bytes.fromhex(attempt),
            span_id=number.to_bytes(8, "big", signed=False)[:7] + b"\1",
            name=f"span-{number}",
            start_time_unix_nano=1,
            end_time_unix_nano=2,
        )
    return request.SerializeToString()


def test_spans_of_unknown_attempts_are_refused_alone(admin, attempt):
    answer = admin.post(
        "/v1/traces",
        content=body("f" * 32, attempt, "e" * 32),
        headers={"content-type": "application/x-protobuf"},
    )
    assert answer.headers["content-type"] == "application/x-protobuf"
    partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert partial.rejected_spans == 2
    assert "no attempt" in partial.error_message
    assert names(admin) == {"span-1"}


def test_an_unusable_span_of_json_is_refused_alone(admin, attempt):
    span = {"traceId": attempt, "spanId": "00000000000000aa", "name": "tool"}
    span |= {"startTimeUnixNano": "2", "endTimeUnixNano": "1"}
    spans = [span, span | {"spanId": "", "name": "lost"}, span | {"traceId": "f" * 32}]
    spans.append(span | {"spanId": "00000000000000ab", "name": "look", "endTimeUnixNano": "3"})
    answer = admin.post("/v1/traces", json={"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "2"
    assert names(admin) == {"tool", "look"}


def test_what_is_no_trace(admin):
    for content, more, status in (
        (b"\xff\xff", {}, 400),
        (b"{", {"content-type": "application/json"}, 400),
        (b"", {"content-type": "text/plain"}, 400),
        (b"junk", {"content-encoding": "gzip"}, 400),
        (gzip.compress(b"x" * 99, mtime=0)[:20], {"content-encoding": "gzip"}, 400),
        (b"", {"content-encoding": "br"}, 415),
    ):
        headers = {"content-type": "application/x-protobuf", **more}
        answer = admin.post("/v1/traces", content=content, headers=headers)
        assert (answer.status_code, "error" in answer.json()) == (status, True), (content, more)


def test_others_are_answered_while_a_body_is_unpacked(admin, attempt, monkeypatch):
    threads, unpack = list[str](), server.decompress

    def decompress(*args):
        threads.append(threading.current_thread().name)
        return unpack(*args)

    monkeypatch.setattr(server, "decompress", decompress)
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    body = gzip.compress(b'{"resourceSpans": []}')
    assert admin.post("/v1/traces", content=body, headers=headers).status_code == 200
    (name,) = threads
    assert name.startswith("asyncio_")  # a thread of the loop's pool
