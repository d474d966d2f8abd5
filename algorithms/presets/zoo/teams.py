"""Presets and modifiers for teams and self-play: whom the calls of a role are compared with, and by
which reward.

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

from agentrl.algorithms.credit import core, turns
from agentrl.algorithms.credit.baselines import Ema
from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, Whiten, column, rewards
from agentrl.algorithms.credit.parts import map_parts
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, lift, reduce_by, units
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo, Average
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, Names, modifier, preset
from agentrl.config import Count
from agentrl.errors import ConfigError, TrainingError, nearest

PAIRS = Average(("rollout", "role"), parts=("row",))
Equal = Annotated[
    list[Literal["role", "rollout", "transition", "row", "group"]], msgspec.Meta(min_length=1)
]


@column()
def GroupMaximum(batch: Batch, reward: str, by: tuple[Unit, ...]) -> Tensor:
    """[U] the highest reward of those that are compared. MAREMAX of comlrl, arXiv 2508.04652."""
    x, ids = rewards(batch, reward), units(batch, core.level_of(reward), *by)
    return reduce_by(x.nan_to_num(nan=-torch.inf), ids, how="amax")[ids]


@column("transition")
def EvenRolloutWeights(batch: Batch, reward: str) -> Tensor:
    """[S] 1 / number of calls that the role made in the rollout and that have the reward: each
    rollout counts once for each of its roles, however often it called."""
    pair = units(batch, "transition", "rollout", "role")
    return 1 / reduce_by(~rewards(batch, reward).isnan(), pair)[pair].clamp(min=1)


@column()
def MainAndSubCredit(batch: Batch, role: str, credit: Credit, others: Credit) -> Tensor:
    """[N] a credit for the calls of one role, another one for those of the others."""
    return torch.where(_made_by(batch, (role,)), credit(batch), others(batch))


@dataclass(frozen=True, slots=True)
class SingleCallAdvantage:
    """[S] the reward of a call minus V of the state before it: every call an episode of its own."""

    value: Column
    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        return self._rewards(batch) - self.value(batch)

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value` at the first token of each call, float64 [N], else NaN."""
        known = self._rewards(batch)[batch.token_transition]
        return torch.where(turns.is_first_token(batch), known, torch.nan)

    def _rewards(self, batch: Batch) -> Tensor:
        x = rewards(batch, self.reward)
        return lift(batch, x, core.level_of(self.reward), "transition")


@column()
def RoleFilter(batch: Batch, roles: tuple[str, ...]) -> Tensor:
    """bool [N]: the tokens of the calls that these roles made. Raises TrainingError for a role that
    made none of the calls."""
    for role in roles:
        if role not in batch.roles and batch.transitions:
            raise TrainingError(
                f"step {batch.step}: none of the {len(batch.transitions)} calls was made in "
                f"the role {role!r}; {nearest(role, batch.roles)}"
            )
    return _made_by(batch, roles)


def _made_by(batch: Batch, roles: tuple[str, ...]) -> Tensor:
    chosen = torch.tensor([role in roles for role in batch.roles], dtype=torch.bool)
    return chosen[batch.transition_role][batch.token_transition]


@column()
def NonzeroAdvantage(batch: Batch, credit: Credit) -> Tensor:
    """bool [N]: tokens whose credit is not 0."""
    return credit(batch) != 0


@preset("dr-mas", clip=PPO_CLIP)
def dr_mas(reward: str) -> Algo:
    """Calls compared with those of the same role. arXiv 2602.08847."""
    return Algo(GroupRelative(reward, at="transition", by=("group", "role"), norm="std"))


@preset("at-grpo", clip=PPO_CLIP)
def at_grpo(reward: str, *, within: Literal["turn", "prompt"] = "turn", std: bool = True) -> Algo:
    """Calls compared with those of the same role and turn or, with `within` = "prompt", with those
    that answered the same: solvers within one proposal, proposers with one another. arXiv
    2510.11062."""
    by: tuple[Unit, ...] = ("group", "role", within)
    return Algo(GroupRelative(reward, at="transition", by=by, norm="std" if std else "none"))


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
    if core.level_of(reward) != level:
        raise ConfigError(
            f"algorithm.options.reward = {reward!r}: in {mode} mode the return of a team is a "
            f"reward of {level}s; let the verifier give it"
        )
    by: tuple[Unit, ...] = ("group", "role") if mode == "cross" else ("group",)
    base = GroupMaximum(reward, by) if baseline == "max" else baseline
    credit = GroupRelative(reward, by=by, base=base, norm="std" if std else "none", ddof=0)
    return Algo(credit, agg=ROW_SUMS)


@preset("m-grpo", clip=PPO_CLIP, kl=True)
def m_grpo(reward: str, *, main: str = "main", sub_reward: str = "transition:sub") -> Algo:
    """The main role compared by the outcome, the calls of each sub-agent by a reward of their own
    over all of the group's. Where others copy calls until every rollout has equally many, each call
    weighs 1 / number of its rollout's, in statistics and loss. arXiv 2511.13288."""
    if core.level_of(sub_reward) != "transition":
        raise ConfigError(
            f"algorithm.options.sub_reward = {sub_reward!r}: it is one of calls; write "
            "'transition:name'"
        )
    by: tuple[Unit, ...] = ("group", "role")
    lead = GroupRelative(reward, at="role", by=by, norm="std")
    calls = GroupRelative(sub_reward, by=by, norm="std", w=EvenRolloutWeights(sub_reward), ddof=0)
    return Algo(MainAndSubCredit(main, lead, calls), agg=PAIRS, optional=(sub_reward,))


@preset("sage", reward="role:outcome", clip=PPO_CLIP, kl=True)
def sage(reward: str) -> Algo:
    """REINFORCE++ whose rewards and scale are those of each role: challenger, planner, solver and
    critic are compared over the whole batch with their own kind alone. The KL penalty is part of
    the loss, where the paper leaves its place open. arXiv 2603.15255."""
    return Algo(Whiten(GroupRelative(reward, base="none"), by=("role",)), agg=TOKENS)


@preset("maporl", reward="transition:maporl", clip=PPO_CLIP, kl=True)
def maporl(reward: str, *, value: str = "") -> Algo:
    """PPO for each role of a debate, every answer an episode of its own: its reward, which
    `agentrl.team_rewards.maporl` makes of the verifier's scores, has the later rounds in it
    already. `value`: a reward that holds V of each call; default: the critic. arXiv 2502.18439."""
    advantage = SingleCallAdvantage(turns.value_of(value), reward)
    return Algo(GroupRelative(advantage, by=("role",), norm="std"), agg=TOKENS)


@preset("marti", reward="transition:marti", clip=PPO_CLIP, kl=True)
def marti(reward: str) -> Algo:
    """Answers compared with those of the same role and turn by a reward for being better than what
    came before, which `agentrl.team_rewards.marti` makes of the verifier's scores. MARTI,
    OpenReview E7jZqo0A50."""
    return Algo(GroupRelative(reward, at="transition", by=("group", "role", "turn"), norm="std"))


@preset("difference", reward="role:difference", clip=PPO_CLIP)
def difference(
    reward: str, *, baseline: Literal["mean", "none"] = "mean", std: bool = False
) -> Algo:
    """Every role by the team's reward less the team's reward without the role, as replays show
    (`algorithm.counterfactual`) or the verifier says (`agentrl.team_rewards.difference`), against
    the mean of the group or, as it is a comparison already, nothing. arXiv 2012.11258."""
    norm: core.Norm = "std" if std else "none"
    return Algo(GroupRelative(reward, by=("group", "role"), base=baseline, norm=norm))


@preset("shapley", reward="role:shapley", clip=PPO_CLIP)
def shapley(reward: str, *, std: bool = False) -> Algo:
    """Every role compared by what it added to all coalitions of the others, as replays show
    (`algorithm.counterfactual`) or the verifier says (`agentrl.team_rewards.shapley`). arXiv
    1907.05707."""
    return Algo(GroupRelative(reward, by=("group", "role"), norm="std" if std else "none"))


@preset("spiral", reward="role:outcome", clip=PPO_CLIP)
def spiral(
    reward: str,
    *,
    decay: Discount = 0.95,
    key: str = "",
    gamma: Discount = 1.0,
    length: Count = 1024,
) -> Algo:
    """Each role against the running mean of its earlier rewards (one for each value of the task's
    field `key`), discounted by every call that follows; advantages of 0 are left out. arXiv
    2506.24119."""
    credit = turns.TurnDiscount(GroupRelative(reward, base=Ema(reward, decay, key)), gamma)
    return Algo(credit, agg=Average(("row",), "const", length), keep=NonzeroAdvantage(credit))


@modifier("ema", prefix="ema_")
def with_ema(algo: Algo, *, decay: Discount = 0.95, key: str = "") -> Algo:
    """Every comparison is with the running mean of earlier rewards, of each role and, with
    `ema_key`, of each value of that field of the task. arXiv 2506.24119."""

    def change(part: Any) -> Any:
        if not isinstance(part, GroupRelative):
            return part
        return replace(part, base=Ema(part.reward, decay, key, part.at))

    credit = map_parts(algo.credit, change)
    if credit == algo.credit:
        raise ConfigError(
            "algorithm.preset: +ema changes the baseline of a comparison, and this preset makes "
            "none; leave +ema out or choose another preset"
        )
    return replace(algo, credit=credit)


@modifier("fade", prefix="fade_")
def with_fade(algo: Algo, *, gamma: Discount = 0.95) -> Algo:
    """Credit is discounted by every call that still follows in the rollout. arXiv 2506.24119."""
    return replace(algo, credit=turns.TurnDiscount(algo.credit, gamma))


@modifier("equal", prefix="equal_")
def equal(algo: Algo, *, units: Equal) -> Algo:
    """Averages the loss over these units, so that each weighs the same however many tokens it has:
    ["role"] one mean per role, as if each had a loss of its own (MAGRPO, arXiv 2508.04652),
    ["rollout", "role"] one per role of every rollout."""
    return replace(algo, agg=replace(algo.agg, unit=tuple(units)))


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


@modifier("only", prefix="only_")
def only(algo: Algo, *, roles: Names) -> Algo:
    """Trains the calls of these roles alone. arXiv 2508.03680."""
    chosen = RoleFilter(tuple(roles))
    keep = chosen if algo.keep is None else core.AllFilters((algo.keep, chosen))
    return replace(algo, keep=keep)
