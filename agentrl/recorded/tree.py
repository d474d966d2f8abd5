"""The tree of a recorded trace: one root, every node below it, and each call's role.

Incomplete recordings are repaired and the repairs are counted: nodes with a missing parent become
children of the root, a cycle is cut at its earliest node, several roots get a common root.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from agentrl.recorded.nodes import Issues, Node, Note


class Tree(NamedTuple):
    """A trace. nodes: the root first, then in the order of their starts, roles filled in."""

    root: Node
    nodes: list[Node]
    notes: list[Note]

    @property
    def calls(self) -> list[Node]:
        """The model calls with messages and an answer."""
        return [
            node for node in self.nodes if node.call and node.call.messages and node.call.answer
        ]


def tree_of(items: Iterable[Node | Note], issues: Issues) -> Tree | None:
    """Build the tree of one trace; None if it has only notes."""
    items = list(items)
    by_id: dict[str, Node] = {}
    for node in items:
        if isinstance(node, Node):
            by_id[node.id] = _fuller(by_id.get(node.id), node)
    if not by_id:
        return None
    trace = next(iter(by_id.values())).trace
    nodes = [_timed(node, issues) for node in by_id.values()]
    root, parents = _parents(nodes, trace, issues)
    named_roles = {
        node.id: node.role or (node.name if node.kind == "agent" else "") for node in (root, *nodes)
    }
    roles = _roles(named_roles, parents)
    ordered = _in_order([node for node in nodes if node.id != root.id])
    placed = [
        replace(node, parent=parents.get(node.id, ""), role=roles[node.id])
        for node in (root, *ordered)
    ]
    notes = {
        (note.key or number, note.name): note
        for number, note in enumerate(items)
        if isinstance(note, Note)
    }  # exports overlap
    return Tree(placed[0], placed, [*notes.values()])


def _in_order(nodes: list[Node]) -> list[Node]:
    """Nodes in the order of their starts; a node without a time follows the node that was read
    before it."""
    last, keys = 0, list[int]()
    for node in nodes:
        last = node.start or last
        keys.append(last)
    return [node for _, node in sorted(zip(keys, nodes, strict=True), key=lambda pair: pair[0])]


def _fuller(earlier: Node | None, node: Node) -> Node:
    """The more complete of two records of a node: exports overlap."""
    if earlier is None:
        return node
    filled = [
        (bool(n.call and n.call.answer), bool(n.end), n.output is not None) for n in (earlier, node)
    ]
    return node if filled[1] > filled[0] else earlier


def _timed(node: Node, issues: Issues) -> Node:
    if node.end and node.end < node.start:
        issues.add(
            "a span ends before it starts; its duration is 0",
            f"{node.name[:60]} of {node.trace[:40]}",
        )
        return replace(node, end=node.start)
    return node


def _parents(nodes: list[Node], trace: str, issues: Issues) -> tuple[Node, dict[str, str]]:
    """The root, and the parent of every other node."""
    by_id = {node.id: node for node in nodes}
    parents = {node.id: node.parent for node in nodes if node.parent in by_id}
    _cut_cycles(nodes, parents, issues)
    tops = sorted((node for node in nodes if node.id not in parents), key=lambda node: node.start)
    roots = [node for node in tops if not node.parent]
    orphans = [node for node in tops if node.parent] if roots else []
    roots = roots or tops
    root = roots[0]
    if len(roots) > 1:
        issues.add("a trace has several roots; a common root was added", trace[:60])
        root = Node(
            trace=trace,
            id=f"{trace}-root",
            name="trace",
            kind="chain",
            start=root.start,
            end=max(n.end for n in roots),
            input=root.input,
            output=roots[-1].output,
        )
        parents |= {node.id: root.id for node in roots}
    if orphans:
        issues.add(
            "a span's parent is not in the recording; the root is used instead",
            f"{orphans[0].name[:60]} of {trace[:40]}",
        )
        parents |= {node.id: root.id for node in orphans}
    late = [
        n
        for n in nodes
        if n.start and (p := by_id.get(parents.get(n.id, ""))) and p.start > n.start
    ]
    if late:
        issues.add(
            "a span starts before its parent; times are as recorded",
            f"{late[0].name[:60]} of {trace[:40]}",
        )
    return root, parents


def _cut_cycles(nodes: list[Node], parents: dict[str, str], issues: Issues) -> None:
    clear: set[str] = set()
    for node in sorted(nodes, key=lambda node: node.start):
        path: dict[str, None] = {}  # in its order
        at = node.id
        while at in parents and at not in clear and at not in path:
            path[at] = None
            at = parents[at]
        if at in path:
            issues.add(
                "spans are each other's parents; the earliest is moved below the root",
                f"{node.name[:60]} of {node.trace[:40]}",
            )
            steps = [*path]
            del parents[node.id if node.id in steps[steps.index(at) :] else at]
        clear.update(path)


def _roles(named_roles: dict[str, str], parents: dict[str, str]) -> dict[str, str]:
    """The role of each node: its own, or that of its nearest ancestor with one; "": none.
    named_roles: the role that each node names itself."""
    roles: dict[str, str] = {}
    for start in named_roles:
        at, path = start, [start]
        while not named_roles[at] and at not in roles and at in parents:
            at = parents[at]
            path.append(at)
        roles |= dict.fromkeys(path, roles.get(at) or named_roles[at])
    return roles
