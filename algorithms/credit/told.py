"""Credit by the effect of a privileged text in the prompt, which only training has, on the policy's
log-probs.

The gap of a call is the reward `told`: the log-prob of its sampled tokens given the text minus that
without it, in nats; `Batch.told` is the gap of each token. A missing gap means that the call has no
text.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Credit, rewards, rollout_rewards, standardise
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import (
    Level,
    known_mean,
    next_same,
    previous,
    reduce_by,
    scan,
    units,
)
from agentrl.algorithms.data.state import RememberedColumn, StatePart
from agentrl.core import types
from agentrl.core.errors import TrainingError
from agentrl.core.types import Json, Rollout

log = logging.getLogger("agentrl.algorithm")
TOLD = f"transition:{types.TOLD}"
STYLE = f"transition:{types.TOLD}_style"  # as `told`, for a few calls with the text of another task
EVIDENCE = f"transition:{types.TOLD}_evidence"  # see `Evidence`; of a few calls of successes
EMA_WEIGHT = 0.3  # weight of the latest step in the average of the divergence
MIN_DECREASE = 0.02  # an average counts as lower if it falls by this share
MIN_EVIDENCE = 3  # groups that have to be measured, once any can be, before a text is used
EVIDENCE_DECAY = 0.9  # weight of earlier groups, per step
Z_SCORE = 2.0  # of the mean, from which a policy is taken to follow
DECAY = 0.95  # decay of evidence, per call
MIN_PRIOR = 0.01  # the smallest prior of success and of failure, which the paper leaves open


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whether the policy follows the text: sums over groups, decayed from step to step.

    Of each group with a success and a failure: the mean log-prob per token of the success's calls
    given the text that the failure is told, minus that given a wrong text or none, whichever is
    higher. A policy that cannot read such texts changes in any direction, and would be trained
    towards noise."""

    groups: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def after(self, values: Tensor) -> Evidence:
        """values: of the groups measured in a step, [n]."""
        earlier = EVIDENCE_DECAY if len(values) else 1.0
        return Evidence(
            earlier * self.groups + len(values),
            earlier * self.total + float(values.sum()),
            earlier * self.squares + float(values.square().sum()),
        )

    @property
    def z_score(self) -> float:
        """Of the mean, with the sample variance; 0 for a single group, and if all values are 0."""
        if self.groups <= 1 or not self.squares:
            return 0.0
        mean = self.total / self.groups
        variance = max(self.squares / self.groups - mean**2, 0.0) / (self.groups - 1)
        return mean / math.sqrt(variance) if variance else math.copysign(math.inf, mean)

    @property
    def is_missing(self) -> bool:
        """Whether groups were measured but do not show that the policy follows texts."""
        return self.groups > 0 and (self.groups < MIN_EVIDENCE or self.z_score < Z_SCORE)


@dataclass(slots=True)
class GapState:
    """The divergence of the policy from itself given the text, in nats per token. average:
    exponentially weighted over steps; lowest: minimum of this average; since: steps since that
    minimum. evidence: whether the text is used."""

    patience: int = 0
    average: float | None = None
    lowest: float | None = None
    since: int = 0
    retired: bool = False
    evidence: Evidence = Evidence()
    last: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step

    def measured(self, values: Tensor) -> GapState:
        """With the evidence of a step's groups; logs when it becomes missing or sufficient."""
        evidence = self.evidence.after(values)
        if evidence.is_missing and not self.evidence.is_missing:
            log.warning(
                "+told: the text is not used until it raises the probability of successful answers "
                "above that with a wrong text and without one (z-score %.1f of %.0f groups; 2 of 3 "
                "are needed)", evidence.z_score, evidence.groups,
            )  # fmt: skip
        elif self.evidence.is_missing and not evidence.is_missing:
            log.warning(
                "+told: successful answers show that the policy follows the text; it is used"
            )
        return replace(self, evidence=evidence)

    def after(self, divergence: float | None, metrics: dict[str, float]) -> GapState:
        """The state after a step with this divergence; None: no call had a text."""
        if self.evidence.groups:
            metrics = {**metrics, "told/evidence": self.evidence.z_score}
        if divergence is None or self.retired:
            idle = {"told/retired": float(self.retired), "told/calls": 0.0}
            return replace(self, last={**metrics, **idle})
        earlier = divergence if self.average is None else self.average
        average = EMA_WEIGHT * divergence + (1 - EMA_WEIGHT) * earlier
        falls = self.lowest is None or average < self.lowest - MIN_DECREASE * abs(self.lowest)
        since = 0 if falls else self.since + 1
        retired = 0 < self.patience <= since
        if retired:
            log.warning(
                "+told: the divergence from the policy that is told has not fallen for %d steps; "
                "from now on nothing is told", since,
            )  # fmt: skip
        last = {**metrics, "told/kl": divergence, "told/retired": float(retired)}
        lowest = average if falls else self.lowest
        return GapState(self.patience, average, lowest, since, retired, self.evidence, last)

    def metrics(self) -> Mapping[str, float]:
        return self.last

    def dump(self) -> Json:
        return [self.average, self.lowest, self.since, self.retired, [*astuple(self.evidence)]]

    def restore(self, data: Json) -> None:
        kind = tuple[float | None, float | None, int, bool, tuple[float, float, float]]
        *gap, evidence = msgspec.convert(data, kind)
        self.average, self.lowest, self.since, self.retired = gap
        self.evidence = Evidence(*evidence)


@dataclass(frozen=True, slots=True)
class OtherReward:
    """Declares another reward that `ToldGap` reads, because a record can name only one."""

    reward: str


@dataclass(frozen=True, slots=True)
class ToldGap(RememberedColumn):
    """Whether the text is still used, 1 or 0 for each rollout: until the divergence has not fallen
    for `patience` steps (0: always). RetireOPD, arXiv 2609.20784, also waits for a share of the
    teacher's success rate; here the teacher never acts and has none."""

    patience: int = 0
    reward: str = TOLD
    style: OtherReward = OtherReward(STYLE)
    evidence: OtherReward = OtherReward(EVIDENCE)
    stored_as: ClassVar[str] = "told-gap"

    @property
    def level(self) -> Level:
        return "rollout"

    def part(self, seed: int) -> GapState:
        return GapState(self.patience)

    def recall(
        self, part: StatePart, batch: Batch, rollouts: Sequence[Rollout]
    ) -> tuple[Tensor, StatePart]:
        assert isinstance(part, GapState)
        told, style = rewards(batch, self.reward), rewards(batch, self.style.reward)
        has_gap, both = ~told.isnan(), ~(told + style).isnan()
        count = float(call_sizes(batch)[has_gap].sum())
        metrics = {"told/calls": float(has_gap.sum())}
        if size := float(told[both].abs().sum()):
            metrics["told/style"] = float(style[both].abs().sum()) / size
        divergence = -float(told[has_gap].sum()) / count if count else None
        group = batch.rollout_group[batch.transition_rollout]
        evidence = known_mean(rewards(batch, self.evidence.reward), group, len(batch.groups))
        measured = part.measured(evidence[~evidence.isnan()])
        column = torch.full((len(rollouts),), float(not part.retired), dtype=torch.float64)
        return column, measured.after(divergence, metrics)


@dataclass(frozen=True, slots=True)
class ToldCredit:
    """The reward `told` of each token's call, clamped to +- limit, [N]: its gradient is minus that
    of KL(policy || policy given the text), estimated from the sampled calls."""

    limit: float
    reward: str = TOLD

    def __call__(self, batch: Batch) -> Tensor:
        return rewards(batch, self.reward).clamp(-self.limit, self.limit)[batch.token_transition]


@dataclass(frozen=True, slots=True)
class ToldShare:
    """The weight of the host's credit, [N]: `share` for tokens of calls with a text, 1 for
    others."""

    share: float
    reward: str = TOLD

    def __call__(self, batch: Batch) -> Tensor:
        told = rewards(batch, self.reward)[batch.token_transition]
        return torch.where(told.isnan(), 1.0, self.share)


@dataclass(frozen=True, slots=True)
class ToldScale:
    """A credit A (blend + (1 - blend) w), with w = exp(sign(A) gap) clamped to 1 +- band. The gap
    is that of the token, or the mean per token of its call. It never changes the sign. RLSD, arXiv
    2604.03128; by call as TurnSight, 2608.04007, here without its views of several horizons."""

    credit: Credit
    blend: float
    band: float
    by_token: bool = False
    reward: str = TOLD

    def __call__(self, batch: Batch) -> Tensor:
        credit = self.credit(batch)
        w = (credit.sign() * self.gap(batch)).exp().clamp(1 - self.band, 1 + self.band)
        return credit * torch.where(w.isnan(), 1.0, self.blend + (1 - self.blend) * w)

    def gap(self, batch: Batch) -> Tensor:
        if not self.by_token:
            return (rewards(batch, self.reward) / call_sizes(batch))[batch.token_transition]
        if len(batch.told) != batch.n_tokens:
            raise TrainingError(f"step {batch.step}: nothing was told to the tokens of this batch")
        return batch.told


@dataclass(frozen=True, slots=True)
class ToldBelief:
    """A credit A (blend + (1 - blend) w) with one w per call. A belief in success begins with the
    group's success rate; each call adds its reward `told` to the log-odds, and earlier additions
    decay. The change of the belief, signed as A, standardised within the rollout's calls of one
    role, is z, and w = 1 + band z within 1 +- band. AgentOPSD, arXiv 2608.05987."""

    credit: Credit
    blend: float
    band: float
    least: float
    outcome: str
    reward: str = TOLD

    def __call__(self, batch: Batch) -> Tensor:
        credit, calls = self.credit(batch), len(batch.transitions)
        evidence = rewards(batch, self.reward)
        ids = units(batch, "transition", "rollout", "role")
        before = previous(next_same(ids))
        odds = scan(evidence.nan_to_num(nan=0.0), DECAY, before)
        prior = self.prior(batch)[batch.transition_rollout].logit()
        belief = (prior + odds).sigmoid()
        earlier = torch.where(before >= 0, belief[before], prior.sigmoid())
        sign = known_mean(credit, batch.token_transition, calls).nan_to_num(nan=0.0).sign()
        q = torch.where(evidence.isnan(), torch.nan, sign * (belief - earlier))
        z = standardise(q, ids, norm="std", ddof=0, eps=0.0).advantage
        w = (1 + self.band * z).clamp(1 - self.band, 1 + self.band)
        w = torch.where(evidence.isnan(), 1.0, self.blend + (1 - self.blend) * w)
        return credit * w[batch.token_transition]

    def prior(self, batch: Batch) -> Tensor:
        """The rate of success of each rollout's group, [U]."""
        x = rollout_rewards(batch, self.outcome)
        success = torch.where(x.isnan(), torch.nan, (x >= self.least).double())
        rate = known_mean(success, batch.rollout_group, len(batch.groups))
        return rate.nan_to_num(nan=0.5).clamp(MIN_PRIOR, 1 - MIN_PRIOR)[batch.rollout_group]


def call_sizes(batch: Batch) -> Tensor:
    """Number of tokens of each call, float64 [S]."""
    return reduce_by(torch.ones(batch.n_tokens), batch.token_transition, len(batch.transitions))
