"""Tables of reward models and judges: `[reward_model]`, `[reward_models.NAME]`, `[judges.NAME]`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from agentrl.config.base import Count, KindSection, Natural, NonNegative, Positive, Section


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


class RewardModelConfig(KindSection, frozen=True, tag_field="kind", tag="scalar"):
    """A model whose scores are rewards of the table's name: a decoder with a head of one label, or
    an ensemble from `agentrl rm train`."""

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


class JudgeConfig(KindSection, frozen=True, kw_only=True, tag_field="kind"):
    """A model that judges rollouts; its verdicts are rewards of the table's name."""

    upstream: str  # one of [upstreams], or the name of a policy that judges
    # criterion, inserted in the question to the judge
    rubric: str = "how well the agent did what it was asked for"
    concurrency: Count = 8  # concurrent questions
    max_tokens: Count = 1024  # of an answer
    max_calls: Natural = 0  # questions of the whole run, which ends after them; 0: unlimited
    max_usd: NonNegative = 0.0  # cost of the whole run, by `prices`; 0: unlimited
    # USD per million tokens of questions, and of answers.
    prices: tuple[NonNegative, NonNegative] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.max_usd and not any(self.prices):
            raise ValueError("max_usd has no effect without prices")


class PointwiseJudge(JudgeConfig, frozen=True, kw_only=True, tag="pointwise"):
    """Scores each rollout by itself; the reward is 0 at the lowest score and 1 at the highest."""

    range: tuple[int, int] = (0, 10)  # lowest and highest score
    # Points [score, reward] for linear interpolation, measured on a labelled set.
    calibration: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range[0] >= self.range[1]:
            raise ValueError("range must be [lowest score, highest score]")
        scores, rewards = ([p[i] for p in self.calibration] for i in (0, 1))
        if scores != sorted(set(scores)) or rewards != sorted(rewards):
            raise ValueError("calibration must rise: scores, and rewards that do not fall")


class GroupJudge(PointwiseJudge, frozen=True, kw_only=True, tag="group"):
    """Scores all rollouts of a group in one answer, like ART's RULER."""


class PairwiseJudge(JudgeConfig, frozen=True, kw_only=True, tag="pairwise"):
    """Compares two rollouts in both orders; two different answers are a tie. The reward is the
    fraction of comparisons won, a tie counts 1/2. In groups of up to four rollouts all pairs are
    compared, in larger groups each rollout with two others."""


class PrincipleJudge(JudgeConfig, frozen=True, kw_only=True, tag="principles"):
    """Asks for each principle whether it holds, yes or no. RLBFF, arXiv 2509.21319."""

    # statements that are true of a good rollout, each asked separately
    principles: Annotated[list[str], msgspec.Meta(min_length=1)]
    combine: Literal["mean", "all"] = "mean"  # fraction that holds, or 1 if all hold, else 0


Judge = PointwiseJudge | GroupJudge | PairwiseJudge | PrincipleJudge
