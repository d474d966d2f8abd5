"""Reading again what changes in a store, also while it is away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.errors import Unavailable
from agentrl.store import base
from agentrl.store.base import keep_reading

AWAY = Unavailable("the disk is full")


@pytest.mark.parametrize("broken", ["wait", "read"])
async def test_a_store_that_is_away_is_said_once_and_read_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    ends = iter([None, *[AWAY] * 9, None, None, AWAY, None])
    cursors, pauses = list[int](), list[float]()

    def happens() -> None:
        error = next(ends, asyncio.CancelledError())
        if error is not None:
            raise error

    async def wait(cursor: int, *, timeout: float | None) -> int:
        assert timeout == 60.0
        cursors.append(cursor)
        if broken == "wait":
            happens()
        return 7

    async def read() -> None:
        if broken == "read":
            happens()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(base.asyncio, "sleep", sleep)
    store: Any = SimpleNamespace(wait=wait)
    with pytest.raises(asyncio.CancelledError):
        await keep_reading(store, read, "nothing is labelled now", pause=0.5, timeout=60.0)
    assert caplog.messages == ["nothing is labelled now: the disk is full; tried again"] * 2
    assert pauses == [0.5, 1.0, *[2.0] * 8, 0.5, 0.5, 1.0, 0.5]
    assert cursors == [0, 7, *[0] * 9, 7, 7, 0, 7]


async def test_a_long_pause_is_not_shortened_while_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses = list[float]()

    async def wait(cursor: int, *, timeout: float | None) -> int:
        if len(pauses) == 2:
            raise asyncio.CancelledError
        raise AWAY

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(base.asyncio, "sleep", sleep)
    store: Any = SimpleNamespace(wait=wait)
    with pytest.raises(asyncio.CancelledError):
        await keep_reading(store, asyncio.Event().wait, "nothing is read", pause=5.0)  # type: ignore[arg-type]
    assert pauses == [5.0, 5.0]
