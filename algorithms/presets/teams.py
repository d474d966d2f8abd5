"""Presets and modifiers for teams: whom the calls of a role are compared with, and by which reward.

A batch holds the calls of one policy. What depends on what other roles did is therefore a reward
that the verifier gives, which sees the whole rollout (`agentrl.team_rewards` has the formulas), or
comes from a critic that reads whole rollouts (`counterfactual`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from agentrl.algorithms.credit.core import Base, Column, GroupRelative, Whiten, level_of
from agentrl.algorithms.data.ids import Unit
from agentrl.algorithms.multiagent.coma import Counterfactual
from agentrl.algorithms.multiagent.critics import CriticTraining
from agentrl.algorithms.multiagent.role_credit import (
    EvenRolloutWeights,
    GroupMaximum,
    MainAndSubCredit,
    SingleCallAdvantage,
)
from agentrl.algorithms.multiagent.rollout_episodes import JointActionSpace
from agentrl.algorithms.objective.core import Algo, Average
from agentrl.algorithms.presets.registry import Discount, Num, modifier, preset
from agentrl.algorithms.presets.rollouts import ROW_SUMS, TOKENS, kl_loss, ppo_clip
from agentrl.algorithms.presets.turns import Names, Scale, value_of
from agentrl.config import Count, Positive
from agentrl.errors import ConfigError

PAIRS = Average(("rollout", "role"), parts=("row",))
Equal = Annotated[
    list[Literal["role", "rollout", "transition", "row", "group"]], msgspec.Meta(min_length=1)
]


@preset("dr-mas")
def dr_mas(*, reward: str = "outcome", clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Calls compared with those of the same role. arXiv 2602.08847."""
    credit = GroupRelative(reward, at="transition", by=("group", "role"), norm="std")
    return Algo(credit, ppo_clip(clip_low, clip_high))


@preset("at-grpo")
def at_grpo(
    *,
    reward: str = "outcome",
    within: Literal["turn", "prompt"] = "turn",
    std: bool = True,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Calls compared with those of the same role and turn or, with `within` = "prompt", with those
    that answered the same: solvers within one proposal, proposers with one another. arXiv
    2510.11062."""
    norm: Scale = "std" if std else "none"
    credit = GroupRelative(reward, at="transition", by=("group", "role", within), norm=norm)
    return Algo(credit, ppo_clip(clip_low, clip_high))


@preset("magrpo")
def magrpo(
    *,
    mode: Literal["aligned", "cross"] = "aligned",
    reward: str = "",
    baseline: Literal["mean", "loo", "max", "none"] = "mean",
    std: bool = False,
) -> Algo:
    """The team's return (the reward of rollouts `outcome`) against that of the group's other joint
    rollouts, for every call of every role, on sums of log-probs or, in cross mode, every answer's
    mean return over all combinations with the others' (`transition:cross`, by
    `agentrl.team_rewards.cross`) against that of the other answers of its role. baseline: the mean
    of all (MAGRPO), of the others (MARLOO), the highest (MAREMAX, which is never above 0) or
    nothing (MAREINFORCE). arXiv 2508.04652."""
    level, name = ("transition", "transition:cross") if mode == "cross" else ("rollout", "outcome")
    reward = reward or name
    if level_of(reward) != level:
        raise ConfigError(
            f"algorithm.options.reward = {reward!r}: in {mode} mode the return of a team is a "
            f"reward of {level}s; let the verifier give it"
        )
    by: tuple[Unit, ...] = ("group", "role") if mode == "cross" else ("group",)
    base: Base | Column = GroupMaximum(reward, by) if baseline == "max" else baseline
    credit = GroupRelative(reward, by=by, base=base, norm="std" if std else "none", ddof=0)
    return Algo(credit, agg=ROW_SUMS)


@preset("m-grpo")
def m_grpo(
    *,
    reward: str = "outcome",
    main: str = "main",
    sub_reward: str = "transition:sub",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """The main role compared by the outcome, the calls of each sub-agent by a reward of their own
    over all of the group's. Where others copy calls until every rollout has equally many, each call
    weighs 1 / number of its rollout's, in statistics and loss. arXiv 2511.13288."""
    if level_of(sub_reward) != "transition":
        raise ConfigError(
            f"algorithm.options.sub_reward = {sub_reward!r}: it is one of calls; write "
            "'transition:name'"
        )
    by: tuple[Unit, ...] = ("group", "role")
    lead = GroupRelative(reward, at="role", by=by, norm="std")
    calls = GroupRelative(sub_reward, by=by, norm="std", w=EvenRolloutWeights(sub_reward), ddof=0)
    credit = MainAndSubCredit(main, lead, calls)
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl), PAIRS, optional=(sub_reward,))


@preset("sage")
def sage(
    *,
    reward: str = "role:outcome",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """REINFORCE++ whose rewards and scale are those of each role: challenger, planner, solver and
    critic are compared over the whole batch with their own kind alone. The KL penalty is part of
    the loss, where the paper leaves its place open. arXiv 2603.15255."""
    credit = Whiten(GroupRelative(reward, base="none"), by=("role",))
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl), TOKENS)


@preset("maporl")
def maporl(
    *,
    reward: str = "transition:maporl",
    value: str = "",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """PPO for each role of a debate, every answer an episode of its own: its reward, which
    `agentrl.team_rewards.maporl` makes of the verifier's scores, has the later rounds in it
    already. `value`: a reward that holds V of each call; default: the critic. arXiv 2502.18439."""
    credit = GroupRelative(SingleCallAdvantage(value_of(value), reward), by=("role",), norm="std")
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl), TOKENS)


@preset("marti")
def marti(
    *, reward: str = "transition:marti", clip_low: Num = 0.2, clip_high: Num = 0.2, kl: Num = 0.0
) -> Algo:
    """Answers compared with those of the same role and turn by a reward for being better than what
    came before, which `agentrl.team_rewards.marti` makes of the verifier's scores. MARTI,
    OpenReview E7jZqo0A50."""
    credit = GroupRelative(reward, at="transition", by=("group", "role", "turn"), norm="std")
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl))


@preset("difference")
def difference(
    *,
    reward: str = "role:difference",
    baseline: Literal["mean", "none"] = "mean",
    std: bool = False,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Every role by what the team came to less what it comes to without the role, as replays show
    (`algorithm.counterfactual`) or the verifier says (`agentrl.team_rewards.difference`), against
    the mean of the group or, as it is a comparison already, nothing. arXiv 2012.11258."""
    credit = GroupRelative(
        reward, by=("group", "role"), base=baseline, norm="std" if std else "none"
    )
    return Algo(credit, ppo_clip(clip_low, clip_high))


@preset("shapley")
def shapley(
    *, reward: str = "role:shapley", std: bool = False, clip_low: Num = 0.2, clip_high: Num = 0.2
) -> Algo:
    """Every role compared by what it added to all coalitions of the others, as replays show
    (`algorithm.counterfactual`) or the verifier says (`agentrl.team_rewards.shapley`). arXiv
    1907.05707."""
    return difference(reward=reward, std=std, clip_low=clip_low, clip_high=clip_high)


@preset("coma")
def coma(
    *,
    roles: Names,
    actions: Names,
    critic: Literal["central", "vdn", "qmix"] = "central",
    reward: str = "outcome",
    width: Count = 64,
    gamma: Discount = 0.99,
    lam: Discount = 0.8,
    critic_lr: Positive = 5e-3,
    updates: Count = 8,
    std: bool = False,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Calls against what else their role could have answered, the others as they were, by a critic
    of the team: a central one of its joint actions, or the roles' utilities as VDN (1706.05296) or
    QMIX (1803.11485) make them the team's value. `actions`: the answers that are told apart, any
    other being one more. Roles that other policies play are of the team. arXiv 1705.08926."""
    stage = JointActionSpace(tuple(roles), tuple(actions), width)
    value = Counterfactual(critic, stage, CriticTraining(gamma, lam, critic_lr, updates), reward)
    credit = GroupRelative(value, by=("role",), base="none", norm="std" if std else "none")
    return Algo(credit, ppo_clip(clip_low, clip_high))


@modifier("equal")
def equal(algo: Algo, *, equal_units: Equal) -> Algo:
    """Averages the loss over these units, so that each weighs the same however many tokens it has:
    ["role"] one mean per role, as if each had a loss of its own (MAGRPO, arXiv 2508.04652),
    ["rollout", "role"] one per role of every rollout."""
    return replace(algo, agg=replace(algo.agg, unit=tuple(equal_units)))
