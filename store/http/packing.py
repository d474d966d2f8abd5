"""Compact encoding of traces in msgpack: every message and token is sent only once.

Each call of a trace has its whole conversation and prompt, so a conversation of many calls would be
sent once per call. A packed call has only the part that no earlier call of the trace has, as in the
database, and a link to the rest.
"""

from __future__ import annotations

from bisect import insort_right

from msgspec.structs import replace

from agentrl.store.rows import digest, from_blob, to_blob
from agentrl.store.sql.tree import TreeNode, deepest_prefix
from agentrl.types import Json, Record, Trace, Transition

NONE = -1


class CallLink(Record, frozen=True, array_like=True):
    """Earlier calls that a call shares data with, by index in the trace; -1: none."""

    tokens: int = NONE  # the prompt begins with all tokens of this call
    chat: int = NONE  # the messages begin with the first `shared` of this call, answer included
    shared: int = 0
    tools: int = NONE  # the tools are those of this call


class PackedTrace(Record, frozen=True):
    """A trace whose calls lack the data that their links refer to."""

    trace: Trace
    links: list[CallLink]


def pack(trace: Trace) -> PackedTrace:
    calls, links = list[Transition](), list[CallLink]()
    nodes: list[TreeNode] = []  # of calls with tokens, longest first; `seq` is the call's index
    chats: list[list[Json]] = []
    sent: list[int] = []  # the first call with each set of tools
    holders: dict[tuple[int, int], int] = {}  # (position, id) of a message -> its latest call
    for place, call in enumerate(trace.transitions):
        prompt = to_blob(call.prompt)
        parent = deepest_prefix(prompt, nodes)
        chat, shared = _deepest_chat(call.messages, chats, holders)
        tools = next((i for i in sent if trace.transitions[i].tools == call.tools), NONE)
        if tools == NONE:
            sent.append(place)
        links.append(CallLink(NONE if parent is None else parent.seq, chat, shared, tools))
        if tokens := prompt + to_blob(call.completion):
            insort_right(nodes, TreeNode(place, len(tokens), digest(tokens)), key=_shortness)
        chats.append([*call.messages, *([] if call.answer is None else [call.answer])])
        holders |= {(i, id(message)): place for i, message in enumerate(chats[-1])}
        short = {
            "prompt": from_blob("i", prompt[parent.size if parent else 0 :]),
            "messages": call.messages[shared:],
            "tools": call.tools if tools == NONE else [],
        }
        calls.append(replace(call, **short))
    return PackedTrace(trace=replace(trace, transitions=calls), links=links)


def unpack(packed: PackedTrace) -> Trace:
    calls, tokens, chats = list[Transition](), list[bytes](), list[list[Json]]()
    for call, link in zip(packed.trace.transitions, packed.links, strict=True):
        prompt = (tokens[link.tokens] if link.tokens != NONE else b"") + to_blob(call.prompt)
        shared = chats[link.chat][: link.shared] if link.chat != NONE else []
        full = {
            "prompt": from_blob("i", prompt),
            "messages": [*shared, *call.messages],
            "tools": call.tools if link.tools == NONE else calls[link.tools].tools,
        }
        calls.append(replace(call, **full))
        tokens.append(prompt + to_blob(call.completion))
        chats.append([*full["messages"], *([] if call.answer is None else [call.answer])])
    return replace(packed.trace, transitions=calls)


def _shortness(node: TreeNode) -> int:
    return -node.size


def _deepest_chat(
    messages: list[dict[str, Json]], chats: list[list[Json]], holders: dict[tuple[int, int], int]
) -> tuple[int, int]:
    """Return the earlier call that shares most messages, and their number. Calls read from the
    store share the objects of equal messages."""
    for last in reversed(range(len(messages))):
        place = holders.get((last, id(messages[last])), NONE)
        if place != NONE and chats[place][: last + 1] == messages[: last + 1]:
            return place, last + 1
    return NONE, 0
