"""What server and client agree on: the table of verbs, the two encodings and the errors.

A verb is one line of `SCOPES`; its arguments and result are those of the method of the same name in
`agentrl.store.base.Store`, and from them follow the route, the client's method and the OpenAPI
document. JSON carries token arrays as lists of numbers, msgpack as little-endian bytes (int32,
float32). JSON has no NaN: a number that is none comes out as null, which is read as NaN in token
arrays and refused elsewhere, so programs use msgpack.
"""

from __future__ import annotations

import inspect
import math
import sys
import typing
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any

import msgspec

from agentrl.errors import (
    Conflict,
    Fenced,
    Forbidden,
    Invalid,
    NotFound,
    StoreError,
    Unavailable,
)
from agentrl.store.base import Store
from agentrl.types import Int32, Record

JSON, MSGPACK = "application/json", "application/msgpack"
POLL = 25.0  # seconds until a verb that waits is answered "again"
CALLS = 1024  # verbs in one batch
CLAIM_SECRET = "agentrl-claim-secret"  # the header: see `claims`
KEY = "^[A-Za-z0-9-]{1,64}$"  # the form of an idempotency key

Int = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class KeyScope(IntEnum):
    """What a key may do: everything that is not larger than itself."""

    RUNNER = 1
    ADMIN = 2


RUNNER, ADMIN = KeyScope
SCOPES = {
    "open_run": ADMIN,
    "commit_step": ADMIN,
    "rewind": ADMIN,
    "claim_groups": ADMIN,
    "publish": ADMIN,
    "log": ADMIN,
    "enqueue": ADMIN,
    "claim": RUNNER,
    "heartbeat": RUNNER,
    "finish": RUNNER,
    "cancel": ADMIN,
    "add_transitions": RUNNER,
    "add_spans": RUNNER,
    "run": RUNNER,
    "runs": ADMIN,
    "rollouts": ADMIN,
    "trace": RUNNER,
    "credits": ADMIN,
    "steps": ADMIN,
    "counts": ADMIN,
    "failures": ADMIN,
    "policies": RUNNER,
    "cursor": RUNNER,
    "wait": RUNNER,
    "settled": ADMIN,
    "stats": ADMIN,
    "prune": ADMIN,
    "vacuum": ADMIN,
}
ONCE = {"open_run", "enqueue", "cancel", "prune", "vacuum"}
"""Verbs whose repeat would do no harm but answer differently, or would take as long again: the
client names each call with a key, and the server answers a key it knows with the same answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """One method of the store, as it travels."""

    name: str
    scope: KeyScope
    arguments: type[msgspec.Struct]  # fields in the order of the method's parameters
    result: Any  # the type
    doc: str
    once: bool
    waits: bool  # up to its `timeout`
    decoders: dict[str, Decode] = field(default_factory=dict)  # of arguments, by content type
    results: dict[str, Decode] = field(default_factory=dict)


Decode = Callable[[Any], Any]


def _verb(name: str, scope: KeyScope) -> Verb:
    method = getattr(Store, name)
    types = typing.get_type_hints(method)
    fields: list[Any] = [
        (parameter.name, types[parameter.name])
        if parameter.default is parameter.empty
        else (parameter.name, types[parameter.name], parameter.default)
        for parameter in inspect.signature(method).parameters.values()
        if parameter.name != "self"
    ]
    arguments = msgspec.defstruct(
        "".join(part.title() for part in name.split("_")),
        fields,
        frozen=True,
        forbid_unknown_fields=True,
        omit_defaults=True,
    )
    verb = Verb(
        name=name,
        scope=scope,
        arguments=arguments,
        result=types["return"],
        doc=inspect.getdoc(method) or "",
        once=name in ONCE,
        waits="timeout" in types,
    )
    verb.decoders.update(decoders(verb.arguments))
    verb.results.update(decoders(verb.result))
    return verb


# -- encodings -------------------------------------------------------------------------------------


def decoders(type_: Any) -> dict[str, Decode]:
    """By content type. Strict: they raise msgspec.ValidationError for what does not fit."""
    return {
        JSON: msgspec.json.Decoder(type_, dec_hook=_from_list).decode,
        MSGPACK: msgspec.msgpack.Decoder(type_, dec_hook=_from_bytes).decode,
    }


def _from_list(type_: Any, value: Any) -> Any:
    if type_ is Int32:
        return type_("i", msgspec.convert(value, list[Int]))
    numbers = msgspec.convert(value, list[float | None])
    return type_("f", (math.nan if x is None else x for x in numbers))


def _from_bytes(type_: Any, value: Any) -> Any:
    if not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("expected the bytes of 4-byte numbers, little-endian")
    made = type_("i" if type_ is Int32 else "f", value)
    if sys.byteorder == "big":
        made.byteswap()
    return made


def _to_list(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _to_bytes(value: Any) -> Any:
    if not isinstance(value, array):
        raise TypeError(f"{type(value).__name__} is not JSON")
    if sys.byteorder == "big":
        value = value[:]
        value.byteswap()
    return memoryview(value).cast("B") if len(value) else b""


ENCODE: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder(enc_hook=_to_list).encode,
    MSGPACK: msgspec.msgpack.Encoder(enc_hook=_to_bytes).encode,
}

VERBS = {name: _verb(name, scope) for name, scope in SCOPES.items()}


# -- batches ---------------------------------------------------------------------------------------


class BatchCall(Record, frozen=True):
    """One verb of a batch; `key` as in the header `idempotency-key`."""

    verb: str
    arguments: msgspec.Raw
    key: str | None = None


class BatchRequest(Record, frozen=True):
    """Verbs to be executed in this order. Each is atomic; the batch is not: a refused verb does not
    stop those after it. A verb that waits must come with `timeout` 0."""

    calls: Annotated[list[BatchCall], msgspec.Meta(max_length=CALLS)]


class BatchResult(Record, frozen=True, omit_defaults=True):
    """Of one call: its result, or why it was refused."""

    result: Any = None
    error: Error | None = None


class BatchResponse(Record, frozen=True):
    results: list[BatchResult]


# -- errors ----------------------------------------------------------------------------------------


class Error(Record, frozen=True):
    """The body of every answer that is not 2xx, as `{"error": {...}}`."""

    code: str
    message: str


class Refusal(Record, frozen=True):
    error: Error


CODES: dict[type[StoreError], tuple[str, int]] = {
    Invalid: ("invalid", 422),
    NotFound: ("not_found", 404),
    Fenced: ("fenced", 409),
    Conflict: ("conflict", 409),
    Forbidden: ("forbidden", 403),
    Unavailable: ("unavailable", 503),
    StoreError: ("error", 500),
}
CLASSES = {code: kind for kind, (code, _) in CODES.items()} | {
    "malformed": Invalid,
    "unsupported": Invalid,
    "too_large": Invalid,
    "unauthorized": Forbidden,
}


def refusal(error: StoreError) -> tuple[int, Error]:
    """Status and body of a typed error."""
    kind = next(kind for kind in type(error).__mro__ if kind in CODES)
    code, status = CODES[kind]
    return status, Error(code=code, message=str(error))


def error_from(error: Error) -> StoreError:
    """The very error that the server's store raised."""
    return CLASSES.get(error.code, StoreError)(error.message)
