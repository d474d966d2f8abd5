"""Credit and averages for teams and self-play.

A batch has the calls of one policy only. Credit that depends on other roles' calls therefore comes
from the verifier, which sees the whole rollout, as a reward (`agentrl.algorithms.team_rewards` has
the formulas).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit import calls, core
from agentrl.algorithms.credit.calls import Ema
from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    GroupRelative,
    Whiten,
    map_records,
    nested_records,
    rewards,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, lift, reduce_by, units
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo, Average
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Names, modifier, preset
from agentrl.core.config import Count
from agentrl.core.errors import ConfigError

Equal = Annotated[
    list[Literal["role", "rollout", "transition", "row", "group"]], msgspec.Meta(min_length=1)
]


@dataclass(frozen=True, slots=True)
class GroupMaximum:
    """The highest reward of each comparison group, [U]. MAREMAX of comlrl, arXiv 2508.04652."""

    reward: str
    by: tuple[Unit, ...]

    def __call__(self, batch: Batch) -> Tensor:
        x, ids = rewards(batch, self.reward), units(batch, core.level_of(self.reward), *self.by)
        return reduce_by(x.nan_to_num(nan=-torch.inf), ids, how="amax")[ids]


@dataclass(frozen=True, slots=True)
class SingleCallAdvantage:
    """Reward minus V of the state before the call, [S]: each call is an episode of its own."""

    value: Column
    reward: str
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        return self._rewards(batch) - self.value(batch)

    def returns(self, batch: Batch) -> Tensor:
        """The targets of `value` at the first token of each call, float64 [N]; NaN elsewhere."""
        return calls.at_first_tokens(batch, self._rewards(batch))

    def _rewards(self, batch: Batch) -> Tensor:
        x = rewards(batch, self.reward)
        return lift(batch, x, core.level_of(self.reward), "transition")


@dataclass(frozen=True, slots=True)
class NonzeroAdvantage:
    """Filter for tokens whose credit is not 0, bool [N]."""

    credit: Credit

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch) != 0


@preset("magrpo")
def magrpo(
    *,
    mode: Literal["aligned", "cross"] = "aligned",
    reward: str = "",
    baseline: Literal["mean", "loo", "max", "none"] = "mean",
    std: bool = False,
) -> Algo:
    """Joint rollouts compared by the team's return (reward `outcome`), the same advantage for every
    call of every role, on sums of log-probs. In cross mode, answers of one role compared by their
    mean return over all combinations with the other roles' answers (`transition:cross`, from
    `agentrl.algorithms.team_rewards.cross`). baseline: mean of all (MAGRPO), mean of the others
    (MARLOO), maximum (MAREMAX, never above 0) or none (MAREINFORCE). arXiv 2508.04652."""
    level, name = ("transition", "transition:cross") if mode == "cross" else ("rollout", "outcome")
    reward = reward or name
    if core.level_of(reward) != level:
        raise ConfigError(
            f"algorithm.options.reward = {reward!r}: in {mode} mode the return of a team is a "
            f"reward of {level}s; let the verifier return one"
        )
    by: tuple[Unit, ...] = ("group", "role") if mode == "cross" else ("group",)
    base = GroupMaximum(reward, by) if baseline == "max" else baseline
    credit = GroupRelative(reward, by=by, base=base, norm="std" if std else "none", ddof=0)
    return Algo(credit, agg=ROW_SUMS)


@preset("maporl", reward="transition:maporl", clip=PPO_CLIP, kl=True)
def maporl(reward: str, *, value: str = "") -> Algo:
    """PPO for each role of a debate, with every answer an episode of its own: its reward, which
    `agentrl.algorithms.team_rewards.maporl` computes from the verifier's scores, already includes
    the later rounds. `value`: a reward that holds V of each call; default: the critic. arXiv
    2502.18439."""
    advantage = SingleCallAdvantage(calls.value_of(value), reward)
    return Algo(GroupRelative(advantage, by=("role",), norm="std"), agg=TOKENS)


@preset("spiral", reward="role:outcome", clip=PPO_CLIP)
def spiral(
    reward: str,
    *,
    decay: Discount = 0.95,
    key: str = "",
    gamma: Discount = 1.0,
    length: Count = 1024,
) -> Algo:
    """Each role compared with the running mean of its earlier rewards (one per value of the task
    field `key`), discounted by every later call; advantages of 0 are left out. arXiv 2506.24119.
    Without a penalty it ends at a pure strategy, also where it can be exploited (Kuhn poker)."""
    credit = calls.TurnDiscount(GroupRelative(reward, base=Ema(reward, decay, key)), gamma)
    return Algo(credit, agg=Average(("row",), "const", length), keep=NonzeroAdvantage(credit))


def has_own_baseline(part: object) -> bool:
    """Whether a comparison is one of advantages instead of rewards."""
    return isinstance(part, GroupRelative) and callable(part.reward) and part.base == "none"


@modifier("ema", prefix="ema_")
def with_ema(algo: Algo, *, decay: Discount = 0.95, key: str = "") -> Algo:
    """Replaces the baseline of every comparison by the running mean of earlier rewards, per role
    and, with `ema_key`, per value of that task field. arXiv 2506.24119."""

    def change(part: Any) -> Any:
        if not isinstance(part, GroupRelative):
            return part
        return replace(part, base=Ema(part.reward, decay, key, part.at))

    credit = map_records(algo.credit, change)
    if credit == algo.credit or any(map(has_own_baseline, nested_records(algo.credit))):
        raise ConfigError(
            "algorithm.preset: +ema replaces the baseline of a comparison, and this preset has no "
            "comparison, or computes a baseline of its own; remove +ema or choose another preset"
        )
    return replace(algo, credit=credit)


@modifier("call-discount", prefix="call_discount_")
def call_discount(algo: Algo, *, gamma: Discount = 0.95) -> Algo:
    """Discounts credit by every later call of the rollout. arXiv 2506.24119."""
    return replace(algo, credit=calls.TurnDiscount(algo.credit, gamma))


@modifier("mean-by", prefix="mean_by_")
def mean_by(algo: Algo, *, units: Equal) -> Algo:
    """Averages the loss over these units with equal weights, however many tokens they have:
    ["role"] gives each role a loss of its own (MAGRPO, arXiv 2508.04652), ["rollout", "role"] each
    role of every rollout."""
    return replace(algo, agg=replace(algo.agg, unit=tuple(units)))


@modifier("per-role")
def per_role(algo: Algo) -> Algo:
    """Restricts every comparison and scale of the host to one role; rollouts count once per role.
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
                "remove +per-role or choose another preset"
            )
        norm_by = None if part.norm_by is None else (*part.norm_by, "role")
        at = "role" if level == "rollout" else level
        return replace(part, at=at, by=(*part.by, "role"), norm_by=norm_by)

    return replace(algo, credit=map_records(algo.credit, change))


@dataclass(frozen=True, slots=True)
class RoleFilter:
    """Filter for tokens of these roles, bool [N]. Raises TrainingError for a role without calls."""

    roles: tuple[str, ...]

    def __call__(self, batch: Batch) -> Tensor:
        calls.need_roles(batch, self.roles)
        return calls.made_by(batch, self.roles)[batch.token_transition]


@modifier("only", prefix="only_")
def only(algo: Algo, *, roles: Names) -> Algo:
    """Trains only the calls of these roles. arXiv 2508.03680."""
    chosen = RoleFilter(tuple(roles))
    keep = chosen if algo.keep is None else core.AllFilters((algo.keep, chosen))
    return replace(algo, keep=keep)
