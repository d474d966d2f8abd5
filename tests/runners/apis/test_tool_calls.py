"""Streamed tool calls, however a server numbers them."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.runners.apis.chat import ToolCalls

A, B = '{"text": "a"}', '{"text": "b"}'


def part(arguments: str = "", name: str | None = None, **head: Any) -> dict[str, Any]:
    return head | {"function": {"arguments": arguments} | ({"name": name} if name else {})}


def halves(number: int, text: str, name: str, **head: Any) -> list[dict[str, Any]]:
    first = part(name=name, id=f"c{number}", **head)
    return [first, part(text[:5], **head), part(text[5:], **head)]


def renumbered(first: Any, second: Any) -> list[dict[str, Any]]:
    """Two calls, one after the other."""
    return [*halves(0, A, "f", **first), *halves(1, B, "g", **second)]


FIRST, SECOND = {"index": 0}, {"index": 1}
ONE, TWO = halves(0, A, "f", **FIRST), halves(1, B, "g", **SECOND)
STREAMS = {
    "from 0": [*ONE, *TWO],
    "from 1": renumbered({"index": 1}, {"index": 2}),
    "far apart": renumbered({"index": 10**9}, {"index": 7}),
    "all -1": renumbered({"index": -1}, {"index": -1}),
    "all 0": renumbered(FIRST, FIRST),
    "all null": renumbered({"index": None}, {"index": None}),
    "missing": renumbered({}, {}),
    "alternating": [p for pair in zip(ONE, TWO, strict=True) for p in pair],
    "second first": [TWO[0], ONE[0], *ONE[1:], *TWO[1:]],
    "whole, all 0": [part(A, "f", id="c0", index=0), part(B, "g", id="c1", index=0)],
    "whole, missing": [part(A, "f", id="c0"), part(B, "g", id="c1")],
    "ids, no index": [
        *(part(name="f", id="c0"), part(name="g", id="c1")),
        *(part(B, id="c1"), part(A, id="c0")),
    ],
    "name later": [
        *(part(id="c0", index=0), part(name="f", index=0), part(A, index=0)),
        *(part(id="c1", index=1), part(B, index=1), part(name="g", index=1)),
    ],
    "name later, no index": [
        *(part(id="c0"), part(name="f"), part(A)),
        *(part(B, id="c1"), part(name="g")),
    ],
    "repeated heads": [
        *(part(A[:4], "f", id="c0", index=0), part(A[4:], "f", id="c0", index=0)),
        *(part(B[:4], "g", id="c1", index=0), part(B[4:], "g", id="c1", index=0)),
    ],
    "other ids in later parts": [
        *(ONE[0], part(A[:4], id="x", index=0), part(A[4:], id="y", index=0)),
        *(TWO[0], part(B, id="z", index=1), part(id="v", index=1)),
    ],
    "objects": [
        {"id": "c0", "function": {"name": "f", "arguments": {"text": "a"}}},
        {"id": "c1", "function": {"name": "g", "arguments": {"text": "b"}}},
    ],
    "empty values": [
        *(part(A, "f", id="c0", index=0), part("", index=0) | {"id": None, "type": None}),
        *(part(B, "g", id="c1", index=1), {"id": "", "index": 1, "function": None}),
    ],
}


@pytest.mark.parametrize("form", STREAMS)
def test_calls_are_put_together_as_clients_do(form: str) -> None:
    calls = ToolCalls()
    for one in STREAMS[form]:
        calls.add(one)
    found = {
        (c["id"], c["function"]["name"], c["function"]["arguments"].replace(" ", ""))
        for c in calls.all
    }
    assert len(calls.all) == 2
    assert found == {("c0", "f", '{"text":"a"}'), ("c1", "g", '{"text":"b"}')}


def test_calls_without_ids_and_indexes_begin_with_their_names() -> None:
    calls = ToolCalls()
    for one in (part(A, "f"), part(B[:3], "f"), part(B[3:])):
        calls.add(one)
    assert [call["function"]["arguments"] for call in calls.all] == [A, B]


def test_a_name_in_pieces() -> None:
    calls = ToolCalls()
    for one in (
        part(name="get_", id="c0", index=0),
        part(name="time", index=0),
        part("{}", index=0),
    ):
        calls.add(one)
    assert calls.all[0]["function"] == {"name": "get_time", "arguments": "{}"}
