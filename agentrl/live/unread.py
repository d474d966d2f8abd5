"""Answers of a killed gateway that nobody may have read: its successor gives them again, once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from agentrl.runners.gateway.attribution import ReceivedCall
from agentrl.runners.gateway.recorded import question, question_of
from agentrl.runners.sessions.recorder import said
from agentrl.types import Transition

Unread = dict[bytes, list[Sequence[Transition]]]  # answers by their question


def unread_of(calls: Sequence[Transition]) -> Unread:
    """The answers that a killed process may not have delivered, by their questions: those that no
    later call of the session has read."""
    unread: Unread = {}
    for _, rows in groupby(calls, key=lambda call: call.started):
        choices = list(rows)
        first = choices[0]
        key = question(first.role, first.messages, first.tools, None)
        if not any(read(call, first) for call in calls):
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
