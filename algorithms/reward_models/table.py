"""The tables [reward_model] and [reward_models.NAME] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from agentrl.config.base import Count, KindSection, Name, NonNegative, Positive, Section


class RewardModelTraining(Section, frozen=True):
    """How `agentrl rm train` trains `policy.model` as a reward model on the items of [data]."""

    heads: Count = 1  # size of an ensemble of heads, each trained on its own sample of the items
    # Coefficient of a pair's margin in the loss; 0: the better completion must only score higher.
    margin: NonNegative = 0.0
    # Coefficient of (sum of a pair's scores)^2, which keeps scores around 0.
    centre: NonNegative = 0.01
    epochs: Count = 1  # passes over the items
    batch: Count = 32  # items per optimizer step
    # Peak learning rate: linear warm-up over 10 % of the steps, then linear decay to 0.
    lr: Positive = 1e-5


class RewardModelConfig(KindSection, frozen=True, tag_field="kind", tag="scalar"):
    """A model whose scores are rewards of the table's name: a decoder with a head of one label, or
    an ensemble from `agentrl rm train`."""

    gives_reward: ClassVar[bool] = True
    plays: ClassVar[bool] = True
    model: str  # a checkpoint directory or hub name with the policy's vocabulary
    scope: Literal["rollout", "transition"] = "rollout"  # reward of the rollout, or of each call
    # Weight of an ensemble's standard deviation, which is subtracted from its mean score.
    disagreement: NonNegative = 0.5

    def problems(self, config: Any) -> Iterator[str]:
        if config.policies:
            yield (
                "[reward_models] score the calls of a single policy, but the run has [policies]; "
                "let the verifier return the reward"
            )


class ImplicitRewardModelConfig(RewardModelConfig, frozen=True, tag="implicit"):
    """A decoder whose reward is beta * (its log-prob - the reference's log-prob)."""

    model: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    beta: Positive = 0.05  # reward per nat of the log ratio
    reference: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    train: bool = False  # Whether it is trained on every step, after it has scored the step.
    # Loss of its training: on outcomes from 0 to 1 (PRIME), or on pairs of rollouts of a group
    # (iStar).
    loss: Literal["outcome", "pairs"] = "outcome"
    lr: Positive = 1e-6  # Learning rate, which is constant, with `train`.


RewardModel = RewardModelConfig | ImplicitRewardModelConfig
REWARD_MODELS = dict[Name, RewardModel]


def training_of(config: Any) -> RewardModelTraining:
    settings: RewardModelTraining = config.reward_model
    return settings


def models_of(config: Any) -> dict[str, RewardModel]:
    """The reward models of a run, by the name of the reward."""
    models: dict[str, RewardModel] = config.reward_models
    return models
