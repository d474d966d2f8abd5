"""OTLP in both encodings, against the SDK's own encoder and the protobuf classes."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agentrl.core import otlp
from agentrl.core.errors import Invalid
from agentrl.core.otlp import KIND, OPERATION, kind_of, with_current_names
from agentrl.core.types import Span

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def as_json(**span: Any) -> bytes:
    known = {"traceId": TRACE, "spanId": SPAN, "name": "s"}
    times = {"startTimeUnixNano": "1", "endTimeUnixNano": 2}
    return json.dumps(
        {"resourceSpans": [{"scopeSpans": [{"spans": [known | times | span]}]}]}
    ).encode()


def attributes(**values: Any) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def decode(body: bytes, content_type: str) -> list[Span]:
    return otlp.decode_valid(body, content_type)[0]


def test_spans_of_the_real_sdk() -> None:
    finished = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "mine"}))
    provider.add_span_processor(SimpleSpanProcessor(finished))
    tracer = provider.get_tracer("library")
    given = {KIND: "TOOL", "n": 3, "x": [1.5, 2.5], "yes": True}
    with (
        tracer.start_as_current_span("outer", attributes={OPERATION: "invoke_agent"}) as outer,
        pytest.raises(ValueError, match="broken"),
        tracer.start_as_current_span("inner", attributes=given),
    ):
        raise ValueError("broken")
    body = encode_spans(finished.get_finished_spans()).SerializeToString()
    inner, root = decode(body, "application/x-protobuf")
    context = outer.get_span_context()
    assert (root.attempt, root.id) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert (root.kind, root.parent, root.ok, root.name) == ("agent", None, True, "outer")
    assert root.attributes["resource.service.name"] == "mine"
    assert (inner.kind, inner.parent, inner.ok) == ("tool", root.id, False)
    assert root.start <= inner.start <= inner.end <= root.end
    said = inner.attributes
    assert (said["n"], said["x"], said["yes"]) == (3, [1.5, 2.5], True)
    assert said["exception.type"] == "ValueError"
    assert said["otel.status_description"] == "ValueError: broken"
    assert KIND not in said
    assert not [key for key in said if "telemetry.sdk" in key]


def test_json_has_ids_in_hexadecimal_and_may_say_more() -> None:
    values = attributes(
        **{OPERATION: {"stringValue": "chat"}},
        many={"arrayValue": {"values": [{"intValue": "7"}, {"doubleValue": "NaN"}]}},
        nested={"kvlistValue": {"values": attributes(a={"boolValue": False})}},
        raw={"bytesValue": "AAE="},
    )
    more = {"attributes": values, "parentSpanId": SPAN.upper(), "kind": 3, "unknown": {"x": 1}}
    links = [{"traceId": TRACE, "spanId": SPAN}]
    body = as_json(**more, status={"code": 2}, links=links)
    (span,) = decode(body, "application/json; charset=utf-8")
    assert span == Span(
        id=SPAN,
        attempt=TRACE,
        parent=SPAN,
        name="s",
        kind="llm",
        start=1,
        end=2,
        ok=False,
        attributes={
            "gen_ai.operation.name": "chat",
            "many": [7, "nan"],
            "nested": {"a": False},
            "raw": "AAE=",
        },
    )


@pytest.mark.parametrize(
    ("body", "content_type", "reason"),
    [
        (b"", "text/plain", "spans come as"),
        (b"\xff\xff\xff", "application/x-protobuf", "not an OTLP trace request"),
        (b"{", "application/json", "not an OTLP trace request"),
        (b"[]", "application/json", "not an OTLP trace request"),
        (b"\xff", "application/json", "not an OTLP trace request"),
        (b'{"resourceSpans": [1]}', "application/json", "not an OTLP trace request"),
        (b'{"resourceSpans": {"a": 1}}', "application/json", "not an OTLP trace request"),
        (as_json(traceId="xyz"), "application/json", "not an OTLP trace request"),
        (as_json(traceId=5), "application/json", "not an OTLP trace request"),
        (as_json(name=5), "application/json", "not an OTLP trace request"),
        (as_json(endTimeUnixNano=str(2**70)), "application/json", "not an OTLP trace request"),
        (b'{"resourceSpans":' + b"[" * 5000, "application/json", "not an OTLP trace request"),
    ],
)
def test_bad_requests_are_invalid(body: bytes, content_type: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        decode(body, content_type)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"traceId": "00" * 16}, "no trace id"),
        ({"traceId": "0a"}, "no trace id"),
        ({"spanId": ""}, "no span id"),
        ({"parentSpanId": "0a"}, "parent id"),
        ({"endTimeUnixNano": "0"}, "times"),
        ({"endTimeUnixNano": str(2**63)}, "times"),
    ],
)
def test_an_unusable_span_is_counted_and_the_rest_is_kept(
    wrong: dict[str, Any], reason: str
) -> None:
    request = json.loads(as_json())
    spans = request["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans.insert(0, spans[0] | wrong)
    body = json.dumps(request).encode()
    found, unusable, why = otlp.decode_valid(body, "application/json")
    assert ([span.id for span in found], unusable) == ([SPAN], 1)
    assert reason in why
    assert decode(body, "application/json") == found


def test_a_span_of_a_clock_set_back_has_no_duration() -> None:
    (span,) = decode(as_json(startTimeUnixNano="9"), "application/json")
    assert (span.start, span.end) == (9, 9)


def test_an_empty_request_has_no_spans() -> None:
    assert decode(b"", "application/x-protobuf") == []
    assert decode(b"{}", "application/json") == []


def test_the_answer_speaks_the_language_of_the_request() -> None:
    assert otlp.success("application/json") == (b"{}", "application/json")
    body, form = otlp.success("application/json;charset=utf-8", 2, "no such attempt")
    said = {"rejectedSpans": "2", "errorMessage": "no such attempt"}
    assert (json.loads(body), form) == ({"partialSuccess": said}, "application/json")
    assert otlp.success("application/x-protobuf") == (b"", "application/x-protobuf")
    body, _ = otlp.success("application/x-protobuf", 2, "no such attempt")
    partial = ExportTraceServiceResponse.FromString(body).partial_success
    assert (partial.rejected_spans, partial.error_message) == (2, "no such attempt")


def test_what_is_encoded_is_decoded_again() -> None:
    said = {"a": 1, "b": 2.5, "c": [True, {"d": "x"}], "e": {}, "f": [], "g": 2**64, "h": math.pi}
    said |= {"i": 10**400}
    span = Span(
        id=SPAN, attempt=TRACE, parent=None, name="s", kind="tool", start=1, end=2, attributes=said
    )
    body = otlp.encode([span], {"service.name": "agentrl"}, scope="")
    (found,) = decode(body, "application/x-protobuf")
    expected = said | {"g": float(2**64), "i": str(10**400), "resource.service.name": "agentrl"}
    assert (found.kind, found.attributes) == ("tool", expected)
    (row,) = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert row.status.code == row.status.STATUS_CODE_OK
    with pytest.raises(Invalid, match="no OpenTelemetry id"):
        otlp.encode([msgspec.structs.replace(span, id="x")], {})


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (rb'"cut \ud83d"', "cut ?"),
        (rb'"\ude00 and \ud83d\ude00"', "? and \U0001f600"),
        (b'"\xed\xa0\xbd"', "\ufffd\ufffd\ufffd"),  # the same half, written as bytes
        (b'"\xff"', "\ufffd"),
    ],
)
@pytest.mark.parametrize("place", ["name", "attribute"])
def test_text_that_is_not_unicode_is_replaced_and_other_spans_are_kept(
    text: bytes, stored: str, place: str
) -> None:
    times = b'"startTimeUnixNano": "1", "endTimeUnixNano": "2"'
    ids = b'"traceId": "%s", "spanId": "%s"' % (b"a" * 32, b"b" * 16)
    name = text if place == "name" else b'"n"'
    value = text if place == "attribute" else b'"v"'
    said = b'"attributes": [{"key": "k", "value": {"stringValue": %s}}]' % value
    first = b'{%s, %s, %s, "name": %s}' % (ids, times, said, name)
    second = b'{%s, %s, "name": "good"}' % (ids, times)
    body = b'{"resourceSpans": [{"scopeSpans": [{"spans": [%s, %s]}]}]}' % (first, second)
    found, unusable, why = otlp.decode_valid(body, "application/json")
    assert [span.name for span in found] == [stored if place == "name" else "n", "good"]
    assert found[0].attributes["k"] == (stored if place == "attribute" else "v")
    assert (unusable, "half a surrogate pair, was replaced" in why) == (0, True)
    answer, _ = otlp.success("application/json", unusable, why)
    assert b"was replaced" in answer


# -- kinds and attributes of spans, in the words of other instrumentations -------------------------


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"openinference.span.kind": "LLM", "llm.model_name": "m"}, "llm"),
        ({"openinference.span.kind": "RETRIEVER"}, "internal"),
        ({"gen_ai.operation.name": "plan", "gen_ai.agent.name": "a"}, "chain"),
        ({"gen_ai.operation.name": "embeddings", "gen_ai.system": "openai"}, "internal"),
        ({"traceloop.span.kind": "workflow", "traceloop.entity.name": "team"}, "chain"),
        ({"traceloop.span.kind": "task"}, "chain"),
        ({"traceloop.span.kind": "agent"}, "agent"),
        ({"traceloop.span.kind": "tool"}, "tool"),
        ({"llm.request.type": "chat", "gen_ai.system": "OpenAI"}, "llm"),
        ({"llm.request.type": "embedding"}, "internal"),
        ({"gen_ai.tool.name": "look", "tool_arguments": "{}"}, "tool"),  # Pydantic AI
        ({"agent_name": "clerk", "model_name": "m"}, "agent"),
        ({"gen_ai.system": "openai", "gen_ai.request.model": "m"}, "llm"),  # before 1.27
        ({"http.method": "POST", "gen_ai.agent.name": "clerk"}, "internal"),
    ],
)
def test_the_kind_of_a_span_by_the_words_of_its_instrumentation(
    sent: dict[str, Any], kind: str
) -> None:
    assert kind_of(sent) == kind


@pytest.mark.parametrize(
    ("sent", "name", "value"),
    [
        ({"gen_ai.workflow.name": "crew"}, "gen_ai.agent.name", "crew"),
        ({"agent.name": "clerk"}, "gen_ai.agent.name", "clerk"),
        ({"agent_name": "clerk"}, "gen_ai.agent.name", "clerk"),
        ({"agent_name": "old", "gen_ai.agent.name": "new"}, "gen_ai.agent.name", "new"),
        ({"gen_ai.system": "openai"}, "gen_ai.provider.name", "openai"),
        ({"gen_ai.usage.prompt_tokens": 3}, "gen_ai.usage.input_tokens", 3),
        ({"tool_response": "x"}, "gen_ai.tool.call.result", "x"),
        (
            {"traceloop.span.kind": "agent", "traceloop.entity.name": "clerk"},
            "gen_ai.agent.name",
            "clerk",
        ),
        (
            {"traceloop.span.kind": "tool", "traceloop.entity.name": "look"},
            "gen_ai.tool.name",
            "look",
        ),
    ],
)
def test_older_names_of_attributes_are_kept_and_known_by_the_current_ones(
    sent: dict[str, Any], name: str, value: Any
) -> None:
    found = with_current_names(sent)
    assert found[name] == value
    assert found.items() >= sent.items()
    assert with_current_names({"traceloop.span.kind": "task"}) == {"traceloop.span.kind": "task"}
