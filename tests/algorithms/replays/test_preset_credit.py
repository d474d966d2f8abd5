"""Branching rollouts, against naive credit and published losses."""

from __future__ import annotations

from tests.algorithms.naive import naive_siblings, naive_tree
from tests.algorithms.presets.plays import Case, checked, outcome, tokens, total
from tests.algorithms.worlds import Play


def tree(play: Play, u: int) -> object:
    first = play.calls[0].node
    return u if first is None else (play.group, first)


CASES: dict[str, Case] = {
    "tree-grpo": (
        tokens(lambda plays: total((outcome(plays, True), 1), (outcome(plays, True, tree), 1))),
        "token", "rows", {},
    ),
    "gspo+tree": (
        tokens(lambda plays: total((outcome(plays, True), 1), (outcome(plays, True, tree), 0.5))),
        "row", "rows", {"tree_weight": 0.5},
    ),
    "treerl": (tokens(lambda plays: naive_tree(plays, True)), "token", "rows", {}),
    "vineppo": (tokens(naive_siblings), "token", "rows", {}),
    "c3": (tokens(naive_siblings), "token", "rows", {}),
    "treerl parent": (
        tokens(lambda plays: naive_tree(plays, False)), "token", "rows", {"how": "parent"}
    ),
}  # fmt: skip


test_its_loss_is_the_published_one = checked(CASES)
