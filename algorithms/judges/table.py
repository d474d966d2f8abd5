"""The tables [judges.NAME] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from agentrl.base.parts import has
from agentrl.config.base import Count, KindSection, Name, Natural, NonNegative
from agentrl.errors import nearest
from agentrl.types import POLICY


class JudgeConfig(KindSection, frozen=True, kw_only=True, tag_field="kind"):
    """A model that judges rollouts; its verdicts are rewards of the table's name."""

    gives_reward: ClassVar[bool] = True
    plays: ClassVar[bool] = True
    upstream: str  # Who judges: one of [upstreams], or the name of a policy.
    # criterion, inserted in the question to the judge
    rubric: str = "how well the agent did what it was asked for"
    concurrency: Count = 8  # concurrent questions
    max_tokens: Count = 1024  # Most tokens of an answer.
    max_calls: Natural = 0  # questions of the whole run, which ends after them; 0: unlimited
    max_usd: NonNegative = 0.0  # cost of the whole run, by `prices`; 0: unlimited
    # USD per million tokens of questions, and of answers.
    prices: tuple[NonNegative, NonNegative] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if self.max_usd and not any(self.prices):
            raise ValueError("max_usd has no effect without prices")

    def problems(self, config: Any) -> Iterator[str]:
        if not has("chat-completions"):
            yield "[judges] needs the part 'chat-completions', which is not installed here"
        known = config.endpoints | (set(config.policies) or {POLICY})
        if self.upstream not in known:
            name = next(name for name, judge in judges_of(config).items() if judge is self)
            yield f"judges.{name}.upstream = {self.upstream!r}; {nearest(self.upstream, known)}"


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
    # Reward: the fraction that holds, or 1 if all hold, else 0.
    combine: Literal["mean", "all"] = "mean"


Judge = PointwiseJudge | GroupJudge | PairwiseJudge | PrincipleJudge
JUDGES = dict[Name, Judge]


def judges_of(config: Any) -> dict[str, Judge]:
    """The judges of a run, by the name of the reward."""
    judges: dict[str, Judge] = config.judges
    return judges
