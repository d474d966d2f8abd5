"""Chat completions as conversations: tool calls of a stream, and the memory of earlier answers that
later calls refer to.

Servers number the tool calls of a streamed message from 0, from 1 or not at all, give every call
the same index, alternate between calls, or send the name later than the id. They are assembled in
the same way as by clients.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.core.types import Json

Body = dict[str, Json]


NOTHING: Mapping[str, Json] = {}
THOUGHTS = ("reasoning_content", "reasoning")  # servers' names for the thought of a message


@dataclass(slots=True)
class ConversationMemory:
    """State of an attempt that its later calls may refer to."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Tool call id -> its arguments, byte for byte as the model wrote them."""

    answers: dict[int, list[Body]] = field(default_factory=dict)
    """Key of a conversation -> the assistant's messages that were given in it."""

    kept: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """What a translated API lets later calls refer to: its kind, such as "items" -> id -> it."""

    walked: tuple[int, int, int, int] | None = None
    """The conversation that `recall` saw last, if nothing in it changed: the length of its JSON
    without the end, the hash of that, its number of messages, and its key."""

    def has_any(self, ids: Iterable[str]) -> bool:
        """Whether any of the ids is known."""
        return any(id in by_id for id in ids for by_id in self.kept.values())

    def remember(self, answer: Body, conversation: int | None) -> None:
        """Store the answer to a conversation. `conversation`: its key, which `recall` returned;
        None for a text prompt."""
        for call in _calls(answer):
            if isinstance(arguments := call["function"].get("arguments") or "", str):
                self.arguments[str(call.get("id"))] = arguments
        if conversation is not None:  # without fields that servers leave empty
            filled = {name: value for name, value in answer.items() if value or name == "content"}
            self.answers.setdefault(conversation, []).append(filled)
            if self.walked is not None and conversation != self.walked[-1]:
                # Invalid, because this answer may belong into the middle of the walk.
                self.walked = None

    def recall(
        self, messages: list[Json], *, joined: bool, raw: bytes = b""
    ) -> tuple[list[Json], int]:
        """Return the messages with each answer of this conversation as the policy gave it, and the
        key of the conversation; the same list if nothing changes. Clients send arguments back as
        different JSON, replace malformed ones, add a name, or split an answer into several
        messages. Then a chat template would render other tokens than the sampled ones, and the call
        would not extend the previous one. An answer is identified by its conversation and its
        content, so answers of other agents, and answers that the agent has changed, stay as they
        are. `joined`: whether this API treats neighbouring assistant messages as one turn, even if
        the policy did not write them. `raw`: the JSON of the messages; if it begins with the latest
        conversation, only the rest is read."""
        recalled: list[Json] | None = None  # None while nothing has changed
        new_ids: dict[str, Json] = {}
        index, key = self._resumed(raw)
        while index < len(messages):
            message = turn = messages[index]
            count, role = 1, message.get("role") if isinstance(message, dict) else None
            if role == "assistant":
                turn, count, ids = self._turn(messages, index, key, joined=joined)
                if ids:
                    new_ids |= ids
            elif new_ids and role == "tool":
                id = message.get("tool_call_id")
                turn = message | {"tool_call_id": new_ids.get(str(id), id)}
            if turn is not message and recalled is None and (count > 1 or turn != message):
                recalled = messages[:index]
            if recalled is not None:
                recalled.append(turn)
            key = _next_key(key, turn)
            index += count
        self.walked = None
        if raw.endswith(b"}]") and recalled is None and not _is_assistant(messages[-1]):
            self.walked = len(raw) - 1, hash(raw[:-1]), len(messages), key
        return messages if recalled is None else recalled, key

    def _resumed(self, raw: bytes) -> tuple[int, int]:
        """Return the number of leading messages that are known, and their key."""
        if self.walked is None:
            return 0, 0
        length, digest, count, key = self.walked
        same = raw[length : length + 1] == b"," and hash(raw[:length]) == digest
        return (count, key) if same else (0, 0)

    def _turn(
        self, messages: list[Json], start: int, key: int, *, joined: bool
    ) -> tuple[Body, int, Mapping[str, Json]]:
        """Return the assistant's turn at `start`, the number of its messages, and a mapping from
        the ids of its tool calls to the original ones. `key`: of the conversation before it."""
        answers, best = self.answers.get(key, ()), None
        turn: Body = messages[start]
        end = start + 1
        alone = end == len(messages) or not _is_assistant(messages[end])
        if alone and turn in answers:
            return turn, 1, NOTHING  # the common case
        if alone and not answers:
            return self._with_arguments(turn), 1, NOTHING
        while True:
            if original := _as_given(turn, answers):
                best = (original, end - start, _renamed(turn, original))  # the longest match
            if not (answers or joined) or end == len(messages) or not _is_assistant(messages[end]):
                break
            turn, end = _join(turn, messages[end]), end + 1
        if best is not None:
            return best
        unmatched, count = (turn, end - start) if joined else (messages[start], 1)
        return self._with_arguments(unmatched), count, NOTHING

    def _with_arguments(self, turn: Body) -> Body:
        """Return a turn that is not an answer to this conversation, for example because the agent
        has shortened the history, with the arguments of its calls as the model wrote them."""
        sent = _calls(turn) if self.arguments else []
        calls = [_with_text(call, self.arguments.get(str(call.get("id")))) for call in sent]
        return turn | {"tool_calls": calls} if calls else turn


def _is_assistant(message: Json) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _calls(message: Body) -> list[Body]:
    """Return the tool calls of a message; none if one of them is malformed."""
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list):
        return []
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("function"), dict)):
            return []
    return calls


def _text(content: Json) -> str:
    """Return the text of a message's content; other parts as their JSON."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else repr(content)
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        parts.append(text if isinstance(text, str) else repr(part))
    return "".join(parts)


def _answer_text(message: Body) -> str:
    return _text(message.get("content")) + _text(message.get("refusal"))


def _thought(message: Body) -> str:
    return next((_text(message[name]) for name in THOUGHTS if message.get(name)), "")


def _next_key(key: int, message: Json) -> int:
    """Return the key of a conversation with one more message. The key does not depend on the
    reasoning, which agents may drop, on ids, which they may change, and on whether text is in
    parts."""
    if not isinstance(message, dict):
        return hash((key, repr(message)))
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not calls and isinstance(content, str) and isinstance(role, str):  # most messages
        return hash((key, role, content))
    parts = [key, str(role), _text(content)]
    for call in _calls(message):
        function = call["function"]
        parts += str(function.get("name")), str(function.get("arguments"))
    return hash(tuple(parts))


def _join(turn: Body, more: Body) -> Body:
    """Join two neighbouring assistant messages."""
    joined = turn | {name: value for name, value in more.items() if turn.get(name) is None}
    for name in ("content", *THOUGHTS, "tool_calls"):
        first, second = turn.get(name), more.get(name)
        if not (first and second):
            joined |= {name: first or second} if first or second else {}
        elif isinstance(first, str) and isinstance(second, str):
            joined[name] = first + second
        else:
            joined[name] = [*_parts(first), *_parts(second)]
    return joined


def _parts(content: Json) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _as_given(turn: Body, answers: Sequence[Body]) -> Body | None:
    """Replace a turn by the matching original answer; of several matches the latest, unless one is
    equal to the turn or has the same call ids."""
    matches = [same for answer in answers if (same := _same_answer(turn, answer)) is not None]
    ids = [call.get("id") for call in _calls(turn)]
    return max(
        reversed(matches),
        key=lambda match: (match == turn, [call.get("id") for call in _calls(match)] == ids),
        default=None,
    )


def _same_answer(turn: Body, answer: Body) -> Body | None:
    """Return the turn with the original content of the answer; None if it differs. Reasoning is
    left out if the agent has left it out."""
    same = turn.get("function_call") == answer.get("function_call")
    if not same or _answer_text(turn) != _answer_text(answer):
        return None
    pairs = _paired(turn, answer)
    if pairs is None:
        return None
    original = {name: value for name, value in turn.items() if name != "name"}
    if _answer_text(turn) and not answer.get("refusal"):
        original["content"] = answer["content"]
    if _thought(answer).strip() == _thought(turn).strip() != "":
        original = {name: value for name, value in original.items() if name not in THOUGHTS}
        original |= {name: answer[name] for name in THOUGHTS if answer.get(name)}
    if pairs:
        original["tool_calls"] = [
            _with_text(call, answer_call["function"].get("arguments") or "")
            | ({"id": answer_call["id"]} if answer_call.get("id") else {})
            for call, answer_call in pairs
        ]
    return original


def _paired(turn: Body, answer: Body) -> list[tuple[Body, Body]] | None:
    """Return the calls of a turn with those of the answer, in its order; None if they differ."""
    sent, written = _calls(turn), _calls(answer)
    if len(sent) != len(written) or (turn.get("tool_calls") and not sent):
        return None
    by_id = {str(call.get("id")): call for call in sent}
    if by_id.keys() == {str(call.get("id")) for call in written}:
        sent = [by_id[str(call.get("id"))] for call in written]
    pairs = list(zip(sent, written, strict=True))
    for sent_call, written_call in pairs:
        if sent_call["function"].get("name") != written_call["function"].get("name"):
            return None
        if not _means(
            sent_call["function"].get("arguments"), written_call["function"].get("arguments")
        ):
            return None
    return pairs


def _with_text(call: Body, written: Json) -> Body:
    """Return a call with the arguments as `written` by the model, if its own arguments are
    equivalent."""
    function = call["function"]
    if not isinstance(written, str) or not _means(function.get("arguments"), written):
        return call
    return call | {"function": function | {"arguments": written}}


def _means(received: Json, written: Json) -> bool:
    """Whether `received` are equivalent to the arguments `written` by the model: equal JSON or, if
    they are not a JSON object, an empty object or one with their text."""
    if received == written or not (received or written):
        return True
    sent = _parsed(received) if isinstance(received, str | None) else received
    original = _parsed(written) if isinstance(written, str | None) else written
    if sent is not MALFORMED and _equal(sent, original):
        return True
    if isinstance(original, dict):
        return False
    return isinstance(sent, dict) and [*sent.values()] in ([], [written])


MALFORMED = object()


def _parsed(text: str | None) -> Any:
    try:  # also half surrogates and 1e400, which msgspec refuses
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return MALFORMED


def _equal(a: Json, b: Json) -> bool:
    """Whether two JSON values are equal; in Python 1 == True."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return bool(a == b)


def _renamed(turn: Body, original: Body) -> dict[str, Json]:
    """Return a mapping from the ids of a turn's calls to the original ids, unless they are
    known."""
    pairs = zip(_calls(turn), _calls(original), strict=True)
    new = {str(call.get("id")): original_call.get("id") for call, original_call in pairs}
    return {} if new.keys() == {str(id) for id in new.values()} else new


class ToolCalls:
    """The tool calls so far, in order of appearance."""

    def __init__(self) -> None:
        self.all: list[Body] = []
        self._latest: dict[int | str, Body] = {}  # index, or id if there is no index -> its call

    def add(self, delta: Body) -> None:
        """Merge a part of a call into its call."""
        function = delta.get("function") or {}
        index, id = delta.get("index"), delta.get("id")
        index = None if index == -1 else index
        if (call := self._find(index, id, function)) is None:
            call = {"type": "function", "function": {"name": "", "arguments": ""}}
            self.all.append(call)
        if (key := id if index is None else index) is not None:
            self._latest[key] = call
        first = {k: v for k, v in delta.items() if k not in ("index", "function") and v}
        call |= first | ({"id": call["id"]} if call.get("id") else {})
        for key, more in function.items():
            so_far = call["function"].get(key, "")
            # Some servers repeat the field in every part.
            if more and not (key == "name" and more == so_far):
                text = more if isinstance(more, str) else msgspec.json.encode(more).decode()
                call["function"][key] = so_far + text

    def _find(self, index: int | str | None, id: str | None, function: Body) -> Body | None:
        """Return the call that a part continues; None for a new one."""
        if index is None and id in self._latest:
            return self._latest[id]
        last = self.all[-1] if self.all else None
        call = last if index is None else self._latest.get(index)
        if call is None or (id and id == call.get("id")):
            return call
        begun, other_id = call["function"], id and call.get("id")
        named = function.get("name") and (begun["name"] or other_id)
        if named and (index is None or other_id):
            return None
        # A few servers vary the id within a call, so an id alone begins none.
        begins = named or (other_id and function.get("arguments"))
        return None if begins and is_complete(begun["arguments"]) else call


def is_complete(arguments: str) -> bool:
    """Whether arguments are a JSON object, which only white space can follow."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
