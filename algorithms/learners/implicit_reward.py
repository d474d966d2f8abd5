"""An implicit reward model that learns while the policy does.

Its score s of a rollout is the sum over calls of beta * (log pi - log pi of the reference). It
learns from outcomes, numbers from 0 to 1, by the cross-entropy of sigmoid(s) to them: PRIME, arXiv
2502.01456. Or from pairs of rollouts of one group, the better of which is to have the larger s, by
-log sigmoid(s_better - s_worse): DPO of whole rollouts, as in iStar, arXiv 2509.19199, whose
reference is the policy of the step before, not a fixed one. Either loss reaches the log-probs as
one number per rollout, beta * d loss / d s.

Owns the model's weights and their optimizer. Always true: a batch is scored before it is learned
from, so no reward has seen its own outcome; a gradient that is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from agentrl.algorithms.learners.optimizer import Optimizer, OptimizerKind
from agentrl.algorithms.learners.reward_models import SOURCE, ImplicitScorer, RewardModel, row_of
from agentrl.algorithms.model.load import copy_weights, read_weights, save_weights
from agentrl.algorithms.model.packing import forward_logprobs, pack_rows
from agentrl.errors import TrainingError
from agentrl.types import Group, Rollout, Transition

FOLDER, WEIGHTS = "reward_models", "model.safetensors"
Saved = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass(slots=True)
class ImplicitTrainer:
    """Trains the model of one implicit source of rewards."""

    source: RewardModel
    scorer: ImplicitScorer
    lr: float
    max_grad_norm: float = 1.0
    kind: OptimizerKind = "adamw"
    loss: Literal["outcome", "pairs"] = "outcome"
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.scorer.model.requires_grad_(True)
        parameters = dict(self.scorer.model.named_parameters())
        self.optimizer = Optimizer(parameters, kind=self.kind)

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on the rollouts that the source has scored and whose outcome is known.

        Returns reward_models/<name>/loss, nats; accuracy, the share of rollouts that it put on the
        right side of 1/2, or of pairs in the right order; grad_norm. Nothing where there is no such
        rollout or pair. Raises TrainingError for an outcome to learn from that is no number from 0
        to 1."""
        rollouts = [(group.id, row) for group in groups for row in group.rollouts]
        scored_calls = [
            (id, row, calls) for id, row in rollouts if (calls := self._scored_calls(row))
        ]
        y = torch.tensor([row.reward() for _, row, _ in scored_calls], dtype=torch.float64)
        s = torch.tensor([self._score(row) for _, row, _ in scored_calls], dtype=torch.float64)
        # margin: how sure it is of each of its judgements, and target: how much it should be
        margin, target = s.requires_grad_(), y
        if self.loss == "pairs":
            better, worse = _pairs([id for id, _, _ in scored_calls], y)
            margin = s[better] - s[worse]
            target = torch.ones_like(margin)
        if not margin.numel():
            return {}
        self._check(target)
        loss = binary_cross_entropy_with_logits(margin, target)
        pull = self.scorer.beta * torch.autograd.grad(loss, s)[0]
        try:
            self._backward([calls for _, _, calls in scored_calls], pull)
            norm = self.optimizer.clip(self.max_grad_norm)
            if math.isfinite(norm):
                self.optimizer.step(self.lr)
        finally:
            self.optimizer.zero_grad()
        name = f"reward_models/{self.source.name}"
        return {
            f"{name}/loss": loss.item(),
            f"{name}/accuracy": ((margin > 0) == (target > 0.5)).double().mean().item(),
            f"{name}/grad_norm": norm,
        }

    def save(self, directory: Path) -> None:
        """Write into a checkpoint."""
        folder = self._folder(directory)
        save_weights(self.scorer.model, folder / WEIGHTS)
        self.optimizer.save(folder)

    def read(self, directory: Path) -> Saved:
        """What `save` wrote, for `restore`. Raises PolicyError if it does not fit."""
        folder = self._folder(directory)
        return read_weights(self.scorer.model, folder / WEIGHTS), self.optimizer.read(folder)

    def restore(self, saved: Saved) -> None:
        weights, moments = saved
        copy_weights(self.scorer.model, weights)
        self.optimizer.restore(moments)

    def _folder(self, directory: Path) -> Path:
        return directory / FOLDER / self.source.name

    def _scored_calls(self, rollout: Rollout) -> list[Transition]:
        return [] if math.isnan(rollout.reward()) else self.source.scored_calls(rollout)

    def _score(self, rollout: Rollout) -> float:
        """Of all its calls, as the source has just given it."""
        mine = (row for row in rollout.rewards if row.name == self.source.name)
        return sum(row.value for row in mine if row.source == SOURCE.format(row.name))

    def _backward(self, rollouts: Sequence[Sequence[Transition]], pull: Tensor) -> None:
        """Accumulate the gradient of the loss, whose derivative by every log-prob of a rollout is
        `pull` [rollouts]."""
        model, scorer = self.scorer.model, self.scorer
        rows = [row_of(call) for calls in rollouts for call in calls]
        counts = torch.tensor([sum(len(c.completion) for c in calls) for calls in rollouts])
        of_token = pull.repeat_interleave(counts)
        for pack in pack_rows(rows, scorer.packing, scorer.token_budget):
            logprobs = forward_logprobs(model, pack)
            torch.autograd.backward(logprobs, of_token[pack.index].to(logprobs))

    def _check(self, outcomes: Tensor) -> None:
        if odd := int(((outcomes < 0) | (outcomes > 1)).sum()):
            raise TrainingError(
                f"reward_models.{self.source.name}.train: {odd} of {len(outcomes)} outcomes are "
                "not between 0 and 1, so they are no probability of success; let the verifier "
                "give such a number, or leave train out"
            )


def _pairs(groups: Sequence[str], y: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [P] each: every two rollouts of one group, the first of which ended better."""
    numbers = {id: number for number, id in enumerate(groups)}
    of = torch.tensor([numbers[id] for id in groups], dtype=torch.int64)
    better, worse = ((of[:, None] == of) & (y[:, None] > y)).nonzero(as_tuple=True)
    return better, worse
