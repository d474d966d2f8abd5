"""Tables of models that give rewards: [judges.NAME], [reward_models.NAME] and [reward_model]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from agentrl.core.config.base import Count, KindSection, NonNegative, Positive, Section
from agentrl.core.errors import nearest
from agentrl.core.types import POLICY

if TYPE_CHECKING:
    from agentrl.core.config.schema import RunConfig


class JudgeConfig(KindSection, frozen=True, kw_only=True, tag_field="kind"):
    """Settings of every judge."""

    upstream: str  # Who judges: one of [upstreams], or the name of a policy.
    max_tokens: Count = 1024  # Most tokens of an answer.
    max_usd: NonNegative = 0.0  # cost of the whole run, by `prices`; 0: unlimited
    # USD per million tokens of questions, and of answers.
    prices: tuple[NonNegative, NonNegative] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.max_usd and not any(self.prices):
            raise ValueError("max_usd has no effect without prices")

    def problems(self, config: RunConfig) -> Iterator[str]:
        models = config.endpoints | (set(config.policies) or {POLICY})
        if self.upstream not in models:
            name = next(name for name, judge in config.judges.items() if judge is self)
            yield f"judges.{name}.upstream = {self.upstream!r}; {nearest(self.upstream, models)}"


class RubricJudge(JudgeConfig, frozen=True, kw_only=True):
    """A model that judges rollouts; its verdicts are rewards of the table's name."""

    # Criterion, inserted in the question to the judge; of kind = "principles" a list of statements
    # that are true of a good rollout, each asked separately.
    rubric: str = "how well the agent did what it was asked for"


class PointwiseJudge(RubricJudge, frozen=True, kw_only=True, tag="pointwise"):
    """Scores each rollout by itself from 0 to 10; the reward is a tenth of the score."""


class GroupJudge(PointwiseJudge, frozen=True, kw_only=True, tag="group"):
    """Scores all rollouts of a group in one answer, like ART's RULER."""


class PairwiseJudge(RubricJudge, frozen=True, kw_only=True, tag="pairwise"):
    """Compares two rollouts in both orders; two different answers are a tie. The reward is the
    fraction of comparisons won, a tie counts 1/2. In groups of up to four rollouts all pairs are
    compared, in larger groups each rollout with two others."""


class PrincipleJudge(JudgeConfig, frozen=True, kw_only=True, tag="principles"):
    """Asks for each principle whether it holds, yes or no; the reward is the fraction that holds.
    RLBFF, arXiv 2509.21319."""

    # statements that are true of a good rollout, each asked separately
    rubric: Annotated[list[str], msgspec.Meta(min_length=1)]


class ProbabilityJudge(RubricJudge, frozen=True, kw_only=True, tag="probability"):
    """Asks for one word, yes or no; the reward is the probability of yes among the two, as the
    first token of the answer: one forward pass, and nothing to parse. Unless the two have at least
    half of the probability together, there is no reward."""


Judge = PointwiseJudge | GroupJudge | PairwiseJudge | PrincipleJudge | ProbabilityJudge


class RewardModelTraining(Section, frozen=True):
    """How `agentrl reward-model` trains `policy.model` as a reward model on the items of [data]."""

    # Coefficient of a pair's margin in the loss; 0: the better completion must only score higher.
    margin: NonNegative = 0.0
    epochs: Count = 1  # passes over the items
    batch: Count = 32  # items per optimizer step
    # Peak learning rate: linear warm-up over 10 % of the steps, then linear decay to 0.
    lr: Positive = 1e-5


class RewardModelConfig(KindSection, frozen=True, tag_field="kind", tag="scalar"):
    """A model whose scores are rewards of the table's name: a decoder with a head of one label, or
    an ensemble from `agentrl reward-model`."""

    model: str  # a checkpoint directory or hub name with the policy's vocabulary
    scope: Literal["rollout", "transition"] = "rollout"  # reward of the rollout, or of each call

    def problems(self, config: RunConfig) -> Iterator[str]:
        if config.policies:
            yield (
                "[reward_models] score the calls of a single policy, but the run has [policies]; "
                "let the verifier return the reward"
            )


class ImplicitRewardModelConfig(RewardModelConfig, frozen=True, tag="implicit"):
    """A decoder whose reward is 0.05 * (its log-prob - the initial policy's log-prob)."""

    model: str = ""  # a checkpoint directory or hub name; empty: the initial policy
    # Loss of its training: on outcomes from 0 to 1 (PRIME), or on pairs of rollouts of a group
    # (iStar).
    loss: Literal["outcome", "pairs"] = "outcome"
    # Constant learning rate of its training on every step, such as 1e-6; 0: no training.
    lr: NonNegative = 0.0


RewardModel = RewardModelConfig | ImplicitRewardModelConfig
