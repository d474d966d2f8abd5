"""The turns of a conversation with a user: calls between two of the user's messages.

Invariant: turns are derived only from stored requests, so they are the same for training and
mining.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

import msgspec

from agentrl.core.types import CORRECTION, FEEDBACK, SIGNAL, Json, Reward, Scope, Transition

MIN_GOOD = 0.5  # value from which a turn went well
# Tool results in user messages of Anthropic and Gemini.
RESULTS = ("tool_result", "functionResponse")


def said(call: Transition) -> list[dict[str, Json]]:
    """The user's messages in the request of a call, without those that carry a tool's result."""
    return [m for m in call.messages if m.get("role") == "user" and not _is_result(m)]


def last_user_text(call: Transition) -> str:
    """The text of the user's last message in the request of a call; "" if it is not text."""
    content = said(call)[-1].get("content") if said(call) else ""
    return content if isinstance(content, str) else ""


def _is_result(message: dict[str, Json]) -> bool:
    content: Any = message.get("content", message.get("parts"))
    parts = content if isinstance(content, list) else []
    return any(isinstance(p, dict) and (p.get("type") in RESULTS or RESULTS[1] in p) for p in parts)


def turns(calls: Sequence[Transition]) -> list[list[int]]:
    """Indices of the calls of each turn, in the order of its first call. Calls of a turn have the
    same role and answer the same messages of the user."""
    by_key: dict[bytes, list[int]] = {}
    for index, call in enumerate(calls):
        by_key.setdefault(_key(call), []).append(index)
    return list(by_key.values())


def turn_values(calls: Sequence[Transition], rewards: Iterable[Reward]) -> list[float | None]:
    """The value of each turn: the mean of the signals, feedback and corrections (0) of its calls;
    None if there are none."""
    by_call: dict[str, list[float]] = {}
    for row in rewards:
        if row.scope is Scope.TRANSITION and row.name in (SIGNAL, FEEDBACK, CORRECTION):
            by_call.setdefault(row.target or "", []).append(row.value)
    signals = [[x for i in turn for x in by_call.get(calls[i].id, ())] for turn in turns(calls)]
    return [fmean(values) if values else None for values in signals]


def reasked(calls: Sequence[Transition], rewards: Sequence[Reward]) -> list[tuple[int, int]]:
    """Pairs (first call of a turn that went wrong, first call of the next turn, which went well):
    the user had to ask again. The second call's answer is one that the first should have given.

    A turn follows another if the user's messages continue with one more."""
    ordered, values = turns(calls), turn_values(calls, rewards)
    numbers = {_key(calls[turn[0]]): number for number, turn in enumerate(ordered)}
    pairs = []
    for turn, good in zip(ordered, values, strict=True):
        before = numbers.get(_key(calls[turn[0]], earlier=1))
        bad = None if before is None else values[before]
        if before is not None and bad is not None and good is not None and bad < MIN_GOOD <= good:
            pairs.append((ordered[before][0], turn[0]))
    return pairs


def corrections(
    calls: Sequence[Transition], rewards: Iterable[Reward]
) -> list[tuple[int, dict[str, Json]]]:
    """(index, message) of the calls for which a person wrote another answer: a text, or the JSON of
    a whole message of the assistant, for tool calls."""
    at = {call.id: index for index, call in enumerate(calls)}
    rows = [row for row in rewards if row.name == CORRECTION and row.scope is Scope.TRANSITION]
    return [(at[row.target], written(row.note)) for row in rows if row.target in at]


def written(correction: str) -> dict[str, Json]:
    """The assistant message of a correction."""
    with suppress(msgspec.DecodeError):
        message: Json = msgspec.json.decode(correction)
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        if is_answer and (isinstance(message.get("content"), str) or message.get("tool_calls")):
            return dict(message)
    return {"role": "assistant", "content": correction}


def _key(call: Transition, earlier: int = 0) -> bytes:
    """A key that is equal for calls of one turn. earlier: the key of the turn that many user
    messages before."""
    messages = said(call)
    return msgspec.json.encode((call.role, messages[: len(messages) - earlier]))
