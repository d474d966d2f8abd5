"""COMA, arXiv 1705.08926: a critic of the team says what each call was worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.baselines import remembered_column
from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.algorithms.multiagent.critics import CriticTraining, Kind, TeamCritic, TeamShape
from agentrl.algorithms.multiagent.rollout_episodes import JointActionSpace
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import PPO_CLIP, Discount, Names, preset
from agentrl.config import Count, Positive
from agentrl.types import Rollout


@dataclass(frozen=True, slots=True)
class Counterfactual(RememberedColumn):
    """[S] the advantage of a call's action among those that its role could have taken, the others'
    as they were: COMA, arXiv 1705.08926. Missing for calls of other roles, and where the rollout's
    reward is missing. Raises TrainingError for a role that made no call.

    Whole rollouts are read, so roles that other policies play are part of the team."""

    kind: Kind
    stage: JointActionSpace
    training: CriticTraining
    reward: str = "outcome"

    @property
    def level(self) -> Level:
        return "transition"

    def part(self, seed: int) -> TeamCritic:
        n, width = len(self.stage.roles), self.stage.width
        shape = TeamShape(n, width, self.stage.choices, n * width)
        return TeamCritic(self.kind, shape, self.training, seed)

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, TeamCritic]:
        assert isinstance(part, TeamCritic)
        self.stage.check(rollouts)
        known = [row for row in rollouts if not isnan(row.reward(self.reward)) and self._acts(row)]
        if not known:
            return torch.full((len(batch.transitions),), torch.nan, dtype=torch.float64), part
        episodes = [self.stage.episode(row, row.reward(self.reward)) for row in known]
        advantages = part.advantages(episodes).tolist()
        of_call = {
            call: advantages[number][step][agent]
            for number, row in enumerate(known)
            for call, (step, agent) in self.stage.moves(row).items()
        }
        column = [of_call.get(call, nan) for call in batch.transitions]
        return torch.tensor(column, dtype=torch.float64), part.learned(episodes)

    def _acts(self, rollout: Rollout) -> bool:
        return any(call.role in self.stage.roles for call in rollout.transitions)

    def __call__(self, batch: Batch) -> Tensor:
        return remembered_column(batch, self.name)


@preset("coma", clip=PPO_CLIP)
def coma(
    reward: str,
    *,
    roles: Names,
    actions: Names,
    critic: Literal["central", "vdn", "qmix"] = "central",
    width: Count = 64,
    gamma: Discount = 0.99,
    lam: Discount = 0.8,
    critic_lr: Positive = 5e-3,
    updates: Count = 8,
    std: bool = False,
) -> Algo:
    """Calls against what else their role could have answered, the others as they were, by a critic
    of the team: a central one of its joint actions, or the roles' utilities as VDN (1706.05296) or
    QMIX (1803.11485) make them the team's value. `actions`: the answers that are told apart, any
    other being one more. Roles that other policies play are of the team. arXiv 1705.08926."""
    stage = JointActionSpace(tuple(roles), tuple(actions), width)
    value = Counterfactual(critic, stage, CriticTraining(gamma, lam, critic_lr, updates), reward)
    credit = GroupRelative(value, by=("role",), base="none", norm="std" if std else "none")
    return Algo(credit)
