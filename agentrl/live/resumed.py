"""The open sessions of a killed gateway: which one a request goes on with, and answers that nobody
may have read, which are given again, once.

The store has calls as they were translated for the policy, and redacted; a request is as the
agent's API writes it. Always true: both have the same gist, the texts of instructions, users and
answers without white space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec

from agentrl.live.labels.signals import ANSWERS, INSTRUCTIONS, Message, text_of
from agentrl.runners.gateway.attribution import ReceivedCall
from agentrl.runners.gateway.recorded import question, question_of
from agentrl.runners.sessions.recorder import REDACTED, Exchange, redact, said
from agentrl.types import Json, Transition

SYSTEM = ("system", "instructions", "systemInstruction", "system_instruction")  # of a request
MESSAGES = ("messages", "input", "contents")
SAYING = (*ANSWERS, "user", None)  # roles; Gemini's users need none
RESULTS = ("tool_result", "functionResponse")  # parts of a message that no user says


Unread = dict[bytes, list[Sequence[Transition]]]  # answers by their question


def exchange_of(call: Transition) -> Exchange:
    """What was said until a call's answer, and the answer."""
    *_, last = _gist([], [*call.messages, {**(call.answer or {}), "role": "assistant"}])
    return last


def exchanges_of(body: Mapping[str, Any], patterns: Sequence[re.Pattern[str]]) -> list[Exchange]:
    """The same for each answer in a request, as the store would have it."""
    kept = redact({name: body[name] for name in (*SYSTEM, *MESSAGES) if name in body}, patterns)
    heads = [_message("system", kept[name]) for name in SYSTEM if name in kept]
    found: Json = next((kept[name] for name in MESSAGES if name in kept), [])
    messages = found if isinstance(found, list) else [_message("user", found)]
    return [*_gist(heads, [one for one in messages if isinstance(one, dict)])]


def _message(role: str, content: Json) -> Message:
    about = content if isinstance(content, dict) else {"content": content}
    return {**about, "role": role}


def _gist(heads: Sequence[Message], messages: Sequence[Message]) -> Iterator[Exchange]:
    told = [m for m in messages if m.get("role") in INSTRUCTIONS]
    state = blake2b("".join(map(_squeezed, [*heads, *told])).encode(errors="replace"))
    for message in messages:
        if message.get("role") not in SAYING:
            continue
        text = _squeezed(message)
        if message.get("role") in ANSWERS:
            yield state.hexdigest(), text
        state.update(f"\n{text}".encode(errors="replace") if text else b"")


def _squeezed(message: Message) -> str:
    for name in ("content", "parts"):
        if isinstance(parts := message.get(name), list):
            message = {**message, name: [part for part in parts if not _is_result(part)]}
    return "".join(text_of(message).split())


def _is_result(part: Json) -> bool:
    return isinstance(part, dict) and (part.get("type") in RESULTS or RESULTS[1] in part)


def unread_of(calls: Sequence[Transition]) -> Unread:
    """The answers that a killed process may not have delivered, by their questions: those that no
    later call of the session has read."""
    unread: Unread = {}
    for _, rows in groupby(calls, key=lambda call: call.started):
        choices = list(rows)
        first = choices[0]
        key = question(first.role, first.messages, first.tools, None)
        redacted = REDACTED.encode() in msgspec.json.encode(first.answer)
        if not (redacted or any(read(call, first) for call in calls)):
            unread.setdefault(key, []).append(choices)
    return unread


def read(call: Transition, earlier: Transition) -> bool:
    """Whether a call goes on from the answer of an earlier one."""
    at = len(earlier.messages)
    then = call.messages[at] if len(call.messages) > at else {}
    return then.get("role") == "assistant" and said(then) == said(earlier.answer)


async def answer_again(unread: Unread, call: ReceivedCall) -> Sequence[Transition]:
    """Answer a call that a killed process has answered already, once."""
    kept = unread.get(question_of(call.request, call.role), [])
    return kept.pop(0) if kept else ()
