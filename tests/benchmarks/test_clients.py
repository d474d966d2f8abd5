"""The benchmark `clients`: what it calls exact, lost and silent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.types import Transition, float32, int32
from agentrl.runners.harness_check import SeenRequest
from tests.benchmarks.clients import install
from tests.benchmarks.clients.drive import Played, play
from tests.benchmarks.clients.install import Client, clients
from tests.benchmarks.clients.judge import CLIENT, EXACT, GATEWAY, Cell, cell_of
from tests.benchmarks.clients.page import Row, _beside, row_of, write
from tests.benchmarks.clients.policy import (
    CASES,
    SUM,
    THOUGHT,
    Asked,
    Body,
    questions,
    render,
    render_turn,
)

TOOL = {"name": "add", "description": "Add.", "parameters": {"properties": {"a": {"minimum": 7}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def played(case: str, answer: Body, back: Body, read: Body | None = None) -> Played:
    """Two calls: the policy gives `answer`, and the client sends it back as `back`, which the
    policy reads as `read`."""
    found = Played("one", False)
    first = {"role": "user", "content": questions(case)[0]}
    last = {"role": "user", "content": "Are you sure?"}
    tools = [{"type": "function", "function": TOOL}]
    for sent, seen in (([first], [first]), ([first, back, last], [first, read or back, last])):
        body: Body = {"model": "m", "messages": sent, "tools": tools}
        asked = Asked(case, False, body | {"messages": seen}, answer)
        asked.prompt = render(asked.body).encode()
        end = [*render_turn(answer).encode()]
        tokens: Any = {"prompt": int32([*asked.prompt]), "completion": int32(end)}
        row = Transition("r", "a", 0, **tokens, logprobs=float32([0.0] * len(end)))
        found.calls.append(row)
        found.asked.append(asked)
        found.seen.append(SeenRequest(0.0, "POST /v1/chat/completions", 0, body, status=200))
        answer = {"role": "assistant", "content": SUM}
    return found


WORDS = {"role": "assistant", "content": "One."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def with_arguments(text: str) -> Body:
    function = {"name": "add", "arguments": text}
    return {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": function}]}


@pytest.mark.parametrize(
    ("answer", "back", "verdict", "reason"),
    [
        (WORDS, WORDS, EXACT, ""),
        (WORDS | {"reasoning_content": THOUGHT}, WORDS, CLIENT, "leaves the thought out"),
        (WORDS, {"role": "assistant", "content": "One"}, CLIENT, "changes the words"),
        (CALLS, {"role": "assistant", "content": ""}, CLIENT, "leaves the call out"),
        (CALLS, with_arguments('{"a": 2}'), CLIENT, "changes the arguments"),
        (CALLS, with_arguments('{"a":1}'), GATEWAY, ""),  # as equal JSON: it could be restored
        (CALLS, CALLS, EXACT, ""),
        (with_arguments('{"a": 1'), with_arguments("{}"), CLIENT, "empties malformed arguments"),
        (with_arguments('{"a": 1'), with_arguments('{"a": 1}'), CLIENT, "repairs malformed"),
        (with_arguments('{"a": 1'), with_arguments('{"X": "{\\"a\\": 1"}'), GATEWAY, ""),
        (WORDS, WORDS | {"name": "solver"}, GATEWAY, ""),
    ],
)
def test_a_cell_is_exact_or_has_its_reason(
    answer: Body, back: Body, verdict: str, reason: str
) -> None:
    cell = cell_of(played("words", answer, back), "words")
    assert (cell.verdict, reason in cell.reason) == (verdict, True)
    assert cell.silent == []
    assert (cell.reason == "") == (verdict == EXACT)


def test_what_the_policy_does_not_read_is_silent() -> None:
    one = played("words", WORDS, WORDS)
    for asked in one.asked:
        asked.body["tools"] = [{"type": "function", "function": TOOL | {"parameters": {}}}]
    one.seen[0].body["labels"] = {"team": "a"}
    assert cell_of(one, "words").silent == ["option labels", "tool add: 7, a, minimum, properties"]
    one.console = ["labels has no effect"]
    assert "option labels" not in cell_of(one, "words").silent
    told = played("words", WORDS, WORDS, read={"role": "assistant", "content": "Two."})
    assert cell_of(told, "words").silent == ["words: ['One.'] was read as ['Two.']"]


def test_every_cell_that_is_not_exact_has_its_reason_on_the_page() -> None:
    chosen = clients(["openai-chat", "codex"])
    cells = [Cell("words", False, CLIENT, "leaves the words out"), Cell("call", False, EXACT)]
    rows = {"openai-chat": [Row(False, cells, {"API": "Chat Completions"})]}
    page = write(rows, chosen, {"codex": "npm has no such version"})
    assert "| 1 of 2 | - | `words`: leaves the words out |" in page
    assert "| Codex | @openai/codex" in page
    assert "npm has no such version" in page


def test_clients_with_the_same_packages_share_an_environment() -> None:
    every = clients()
    assert len(every) >= 40
    chat, responses, other = (
        next(one for one in every if one.name == name)
        for name in ("openai-chat", "openai-responses", "anthropic")
    )
    assert chat.folder == responses.folder != other.folder
    assert chat.versions.startswith("openai ")
    assert all((install.HERE / "agents" / one.program).is_file() for one in every if one.program)
    assert all("==" in one.packages[0] for one in every if one.packages), "pinned"


def test_what_a_client_asks_beside_is_counted_without_ids() -> None:
    found = played("words", WORDS, WORDS)
    for number in range(3):
        place = f"POST /a/{number:032x}/v1/conversations/conv_{number:032x}/items?limit=1"
        found.seen.append(SeenRequest(0.0, place, 0, {}, status=200))
    assert _beside(found, {id(one) for one in found.seen[:2]}) == (
        "POST /v1/conversations/{id}/items (3 times)"
    )


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_openai_sdk_continues_exactly(
    streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    about: Any = {"packages": ("openai==0",), "program": "openai_sdk.py", "argument": "chat"}
    client = Client(name="openai", title="openai", **about)
    python = client.folder / "bin" / "python"  # this environment's, which has the SDK
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    row = row_of(await play(client, streamed=streamed))
    assert [(cell.verdict, cell.reason, cell.silent) for cell in row.cells] == [
        (EXACT, "", []) for _ in CASES
    ]
    assert row.facts["API"] == "Chat Completions"
    assert row.facts["Arguments"] == "as sent"
    assert row.facts["Cut-off arguments"] == "as sent; error"
