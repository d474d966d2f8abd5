"""Traces as they are sent in msgpack: every message and every token once.

A call of a trace has its whole conversation and prompt, so a conversation of many turns would be
sent once for each turn. Here a call has only what no earlier call of the trace has, as in the
database, and a link to the rest.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentrl.store.rows import digest, from_blob, to_blob
from agentrl.store.tree import TreeNode, deepest_prefix
from agentrl.types import Json, Record, Trace, Transition

NONE = -1


class CallLink(Record, frozen=True, array_like=True):
    """What a call takes from earlier ones, by their places in the trace; -1: nothing."""

    tokens: int = NONE  # its prompt begins with all tokens of that call
    chat: int = NONE  # its messages begin with the first `shared` of that call, answer included
    shared: int = 0
    tools: int = NONE  # it has the tools of that call


class PackedTrace(Record, frozen=True):
    """A trace whose calls are without what their links say."""

    trace: Trace
    links: list[CallLink]


def pack(trace: Trace) -> PackedTrace:
    calls, links = list[Transition](), list[CallLink]()
    nodes: list[TreeNode] = []  # of calls with tokens; `seq` is the place
    chats: list[list[Json]] = []
    sent: list[int] = []  # the first call of each set of tools
    holders: dict[tuple[int, int], int] = {}  # by place and identity of a message: who has it
    for place, call in enumerate(trace.transitions):
        prompt = to_blob(call.prompt)
        parent = deepest_prefix(prompt, sorted(nodes, key=lambda node: -node.size))
        chat, shared = _deepest_chat(call.messages, chats, holders)
        tools = next((i for i in sent if trace.transitions[i].tools == call.tools), NONE)
        if tools == NONE:
            sent.append(place)
        links.append(CallLink(NONE if parent is None else parent.seq, chat, shared, tools))
        if whole := prompt + to_blob(call.completion):
            nodes.append(TreeNode(place, len(whole), digest(whole)))
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
        whole = {
            "prompt": from_blob("i", prompt),
            "messages": [*shared, *call.messages],
            "tools": call.tools if link.tools == NONE else calls[link.tools].tools,
        }
        calls.append(replace(call, **whole))
        tokens.append(prompt + to_blob(call.completion))
        chats.append([*whole["messages"], *([] if call.answer is None else [call.answer])])
    return replace(packed.trace, transitions=calls)


def _deepest_chat(
    messages: list[dict[str, Json]], chats: list[list[Json]], holders: dict[tuple[int, int], int]
) -> tuple[int, int]:
    """The earlier call that has most of the messages, and how many. The calls that the store reads
    share one object for each message."""
    for last in reversed(range(len(messages))):
        place = holders.get((last, id(messages[last])), NONE)
        if place != NONE and chats[place][: last + 1] == messages[: last + 1]:
            return place, last + 1
    return NONE, 0
