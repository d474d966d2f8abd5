"""Reward models and judges: `[reward_model]`, `[reward_models.NAME]`, `[judges.NAME]`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from agentrl.config.base import Count, KindSection, Natural, NonNegative, Positive, Section


class RewardModelTraining(Section, frozen=True):
    """How `agentrl rm train` makes a reward model of `policy.model` from the items of [data]."""

    heads: Count = 1  # an ensemble of so many scores, each trained on its own sample of the items
    # How much more than a pair's margin, times this, the better side must score; 0: just more.
    margin: NonNegative = 0.0
    # Coefficient of (sum of a pair's scores)^2, which keeps scores around 0.
    centre: NonNegative = 0.01
    epochs: Count = 1  # passes over the items
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

    beta: Positive = 0.05  # what a nat of the log ratio is worth as a reward
    reference: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    train: bool = False  # learn from every step, after scoring it
    # from outcomes from 0 to 1 (PRIME), or from pairs of rollouts of a group (iStar)
    loss: Literal["outcome", "pairs"] = "outcome"
    lr: Positive = 1e-6  # constant, where it learns


RewardModel = RewardModelConfig | ImplicitRewardModelConfig


class JudgeConfig(KindSection, frozen=True, kw_only=True, tag_field="kind"):
    """A model that judges what agents did, and whose verdicts are the reward of its name."""

    upstream: str  # of [upstreams] or, to let a policy judge, the name of that policy
    # what it judges by, in words that end up in its question
    rubric: str = "how well the agent did what it was asked for"
    concurrency: Count = 8  # questions at a time
    max_tokens: Count = 1024  # of an answer
    max_calls: Natural = 0  # in the whole run, which ends there; 0: any number
    max_usd: NonNegative = 0.0  # likewise, by the prices; 0: any sum
    # USD for a million tokens of questions, and of answers.
    prices: tuple[NonNegative, NonNegative] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.max_usd and not any(self.prices):
            raise ValueError("max_usd means nothing without prices")


class PointwiseJudge(JudgeConfig, frozen=True, kw_only=True, tag="pointwise"):
    """A score for each rollout by itself; the reward is 0 at the low end of the range, 1 at the
    high one."""

    range: tuple[int, int] = (0, 10)  # the lowest and the highest score that it may give
    # Points [score, reward] that rewards lie between, as measured on a labelled set.
    calibration: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.range[0] >= self.range[1]:
            raise ValueError("range is its lowest and its highest score")
        scores, rewards = ([p[i] for p in self.calibration] for i in (0, 1))
        if scores != sorted(set(scores)) or rewards != sorted(rewards):
            raise ValueError("calibration must rise: scores, and rewards that do not fall")


class GroupJudge(PointwiseJudge, frozen=True, kw_only=True, tag="group"):
    """Scores for all rollouts of a group in one answer, as in ART's RULER."""


class PairwiseJudge(JudgeConfig, frozen=True, kw_only=True, tag="pairwise"):
    """Which of two is better, asked in both orders: two different answers are a tie. The reward is
    the share of comparisons that a rollout wins, ties half. Every two of a group of up to four are
    compared; in larger ones each with two others."""


class PrincipleJudge(JudgeConfig, frozen=True, kw_only=True, tag="principles"):
    """Whether each principle holds, yes or no. RLBFF, arXiv 2509.21319."""

    # sentences that hold of a good rollout, each asked by itself
    principles: Annotated[list[str], msgspec.Meta(min_length=1)]
    combine: Literal["mean", "all"] = "mean"  # the share that holds, or 1 if all do, else 0


Judge = PointwiseJudge | GroupJudge | PairwiseJudge | PrincipleJudge
