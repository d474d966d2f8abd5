"""The OpenAPI document of the server, from the table of verbs."""

from __future__ import annotations

from typing import Any

import msgspec

from agentrl import __version__
from agentrl.store.http.wire import (
    JSON,
    KEY,
    VERBS,
    BatchRequest,
    BatchResponse,
    Error,
    Refusal,
    Verb,
)
from agentrl.types import Int32

Schema = dict[str, Any]
REFUSED = {
    "400": "The body cannot be read.",
    "401": "The key is missing or unknown.",
    "403": "The key's scope is too small.",
    "404": "There is no run, group or attempt of that name.",
    "409": "The state of the store forbids it (`conflict`), or the caller was replaced (`fenced`).",
    "413": "The body is too large.",
    "415": "The content type is not known.",
    "422": "The arguments can never be right.",
    "503": "The store is away for a moment: repeat after `retry-after` seconds.",
}
MSGPACK_NOTE = (
    "Bodies may also be `application/msgpack`: the same objects, with token arrays as little-endian"
    " bytes (int32, float32). The answer comes as the request did."
)


def document() -> Schema:
    """OpenAPI 3.1. Bodies are described as JSON."""
    types: list[Any] = [Refusal, Error, BatchRequest, BatchResponse]
    for verb in VERBS.values():
        types += [verb.arguments, verb.result]
    found, components = msgspec.json.schema_components(
        types, schema_hook=_custom, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(VERBS, zip(found[4::2], found[5::2], strict=True), strict=True))
    paths: Schema = {
        f"/v1/{name}": {"post": _operation(VERBS[name], arguments, result)}
        for name, (arguments, result) in schemas.items()
    }
    paths["/v1/batch"] = {"post": _post("batch", BatchRequest.__doc__ or "", found[2], found[3])}
    paths["/v1/traces"] = {"post": _traces()}
    paths["/healthz"] = {"get": _page("healthz", "Whether the store can be read.")}
    paths["/openapi.json"] = {"get": _page("openapi", "This document.")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl store", "version": __version__, "description": MSGPACK_NOTE},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _custom(type_: type) -> Schema:
    if type_ is Int32:
        number: Schema = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
    else:
        number = {"type": "number"}
    return {"type": "array", "items": number}


def _operation(verb: Verb, arguments: Schema, result: Schema) -> Schema:
    made = _post(verb.name, f"{verb.doc}\n\nScope: {verb.scope.name.lower()}.", arguments, result)
    if verb.waits:
        made["responses"]["202"] = {"description": "Not yet: send the same request again."}
    if verb.once:
        made["responses"]["202"] = {"description": "In progress: send the same request again."}
        made["parameters"] = [
            {
                "name": "idempotency-key",
                "in": "header",
                "description": "A repeat with the same key gets the same answer.",
                "schema": {"type": "string", "pattern": KEY},
            }
        ]
    return made


def _post(name: str, doc: str, arguments: Schema, result: Schema) -> Schema:
    return {
        "operationId": name,
        "description": doc,
        "requestBody": {"required": True, "content": {JSON: {"schema": arguments}}},
        "responses": {
            "200": {"description": "Done, durably.", "content": {JSON: {"schema": result}}},
            **_refusals(),
        },
    }


def _refusals() -> Schema:
    body = {JSON: {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    return {status: {"description": why, "content": body} for status, why in REFUSED.items()}


def _traces() -> Schema:
    body = {"schema": {"type": "object"}}
    done = {"description": "Kept, but for what `partialSuccess` names.", "content": {JSON: body}}
    return {
        "operationId": "traces",
        "description": "OTLP/HTTP: an ExportTraceServiceRequest, as JSON or protobuf, also gzip. "
        "The trace id of a span is its attempt. KeyScope: runner.",
        "requestBody": {"required": True, "content": {JSON: body}},
        "responses": {"200": done, **_refusals()},
    }


def _page(name: str, what: str) -> Schema:
    content = {JSON: {"schema": {"type": "object"}}}
    return {
        "operationId": name,
        "security": [],
        "responses": {
            "200": {"description": what, "content": content},
            "503": {"description": REFUSED["503"], "content": content},
        },
    }
