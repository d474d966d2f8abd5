"""From the stored calls of a session to what they say about it: what came after each answer, what
the user said, and the feedback that was posted.

Messages are read in the shapes of OpenAI (`content`, `tool_calls`, role `tool`), Anthropic (blocks
in `content`) and Gemini (`parts`, role `model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import dropwhile, takewhile
from statistics import fmean
from typing import Any

import msgspec

from agentrl.live.records.marks import FAILED, MARK, OUTCOME
from agentrl.runners.sessions.feedback import Feedback
from agentrl.types import (
    CORRECTION,
    FEEDBACK,
    HINDSIGHT,
    SIGNAL,
    TOLD,
    TURN,
    Json,
    Record,
    Reward,
    Scope,
    Transition,
)

Message = dict[str, Json]
VERIFIER, NEXT_MESSAGE = "verifier", "next_message"  # signals that nobody posts
ASKED = (VERIFIER, NEXT_MESSAGE)
LONGEST_NAME, LONGEST_TEXT = 100, 2**18  # characters of feedback
ANSWERS, INSTRUCTIONS = ("assistant", "model"), ("system", "developer")  # roles


class Reply(Record, frozen=True):
    """What followed the answer of one call: the user's next message, results of tools, or both."""

    call: str  # id
    messages: list[Message]  # of the call's request
    answer: Message
    next: list[Message]


def replies(calls: Sequence[Transition]) -> list[Reply]:
    """What came next, for each call whose conversation a later one goes on with."""
    said = [[m for m in call.messages if m.get("role") not in INSTRUCTIONS] for call in calls]
    keys = [[_key(message) for message in messages] for messages in said]
    found = []
    for i, call in enumerate(calls):
        later = (
            following
            for j in range(i + 1, len(calls))
            if (following := _beyond(call, keys[i], said[j], keys[j]))
        )
        if call.answer is not None and call.repeats is None and (after := next(later, None)):
            found.append(
                Reply(call=call.id, messages=call.messages, answer=call.answer, next=after)
            )
    return found


def _beyond(
    call: Transition, prefix: list[bytes], messages: list[Message], keys: list[bytes]
) -> list[Message]:
    """The messages between the call's answer in a later request and the next answer; empty if the
    request does not go on with this answer."""
    if keys[: len(prefix)] != prefix:
        return []
    rest = messages[len(prefix) :]
    if not rest or not _is_answer(rest[0]) or not _same_answer(rest[0], call.answer or {}):
        return []
    return [*takewhile(lambda m: not _is_answer(m), dropwhile(_is_answer, rest))]


def _same_answer(sent: Message, given: Message) -> bool:
    """Whether a message is the answer of a call; agents may leave out its text or reasoning."""
    one, other = (" ".join(text_of(message).split()) for message in (sent, given))
    return not one or not other or one == other


def text_of(message: Message) -> str:
    """The text of a message: of its text parts and, for a result of a tool, its output."""
    return "\n".join(text for part in _parts(message) if (text := _text(part)))


def _parts(message: Message) -> Iterator[Any]:
    content = message.get("content", message.get("parts"))
    yield from content if isinstance(content, list) else [content]


def _text(part: Json) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return ""
    if part.get("type") == "tool_result":
        return text_of(part)
    if "functionResponse" in part:
        return msgspec.json.encode(part["functionResponse"]).decode()
    text = part.get("text")
    return text if isinstance(text, str) and not part.get("thought") else ""


def _is_answer(message: Message) -> bool:
    return message.get("role") in ANSWERS


def _key(message: Message) -> bytes:
    """What two requests say alike if one goes on with the other: roles and texts. Agents set marks
    of caches elsewhere at each request, and write arguments of tools anew."""
    role = "assistant" if _is_answer(message) else message.get("role")
    return msgspec.json.encode((role, " ".join(text_of(message).split())))


def digest_of_session(calls: Sequence[Transition]) -> str:
    """A digest of what its user and tools said, not of the answers: equal for a session that is
    repeated, whichever version answers. Otherwise it would count in each lane, and more in one with
    little traffic."""
    state = blake2b(digest_size=16)
    others = (*ANSWERS, *INSTRUCTIONS)
    said = {_key(m): None for call in calls for m in call.messages if m.get("role") not in others}
    for key in said:
        state.update(key)
    return state.hexdigest()


def posted(rewards: Iterable[Reward]) -> dict[str, float]:
    """Values in 0..1 that were posted as feedback, by name: that of the session, else the mean of
    its calls'. A correction has the value 0: the answer should have been another."""
    whole, of_calls = dict[str, float](), dict[str, list[float]]()
    for row in rewards:
        if row.source != FEEDBACK or row.name in ASKED or not 0 <= row.value <= 1:
            continue
        if row.scope is Scope.ROLLOUT:
            whole[row.name] = row.value
        else:
            of_calls.setdefault(row.name, []).append(row.value)
    return {name: fmean(values) for name, values in of_calls.items()} | whole


def unfit(said: Feedback) -> str:
    """Why feedback cannot be a signal; empty if it can."""
    name, value = said.name, said.value
    if name == CORRECTION:
        return "a correction is the text in the field 'correction'; choose another name"
    if name in reserved():
        return f"{name!r} is the name of a signal that is not posted; choose another"
    if value is not None and not 0 <= value <= 1:
        return f"the value {value:g} of {name!r:.80} is not between 0 and 1; scale it"
    if len(name) > LONGEST_NAME or len(said.note) + len(said.correction or "") > LONGEST_TEXT:
        return f"a name has at most {LONGEST_NAME} characters, note and correction {LONGEST_TEXT:,}"
    return ""


def reserved() -> set[str]:
    """Rewards that a run makes itself: whoever could post them would write what is learned."""
    return {*ASKED, SIGNAL, MARK, OUTCOME, FAILED, HINDSIGHT, TOLD, TURN}


def task_of(calls: Sequence[Transition]) -> Message:
    """The task that a verifier sees: the first thing that the user said."""
    users = (m for call in calls for m in call.messages if m.get("role") == "user")
    return {"input": next((text for m in users if (text := text_of(m))), "")}


def result_of(calls: Sequence[Transition]) -> str:
    """The result that a verifier sees: the text of the last answer that has one."""
    answers = (text_of(call.answer or {}) for call in reversed(calls))
    return next((text for text in answers if text), "")
