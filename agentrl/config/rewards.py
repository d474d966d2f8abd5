"""Tables of reward models: `[reward_models.NAME]`."""

from __future__ import annotations

from typing import ClassVar, Literal

from agentrl.config.base import KindSection, NonNegative, Positive


class RewardModelConfig(KindSection, frozen=True, tag_field="kind", tag="scalar"):
    """A model whose scores are rewards of the table's name: a decoder with a head of one label, or
    an ensemble from `agentrl rm train`."""

    gives_reward: ClassVar[bool] = True
    plays: ClassVar[bool] = True
    model: str  # a checkpoint directory or hub name with the policy's vocabulary
    scope: Literal["rollout", "transition"] = "rollout"  # reward of the rollout, or of each call
    # For an ensemble: the reward is the mean score minus this times the standard deviation.
    disagreement: NonNegative = 0.5


class ImplicitRewardModelConfig(RewardModelConfig, frozen=True, tag="implicit"):
    """A decoder whose reward is beta * (its log-prob - the reference's log-prob)."""

    model: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    beta: Positive = 0.05  # reward per nat of the log ratio
    reference: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    train: bool = False  # train it on every step, after it has scored the step
    # train on outcomes from 0 to 1 (PRIME), or on pairs of rollouts of a group (iStar)
    loss: Literal["outcome", "pairs"] = "outcome"
    lr: Positive = 1e-6  # constant, with `train`


RewardModel = RewardModelConfig | ImplicitRewardModelConfig
