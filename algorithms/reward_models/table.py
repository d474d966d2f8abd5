"""The table [reward_model] of the run file."""

from __future__ import annotations

from typing import Any

from agentrl.config.base import Count, NonNegative, Positive, Section


class RewardModelTraining(Section, frozen=True):
    """How `agentrl rm train` trains `policy.model` as a reward model on the items of [data]."""

    heads: Count = 1  # size of an ensemble of heads, each trained on its own sample of the items
    # Coefficient of a pair's margin in the loss; 0: the better side must only score higher.
    margin: NonNegative = 0.0
    # Coefficient of (sum of a pair's scores)^2, which keeps scores around 0.
    centre: NonNegative = 0.01
    epochs: Count = 1  # passes over the items
    batch: Count = 32  # items per optimizer step
    lr: Positive = 1e-5  # peak: linear warm-up over 10 % of the steps, then linear decay to 0


def training_of(config: Any) -> RewardModelTraining:
    settings: RewardModelTraining = config.reward_model
    return settings
