"""Baselines and rewards of groups by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
import torch

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.presets.policy_gradient import (
    BestOverSecond,
    GreedyBaseline,
    NonzeroVariance,
    OverlongPenalty,
    PassAtKReward,
    SampledRewards,
)
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.stages import load_algorithm
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, TrainingError
from tests.algorithms.credit.test_credit import f2, flat, near
from tests.algorithms.worlds import NAN, Call, Play, world


def group(*outcomes: float, tokens: Sequence[int] | None = None, greedy: int = -1) -> Batch:
    sizes = tokens or [1] * len(outcomes)
    return world(
        *(
            Play([Call(tokens=n)], outcome=o, greedy=i == greedy)
            for i, (o, n) in enumerate(zip(outcomes, sizes, strict=True))
        )
    )


def subsets(outcomes: Sequence[int], i: int, k: int) -> float:
    """What the k-subsets with rollout i come to, less k / n of the mean of those without it."""
    n = len(outcomes)
    every = list(itertools.combinations(range(n), k))
    won = {subset: max(outcomes[j] for j in subset) for subset in every}
    without = [won[subset] for subset in every if i not in subset]
    return sum(won[s] for s in every if i in s) / len(every) - k / n * fmean(without)


def test_a_group_without_a_greedy_rollout_is_missing() -> None:
    plays = [Play([Call()], outcome=1.0, greedy=True), Play([Call()], outcome=0.0)]
    batch = world(*plays, Play([Call()], outcome=0.0, group=1))
    assert GroupRelative(SampledRewards(), base=GreedyBaseline())(batch).tolist() == pytest.approx(
        [NAN, -1, NAN], nan_ok=True
    )
    with pytest.raises(TrainingError, match="step 0: none of the 1 groups has a greedy rollout"):
        GreedyBaseline()(group(1, 0))


def test_best_of_ties_of_one_and_of_none() -> None:
    assert BestOverSecond()(group(1, 1, 0)).tolist() == [0, 0, 0]
    assert BestOverSecond()(group(0.7)).tolist() == [0]
    assert BestOverSecond()(group(0.7, NAN)).tolist() == pytest.approx([0, NAN], nan_ok=True)


def test_pass_at_k_of_groups_that_are_too_small_is_missing() -> None:
    for k in (2, 3):
        assert PassAtKReward(k=k)(group(1, 0, NAN)).isnan().all()
        assert make("pass-at-k", {"k": k}).credit(group(1, 0, NAN)).isnan().all()


@pytest.mark.parametrize(("n", "k"), [(3, 1), (3, 2), (5, 2), (5, 4), (6, 3)])
def test_pass_at_k_has_the_gradient_of_pass_at_k(n: int, k: int) -> None:
    """Over all outcomes of n rollouts that succeed with probability p = .3 = sigmoid(z): d pass@k /
    d z = k (1 - p)^k p. Every advantage is also that of lists of subsets."""
    p, credit, gradient = 0.3, make("pass-at-k", {"k": k}).credit, 0.0
    for outcomes in itertools.product((0, 1), repeat=n):
        advantage = credit(group(*outcomes)).tolist()
        assert advantage == pytest.approx([subsets(outcomes, i, k) for i in range(n)], abs=1e-12)
        if len(set(outcomes)) == 1:
            assert advantage == [0.0] * n
        chance = math.prod(p if won else 1 - p for won in outcomes)
        score = sum(a * (won - p) for a, won in zip(advantage, outcomes, strict=True))
        gradient += chance * score
    assert gradient == pytest.approx(k * (1 - p) ** k * p, rel=1e-12)


def test_pass_at_k_of_all_rollouts_of_a_group_is_refused_at_load() -> None:
    def loaded(k: int, **more: Any) -> None:
        settings = {"preset": "pass-at-k", "options": {"k": k}, "group_size": 4, **more}
        load_algorithm(resolve({"algorithm": settings}, source="run.toml"))

    loaded(3)
    loaded(4, branching={"kind": "mc", "width": 1})
    for k in (4, 5):
        with pytest.raises(ConfigError, match=f"group_size = 4: .* fewer than {k + 1} rollouts"):
            loaded(k)


def test_rewards_that_differ_by_rounding_have_no_best_one() -> None:
    batch = group(0.1 + 0.2, 0.3, 0.3)
    assert GroupRelative(BestOverSecond(), base="none")(batch).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [1e200, 1e-3, 5e303])
def test_gaps_to_the_second_do_not_overflow(size: float) -> None:
    x = size * torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    eps = 2e-6 / max(size, 0.02)
    assert near(BestOverSecond()(flat(x.tolist())), [2 / (1 + eps), 0, 0, 0], within=1e-12)


def test_alive_keeps_groups_that_differ() -> None:
    assert NonzeroVariance()(f2()).tolist() == [True] * 4 + [False] * 2
    assert NonzeroVariance()(flat([0.7] * 7)).sum() == 0
    assert NonzeroVariance()(flat([NAN, 1.0, NAN])).sum() == 0
    assert NonzeroVariance()(flat([NAN, 1.0, 0.0])).sum() == 3


def test_an_overlong_cache_beyond_the_limit_is_all_of_it() -> None:
    shaped = OverlongPenalty("outcome", 8, 4096)(group(1.0, 1.0, 1.0, tokens=[2, 4, 8]))
    assert (shaped - 1).tolist() == pytest.approx([-0.25, -0.5, -1])
