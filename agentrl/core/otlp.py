"""OTLP/HTTP trace requests, with which OpenTelemetry SDKs send spans, decoded and encoded.

The trace id of a span is the id of its attempt. Attributes become JSON. Those of the resource get
the prefix `resource.`; values without a field in `Span` become the attributes `otel.scope.name`,
`otel.status_description` and `exception.*`. The kind of a span follows from its attributes.
Source: the OTLP specification 1.x (opentelemetry.io/docs/specs/otlp), protobuf and JSON encoding.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from agentrl.core.errors import Invalid, install_command
from agentrl.core.types import Json, Span

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue
    from opentelemetry.proto.trace.v1 import trace_pb2


DIFF = "agentrl.diff"  # span attribute: the changes that the agent made in its workspace
KIND, TRACELOOP_KIND = "openinference.span.kind", "traceloop.span.kind"
KINDS = frozenset({"agent", "chain", "tool", "llm"})
TRACELOOP_KINDS = {"workflow": "chain", "task": "chain", "agent": "agent", "tool": "tool"}
# Names of version 0.1.0 of OpenTelemetry's semantic conventions for generative AI.
OPERATION, AGENT_NAME, TOOL_NAME = "gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.tool.name"
OPERATIONS = {
    "chat": "llm",
    "text_completion": "llm",
    "generate_content": "llm",
    "execute_tool": "tool",
    "invoke_agent": "agent",
    "create_agent": "agent",
    "invoke_workflow": "chain",
    "plan": "chain",
}
CURRENT = {
    "gen_ai.system": "gen_ai.provider.name",
    "gen_ai.workflow.name": AGENT_NAME,
    "gen_ai.usage.prompt_tokens": "gen_ai.usage.input_tokens",
    "gen_ai.usage.completion_tokens": "gen_ai.usage.output_tokens",
    "gen_ai.openai.request.seed": "gen_ai.request.seed",
    "agent.name": AGENT_NAME,  # OpenInference
    "tool.name": TOOL_NAME,
    "agent_name": AGENT_NAME,  # Pydantic AI up to version 2 of its instrumentation
    "tool_arguments": "gen_ai.tool.call.arguments",
    "tool_response": "gen_ai.tool.call.result",
}
"""The current name of each older or other name of an attribute that instrumentations send."""
DESCRIPTION = "otel.status_description"  # the message of a failed span


def kind_of(attributes: dict[str, Json]) -> str:
    """The kind of a span, from its OpenInference attribute (which is removed from `attributes`),
    its GenAI operation or OpenLLMetry kind, or an attribute that only spans of one kind have;
    otherwise "internal"."""
    kind = str(attributes.get(KIND, "")).lower()
    if kind in KINDS:
        del attributes[KIND]
        return kind
    if OPERATION in attributes:
        return OPERATIONS.get(str(attributes[OPERATION]), "internal")
    if (kind := str(attributes.get(TRACELOOP_KIND, "")).lower()) in TRACELOOP_KINDS:
        return TRACELOOP_KINDS[kind]
    if attributes.get("llm.request.type") in ("chat", "completion"):  # OpenLLMetry
        return "llm"
    if TOOL_NAME in attributes:
        return "tool"
    if "gen_ai.request.model" in attributes and "gen_ai.system" in attributes:
        return "llm"
    return "agent" if "agent_name" in attributes else "internal"


def with_current_names(attributes: Mapping[str, Json]) -> dict[str, Json]:
    """The attributes, with outdated names also under their current names."""
    added = {CURRENT[old]: attributes[old] for old in CURRENT if old in attributes}
    entity = {"tool": TOOL_NAME, "agent": AGENT_NAME, "workflow": AGENT_NAME}
    name = entity.get(str(attributes.get(TRACELOOP_KIND)))
    if name is not None and "traceloop.entity.name" in attributes:
        added.setdefault(name, attributes["traceloop.entity.name"])
    return added | dict(attributes)


PROTOBUF, JSON_FORM = "application/x-protobuf", "application/json"
Add = Callable[[list[Span]], Awaitable[tuple[int, str]]]
"""Stores spans; returns how many it refuses, and why."""
LATEST_TIME = 2**63 - 1  # nanoseconds; the largest value of a store column
MAX_INTEGER = 2**1023  # every smaller integer can be converted to a float
SMALL_BODY = 2**16  # bytes
ID_FIELDS = {"traceId", "spanId", "parentSpanId"}
NOT_KEPT = ("telemetry.sdk.", "process.", "host.", "os.")  # attributes of the resource


async def receive(body: bytes, content_type: str, add: Add) -> tuple[bytes, str]:
    """Add the spans of a request; return the body and the content type of its response. Raises
    Invalid for a body that is not a request."""
    if len(body) > SMALL_BODY:  # off the event loop, so that other requests are answered
        spans, invalid, why = await asyncio.to_thread(decode_valid, body, content_type)
    else:
        spans, invalid, why = decode_valid(body, content_type)
    refused, reason = await add(spans)
    return success(content_type, invalid + refused, reason or why)


def discard(content_type: str) -> tuple[bytes, str]:
    """Body and content type of the response to logs or metrics, which are not stored: an agent
    would retry after a refusal, and training does not use them."""
    return b"{}" if content_type == JSON_FORM else b"", content_type


def decode_valid(body: bytes, content_type: str) -> tuple[list[Span], int, str]:
    """The valid spans of an ExportTraceServiceRequest in its order, the number of invalid ones, and
    the error of the last invalid one, or else a note about what was changed.

    A span is invalid if its ids do not have 16 and 8 bytes, or if its times are missing or past the
    year 2262. A span that ends before it starts (a clock was set back) gets the duration 0. Raises
    Invalid for another content type or a malformed body."""
    form = content_type.partition(";")[0].strip().lower()
    if form == PROTOBUF:
        request, changed = _parse(body), ""
    elif form == JSON_FORM:
        request, changed = _parse_json(body)
    else:
        raise Invalid(f"spans come as {PROTOBUF} or {JSON_FORM}, not as {content_type!r:.80}")
    valid, invalid, why = list[Span](), 0, ""
    for resource in request.resource_spans:
        resource_attributes = {
            f"resource.{pair.key}": _value(pair.value)
            for pair in resource.resource.attributes
            if not pair.key.startswith(NOT_KEPT)
        }
        for scope in resource.scope_spans:
            for span in scope.spans:
                try:
                    valid.append(_span(span, scope.scope.name, resource_attributes))
                except Invalid as error:
                    invalid, why = invalid + 1, str(error)
    return valid, invalid, why or changed


def requests_of(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """The requests of a file in protobuf, in OTLP's JSON: one request, or several behind their
    sizes, as varints (the specification's file exporter) or as 4 bytes (the Collector's). Raises
    Invalid for another file."""
    for body in _delimited(file):
        yield _as_json(_parse(body))


def _delimited(file: BinaryIO) -> Iterator[bytes]:
    start = file.read(1)
    if start == b"\n":  # the tag of a request's first field
        yield start + file.read()
        return
    while start:
        size = int.from_bytes(file.read(3), "big") if start == b"\0" else _varint(start, file)
        body = file.read(size)
        if len(body) < size or not size:
            raise Invalid("it is truncated, or not OTLP in protobuf, from some point on")
        yield body
        start = file.read(1)


def _varint(start: bytes, file: BinaryIO) -> int:
    size, shift, at = 0, 0, start
    while at and at[0] & 128 and shift < 28:
        size, shift, at = size | (at[0] & 127) << shift, shift + 7, file.read(1)
    return size | at[0] << shift if at else 0


def success(content_type: str, rejected: int = 0, message: str = "") -> tuple[bytes, str]:
    """Body and content type of the response to a request of `content_type`. rejected: the number of
    spans that were dropped because of `message`; the client must not send them again."""
    if content_type.partition(";")[0].strip().lower() == JSON_FORM:
        partial = {"rejectedSpans": str(rejected), "errorMessage": message}
        return msgspec.json.encode(
            {"partialSuccess": partial} if rejected or message else {}
        ), JSON_FORM
    service = _classes()
    answer = service.ExportTraceServiceResponse()
    if rejected or message:
        answer.partial_success.rejected_spans = rejected
        answer.partial_success.error_message = message
    return answer.SerializeToString(), PROTOBUF


def encode(spans: Iterable[Span], resource: Mapping[str, Json], scope: str = "agentrl") -> bytes:
    """A protobuf request with `spans`. The kinds `agent`, `chain`, `tool` and `llm` become the
    OpenInference attribute. Raises Invalid for an attempt or span id that is not hexadecimal."""
    body: bytes = _request(spans, resource, scope).SerializeToString()
    return body


def json_of(
    spans: Iterable[Span], resource: Mapping[str, Json], scope: str = "agentrl"
) -> dict[str, Any]:
    """Encode spans in OTLP's JSON; see `encode`."""
    return _as_json(_request(spans, resource, scope))


def _request(
    spans: Iterable[Span], resource: Mapping[str, Json], scope: str
) -> ExportTraceServiceRequest:
    request: ExportTraceServiceRequest = _classes().ExportTraceServiceRequest()
    outer = request.resource_spans.add()
    _put(outer.resource.attributes, resource)
    inner = outer.scope_spans.add()
    inner.scope.name = scope
    for span in spans:
        try:
            row = inner.spans.add(
                trace_id=bytes.fromhex(span.attempt),
                span_id=bytes.fromhex(span.id),
                parent_span_id=bytes.fromhex(span.parent or ""),
            )
        except ValueError:
            raise Invalid(f"span {span.id!r} of {span.attempt!r} has no OpenTelemetry id") from None
        row.name, row.start_time_unix_nano, row.end_time_unix_nano = span.name, span.start, span.end
        row.kind = row.SPAN_KIND_CLIENT if span.kind == "llm" else row.SPAN_KIND_INTERNAL
        row.flags = 0x101  # sampled; the parent is not remote
        row.status.code = row.status.STATUS_CODE_OK if span.ok else row.status.STATUS_CODE_ERROR
        row.status.message = "" if span.ok else str(span.attributes.get(DESCRIPTION, ""))
        named = {KIND: span.kind.upper()} if span.kind in KINDS else {}
        _put(row.attributes, span.attributes | named)
    return request


def _as_json(request: ExportTraceServiceRequest) -> dict[str, Any]:
    """A request in OTLP's JSON: protobuf's, except that ids are hexadecimal and enums numbers."""
    from google.protobuf import json_format

    data: dict[str, Any] = json_format.MessageToDict(request, use_integers_for_enums=True)
    for row in _with_ids(data):
        for name in row.keys() & ID_FIELDS:
            row[name] = base64.b64decode(row[name]).hex()
    return data


def _with_ids(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans and links of a request in JSON."""
    for resource in data.get("resourceSpans") or ():
        for scope in resource.get("scopeSpans") or ():
            for span in scope.get("spans") or ():
                yield from (span, *(span.get("links") or ()))


def _classes() -> Any:
    try:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
    except ImportError as error:
        message = f"OTLP needs the package opentelemetry-proto: {install_command('server')}"
        raise Invalid(message) from error
    return trace_service_pb2


def _parse(body: bytes) -> ExportTraceServiceRequest:
    from google.protobuf.message import DecodeError

    try:
        request: ExportTraceServiceRequest = _classes().ExportTraceServiceRequest.FromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the body is not an OTLP trace request: {error}") from None
    return request


def _parse_json(body: bytes) -> tuple[ExportTraceServiceRequest, str]:
    """Parse the JSON encoding: protobuf's, except that ids are hexadecimal. Ignores unknown fields,
    as the specification requires of receivers. Also returns a note about what was changed."""
    request: ExportTraceServiceRequest = _classes().ExportTraceServiceRequest()
    from google.protobuf import json_format

    try:
        data, changed = _read_json(body)
        for row in _with_ids(data):
            for name in row.keys() & ID_FIELDS:
                row[name] = base64.b64encode(bytes.fromhex(row[name])).decode()
        json_format.ParseDict(data, request, ignore_unknown_fields=True)
    # ValueError: an id that is not hexadecimal; TypeError and AttributeError: wrong JSON types.
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Invalid(f"the body is not an OTLP trace request: {error}") from None
    return request, changed


def _read_json(body: bytes) -> tuple[dict[str, Any], str]:
    """A JSON object, and a sentence if its text was changed: JavaScript and Java cut strings
    between the two halves of a character beyond U+FFFF, and JSON can write a half, unlike UTF-8."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any]), ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = json.dumps(json.loads(body.decode("utf-8", "replace")), ensure_ascii=False)
        data = msgspec.json.decode(text.encode("utf-8", "replace"), type=dict[str, Any])
    return data, "text that is not Unicode, such as half a surrogate pair, was replaced"


def _span(span: trace_pb2.Span, scope: str, resource_attributes: dict[str, Json]) -> Span:
    if len(span.trace_id) != 16 or not any(span.trace_id):
        raise Invalid(f"span {span.name!r:.80} has no trace id of 16 bytes")
    if len(span.span_id) != 8 or not any(span.span_id):
        raise Invalid(f"span {span.name!r:.80} has no span id of 8 bytes")
    if len(span.parent_span_id) not in (0, 8):
        raise Invalid(f"span {span.name!r:.80} has a parent id that is not of 8 bytes")
    start, end = span.start_time_unix_nano, span.end_time_unix_nano
    if not (0 < start <= LATEST_TIME and 0 < end <= LATEST_TIME):
        raise Invalid(f"span {span.name!r:.80} has the times {start} to {end}; give both")
    attributes = resource_attributes | {pair.key: _value(pair.value) for pair in span.attributes}
    kind = kind_of(attributes)
    if scope:
        attributes["otel.scope.name"] = scope
    if span.status.message:
        attributes[DESCRIPTION] = span.status.message
    for event in span.events:
        if event.name == "exception":
            attributes |= {pair.key: _value(pair.value) for pair in event.attributes}
    return Span(
        id=span.span_id.hex(),
        attempt=span.trace_id.hex(),
        parent=span.parent_span_id.hex() or None,
        name=span.name,
        kind=kind,
        start=start,
        end=max(start, end),
        ok=span.status.code != span.status.STATUS_CODE_ERROR,
        attributes=attributes,
    )


def _value(value: AnyValue) -> Json:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {pair.key: _value(pair.value) for pair in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "double_value" and not math.isfinite(value.double_value):
        return str(value.double_value)  # JSON has no NaN and no infinities
    return getattr(value, kind) if kind else None


def _put(pairs: Any, values: Mapping[str, Json]) -> None:
    for key, value in values.items():
        if value is not None:
            _set(pairs.add(key=key).value, value)


def _set(target: AnyValue, value: Json) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int) and -(2**63) <= value <= LATEST_TIME:
        target.int_value = value
    elif isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_INTEGER):
        target.double_value = float(value)
    elif isinstance(value, list | tuple):
        target.array_value.SetInParent()
        for item in value:
            _set(target.array_value.values.add(), item)
    elif isinstance(value, Mapping):
        target.kvlist_value.SetInParent()
        _put(target.kvlist_value.values, value)
    elif value is not None:
        target.string_value = str(value)
