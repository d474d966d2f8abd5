"""Writes docs/reference/clients.md: what each client sends, and whether it continues exactly."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.core.types import Json
from tests.benchmarks.clients.drive import Played, play
from tests.benchmarks.clients.install import Client, clients
from tests.benchmarks.clients.judge import (
    CLIENT,
    EXACT,
    NONE,
    Cell,
    Step,
    arguments_changed,
    cell_of,
    echo_of,
    given,
    steps_of,
)
from tests.benchmarks.clients.policy import Body, plain
from tests.benchmarks.clients.wire import api_of, items_of

PAGE = Path("docs/reference/clients.md")
ATTEMPT = re.compile(r"/a/[0-9a-f]{32}(/[^/]+)?(?=/v1)")
ID = re.compile(r"(?<=/)[a-z]+_[0-9a-f]{32}\b")  # of an object that the gateway keeps
HEAD = """# What clients send

Real clients against the gateway, in front of a policy that answers by a script: words, a thought,
one call, two calls, words between calls, arguments that are no JSON, and arguments with odd
spaces and escapes. Every answer comes back in a later request. A harness gets one prompt, and only
the seven answers that contain a call. `make clients` installs the
[clients](../../tests/benchmarks/clients/agents) (4 GB), plays them and writes this page.

A conversation **continues exactly** if the tokens of each call begin with those of the call
before and its answer, under a chat template that renders all of its input; then it is one row, in
which all tokens of answers were sampled by the policy. Where a client sends back something else,
the next call begins a new row ([token tree](../concepts/token-tree.md)); only the shared prefix is
lost.
"""
EXPLAINED = """
- *Calls only*: `content` of an assistant message that has only calls (chat completions).
- *Arguments*: with odd spaces and escapes; what is not `as sent` is restored by the gateway, by
  the call's id.
- *Cut-off arguments*: how `{"a": 1, "b": 2` comes back, and what the client does; *error*: it
  tells the policy. In Messages and generateContent, whose arguments are objects, the gateway
  gives the text as `{"INVALID_JSON": text}`.
- *Thought*: whether reasoning comes back.
- *Order*: of the parts of an answer with a call, words and a second call; if it is not streamed,
  the words come first.
- *Besides*: changed ids of calls; the `name` of the client's messages; other requests.
"""


@dataclass(slots=True)
class Row:
    """What one client does, streamed or not."""

    streamed: bool
    cells: list[Cell]
    facts: dict[str, str] = field(default_factory=dict)


def measured(name: str, streamed: bool) -> Row:
    """Play a client of clients.toml, in a process of its own."""
    (client,) = clients([name])
    return row_of(asyncio.run(play(client, streamed=streamed)))


def row_of(played: Played) -> Row:
    steps = {case: steps_of(played, case) for case in played.cases}
    row = Row(played.streamed, [cell_of(played, case) for case in played.cases])
    apis = Counter(step.api for each in steps.values() for step in each)
    called, odd = _pair(steps["call"]), _pair(steps["escapes"])
    row.facts = {
        "API": apis.most_common(1)[0][0] if apis else "-",
        "Calls only": _content(*called) if called else "-",
        "Arguments": _arguments(*odd) if odd else "-",
        "Cut-off arguments": _malformed(played, steps["malformed"]),
        "Thought": _thought(steps),
        "Order": _order(steps["words_between"]),
        "Besides": "; ".join(_besides(played, steps, called)) or "-",
    }
    return row


def _pair(steps: list[Step]) -> tuple[Step, Step] | None:
    return (steps[0], steps[1]) if len(steps) > 1 else None


def _last_answer(step: Step) -> Body:
    """The last assistant message with calls of a chat completion request."""
    found = [m for m in step.sent.body.get("messages") or () if m.get("tool_calls")]
    return found[-1] if found else {}


def _content(before: Step, after: Step) -> str:
    if after.api != "Chat Completions":
        return "-"
    message = _last_answer(after)
    return f"`{json.dumps(message['content'])}`" if "content" in message else "absent"


def _arguments(before: Step, after: Step) -> str:
    calls = [item for item in echo_of(before, after) if item.kind == "call"]
    if not calls:
        return "left out"
    written = next(item.text for item in given(before.asked) if item.kind == "call")
    if calls[0].text == written:
        return "as sent"
    if arguments_changed(written, calls[0]):
        return "changed"
    return "as an object" if isinstance(calls[0].raw, dict) else "re-serialised"


def _malformed(played: Played, steps: list[Step]) -> str:
    pair = _pair(steps)
    if pair is None:
        return f"raises: {_cut(outcome)}" if (outcome := _outcome(played)) else "ends"
    before, after = pair
    written = next(item.text for item in given(before.asked) if item.kind == "call")
    calls = [item for item in echo_of(before, after) if item.kind == "call"]
    if not calls:
        how = "not sent back"
    elif calls[0].text == written:
        how = "as sent"
    elif not arguments_changed(written, calls[0]):
        how = f"as `{_cut(calls[0].text, 24)}`"
    else:
        how = "`{}`" if "empties" in arguments_changed(written, calls[0]) else "repaired"
    said = after.others[len(before.others) :]
    results = [item.text for item in said if item.kind == "result"]
    if results and results[0].strip("\"' ") in ("3", '{"result": "3"}', '{"output": "3"}'):
        return f"{how}; runs the tool"
    if said:
        return f"{how}; error" if said[0].kind == "result" else f"{how}; then {said[0].kind}"
    return f"{how}; asks again"


def _outcome(played: Played) -> str:
    return played.outcomes.get("malformed", played.outcomes.get("", ""))


def _thought(steps: dict[str, list[Step]]) -> str:
    found = []
    for case in ("thought", "thought_call"):
        if (pair := _pair(steps.get(case, []))) is None:
            continue
        back = [item.text for item in echo_of(*pair) if item.kind == "thought"]
        found.append("left out" if not back else "sealed" if "(sealed)" in back[0] else "kept")
    if len(set(found)) < 2:
        return found[0] if found else "-"
    return f"{found[0]}; with a call {found[1]}"


def _besides(
    played: Played, steps: dict[str, list[Step]], called: tuple[Step, Step] | None
) -> Iterator[str]:
    """What few clients do: other ids or none, names of messages, other requests."""
    if called and (ids := _ids(*called)) != "kept":
        yield f"ids: {ids}"
    if called and (name := _name(*called)) != "-":
        yield f"name: {name}"
    own = {id(step.sent) for each in steps.values() for step in each}
    if (beside := _beside(played, own)) != "-":
        yield beside


def _ids(before: Step, after: Step) -> str:
    calls = [item for item in echo_of(before, after) if item.kind == "call"]
    own = {item.id for item in given(before.asked) if item.kind == "call"}
    if not calls or not calls[0].id:
        return "none"
    return "kept" if calls[0].id in own else "new"


def _name(before: Step, after: Step) -> str:
    name = _last_answer(after).get("name")
    return f"`{name}`" if name else "-"


def _order(steps: list[Step]) -> str:
    if (pair := _pair(steps)) is None:
        return "-"
    if pair[1].before is not None:
        return "by `previous_response_id`"
    kinds = [item.kind for item in echo_of(*pair) if item.kind != "thought"]
    return ", ".join(kinds)


def _beside(played: Played, own: set[int]) -> str:
    """What is asked beside `own`, the ids of the agent's requests."""
    found: Counter[str] = Counter()
    for one in played.seen:
        if id(one) in own:
            continue
        path = ID.sub("{id}", ATTEMPT.sub("", one.path.partition("?")[0]))
        if api := api_of(one.path):
            texts = [item.text for item in items_of(api, one.body) if item.kind == "system"]
            path = f"a call with another system prompt: {_cut(texts[0] if texts else '', 80)}"
        found[path] += 1
    return "; ".join(f"{path} ({count} times)" for path, count in found.items()) or "-"


def _cut(text: Json, length: int = 60) -> str:
    line = " ".join(plain(text).split()).replace("|", "\\|").replace("`", "'")
    return line if len(line) <= length else line[: length - 3] + "..."


# -- the page --------------------------------------------------------------------------------------


def write(rows: dict[str, list[Row]], chosen: list[Client], failed: dict[str, str]) -> str:
    """The page; `failed`: why a client could not be installed."""
    shown = [client for client in chosen if client.name in rows]
    names = list(rows[shown[0].name][0].facts) if shown else []
    lines = [HEAD, "## Whether it continues exactly", ""]
    lines += ["| clients | whole | streamed | where not, and why |", "|---|--:|--:|---|"]
    lines += _grouped([(one.title, _exact_cells(rows[one.name])) for one in shown])
    lines += ["", _versions(shown)]
    lines += ["", "## How the second request renders the first answer", EXPLAINED]
    lines += [f"| clients | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    facts = [(one.title, [_both(rows[one.name], name) for name in names]) for one in shown]
    lines += _grouped(facts)
    if failed:
        lines += ["", "## Not installed", "", "| client | versions | why |", "|---|---|---|"]
        lines += [
            f"| {client.title} | {client.versions} | {_cut(failed[client.name], 120)} |"
            for client in chosen
            if client.name in failed
        ]
    return "\n".join(lines) + "\n"


def _versions(shown: list[Client]) -> str:
    """The packages of all clients, each once, by registry."""
    found: dict[str, dict[str, None]] = {}
    for one in shown:
        own = found.setdefault("PyPI" if one.packages else "npm", {})
        own.update(dict.fromkeys(one.versions.split(", ")))
    named = "; ".join(f"{registry}: {', '.join(each)}" for registry, each in found.items())
    return f"Versions. {named}."


def _grouped(rows: list[tuple[str, list[str]]]) -> list[str]:
    """Lines of a table, one for all clients with the same cells."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for client, cells in rows:
        alike.setdefault(tuple(cells), []).append(client)
    return [f"| {'; '.join(clients)} | {' | '.join(cells)} |" for cells, clients in alike.items()]


def _exact_cells(rows: list[Row]) -> list[str]:
    counts = {True: "-", False: "-"}
    reasons: dict[str, dict[str, list[bool]]] = {}
    for row in rows:
        exact = sum(cell.verdict == EXACT for cell in row.cells)
        counts[row.streamed] = f"{exact} of {len(row.cells)}"
        for cell in row.cells:
            if cell.verdict != EXACT:
                reason = cell.reason if cell.verdict == CLIENT else _other(cell)
                reasons.setdefault(reason, {}).setdefault(cell.case, []).append(row.streamed)
    why = "; ".join(
        f"{', '.join(_case(case, modes, len(rows)) for case, modes in cases.items())}: {reason}"
        for reason, cases in reasons.items()
    )
    return [counts[False], counts[True], why]


def _other(cell: Cell) -> str:
    return ("" if cell.verdict == NONE else "**the gateway**: ") + _cut(cell.reason, 160)


def _case(case: str, modes: list[bool], ways: int) -> str:
    if len(modes) == ways:
        return f"`{case}`"
    return f"`{case}` {'streamed' if modes[0] else 'whole'}"


def _both(rows: list[Row], name: str) -> str:
    found = {row.streamed: row.facts[name] for row in rows}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return f"{found[False]}; streamed: {found[True]}"
