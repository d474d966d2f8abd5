"""Advantages of every degenerate group. Numbers of presets: `tests/golden/presets.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    Credit,
    GroupRelative,
    Norm,
    RewardToGo,
    Whiten,
    gae,
    next_action,
    response_lengths,
    standardise,
    weighted_sum,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.core.errors import TrainingError

NAN = math.nan
F1 = torch.tensor([1.0, 0, 0, 0])
ONE = torch.zeros(4, dtype=torch.int64)


def flat(
    rewards: Sequence[float],
    tokens: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    calls: Sequence[int] | None = None,
    roles: Sequence[int] | None = None,
) -> Batch:
    """One rollout per reward; tokens per call, calls per rollout, default one of each."""
    n = len(rewards)
    group = torch.tensor(groups or [0] * n)
    transition_rollout = torch.arange(n).repeat_interleave(torch.tensor(calls or [1] * n))
    s = transition_rollout.numel()
    token_transition = torch.arange(s).repeat_interleave(torch.tensor(tokens or [1] * s))
    return Batch(
        rows=[],
        token_row=token_transition,
        token_transition=token_transition,
        sampler_logprobs=torch.zeros(token_transition.numel()),
        transition_rollout=transition_rollout,
        transition_role=torch.tensor(roles or [0] * s),
        row_rollout=transition_rollout,
        rollout_group=group,
        rewards={"outcome": torch.tensor(rewards, dtype=torch.float64)},
        roles=["main", "sub"],
        groups=[str(g) for g in range(int(group.max()) + 1)],
        rollouts=[str(u) for u in range(n)],
        transitions=[str(t) for t in range(s)],
    )


def f2() -> Batch:
    return flat([1, 0, 0, 0, 1, 1], groups=[0, 0, 0, 0, 1, 1])


def advantages(x: Tensor, by: Tensor, **options: Any) -> Tensor:
    return standardise(x, by, **options).advantage


def near(values: Tensor, expected: Sequence[float], within: float = 5e-7) -> bool:
    return values.tolist() == pytest.approx(list(expected), abs=within, nan_ok=True)


# -- worked numbers ------------------------------------------------------------------------------


def test_weights_stand_for_copies_of_calls() -> None:
    """E10: of d = 4 calls a rollout made d_k = 2, which count twice instead of being copied."""
    rewards, weight = torch.tensor([1.0, 0, 0.5, 0, 0, 1]), torch.tensor([2.0, 2, 1, 1, 1, 1])
    copies = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5])
    weighted = standardise(rewards, torch.zeros(6).long(), norm="std", w=weight).advantage
    copied = standardise(rewards[copies], torch.zeros(8).long(), norm="std").advantage
    assert near(weighted[copies], copied.tolist(), within=1e-12)


def test_gae() -> None:
    r, v = torch.tensor([0.0, 0, 1]), torch.tensor([0.5, 0.6, 0.7])
    advantage, returns = gae(r, v, torch.tensor([1, 2, -1]), 1.0, 0.95)
    assert near(advantage, [0.46575, 0.385, 0.3])
    assert near(returns, [0.96575, 0.985, 1])
    steps = gae(torch.tensor([0.0, 1]), torch.tensor([0.4, 0.5]), torch.tensor([1, -1]), 0.9, 0.8)
    assert near(steps[0], [0.41, 0.5])
    assert near(steps[1], [0.81, 1])


# -- degenerate groups ---------------------------------------------------------------------------

CREDITS: dict[str, Credit] = {
    "grpo": GroupRelative(norm="std"),
    "mean": GroupRelative(),
    "loo": GroupRelative(base="loo"),
    "opo": GroupRelative(bw=response_lengths),
    "maxrl": GroupRelative(norm="mean"),
    "batch": GroupRelative(norm="std", norm_by=("all",)),
    "whiten": Whiten(GroupRelative()),
    "togo": Whiten(RewardToGo()),
}


@pytest.mark.parametrize("name", CREDITS)
@pytest.mark.parametrize("rewards", [[0.7], [0.7] * 2, [0.9] * 8, [0.7] * 12, [0.0] * 4])
def test_nothing_to_compare_is_exactly_zero(name: str, rewards: list[float]) -> None:
    for values in (rewards, torch.tensor(rewards).tolist()):  # as float64 and as float32 make them
        assert CREDITS[name](flat(values)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.1547, -0.5773]),
        ("mean", [0.6667, -0.3333]),
        ("loo", [1, -0.5]),
        ("opo", [0.5, -0.5]),
        ("maxrl", [2, -1]),
        ("whiten", [0.866, -0.866]),
        ("togo", [0.866, -0.866]),
    ],
)
def test_a_rollout_without_tokens_counts_in_the_statistics(
    name: str, expected: list[float]
) -> None:
    advantage = CREDITS[name](flat([1, 0, 0], tokens=[2, 2, 0]))
    assert near(advantage[[0, 2]], expected, within=1e-4)


def test_a_missing_reward_is_missing_never_zero() -> None:
    for name, credit in CREDITS.items():
        whole = credit(flat([1, 0, 0.5], tokens=[1, 2, 1]))
        more = credit(flat([1, NAN, 0, 0.5], tokens=[1, 3, 2, 1]))
        assert more[1:4].isnan().all(), name
        assert torch.equal(more[[0, 4, 5, 6]], whole), name


def test_standardise_gives_zero_for_missing_units() -> None:
    x = torch.tensor([1.0, NAN, 0.0])
    assert near(advantages(x, ONE[:3]), [0.5, 0, -0.5])
    given = torch.tensor([NAN, 0.0, 0.5])
    assert near(advantages(x, ONE[:3], base=given), [0, 0, -0.5])


def test_maxrl_without_success_or_with_losses_is_zero() -> None:
    x = torch.tensor([-1.0, 0.5, 0.0, 0.0])
    assert advantages(x, ONE, norm="mean").tolist() == [0, 0, 0, 0]


def test_maxrl_is_bounded_where_gains_and_losses_nearly_cancel() -> None:
    x = torch.tensor([1.0, -1.0 + 1e-9, 0.0, 0.0], dtype=torch.float64)
    assert near(advantages(x, ONE, norm="mean"), [2, -2, 0, 0], within=1e-6)
    # Of n rewards none is further than n + 1: all but one of n are a little below 0 here.
    rare = torch.tensor([1.0, *[-0.0099] * 99], dtype=torch.float64)
    most = advantages(rare, torch.zeros(100).long(), norm="mean").abs().max()
    assert 45 < most <= 101


@pytest.mark.parametrize("size", [1e200, 1e-3, 5e303])
def test_deviations_do_not_overflow(size: float) -> None:
    x = size * torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    eps = 2e-6 / max(size, 0.02)  # in standard deviations, which are half the size
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=torch.float64) / (1 + eps)
    assert near(advantages(x, ONE, norm="std"), expected.tolist(), within=1e-12)


@pytest.mark.parametrize("norm", ["none", "std", "mean"])
def test_differences_below_a_millionth_are_none(norm: Norm) -> None:
    """The same number as in CREDIT.md: from the mean, in shares of the group's largest |reward|."""
    x = 1e6 * torch.ones(4, dtype=torch.float64)
    x[0] += 1.2  # 0.9 above the mean
    assert advantages(x, ONE, norm=norm).tolist() == [0, 0, 0, 0]
    x[0] += 3.0
    assert (advantages(x, ONE, norm=norm) != 0).any()


def test_a_constant_reward_is_not_divided_by_rounding() -> None:
    x = torch.full((12,), 0.7, dtype=torch.float64)
    by = torch.zeros(12, dtype=torch.int64)
    assert advantages(x, by, base="none", norm="std").tolist() == [0.0] * 12
    assert near(advantages(x, by, base="none"), [0.7] * 12)


def test_small_differences_of_large_rewards_are_information() -> None:
    x = torch.tensor([1000.01, 1000.0], dtype=torch.float64)
    assert near(advantages(x, ONE[:2]), [0.005, -0.005])


def test_frequency_weights_that_leave_no_other_give_zero() -> None:
    x = torch.tensor([1.0, 0.0])
    for share in (0.5, 0.25):
        w = torch.full((2,), share)
        assert advantages(x, ONE[:2], norm="std", w=w).tolist() == [0, 0]
        assert advantages(x, ONE[:2], base="loo", w=w).tolist() == [0, 0]
    assert advantages(x, ONE[:2], w=torch.tensor([1.0, 0.0])).tolist() == [0, 0]


# -- time ----------------------------------------------------------------------------------------


def test_reward_to_go_counts_action_tokens_over_calls_and_rows() -> None:
    batch = flat([1, 0.5], tokens=[2, 1, 1], calls=[2, 1])
    assert near(RewardToGo(gamma=0.5)(batch), [0.25, 0.5, 1, 0.5])
    assert near(RewardToGo()(batch), [1, 1, 1, 0.5])


def test_links_follow_the_order_of_calls_not_of_rows() -> None:
    # Row 0 holds calls 0 and 2; call 1, a sub-agent's, has a row of its own.
    batch = replace(
        flat([1], tokens=[2, 1, 1], calls=[3]), token_transition=torch.tensor([0, 0, 2, 1])
    )
    assert next_action(batch).tolist() == [1, 3, -1, 2]


# -- mixing --------------------------------------------------------------------------------------


def test_what_one_reward_misses_the_others_still_teach() -> None:
    batch = flat([1, 0, NAN])
    batch.rewards["style"] = torch.tensor([0.0, NAN, NAN])
    style = GroupRelative("style", base="none")
    mixed = weighted_sum((GroupRelative(), 2.0), (style, lambda b: torch.ones(b.n_tokens)))
    assert near(mixed(batch), [1, -1, NAN])


def test_unknown_and_infinite_rewards_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"step 0: none of 2 rollouts .*'outcom'.*'outcome'"):
        GroupRelative("outcom")(flat([1, 0]))
    with pytest.raises(TrainingError, match="1 of 2 values of reward 'outcome' are infinite"):
        GroupRelative()(flat([1, math.inf]))


def test_an_empty_batch_has_no_credit() -> None:
    empty = flat([1, 0], tokens=[0, 0])
    for name, credit in CREDITS.items():
        assert credit(empty).shape == (0,), name
