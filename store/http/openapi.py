"""Builds the server's OpenAPI document from the table of verbs."""

from __future__ import annotations

from typing import Any

import msgspec

from agentrl import __version__
from agentrl.store.http import wire
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
    " bytes (int32, float32), and a trace packed, so that each of its messages and tokens is sent"
    " once. The answer comes as the request did."
)


TRACES = (
    "OTLP/HTTP: an ExportTraceServiceRequest, as JSON or protobuf, also gzip. The trace id of a "
    "span is its attempt. The answer names in `partialSuccess` what was not kept. Scope: runner."
)
OBJECT = {"type": "object"}


def document() -> Schema:
    """Return the OpenAPI 3.1 document, with JSON bodies."""
    types: list[Any] = [wire.Refusal, wire.Error, wire.BatchRequest, wire.BatchResponse]
    for verb in wire.VERBS.values():
        types += [verb.arguments, verb.result]
    found, components = msgspec.json.schema_components(
        types, schema_hook=_array, ref_template="#/components/schemas/{name}"
    )
    verbs = zip(wire.VERBS.values(), found[4::2], found[5::2], strict=True)
    posts = {verb.name: _verb(verb, arguments, result) for verb, arguments, result in verbs}
    posts["batch"] = _post("batch", wire.BatchRequest.__doc__ or "", found[2], found[3])
    posts["traces"] = _post("traces", TRACES, OBJECT, OBJECT)
    pages = {"healthz": "Whether the store can be read.", "openapi.json": "This document."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl store", "version": __version__, "description": MSGPACK_NOTE},
        "paths": {f"/v1/{name}": {"post": post} for name, post in posts.items()}
        | {f"/{name}": {"get": _page(name, what)} for name, what in pages.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _array(type_: type) -> Schema:
    """Return the JSON schema of a token or log-prob array."""
    number: Schema = {"type": "number"}
    if type_ is Int32:
        number = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
    return {"type": "array", "items": number}


def _verb(verb: wire.Verb, arguments: Schema, result: Schema) -> Schema:
    doc = f"{verb.doc}\n\nScope: {', '.join(verb.scopes)}."
    post = _post(verb.name, doc, arguments, result)
    if verb.waits:
        post["responses"]["202"] = {"description": "Not yet: send the same request again."}
    if verb.once:
        post["responses"]["202"] = {"description": "In progress: send the same request again."}
        post["parameters"] = [
            {
                "name": "idempotency-key",
                "in": "header",
                "description": "A repeat with the same key gets the same answer.",
                "schema": {"type": "string", "pattern": wire.KEY},
            }
        ]
    return post


def _post(name: str, doc: str, arguments: Schema, result: Schema) -> Schema:
    refusal = {wire.JSON: {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    return {
        "operationId": name,
        "description": doc,
        "requestBody": {"required": True, "content": {wire.JSON: {"schema": arguments}}},
        "responses": {
            "200": {"description": "Done, durably.", "content": {wire.JSON: {"schema": result}}},
            **{code: {"description": why, "content": refusal} for code, why in REFUSED.items()},
        },
    }


def _page(name: str, what: str) -> Schema:
    content = {wire.JSON: {"schema": OBJECT}}
    return {
        "operationId": name.removesuffix(".json"),
        "security": [],
        "responses": {
            "200": {"description": what, "content": content},
            "503": {"description": REFUSED["503"], "content": content},
        },
    }
