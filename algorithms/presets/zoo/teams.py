"""Presets and modifiers for teams: whom the calls of a role are compared with, and by which reward.

A batch holds the calls of one policy. What depends on what other roles did is therefore a reward
that the verifier gives, which sees the whole rollout (`agentrl.team_rewards` has the formulas), or
comes from a critic that reads whole rollouts (`coma`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    AllFilters,
    Base,
    Column,
    Credit,
    GroupRelative,
    Whiten,
    level_of,
    map_parts,
    rewards,
)
from agentrl.algorithms.credit.turns import is_first_token, value_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, reduce_by, units
from agentrl.algorithms.objective.core import Algo, Average
from agentrl.algorithms.presets.registry import (
    PPO_CLIP,
    ROW_SUMS,
    TOKENS,
    Names,
    Scale,
    modifier,
    preset,
)
from agentrl.errors import ConfigError, TrainingError, nearest


@dataclass(frozen=True, slots=True)
class GroupMaximum:
    """[U] the highest reward of those that are compared. MAREMAX of comlrl, arXiv 2508.04652."""

    reward: str
    by: tuple[Unit, ...]

    def __call__(self, batch: Batch) -> Tensor:
        x, ids = rewards(batch, self.reward), units(batch, level_of(self.reward), *self.by)
        return reduce_by(x.nan_to_num(nan=-torch.inf), ids, how="amax")[ids]


@dataclass(frozen=True, slots=True)
class EvenRolloutWeights:
    """[S] 1 / number of calls that the role made in the rollout and that have the reward: each
    rollout counts once for each of its roles, however often it called."""

    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        pair = units(batch, "transition", "rollout", "role")
        return 1 / reduce_by(~rewards(batch, self.reward).isnan(), pair)[pair].clamp(min=1)


@dataclass(frozen=True, slots=True)
class MainAndSubCredit:
    """[N] a credit for the calls of one role, another one for those of the others."""

    role: str
    credit: Credit
    others: Credit

    def __call__(self, batch: Batch) -> Tensor:
        leads = torch.tensor([role == self.role for role in batch.roles], dtype=torch.bool)
        mine = leads[batch.transition_role][batch.token_transition]
        return torch.where(mine, self.credit(batch), self.others(batch))


@dataclass(frozen=True, slots=True)
class SingleCallAdvantage:
    """[S] the reward of a call minus V of the state before it: every call an episode of its own."""

    value: Column
    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        return rewards(batch, self.reward) - self.value(batch)

    def returns(self, batch: Batch) -> Tensor:
        """What `value` should have said, float64 [N], at the first token of each call."""
        known = rewards(batch, self.reward)[batch.token_transition]
        return torch.where(is_first_token(batch), known, torch.nan)


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """bool [N]: the tokens of the calls that these roles made. Raises TrainingError for a role that
    made none of the calls."""

    roles: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        for role in self.roles:
            if role not in batch.roles and batch.transitions:
                raise TrainingError(
                    f"step {batch.step}: none of the {len(batch.transitions)} calls was made in "
                    f"the role {role!r}; {nearest(role, batch.roles)}"
                )
        chosen = torch.tensor([role in self.roles for role in batch.roles], dtype=torch.bool)
        return chosen[batch.transition_role][batch.token_transition]


PAIRS = Average(("rollout", "role"), parts=("row",))


Equal = Annotated[
    list[Literal["role", "rollout", "transition", "row", "group"]], msgspec.Meta(min_length=1)
]


@preset("dr-mas", clip=PPO_CLIP)
def dr_mas(reward: str) -> Algo:
    """Calls compared with those of the same role. arXiv 2602.08847."""
    credit = GroupRelative(reward, at="transition", by=("group", "role"), norm="std")
    return Algo(credit)


@preset("at-grpo", clip=PPO_CLIP)
def at_grpo(reward: str, *, within: Literal["turn", "prompt"] = "turn", std: bool = True) -> Algo:
    """Calls compared with those of the same role and turn or, with `within` = "prompt", with those
    that answered the same: solvers within one proposal, proposers with one another. arXiv
    2510.11062."""
    norm: Scale = "std" if std else "none"
    credit = GroupRelative(reward, at="transition", by=("group", "role", within), norm=norm)
    return Algo(credit)


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


@preset("m-grpo", clip=PPO_CLIP, kl=True)
def m_grpo(reward: str, *, main: str = "main", sub_reward: str = "transition:sub") -> Algo:
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
    return Algo(credit, agg=PAIRS, optional=(sub_reward,))


@preset("sage", reward="role:outcome", clip=PPO_CLIP, kl=True)
def sage(reward: str) -> Algo:
    """REINFORCE++ whose rewards and scale are those of each role: challenger, planner, solver and
    critic are compared over the whole batch with their own kind alone. The KL penalty is part of
    the loss, where the paper leaves its place open. arXiv 2603.15255."""
    credit = Whiten(GroupRelative(reward, base="none"), by=("role",))
    return Algo(credit, agg=TOKENS)


@preset("maporl", reward="transition:maporl", clip=PPO_CLIP, kl=True)
def maporl(reward: str, *, value: str = "") -> Algo:
    """PPO for each role of a debate, every answer an episode of its own: its reward, which
    `agentrl.team_rewards.maporl` makes of the verifier's scores, has the later rounds in it
    already. `value`: a reward that holds V of each call; default: the critic. arXiv 2502.18439."""
    credit = GroupRelative(SingleCallAdvantage(value_of(value), reward), by=("role",), norm="std")
    return Algo(credit, agg=TOKENS)


@preset("marti", reward="transition:marti", clip=PPO_CLIP, kl=True)
def marti(reward: str) -> Algo:
    """Answers compared with those of the same role and turn by a reward for being better than what
    came before, which `agentrl.team_rewards.marti` makes of the verifier's scores. MARTI,
    OpenReview E7jZqo0A50."""
    credit = GroupRelative(reward, at="transition", by=("group", "role", "turn"), norm="std")
    return Algo(credit)


@preset("difference", reward="role:difference", clip=PPO_CLIP)
def difference(
    reward: str, *, baseline: Literal["mean", "none"] = "mean", std: bool = False
) -> Algo:
    """Every role by what the team came to less what it comes to without the role, as replays show
    (`algorithm.counterfactual`) or the verifier says (`agentrl.team_rewards.difference`), against
    the mean of the group or, as it is a comparison already, nothing. arXiv 2012.11258."""
    credit = GroupRelative(
        reward, by=("group", "role"), base=baseline, norm="std" if std else "none"
    )
    return Algo(credit)


@preset("shapley", reward="role:shapley", clip=PPO_CLIP)
def shapley(reward: str, *, std: bool = False) -> Algo:
    """Every role compared by what it added to all coalitions of the others, as replays show
    (`algorithm.counterfactual`) or the verifier says (`agentrl.team_rewards.shapley`). arXiv
    1907.05707."""
    credit = GroupRelative(reward, by=("group", "role"), norm="std" if std else "none")
    return Algo(credit)


@modifier("equal")
def equal(algo: Algo, *, equal_units: Equal) -> Algo:
    """Averages the loss over these units, so that each weighs the same however many tokens it has:
    ["role"] one mean per role, as if each had a loss of its own (MAGRPO, arXiv 2508.04652),
    ["rollout", "role"] one per role of every rollout."""
    return replace(algo, agg=replace(algo.agg, unit=tuple(equal_units)))


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
