"""What comes from a policy server, as it is cut into events."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator

import pytest

from agentrl.runners.gateway.response import events


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("mark", [b"", BOM_UTF8])
async def test_events_wherever_the_chunks_end(end: bytes, size: int, mark: bytes) -> None:
    lines = [b": ping", b"", b"data: 1", b"", b"event: x", b"data: [DONE]", b"", b""]
    stream = mark + end.join(lines)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    found = [event async for event in events(chunks())]
    assert found == [b": ping\n\n", b"data: 1\n\n", b"event: x\ndata: [DONE]\n\n"]


async def test_a_carriage_return_of_the_text_stays() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for chunk in (b"data: a\r", b"b\n\n", b"data: c"):
            yield chunk

    assert [event async for event in events(chunks())] == [b"data: a\rb\n\n", b"data: c"]


async def test_only_the_first_mark_is_none_of_the_text() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield BOM_UTF8 + BOM_UTF8 + b"data: a"

    assert [event async for event in events(chunks())] == [BOM_UTF8 + b"data: a"]
