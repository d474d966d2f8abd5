"""Stores spans of any OpenTelemetry SDK, from the body of POST /v1/traces.

A trace is an attempt: the trace id of a span is its attempt's id. Spans of unknown attempts and
invalid spans are rejected individually, as OTLP's partial success; the others are stored.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException

from agentrl.base import otlp
from agentrl.errors import Invalid, NotFound
from agentrl.store.base import Store
from agentrl.types import Span

PATH = "/v1/traces"
GZIP = 31  # zlib's name for the gzip format with the largest window


def decompress(body: bytes, encoding: str, largest: int) -> bytes:
    """Decode a body. Raises HTTPException if it is larger than `largest` bytes or malformed."""
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise HTTPException(415, f"Content-Encoding must be gzip or identity, not {encoding!r}.")
    stream = zlib.decompressobj(GZIP)
    try:
        plain = stream.decompress(body, largest + 1)
    except zlib.error as error:
        raise HTTPException(400, f"The body is not gzip: {error}.") from error
    if len(plain) > largest:
        raise HTTPException(413, f"The body is larger than {largest} bytes when unpacked.")
    if not stream.eof:
        raise HTTPException(400, "The gzip body ends too early.")
    return plain


async def receive_spans(
    store: Store, body: bytes, content_type: str, check: Callable[[set[str]], Awaitable[None]]
) -> tuple[bytes, str]:
    """Add the spans; return the response body and its content type. `check` refuses attempts of
    other runs. Needs no claim secret, which an SDK inside an agent does not have: the attempt's id
    has 128 random bits."""

    async def add(spans: list[Span]) -> tuple[int, str]:
        await check({span.attempt for span in spans})
        try:
            await store.add_spans(spans)
        except NotFound:
            return await _by_attempt(store, spans)
        return 0, ""

    try:
        return await otlp.receive(body, content_type, add)
    except Invalid as error:
        raise HTTPException(400, str(error)) from error


async def _by_attempt(store: Store, spans: list[Span]) -> tuple[int, str]:
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.attempt].append(span)
    refused, why = 0, ""
    for mine in traces.values():
        try:
            await store.add_spans(mine)
        except NotFound as error:
            refused, why = refused + len(mine), str(error)
    return refused, why
