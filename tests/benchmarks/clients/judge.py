"""What a client did with the answers, and whether each conversation was recorded as one row.

A cell is one case, streamed or not. It is `exact` if in the store the tokens of each call begin
with those of the call before and its answer. If it is not, the reason is the client's where the
request shows that it does not send back what it was given, and else the gateway's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from agentrl.core.types import Int32, Json, Transition
from agentrl.runners.harness_check import SHELL, SeenRequest
from tests.benchmarks.clients.drive import Played
from tests.benchmarks.clients.policy import CASE, CASES, Asked, Body, plain
from tests.benchmarks.clients.wire import Item, api_of, items_of, tools_of

EXACT, CLIENT, GATEWAY, NONE = "exact", "client", "gateway", "none"
REFERENCE = "(by reference)"  # words that the client sent as the id of an item
ANSWERS = ("thought", "words", "call")
# Options that are another field of a chat completion, or part of what is compared as a whole.
COMPARED = {
    *("model", "stream", "stream_options", "tools", "messages", "input", "instructions", "system"),
    *(
        "previous_response_id",
        "contents",
        "systemInstruction",
        "system_instruction",
        "generationConfig",
    ),
}
OTHERS = ("side", "subagent")  # roles that a harness's preset gives to calls beside the agent's
EMPTY: tuple[Json, ...] = (None, [], {}, "", False)
# Options whose value asks for what the gateway does anyway.
USUAL: dict[str, Json] = {
    "candidate_count": 1,
    "include": ["reasoning.encrypted_content"],
    "include_thoughts": True,
    "response_modalities": ["TEXT"],
    "thinking": {"type": "adaptive"},  # the policy decides when it thinks
}
RENAMED = {
    "max_tokens": ("max_tokens", "max_completion_tokens"),
    "max_output_tokens": ("max_tokens", "max_completion_tokens"),
    "stop_sequences": ("stop",),
    "reasoning": ("reasoning_effort",),
    "thinking_level": ("reasoning_effort",),
    "output_config": ("reasoning_effort", "response_format"),
    "text": ("response_format", "verbosity"),
    "tool_config": ("tool_choice",),
    "disable_parallel_tool_use": ("parallel_tool_calls",),
}


@dataclass(slots=True)
class Step:
    """One call: as the client sent it, as the policy read it, and as the store has it."""

    sent: SeenRequest
    asked: Asked
    call: Transition
    before: Step | None = None  # the step of which the server is to remember the conversation

    @property
    def api(self) -> str:
        return api_of(self.sent.path)

    @property
    def items(self) -> list[Item]:
        """The conversation, with what the request only refers to."""
        own = items_of(self.api, self.sent.body)
        if self.before is None:
            return own
        known = [*self.before.items, *given(self.before.asked)]
        return [*known, *(item for item in own if item.kind != "system" or item not in known)]

    @property
    def answers(self) -> list[Item]:
        """What earlier answers look like in this request; neighbours of a kind are one."""
        return _merged([item for item in self.items if item.kind in ANSWERS])

    @property
    def others(self) -> list[Item]:
        return _merged([item for item in self.items if item.kind not in ANSWERS])


@dataclass(slots=True)
class Cell:
    case: str
    streamed: bool
    verdict: str
    reason: str = ""
    silent: list[str] = field(default_factory=list)


def steps_of(played: Played, case: str) -> list[Step]:
    """The agent's calls of a case in their order, without those beside."""
    sent = [
        one
        for one, own in _by_case(played)
        if own == case and not _is_beside(one) and one.status == 200 and api_of(one.path)
    ]
    asked = [one for one in played.asked if one.case == case and not one.beside]
    calls = {text_of(call.prompt): call for call in played.calls}
    known = [(a, calls[a.prompt]) for a in asked if a.prompt in calls]
    steps: list[Step] = []
    for one, pair in zip(sent, known, strict=False):
        refers = bool(steps) and bool(one.body.get("previous_response_id"))
        steps.append(Step(one, *pair, before=steps[-1] if refers else None))
    return [step for step in steps if step.call.role not in OTHERS]


def text_of(tokens: Int32) -> bytes:
    """The text of the scripted policy's tokens."""
    return bytes(list(tokens))


def _by_case(played: Played) -> Iterator[tuple[SeenRequest, str]]:
    """Each request with its case: the latest for one that does not repeat the question."""
    case = ""
    for one in played.seen:
        found = CASE.findall(json.dumps(one.body))
        case = found[-1] if found else case
        yield one, case


def _is_beside(one: SeenRequest) -> bool:
    """Whether a request is none of the agent's own calls: it offers no tool for its work."""
    return not (api_of(one.path) and _offers_work(one))


def _offers_work(one: SeenRequest) -> bool:
    tools = tools_of(api_of(one.path), one.body)
    return "add" in tools or any(map(SHELL.search, tools))


def cell_of(played: Played, case: str) -> Cell:
    """Judge one case."""
    cell = Cell(case, played.streamed, NONE)
    steps = steps_of(played, case)
    outcome = played.outcomes.get(case, played.outcomes.get("", ""))
    cell.silent = sorted({one for step in steps for one in unheard(step, played.console)})
    if len(steps) < 2:
        refused = [one for one, own in _by_case(played) if own == case and one.status >= 400]
        cell.reason = outcome or (refused[0].error if refused else "never asks again")
        if refused or (outcome and case != "malformed"):
            cell.verdict = GATEWAY
        return cell
    for before, after in pairwise(steps):
        done = text_of(before.call.prompt) + text_of(before.call.completion)
        if text_of(after.call.prompt).startswith(done) and before.call.exact and after.call.exact:
            continue
        cell.reason = lost(before, after)
        cell.verdict = CLIENT if cell.reason else GATEWAY
        cell.reason = cell.reason or difference(done, text_of(after.call.prompt))
        if cell.verdict == GATEWAY:
            cell.silent += unsaid(after)
        return cell
    cell.verdict = EXACT
    return cell


def difference(done: bytes, prompt: bytes) -> str:
    """Where a prompt leaves the earlier call and its answer."""
    at = next((k for k, (a, b) in enumerate(zip(done, prompt, strict=False)) if a != b), -1)
    was, now = (text[max(0, at - 20) : at + 40].decode(errors="replace") for text in (done, prompt))
    return f"{was!r} became {now!r}"


# -- what the client does not send back ------------------------------------------------------------


def lost(before: Step, after: Step) -> str:
    """Why `after` cannot continue `before` from what its request says; nothing if it can."""
    if before.sent.body == after.sent.body:
        return "repeats the request"
    if tools_of(before.api, before.sent.body) != tools_of(after.api, after.sent.body):
        return "offers other tools"
    known, now = before.others, after.others
    for old, new in zip(known, now, strict=False):
        if not _begins(old, new):
            return f"changes {'the system prompt' if old.kind == 'system' else 'earlier turns'}"
    if len(now) < len(known):
        return "leaves earlier turns out"
    said, back = before.answers, after.answers
    for old, new in zip(said, back, strict=False):
        if (old.kind, _json(old.text)) != (new.kind, _json(new.text)) and not _begins(old, new):
            return "changes an earlier answer"
    return _changed(given(before.asked), echo_of(before, after))


def given(asked: Asked) -> list[Item]:
    """The answer as items, in the order of the case."""
    answer = asked.answer
    calls = [
        Item("call", one["function"]["arguments"], one["function"]["name"], one["id"])
        for one in answer.get("tool_calls") or ()
    ]
    words = [Item("words", answer["content"])] if answer.get("content") else []
    thought = answer.get("reasoning_content")
    first = [Item("thought", thought)] if thought else []
    late = asked.turn == 0 and CASES.get(asked.case, ())[:1] == ("call",)
    return [*first, *calls[:1], *words, *calls[1:]] if late else [*first, *words, *calls]


def echo_of(before: Step, after: Step) -> list[Item]:
    """How `after` renders the answer of `before`."""
    said = before.answers
    back = after.answers[max(0, len(said) - 1) :]
    if not said or not back:
        return back
    rest = back[0].text[len(said[-1].text) :]  # two answers of words may be neighbours
    more = [Item(back[0].kind, rest)] if rest and said[-1].kind != "call" else []
    return [*more, *back[1:]]


def _changed(said: list[Item], back: list[Item]) -> str:
    texts = {kind: "".join(i.text for i in said if i.kind == kind) for kind in ANSWERS}
    again = {kind: "".join(i.text for i in back if i.kind == kind) for kind in ANSWERS}
    found = []
    if texts["thought"] and not again["thought"]:
        found.append("leaves the thought out")
    elif "(sealed)" not in again["thought"] and again["thought"] != texts["thought"]:
        found.append("changes the thought")
    if texts["words"] and not again["words"]:
        found.append("leaves the words out")
    elif again["words"] not in (texts["words"], REFERENCE):
        same = again["words"].strip() == texts["words"].strip()
        found.append("strips white space" if same else "changes the words")
    calls, sent = ([i for i in items if i.kind == "call"] for items in (said, back))
    if len(sent) != len(calls):
        found.append("leaves the call out" if len(sent) < len(calls) else "adds a call")
    both = [[(i.name, str(_json(i.text))) for i in items] for items in (calls, sent)]
    if both[0] != both[1] and sorted(both[0]) == sorted(both[1]):
        return "reorders the calls"
    for old, new in zip(calls, sent, strict=False):
        if old.name != new.name:
            found.append(f"sends a call of `{new.name}` in its place")
        elif how := arguments_changed(old.text, new):
            found.append(how)
    return ", ".join(dict.fromkeys(found))


def arguments_changed(written: str, back: Item) -> str:
    """How arguments came back; nothing if they say the same."""
    if written == back.text or (known := _json(written)) == _json(back.text):
        return ""
    if isinstance(known, Malformed):
        if json.dumps(written)[1:-1] in back.text or written in _leaves(_json(back.text)):
            return ""
        empty = back.text.strip() in ("", "{}", "null")
        return "empties malformed arguments" if empty else "repairs malformed arguments"
    return "changes the arguments"


class Malformed(str):
    """A text that is not JSON."""


def _json(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return Malformed(text)


def _begins(old: Item, new: Item) -> bool:
    same = old.kind == new.kind and old.kind not in ("call", "result")
    return (old.kind, old.text) == (new.kind, new.text) or (same and new.text.startswith(old.text))


def _merged(items: list[Item]) -> list[Item]:
    merged: list[Item] = []
    for item in items:
        plain_thought = item.kind == "thought" and item.text != "(sealed)"
        if merged and merged[-1].kind == item.kind and item.kind not in ("call", "result"):
            last = merged.pop()
            if "(sealed)" in (last.text, item.text):
                item = item if plain_thought else last
            else:
                item = Item(item.kind, last.text + item.text, last.name, last.id, last.raw)
        merged.append(item)
    return merged


# -- what the policy does not read -----------------------------------------------------------------


def unheard(step: Step, console: list[str]) -> Iterator[str]:
    """What of a request neither reaches the policy nor is listed: texts, tools and options."""
    body, read = step.sent.body, step.asked.body
    told = " ".join([*step.call.ignored, *console]).lower()
    texts = "\n".join(plain(message.get("content")) for message in read["messages"])
    for item in items_of(step.api, body):
        if item.kind in ("system", "user") and item.text not in texts:
            yield f"{item.kind}: {item.text[:60]}"
        if item.kind == "result" and not all(
            leaf in texts or json.dumps(leaf)[1:-1] in texts for leaf in _leaves(_json(item.text))
        ):
            yield f"result: {item.text[:60]}"
    offered = tools_of("Chat Completions", read)
    for name, about in tools_of(step.api, body).items():
        own = next((n for n in offered if n == name or n.endswith(f"__{name}")), None)
        if own is None:
            if name.lower() not in told:
                yield f"tool {name}"
            continue
        known = _facts(offered[own])
        if missing := [one for one in _facts(about) if one not in known and one not in told]:
            yield f"tool {name}: {', '.join(sorted(missing)[:4])}"
    for name, value in _options(step.api, body):
        plainly = _snake(name)
        names = {name, plainly, *RENAMED.get(plainly, ())}
        listed = name.lower() in told or plainly in told
        usual = value in EMPTY or value == USUAL.get(plainly)
        if not usual and not listed and not names & read.keys():
            yield f"option {name}"


def unsaid(step: Step) -> list[str]:
    """What the policy reads of earlier answers in another way than the client sent them."""
    read = [one for one in items_of("Chat Completions", step.asked.body) if one.kind in ANSWERS]
    read, sent = _merged(read), step.answers
    found = []
    for kind in ANSWERS:
        texts = [
            [_json(i.text) if kind == "call" else i.text for i in items if i.kind == kind]
            for items in (sent, read)
        ]
        if kind != "call":
            texts = [["".join(map(str, one))] for one in texts]
        if texts[0] != texts[1] and "(sealed)" not in str(texts[0]):
            found.append(f"{kind}: {texts[0]!r:.80} was read as {texts[1]!r:.80}")
    return found


def _options(api: str, body: Body) -> Iterator[tuple[str, Json]]:
    for name, value in body.items():
        if name not in COMPARED:
            yield name, value
    for name, value in (body.get("generationConfig") or {}).items():
        if _snake(name) == "thinking_config":
            yield from value.items()
        else:
            yield name, value


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name)


def _facts(schema: Json) -> set[str]:
    """What a tool says, in one spelling: its texts, names of properties, types and limits."""
    found: set[str] = set()
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("nullable", "propertyOrdering", "property_ordering", "title"):
                continue
            inner = _facts(value)
            found |= inner | ({_plainly(name)} if inner or value == {} else set())
    elif isinstance(schema, list):
        for one in schema:
            found |= _facts(one)
    elif schema not in (None, "", False):
        found.add(_plainly(str(schema)))
    return found


def _plainly(text: str) -> str:
    return text.replace("_", "").replace("$", "").lower().strip()


def _leaves(value: Json) -> list[str]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if value is None or isinstance(value, bool | float) else [str(value)]
