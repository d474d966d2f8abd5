"""Presets and modifiers for agents: credit that differs inside a rollout.

Each scheme is a preset of its own and a modifier of any other: "gspo+gigpo" compares by states and
clips by rows. Where a scheme needs the reward of the whole rollout, a modifier takes the first one
that its host reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from agentrl.algorithms.credit.baselines import Tabular
from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    CriticValues,
    GroupRelative,
    Whiten,
    map_parts,
    rewards_read,
    weighted_sum,
)
from agentrl.algorithms.credit.mixtures import CallsOrOutcome, OutcomePlusCalls
from agentrl.algorithms.credit.outcomes import AllFilters
from agentrl.algorithms.credit.turns import (
    BiLevelGae,
    CallRewards,
    FirstTokenValues,
    HiperGae,
    PeerValues,
    RoleFilter,
    SameStateRelative,
    StepGae,
    TurnDiscount,
    ValuesFromReward,
)
from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import Clip
from agentrl.algorithms.presets.registry import Cap, Discount, Num, Share, modifier, preset
from agentrl.algorithms.presets.rollouts import TOKENS, kl_loss, ppo_clip
from agentrl.config import Natural
from agentrl.errors import ConfigError

Names = Annotated[list[str], msgspec.Meta(min_length=1)]
Scale = Literal["none", "std"]


def outcome_of(algo: Algo) -> str:
    """The first reward that an algorithm reads."""
    return next(iter(rewards_read(algo.credit)), "outcome")


def value_of(name: str) -> Column:
    """Values of calls: a reward by name, or without one what the critic says."""
    return ValuesFromReward(name) if name else FirstTokenValues(CriticValues())


def step_gae_credit(value: str, reward: str, gamma: float, lam: float) -> Credit:
    """GAE over calls, whitened over calls."""
    return GroupRelative(StepGae(value_of(value), reward, gamma, lam), by=("all",), norm="std")


def peer_gae_credit(reward: str, gamma: float, lam: float) -> Credit:
    """GAE over calls, from what other rollouts came to in the same state."""
    turns = PeerValues(reward, gamma, by=("group", "turn"))
    return GroupRelative(StepGae(PeerValues(reward, gamma), reward, gamma, lam, turns), base="none")


def hiper_credit(high: str, low: str, reward: str, gamma: float, lam: float) -> Credit:
    """Both levels, each whitened over its calls."""
    parts: tuple[Literal["high", "low"], ...] = ("high", "low")
    columns = [
        HiperGae(CallRewards(high), CallRewards(low), part, reward, gamma, lam) for part in parts
    ]
    return weighted_sum(
        *((GroupRelative(column, by=("all",), norm="std"), 1.0) for column in columns)
    )


@preset("gigpo")
def gigpo(
    *,
    reward: str = "outcome",
    weight: Share = 1.0,
    gamma: Discount = 0.95,
    norm: Scale = "none",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """Rollouts compared within the task, plus calls compared with those in the same state. arXiv
    2505.10978."""
    anchors = SameStateRelative(reward, gamma, norm=norm)
    credit = weighted_sum((GroupRelative(reward, norm=norm), 1.0), (anchors, weight))
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl))


@modifier("gigpo")
def with_gigpo(
    algo: Algo,
    *,
    gigpo_weight: Share = 1.0,
    gigpo_gamma: Discount = 0.95,
    gigpo_norm: Scale = "none",
) -> Algo:
    """Adds the comparison with calls in the same state. arXiv 2505.10978."""
    anchors = SameStateRelative(outcome_of(algo), gigpo_gamma, norm=gigpo_norm)
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (anchors, gigpo_weight)))


@preset("hgpo")
def hgpo(
    *,
    reward: str = "outcome",
    gamma: Discount = 0.95,
    depth: Natural = 2,
    alpha: Num = 1.0,
    norm: Scale = "none",
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """Calls compared with those in the same state after the same states before, longer histories
    weighing more. arXiv 2602.22817."""
    credit = SameStateRelative(reward, gamma, depth, alpha, norm)
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl))


@modifier("hgpo")
def with_hgpo(
    algo: Algo,
    *,
    hgpo_gamma: Discount = 0.95,
    hgpo_depth: Natural = 2,
    hgpo_alpha: Num = 1.0,
    hgpo_norm: Scale = "none",
) -> Algo:
    """Puts HGPO's credit in the place of the host's. arXiv 2602.22817."""
    credit = SameStateRelative(outcome_of(algo), hgpo_gamma, hgpo_depth, hgpo_alpha, hgpo_norm)
    return replace(algo, credit=credit)


@preset("peers")
def peers(
    *,
    reward: str = "outcome",
    gamma: Discount = 0.95,
    lam: Discount = 0.5,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """GAE over calls without a critic: the value of a state is what the group's other rollouts came
    to from there. States as in arXiv 2505.10978, GAE as in 2511.14460."""
    return Algo(peer_gae_credit(reward, gamma, lam), ppo_clip(clip_low, clip_high), kl_loss(kl))


@modifier("peers")
def with_peers(algo: Algo, *, peers_gamma: Discount = 0.95, peers_lam: Discount = 0.5) -> Algo:
    """Puts GAE over calls, with values from the group's other rollouts, in the place of the host's
    credit. States as in arXiv 2505.10978, GAE as in 2511.14460."""
    return replace(algo, credit=peer_gae_credit(outcome_of(algo), peers_gamma, peers_lam))


@preset("mt-grpo")
def mt_grpo(
    *,
    reward: str = "outcome",
    turn_reward: str = "transition:turn",
    weight: Share = 1.0,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Outcome compared over rollouts plus a reward of calls compared within the same turn; where no
    call has one, as without a tool call, the sum of both compared over rollouts. arXiv
    2505.11821."""
    turns = GroupRelative(turn_reward, by=("group", "turn"), norm="std")
    credit = weighted_sum((GroupRelative(reward, norm="std"), 1.0), (turns, weight))
    combined = GroupRelative(OutcomePlusCalls(reward, turn_reward, weight), norm="std")
    return Algo(CallsOrOutcome(credit, combined, turn_reward), ppo_clip(clip_low, clip_high))


@preset("agent-r1")
def agent_r1(
    *,
    reward: str = "outcome",
    value: str = "",
    gamma: Discount = 1.0,
    lam: Discount = 0.95,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
    kl: Num = 0.0,
) -> Algo:
    """PPO with calls as actions: GAE over calls, whitened over calls. `value`: a reward that holds
    V of each call; default: the critic. arXiv 2511.14460."""
    credit = step_gae_credit(value, reward, gamma, lam)
    return Algo(credit, ppo_clip(clip_low, clip_high), kl_loss(kl))


@preset("turn-ppo")
def turn_ppo(
    *,
    reward: str = "outcome",
    value: str = "",
    gamma: Discount = 0.99,
    lam: Discount = 0.95,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Agent-R1 with a discount per turn, token mean. arXiv 2512.17008."""
    credit = step_gae_credit(value, reward, gamma, lam)
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("pspo")
def pspo(
    *,
    reward: str = "outcome",
    value: str = "",
    gamma: Discount = 1.0,
    lam: Discount = 0.95,
    clip_low: Num = 3e-4,
    clip_high: Num = 4e-4,
    clip_dual: Cap = 10.0,
    kl: Num = 0.0,
) -> Algo:
    """GAE over calls, and one clipped ratio per call. arXiv 2601.10029."""
    gate = Gate(Clip(clip_low, clip_high, clip_dual), by="transition")
    return Algo(step_gae_credit(value, reward, gamma, lam), (gate,), kl_loss(kl))


@modifier("step-gae")
def with_step_gae(
    algo: Algo, *, step_value: str = "", step_gamma: Discount = 1.0, step_lam: Discount = 0.95
) -> Algo:
    """Puts GAE over calls in the place of the host's credit. arXiv 2511.14460."""
    return replace(algo, credit=step_gae_credit(step_value, outcome_of(algo), step_gamma, step_lam))


@modifier("table")
def with_table(algo: Algo, *, table_gamma: Discount = 1.0, table_lam: Discount = 0.95) -> Algo:
    """Puts GAE over calls in the place of the host's credit, the value of a state being the mean
    return that earlier steps saw from it: for tasks with few states. arXiv 1506.02438."""
    reward = outcome_of(algo)
    advantage = StepGae(Tabular(reward, table_gamma), reward, table_gamma, table_lam)
    return replace(algo, credit=GroupRelative(advantage, by=("all",), norm="std"))


@preset("ragen")
def ragen(
    *,
    reward: str = "outcome",
    gamma_high: Discount = 0.95,
    gamma: Discount = 1.0,
    lam: Discount = 1.0,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """GAE over calls whose returns end a GAE over the tokens of each. arXiv 2504.20073."""
    credit = Whiten(BiLevelGae(CriticValues(), reward, gamma_high, gamma, lam))
    return Algo(credit, ppo_clip(clip_low, clip_high), agg=TOKENS)


@preset("hiper")
def hiper_preset(
    *,
    reward: str = "outcome",
    high: str = "transition:v_high",
    low: str = "transition:v_low",
    gamma: Discount = 0.95,
    lam: Discount = 1.0,
    clip_low: Num = 0.2,
    clip_high: Num = 0.2,
) -> Algo:
    """Calls that choose subgoals and calls that pursue them, each with values of their own, given
    as rewards of calls. arXiv 2602.16165."""
    return Algo(hiper_credit(high, low, reward, gamma, lam), ppo_clip(clip_low, clip_high))


@modifier("hiper")
def with_hiper(
    algo: Algo,
    *,
    hiper_high: str = "transition:v_high",
    hiper_low: str = "transition:v_low",
    hiper_gamma: Discount = 0.95,
    hiper_lam: Discount = 1.0,
) -> Algo:
    """Puts HiPER's credit in the place of the host's. arXiv 2602.16165."""
    credit = hiper_credit(hiper_high, hiper_low, outcome_of(algo), hiper_gamma, hiper_lam)
    return replace(algo, credit=credit)


@modifier("fade")
def with_fade(algo: Algo, *, fade_gamma: Discount = 0.95) -> Algo:
    """Credit fades with every call that still follows in the rollout. arXiv 2506.24119."""
    return replace(algo, credit=TurnDiscount(algo.credit, fade_gamma))


@modifier("per-role")
def per_role(algo: Algo) -> Algo:
    """Every comparison and scale of the host is within one role; rollouts count once per role.
    arXiv 2602.08847."""

    def change(part: Any) -> Any:
        if isinstance(part, Whiten):
            return replace(part, by=(*part.by, "role"))
        if not isinstance(part, GroupRelative) or "role" in part.by:
            return part
        level = part.level
        if level == "rollout" and any(map(callable, (part.base, part.w, part.bw))):
            raise ConfigError(
                "algorithm.preset: +per-role cannot split a baseline or weight of whole rollouts; "
                "leave +per-role out or choose another preset"
            )
        norm_by = None if part.norm_by is None else (*part.norm_by, "role")
        at = "role" if level == "rollout" else level
        return replace(part, at=at, by=(*part.by, "role"), norm_by=norm_by)

    return replace(algo, credit=map_parts(algo.credit, change))


@modifier("only")
def only(algo: Algo, *, only_roles: Names) -> Algo:
    """Trains the calls of these roles alone. arXiv 2508.03680."""
    chosen = RoleFilter(tuple(only_roles))
    return replace(algo, keep=chosen if algo.keep is None else AllFilters((algo.keep, chosen)))
