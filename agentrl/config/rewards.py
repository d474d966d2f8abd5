"""Reward models: `[reward_model]` and `[reward_models.NAME]`."""

from __future__ import annotations

from typing import Literal

from agentrl.config.base import Count, KindSection, NonNegative, Positive, Section


class RewardModelTraining(Section, frozen=True):
    """How `agentrl rm train` makes a reward model of `policy.model` from the items of [data]."""

    heads: Count = 1  # an ensemble of so many scores, each trained on its own sample of the items
    margin: NonNegative = (
        0.0  # by how much more than that, per unit of a pair's margin, it is better
    )
    centre: NonNegative = (
        0.01  # coefficient of (sum of a pair's scores)^2, which keeps them around 0
    )
    epochs: Count = 1
    batch: Count = 32  # items of an optimizer step
    lr: Positive = 1e-5  # after a linear rise over a tenth of the steps it falls linearly to 0


class RewardModelConfig(KindSection, frozen=True, tag_field="kind", tag="scalar"):
    """A model whose scores are rewards, under its name: a decoder with a head of one label, or an
    ensemble that `agentrl rm train` made."""

    model: str  # a checkpoint directory or hub name with the policy's vocabulary
    scope: Literal["rollout", "transition"] = "rollout"  # a reward of the rollout, or of each call
    # Of an ensemble: the reward is the mean score less this times the scores' deviation.
    disagreement: NonNegative = 0.5


class ImplicitRewardModelConfig(RewardModelConfig, frozen=True, tag="implicit"):
    """A decoder, of which beta * (log probability - that of the reference) is the reward."""

    beta: Positive = 0.05
    reference: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    train: bool = False  # learn from every step, after scoring it
    # from outcomes from 0 to 1 (PRIME), or from pairs of rollouts of a group (iStar)
    loss: Literal["outcome", "pairs"] = "outcome"
    lr: Positive = 1e-6  # constant, where it learns


RewardModel = RewardModelConfig | ImplicitRewardModelConfig
