"""The protocol of server and client: the table of verbs, encodings, errors, and OpenAPI.

Every method of `agentrl.store.base.Store` is a verb: its signature and docstring define the route,
the client's method and the OpenAPI document. Token arrays are lists of numbers in JSON and
little-endian bytes (int32, float32) in msgpack. JSON has no NaN: it is sent as null, which is read
as NaN in token arrays and refused elsewhere. Therefore programs use msgpack.

In msgpack traces are packed, so every message and token is sent only once. Each call of a trace has
its whole conversation and prompt, so a conversation of many calls would be sent once per call. A
packed call has only the part that no earlier call of the trace has, as in the database, and a link
to the rest.
"""

from __future__ import annotations

import inspect
import math
import typing
from array import array
from bisect import insort_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from agentrl import __version__
from agentrl.core import errors
from agentrl.core.types import Int32, Json, Record, Trace, Transition
from agentrl.store import rows
from agentrl.store.base import Store
from agentrl.store.rows import digest, from_blob, to_blob
from agentrl.store.sql.tree import TreeNode, deepest_prefix

NONE = -1


class CallLink(Record, frozen=True, array_like=True):
    """Earlier calls that a call shares data with, by index in the trace; -1: none."""

    tokens: int = NONE  # the prompt begins with all tokens of this call
    chat: int = NONE  # the messages begin with the first `shared` of this call, answer included
    shared: int = 0
    tools: int = NONE  # the tools are those of this call


class PackedTrace(Record, frozen=True):
    """A trace whose calls lack the data that their links refer to."""

    trace: Trace
    links: list[CallLink]


def pack(trace: Trace) -> PackedTrace:
    calls, links = list[Transition](), list[CallLink]()
    # Nodes of calls with tokens, longest first; `seq` is the call's index.
    nodes: list[TreeNode] = []
    chats: list[list[Json]] = []
    sent: list[int] = []  # index of the first call with each set of tools
    holders: dict[tuple[int, int], int] = {}  # (position, id) of a message -> its latest call
    for place, call in enumerate(trace.transitions):
        prompt = to_blob(call.prompt)
        parent = deepest_prefix(prompt, nodes)
        chat, shared = _deepest_chat(call.messages, chats, holders)
        tools = next((i for i in sent if trace.transitions[i].tools == call.tools), NONE)
        if tools == NONE:
            sent.append(place)
        links.append(CallLink(NONE if parent is None else parent.seq, chat, shared, tools))
        if tokens := prompt + to_blob(call.completion):
            insort_right(nodes, TreeNode(place, len(tokens), digest(tokens)), key=_negative_size)
        chats.append([*call.messages, *([] if call.answer is None else [call.answer])])
        holders |= {(i, id(message)): place for i, message in enumerate(chats[-1])}
        short = {
            "prompt": from_blob("i", prompt[parent.size if parent else 0 :]),
            "messages": call.messages[shared:],
            "tools": call.tools if tools == NONE else [],
        }
        calls.append(replace(call, **short))
    return PackedTrace(trace=replace(trace, transitions=calls), links=links)


def unpack(packed: PackedTrace) -> Trace:
    calls, tokens, chats = list[Transition](), list[bytes](), list[list[Json]]()
    for call, link in zip(packed.trace.transitions, packed.links, strict=True):
        prompt = (tokens[link.tokens] if link.tokens != NONE else b"") + to_blob(call.prompt)
        shared = chats[link.chat][: link.shared] if link.chat != NONE else []
        full = {
            "prompt": from_blob("i", prompt),
            "messages": [*shared, *call.messages],
            "tools": call.tools if link.tools == NONE else calls[link.tools].tools,
        }
        calls.append(replace(call, **full))
        tokens.append(prompt + to_blob(call.completion))
        chats.append([*full["messages"], *([] if call.answer is None else [call.answer])])
    return replace(packed.trace, transitions=calls)


def _negative_size(node: TreeNode) -> int:
    return -node.size


def _deepest_chat(
    messages: list[dict[str, Json]], chats: list[list[Json]], holders: dict[tuple[int, int], int]
) -> tuple[int, int]:
    """Return the earlier call that shares the most messages, and their number. Calls read from the
    store share the objects of equal messages."""
    for last in reversed(range(len(messages))):
        place = holders.get((last, id(messages[last])), NONE)
        if place != NONE and chats[place][: last + 1] == messages[: last + 1]:
            return place, last + 1
    return NONE, 0


JSON, MSGPACK = "application/json", "application/msgpack"
POLL = 25.0  # seconds after which a waiting verb is answered with 202: send it again
MAX_BATCH_CALLS = 1024
CLAIM_SECRET = "agentrl-claim-secret"  # header, see `keys`
KEY = "^[A-Za-z0-9-]{1,64}$"  # pattern of an idempotency key

Int = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class KeyScope(StrEnum):
    """Scope of a key; `Verb.scopes` lists those that may call a verb."""

    RUNNER = "runner"
    READER = "reader"
    ADMIN = "admin"


RUNNERS = frozenset({"claim", "heartbeat", "finish", "add_transitions", "add_spans"})
RUNNERS |= {"run", "steps", "trace", "policies", "cursor", "wait"}
RUNNERS |= {"judgement", "add_judgements", "put_images"}
READERS = frozenset({"run", "runs", "rollouts", "groups", "search", "trace", "attempts", "credits"})
READERS |= {"outline", "steps", "metric_names", "series", "counts", "failures", "policies"}
READERS |= {"cursor", "wait", "settled", "stats", "documents", "images"}
READERS |= {"datasets", "items", "sides", "calls", "judgement", "logprobs"}
SCOPES = {KeyScope.RUNNER: RUNNERS, KeyScope.READER: READERS}
"""Scope -> verbs that its keys may call; an admin key may call all."""
ONCE = {"open_run", "enqueue", "cancel", "prune", "forget", "vacuum"}
"""Verbs whose repeat would have another result, or take as long again: the client sends an
idempotency key with each call, and the server returns the same result for a known key."""

Decode = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """One method of the store over HTTP."""

    name: str
    arguments: type[msgspec.Struct]  # fields in the order of the method's parameters
    result: Any  # type of the result
    doc: str
    waits: bool  # has a `timeout`
    scopes: tuple[KeyScope, ...]  # scopes of keys that may call it
    decoders: dict[str, Decode]  # content type -> decoder of arguments
    results: dict[str, Decode]  # content type -> decoder of the result

    @property
    def once(self) -> bool:
        return self.name in ONCE


def _verb(name: str) -> Verb:
    method = getattr(Store, name)
    types = typing.get_type_hints(method)
    _, *parameters = inspect.signature(method).parameters.values()
    fields: list[Any] = [
        (
            parameter.name,
            types[parameter.name],
            *([] if parameter.default is parameter.empty else [parameter.default]),
        )
        for parameter in parameters
    ]
    arguments = msgspec.defstruct(
        name.title().replace("_", ""),
        fields,
        frozen=True,
        forbid_unknown_fields=True,
        omit_defaults=True,
    )
    return Verb(
        name=name,
        arguments=arguments,
        result=types["return"],
        doc=inspect.getdoc(method) or "",
        waits="timeout" in types,
        scopes=tuple(scope for scope in KeyScope if name in SCOPES.get(scope, {name})),
        decoders=decoders(arguments),
        results=decoders(types["return"]) | ({MSGPACK: _unpacked} if name == "trace" else {}),
    )


def encode(form: str, result: Any) -> bytes:
    """Encode the result of a verb; a trace is packed in msgpack."""
    return ENCODE[form](pack(result) if form == MSGPACK and type(result) is Trace else result)


def _unpacked(body: Any) -> Trace | None:
    packed = PACKED(body)
    return None if packed is None else unpack(packed)


# -- encodings -------------------------------------------------------------------------------------


def decoders(type_: Any) -> dict[str, Decode]:
    """Return decoders by content type, which raise msgspec.ValidationError for invalid values."""
    return {
        JSON: msgspec.json.Decoder(type_, dec_hook=_from_list).decode,
        MSGPACK: msgspec.msgpack.Decoder(type_, dec_hook=rows.array_from_bytes).decode,
    }


def _from_list(type_: Any, value: Any) -> Any:
    if type_ is Int32:
        return type_("i", msgspec.convert(value, list[Int]))
    numbers = msgspec.convert(value, list[float | None])
    return type_("f", (math.nan if x is None else x for x in numbers))


def _to_list(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


ENCODE: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder(enc_hook=_to_list).encode,
    MSGPACK: msgspec.msgpack.Encoder(enc_hook=rows.array_to_bytes).encode,
}

PACKED = decoders(PackedTrace | None)[MSGPACK]
VERBS = {
    name: _verb(name)
    for name, method in vars(Store).items()
    if inspect.iscoroutinefunction(method) and not name.startswith("_") and name != "close"
}


# -- batches ---------------------------------------------------------------------------------------


class BatchCall(Record, frozen=True):
    """One call of a batch; `key` as in the header `idempotency-key`."""

    verb: str
    arguments: msgspec.Raw
    key: str | None = None


class BatchRequest(Record, frozen=True):
    """Calls to execute in this order. Each is atomic; the batch is not: a rejected call does not
    stop those after it. A verb with a `timeout` needs `timeout` 0."""

    calls: Annotated[list[BatchCall], msgspec.Meta(max_length=MAX_BATCH_CALLS)]


class BatchResult(Record, frozen=True, omit_defaults=True):
    """The result of one call, or its error."""

    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Error | None = None


class BatchResponse(Record, frozen=True):
    results: list[BatchResult]


# -- errors ----------------------------------------------------------------------------------------


class Error(Record, frozen=True):
    """The body of every response that is not 2xx, as `{"error": {...}}`."""

    code: str
    message: str


class Refusal(Record, frozen=True):
    error: Error


CODES: dict[type[errors.StoreError], tuple[str, int]] = {
    errors.Invalid: ("invalid", 422),
    errors.NotFound: ("not_found", 404),
    errors.Fenced: ("fenced", 409),
    errors.Conflict: ("conflict", 409),
    errors.Forbidden: ("forbidden", 403),
    errors.Unavailable: ("unavailable", 503),
    errors.StoreError: ("error", 500),
}
CLASSES = {code: kind for kind, (code, _) in CODES.items()}
CLASSES |= dict.fromkeys(("malformed", "unsupported", "too_large"), errors.Invalid)
CLASSES["unauthorized"] = errors.Forbidden


def error_from(error: Error) -> errors.StoreError:
    """Return the exception that the server's store raised."""
    return CLASSES.get(error.code, errors.StoreError)(error.message)


Schema = dict[str, Any]
REFUSED = {
    "400": "The body cannot be read.",
    "401": "The key is missing or unknown.",
    "403": "The key's scope does not include this verb.",
    "404": "There is no run, group or attempt of that name.",
    "409": "The state of the store forbids it (`conflict`), or the caller was replaced (`fenced`).",
    "413": "The body is too large.",
    "415": "The content type is not supported.",
    "422": "The arguments are invalid.",
    "503": "The store is temporarily unavailable: retry after `retry-after` seconds.",
}
MSGPACK_NOTE = (
    "Bodies may also be `application/msgpack`: the same objects, with token arrays as little-endian"
    " bytes (int32, float32), and a trace packed, so that each of its messages and tokens is sent"
    " once. The response has the content type of the request."
)


TRACES = (
    "OTLP/HTTP: an ExportTraceServiceRequest, as JSON or protobuf, also gzip. The trace id of a "
    "span is its attempt. `partialSuccess` of the response names the spans that were rejected. "
    "Scope: runner."
)
OBJECT = {"type": "object"}


@cache
def document() -> Schema:
    """Return the OpenAPI 3.1 document, with JSON bodies."""
    types: list[Any] = [Refusal, Error, BatchRequest, BatchResponse]
    for verb in VERBS.values():
        types += [verb.arguments, verb.result]
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_array, ref_template="#/components/schemas/{name}"
    )
    verbs = zip(VERBS.values(), schemas[4::2], schemas[5::2], strict=True)
    posts = {verb.name: _operation(verb, arguments, result) for verb, arguments, result in verbs}
    posts["batch"] = _post("batch", BatchRequest.__doc__ or "", schemas[2], schemas[3])
    posts["traces"] = _post("traces", TRACES, OBJECT, OBJECT)
    pages = {"healthz": "Whether the store can be read.", "openapi.json": "This document."}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl store", "version": __version__, "description": MSGPACK_NOTE},
        "paths": {f"/v1/{name}": {"post": post} for name, post in posts.items()}
        | {f"/{name}": {"get": _page(name, description)} for name, description in pages.items()},
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


def _operation(verb: Verb, arguments: Schema, result: Schema) -> Schema:
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
                "schema": {"type": "string", "pattern": KEY},
            }
        ]
    return post


def _post(name: str, doc: str, arguments: Schema, result: Schema) -> Schema:
    refusal = {JSON: {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    return {
        "operationId": name,
        "description": doc,
        "requestBody": {"required": True, "content": {JSON: {"schema": arguments}}},
        "responses": {
            "200": {"description": "Done, durably.", "content": {JSON: {"schema": result}}},
            **{code: {"description": why, "content": refusal} for code, why in REFUSED.items()},
        },
    }


def _page(name: str, description: str) -> Schema:
    content = {JSON: {"schema": OBJECT}}
    return {
        "operationId": name.removesuffix(".json"),
        "security": [],
        "responses": {
            "200": {"description": description, "content": content},
            "503": {"description": REFUSED["503"], "content": content},
        },
    }
