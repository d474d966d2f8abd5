"""What a call was worth to its team, by a critic of teams that learns from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import torch
from torch import Tensor

from agentrl.algorithms.credit.baselines import remembered_column
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.algorithms.multiagent.critics import CriticTraining, Kind, TeamCritic, TeamShape
from agentrl.algorithms.multiagent.rollout_episodes import JointActionSpace
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
