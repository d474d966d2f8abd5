from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.model.packing import (
    Ids,
    build_forest,
    common_prefix,
    depth_first,
    token_budget_ranges,
)

# Few distinct tokens, so that prefixes coincide.
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(np.array), max_size=7)
budgets = st.integers(1, 25)


def in_order(found: list[Ids]) -> tuple[list[Ids], Ids]:
    order, shared = depth_first(found)
    return [found[i] for i in order], shared


def prefixes(found: list[Ids]) -> set[tuple[int, ...]]:
    return {tuple(each[: n + 1].tolist()) for each in found for n in range(len(each))}


def test_common_prefix() -> None:
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 3])) == 2
    assert common_prefix(np.array([2]), np.array([1])) == 0


@given(sequences)
def test_in_depth_first_order_nothing_shared_is_apart(found: list[Ids]) -> None:
    order, shared = depth_first(found)
    assert sorted(order) == list(range(len(found)))
    for i, k in itertools.combinations(range(len(found)), 2):
        expected = common_prefix(found[order[i]], found[order[k]])
        assert shared[i + 1 : k + 1].min() == expected


@given(sequences)
def test_each_distinct_prefix_is_one_node(found: list[Ids]) -> None:
    found, shared = in_order(found)
    forest = build_forest(found, shared)
    names = {}
    for sequence, path in zip(found, forest.paths, strict=True):
        assert forest.tokens[path].tolist() == sequence.tolist()
        assert forest.depth[path].tolist() == list(range(len(sequence)))
        names.update({int(node): tuple(sequence[: n + 1]) for n, node in enumerate(path)})
    assert len(names) == len(forest.tokens) == len(prefixes(found))
    for i, j in itertools.product(names, repeat=2):
        sees = j <= i < forest.end[j]
        assert sees == (names[i][: len(names[j])] == names[j])


@given(sequences)
def test_without_sharing_every_sequence_is_a_tree(found: list[Ids]) -> None:
    forest = build_forest(found, np.zeros(len(found), np.int64))
    starts = np.cumsum([0, *map(len, found)])
    assert forest.tokens.tolist() == [token for each in found for token in each.tolist()]
    for k, path in enumerate(forest.paths):
        assert path.tolist() == list(range(starts[k], starts[k + 1]))
        assert (forest.end[path] == starts[k + 1]).all()


def size(part: list[Ids]) -> int:
    return len(prefixes(part))


def fits(part: list[Ids], budget: int) -> bool:
    return len(part) == 1 or size(part) <= budget


@given(sequences.filter(len), budgets)
@settings(deadline=None)
def test_a_cut_recomputes_least_then_makes_fewest_parts(found: list[Ids], budget: int) -> None:
    found, shared = in_order(found)
    ranges = token_budget_ranges(np.array([len(each) for each in found]), shared, budget)
    assert [k for start, stop in ranges for k in range(start, stop)] == list(range(len(found)))
    parts = [found[start:stop] for start, stop in ranges]
    assert all(fits(part, budget) for part in parts)
    cost = (sum(map(size, parts)), len(parts))
    for inner in itertools.product([False, True], repeat=len(found) - 1):
        places = [0, *(k + 1 for k, here in enumerate(inner) if here), len(found)]
        other = [found[a:b] for a, b in itertools.pairwise(places)]
        if all(fits(part, budget) for part in other):
            assert cost <= (sum(map(size, other)), len(other))


@given(sequences.filter(len), budgets)
def test_the_parts_grow_what_they_were_counted_as(found: list[Ids], budget: int) -> None:
    found, shared = in_order(found)
    for start, stop in token_budget_ranges(np.array([len(each) for each in found]), shared, budget):
        forest = build_forest(found[start:stop], shared[start:stop])
        assert len(forest.tokens) == size(found[start:stop])


def test_nothing_is_cut_into_nothing() -> None:
    assert depth_first([])[0] == []
    assert token_budget_ranges(np.empty(0, np.int64), np.empty(0, np.int64), 10) == []
    assert build_forest([], np.empty(0, np.int64)).tokens.tolist() == []
