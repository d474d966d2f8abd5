"""The token tree: every call stores only tokens and messages that no earlier call of its attempt
has.

Invariant: the creator of a `TokenTree` has locked its attempts, so nobody else adds to them. One
query for the stored calls is sent at the start, and awaited at the first use. Late calls have only
late parents, regular calls only regular ones: these may move to another attempt without the late.
"""

from __future__ import annotations

from bisect import insort_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from agentrl.errors import Conflict
from agentrl.store import rows
from agentrl.store.database import WritingConnection, load_sql
from agentrl.store.rows import digest

SQL = load_sql("traces")
Tree = tuple[str, bool]  # (attempt, whether its calls are late)


@dataclass(frozen=True, slots=True)
class PreparedTransition:
    """A transition with all that is computed outside the transaction, in which other writers
    wait."""

    columns: dict[str, Any]
    prompt: bytes
    lines: list[str]  # messages as JSON
    chat: bytes  # the lines, each with a line break
    tools: str | None

    @property
    def attempt(self) -> str:
        return str(self.columns["attempt"])


class TreeNode(NamedTuple):
    """Length and digest of an earlier call's tokens or messages, which another may continue."""

    seq: int
    size: int  # bytes
    digest: bytes


def prefix_digests(data: bytes, sizes: Iterable[int]) -> dict[int, bytes]:
    """Return the digest of `data[:size]` for every size up to its length, in one pass."""
    view, state, done = memoryview(data), blake2b(digest_size=16), 0
    found: dict[int, bytes] = {}
    for size in sorted(set(sizes)):
        if size > len(view):
            break
        state.update(view[done:size])
        done = size
        found[size] = state.copy().digest()
    return found


def deepest_prefix(data: bytes, nodes: Iterable[TreeNode]) -> TreeNode | None:
    """Return the first of `nodes`, sorted by descending length, that is a prefix of `data`.

    Nodes are checked in growing batches: a linear conversation needs only one; with many branches
    `data` is hashed only a few times."""
    waiting, some = iter(nodes), 1
    while batch := list(islice(waiting, some)):
        found = prefix_digests(data, [node.size for node in batch])
        for node in batch:
            if found.get(node.size) == node.digest:
                return node
        some *= 8
    return None


class TokenTree:
    """The calls of some attempts in one transaction, which adds to them. `ids`: calls to add."""

    def __init__(
        self, conn: WritingConnection, attempts: Sequence[str], ids: Sequence[str]
    ) -> None:
        self._conn = conn
        columns = {"attempts": rows.to_json(attempts, "Attempts"), "ids": rows.to_json(ids, "Ids")}
        self._asked = conn.ask(SQL["tree"], columns)
        self._calls: dict[str, Tree] | None = None  # id -> its tree
        self._nodes: dict[Tree, list[TreeNode]] = defaultdict(list)  # longest first, then latest
        self._chats: dict[Tree, list[TreeNode]] = defaultdict(list)
        self._answers: dict[tuple[Tree, int, bytes, bytes], int] = {}
        self._rows: dict[str, rows.Columns] = {}  # id -> columns of a call not yet stored
        self._new: list[str] = []  # ids of added calls, with `seq` -1, -2, ...

    def known_late(self, call: PreparedTransition) -> bool | None:
        """Whether a stored call is late; None if it is not stored. Raises Conflict if its id is
        another attempt's."""
        if self._calls is None:
            self._calls = self._read()
        attempt, late = self._calls.get(call.columns["id"], (call.attempt, None))
        if attempt != call.attempt:
            raise Conflict(
                f"Transition {call.columns['id']} belongs to attempt {attempt}, not to "
                f"{call.attempt}: give each call an id of its own."
            )
        return late

    def add(self, call: PreparedTransition, *, late: bool) -> None:
        """Add a new call below its longest stored prefix."""
        if call.tools is not None:  # equal in most calls of a run: stored once, by content
            self._conn.execute(SQL["add_payload"], (call.columns["tools"], call.tools))
        tree = call.attempt, late
        parent = deepest_prefix(call.prompt, _fitting(self._nodes[tree], call.prompt))
        chat, shared = self._heard(call, tree)
        columns = {
            **call.columns,
            **self._link("parent", parent.seq if parent else None),
            **self._link("chat_parent", chat),
            "prompt": call.prompt[parent.size if parent else 0 :],
            "chat_shared": shared,
            "messages": f"[{','.join(call.lines[shared:])}]",
            "late": late,
        }
        if columns["parent_id"] in self._rows or columns["chat_parent_id"] in self._rows:
            self.write()
        self._rows[columns["id"]] = columns
        self._remember(call, tree)

    def write(self) -> None:
        """Store added calls. A call and its parent must not be in the same statement."""
        self._conn.executemany(SQL["add_transition"], self._rows.values())
        self._rows = {}

    def _read(self) -> dict[str, Tree]:
        calls = {}
        for row in self._asked.fetchall():
            tree, seq = (row["attempt_id"], bool(row["late"])), row["seq"]
            calls[row["id"]] = tree
            if row["size"]:
                self._nodes[tree].append(TreeNode(seq, row["size"], row["digest"]))
            if row["chat_size"]:
                chat = TreeNode(seq, row["chat_size"], row["chat_digest"])
                self._chats[tree].append(chat)
                if row["answer_digest"] is not None:
                    answer = tree, chat.size, chat.digest, row["answer_digest"]
                    self._answers[answer] = max(self._answers.get(answer, seq), seq)
        for nodes in (*self._nodes.values(), *self._chats.values()):
            nodes.sort(key=lambda node: (-node.size, -node.seq))
        return calls

    def _heard(self, call: PreparedTransition, tree: Tree) -> tuple[int | None, int]:
        """Return the call whose messages this one repeats, and their number: agents resend the
        whole conversation."""
        parent = deepest_prefix(call.chat, _fitting(self._chats[tree], call.chat))
        if parent is None:
            return None, 0
        shared = call.chat[: parent.size].count(b"\n")
        if shared < len(call.lines):
            line = digest(call.lines[shared].encode())
            answered = self._answers.get((tree, parent.size, parent.digest, line))
            if answered is not None:  # the next message is the answer to that call
                return answered, shared + 1
        return parent.seq, shared

    def _link(self, name: str, seq: int | None) -> dict[str, Any]:
        if seq is None or seq >= 0:
            return {name: seq, f"{name}_id": None}
        return {name: None, f"{name}_id": self._new[-1 - seq]}

    def _remember(self, call: PreparedTransition, tree: Tree) -> None:
        assert self._calls is not None
        columns = call.columns
        self._calls[columns["id"]] = tree
        self._new.append(columns["id"])
        seq, answer = -len(self._new), columns["answer_digest"]
        chat = TreeNode(seq, columns["chat_size"], columns["chat_digest"])
        node = TreeNode(seq, columns["size"], columns["digest"])
        for one, nodes in ((node, self._nodes[tree]), (chat, self._chats[tree])):
            if one.size:
                insort_left(nodes, one, key=_shortness)
        if chat.size and answer is not None:
            self._answers[tree, chat.size, chat.digest, answer] = seq


def _shortness(node: TreeNode) -> int:
    return -node.size


def _fitting(nodes: Iterable[TreeNode], data: bytes) -> Iterable[TreeNode]:
    return (node for node in nodes if node.size <= len(data))
