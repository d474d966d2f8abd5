"""The token tree: every call stores only tokens and messages that no earlier call of its attempt
has.

Invariant: while a `TokenTree` is used, no other writer adds to its attempts: a transaction has the
file for itself on SQLite, and on PostgreSQL its creator has locked their rows. The stored calls of
an attempt are requested at the start and awaited at the first use, or they are cached. In the same
transaction the database checks that the cache is complete (`check_known` in `traces.sql`): if not,
it raises an error on purpose, and the writer runs each verb alone, without the cache. Late calls
have only late parents and regular calls only regular ones, because regular calls may move to
another attempt without the late ones.
"""

from __future__ import annotations

from bisect import insort_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from agentrl.core.errors import Conflict
from agentrl.store import rows
from agentrl.store.rows import digest
from agentrl.store.sql.database import Cursor, WritingConnection, load_sql

SQL = load_sql("traces")
MAX_CALLS_CACHED = 20_000  # calls that a process remembers, about a kilobyte each


@dataclass(frozen=True, slots=True)
class PreparedTransition:
    """A call with all that is computed outside the transaction, in which other writers
    wait."""

    columns: dict[str, Any]
    prompt: bytes
    lines: list[str]  # messages as JSON
    chat: bytes  # the lines, each with a line break
    tools: str | None
    images: tuple[str, ...]  # digests

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
    view, state, hashed = memoryview(data), blake2b(digest_size=16), 0
    digests: dict[int, bytes] = {}
    for size in sorted(set(sizes)):
        if size > len(view):
            break
        state.update(view[hashed:size])
        hashed = size
        digests[size] = state.copy().digest()
    return digests


def deepest_prefix(data: bytes, nodes: Iterable[TreeNode]) -> TreeNode | None:
    """Return the first of `nodes`, sorted by descending length, that is a prefix of `data`.

    Nodes are checked in growing batches: a linear conversation needs only one; with many branches
    `data` is hashed only a few times."""
    waiting, size = iter(nodes), 1
    while batch := list(islice(waiting, size)):
        digests = prefix_digests(data, [node.size for node in batch])
        for node in batch:
            if digests.get(node.size) == node.digest:
                return node
        size *= 8
    return None


@dataclass(slots=True)
class CallTree:
    """The regular or the late calls of an attempt. Nodes are sorted: longest first, then latest."""

    nodes: list[TreeNode] = field(default_factory=list)
    chats: list[TreeNode] = field(default_factory=list)
    answers: dict[tuple[int, bytes, bytes], int] = field(default_factory=dict)

    def add(self, seq: int, columns: Mapping[str, Any]) -> None:
        """Add a call that is later than all others."""
        node = TreeNode(seq, columns["size"], columns["digest"])
        chat = TreeNode(seq, columns["chat_size"], columns["chat_digest"])
        for new_node, nodes in ((node, self.nodes), (chat, self.chats)):
            if new_node.size:
                insort_left(nodes, new_node, key=_shortness)
        if chat.size and columns["answer_digest"] is not None:
            self.answers[chat.size, chat.digest, columns["answer_digest"]] = seq

    def heard(self, call: PreparedTransition) -> tuple[int | None, int]:
        """Return the earlier call whose messages this call repeats, and their number: agents resend
        the whole conversation."""
        parent = deepest_prefix(call.chat, _fitting(self.chats, call.chat))
        if parent is None:
            return None, 0
        shared = call.chat[: parent.size].count(b"\n")
        if shared < len(call.lines):
            next_message = digest(call.lines[shared].encode())
            answered = self.answers.get((parent.size, parent.digest, next_message))
            if answered is not None:  # the next message is the answer to that call
                return answered, shared + 1
        return parent.seq, shared


@dataclass(slots=True)
class AttemptCalls:
    """All calls of an attempt of a run."""

    run: str = ""
    late: dict[str, bool] = field(default_factory=dict)  # id of every call -> whether it is late
    # Ids of calls that this process added. Their nodes have the `seq` -1, -2, ..., because the
    # database numbers a call when it is written, without returning the number: see `_link`.
    added: list[str] = field(default_factory=list)
    trees: tuple[CallTree, CallTree] = field(default_factory=lambda: (CallTree(), CallTree()))
    # Digests to which this process has added references.
    images: set[str] = field(default_factory=set)


class KnownAttempts:
    """A cache of the calls of attempts that this process claimed or added to, so that a write does
    not fetch them again. It is valid while no other process adds to an attempt; `check_known`
    verifies this in the transaction that uses it. Entries are taken out for a transaction, and
    returned only when it has committed."""

    def __init__(self) -> None:
        self._cached: dict[str, AttemptCalls] = {}
        self._calls = 0  # cached calls, plus one per attempt

    def take(self, attempts: Iterable[str]) -> dict[str, AttemptCalls]:
        taken = {id: self._cached.pop(id) for id in attempts if id in self._cached}
        self._calls -= sum(len(calls.late) + 1 for calls in taken.values())
        return taken

    def keep(self, attempts: Mapping[str, AttemptCalls]) -> None:
        self.take(attempts)
        self._cached |= attempts
        self._calls += sum(len(calls.late) + 1 for calls in attempts.values())
        while self._calls > MAX_CALLS_CACHED:
            self.take([next(iter(self._cached))])


class TokenTree:
    """The calls of some attempts in one transaction, which adds to them. `cached`: calls of
    attempts that need not be fetched. `ids`: calls to add. `now`: the transaction's time, if known
    without asking the database."""

    def __init__(
        self,
        conn: WritingConnection,
        attempts: Sequence[str],
        ids: Sequence[str],
        cached: Mapping[str, AttemptCalls],
        now: float | None,
    ) -> None:
        self._conn = conn
        self.calls = {id: cached.get(id) or AttemptCalls() for id in attempts}
        self._others: dict[str, str] = {}  # id -> attempt of a stored call
        self._rows: dict[str, rows.Columns] = {}  # id -> columns of a call not yet stored
        self._query: Cursor | None = None
        if cached:
            sizes = [(id, len(calls.late)) for id, calls in cached.items()]
            conn.ask(SQL["check_known"], {"known": rows.to_json(sizes, "Attempts"), "now": now})
        if unknown := [id for id in attempts if id not in cached]:
            columns = {"attempts": rows.to_json(unknown, "Attempts")}
            self._query = conn.ask(SQL["tree"], {**columns, "ids": rows.to_json(ids, "Ids")})

    def has(self, call: PreparedTransition) -> bool:
        """Whether a call is stored already. Raises Conflict if its id is another attempt's."""
        if self._query is not None:
            self._read(self._query)
            self._query = None
        id = call.columns["id"]
        if self._others.get(id, call.attempt) != call.attempt:
            raise Conflict(
                f"Call {id} belongs to attempt {self._others[id]}, not to {call.attempt}: "
                "give each call an id of its own."
            )
        return id in self.calls[call.attempt].late

    def is_late(self, call: PreparedTransition) -> bool:
        """Whether a call that the tree has is late."""
        return self.calls[call.attempt].late[call.columns["id"]]

    def add(self, call: PreparedTransition, *, late: bool) -> None:
        """Add a new call below its longest stored prefix."""
        if call.tools is not None:  # equal in most calls of a run, so stored once, by content
            self._conn.execute(SQL["add_payload"], (call.columns["tools"], call.tools))
        calls, id = self.calls[call.attempt], call.columns["id"]
        tree = calls.trees[late]
        parent = deepest_prefix(call.prompt, _fitting(tree.nodes, call.prompt))
        chat, shared = tree.heard(call)
        prompt = call.prompt[parent.size if parent else 0 :]
        columns = {
            **call.columns,
            **_link(calls, "parent", parent.seq if parent else None),
            **_link(calls, "chat_parent", chat),
            "prompt": rows.with_runs(prompt) if call.images else prompt,
            "chat_shared": shared,
            "messages": f"[{','.join(call.lines[shared:])}]",
            "late": late,
        }
        if columns["parent_id"] in self._rows or columns["chat_parent_id"] in self._rows:
            self.write()
        self._rows[id], self._others[id] = columns, call.attempt
        calls.late[id] = late
        calls.added.append(id)
        tree.add(-len(calls.added), columns)

    def write(self) -> None:
        """Store added calls. A call and its parent are never in the same statement: it finds the
        number of its parent by a query, which does not see rows of its own statement."""
        self._conn.executemany(SQL["add_transition"], self._rows.values())
        self._rows = {}

    def _read(self, result: Cursor) -> None:
        for row in sorted(result.fetchall(), key=lambda row: int(row["seq"])):
            id, attempt, late = row["id"], row["attempt_id"], bool(row["late"])
            self._others[id] = attempt
            if (calls := self.calls.get(attempt)) is not None:
                calls.late[id] = late
                calls.trees[late].add(row["seq"], row)


def _link(calls: AttemptCalls, name: str, seq: int | None) -> dict[str, Any]:
    """Return the columns that name an earlier call, by its number if that is known, else (a `seq`
    below 0) by its id, which the statement resolves."""
    if seq is None or seq >= 0:
        return {name: seq, f"{name}_id": None}
    return {name: None, f"{name}_id": calls.added[-1 - seq]}


def _shortness(node: TreeNode) -> int:
    return -node.size


def _fitting(nodes: Iterable[TreeNode], data: bytes) -> Iterable[TreeNode]:
    return (node for node in nodes if node.size <= len(data))
