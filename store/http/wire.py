"""The protocol of server and client: the table of verbs, the two encodings and the errors.

Every method of `agentrl.store.base.Store` is a verb: its signature and docstring define the route,
the client's method and the OpenAPI document. Token arrays are lists of numbers in JSON and
little-endian bytes (int32, float32) in msgpack, where traces are packed (`packing.py`). JSON has no
NaN: it is sent as null, which is read as NaN in token arrays and refused elsewhere; so programs use
msgpack.
"""

from __future__ import annotations

import inspect
import math
import typing
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from agentrl import errors
from agentrl.store import rows
from agentrl.store.base import Store
from agentrl.store.http.packing import PackedTrace, pack, unpack
from agentrl.types import Int32, Record, Trace

JSON, MSGPACK = "application/json", "application/msgpack"
POLL = 25.0  # seconds after which a waiting verb is answered with 202: send it again
CALLS = 1024  # verbs in one batch
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
    result: Any  # the type
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
        (one.name, types[one.name], *([] if one.default is one.empty else [one.default]))
        for one in parameters
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
    """Calls to execute in this order. Each is atomic; the batch is not: a refused call does not
    stop those after it. A verb with a `timeout` needs `timeout` 0."""

    calls: Annotated[list[BatchCall], msgspec.Meta(max_length=CALLS)]


class BatchResult(Record, frozen=True, omit_defaults=True):
    """The result of one call, or the error with which it was refused."""

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
