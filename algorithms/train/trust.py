"""How far the optimizer steps of a training step move the policy, and the way back from too far.

The distance is the KL divergence of the policy before the training step from the one after it, in
nats per token: the k3 estimate (joschu.net/blog/kl-approx.html) on the step's sampled tokens,
weighted as in the loss, and by policy / sampler where an older version sampled them. It takes a
forward pass, so of a large batch only a part is measured: neighbouring rows, whose common prefixes
are computed once. Always true: which rows is a function of seed and step, and nobody samples from
weights that are undone, because they are published later.

Many steps of the largest length that is allowed lose a policy as one that is too long does: half of
tower's runs at four times its rate lost the form of answers in steps that were undone again and
again. So the rate is lowered where recent steps went far, and rises slowly. Checkpoints have it.

A step with half the learning rate ends half way, because AdamW's step is proportional to it: so an
undone step is made again without another gradient. First moments shrink by its square.
Whole, they push the next steps too far as well; at 0, many small steps learn too slowly; and
without second moments the next step is the largest that AdamW makes.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.objective.core import kl_value
from agentrl.algorithms.objective.ratios import ratio
from agentrl.config import AlgorithmConfig
from agentrl.types import POLICY, Json

log = logging.getLogger("agentrl.algorithm")

MAX_KL = 0.05  # for each optimizer step, by default: tens of times what that of a healthy run moves
HALVINGS = 10  # after which nothing of a step is kept
MOST = 2.0  # of the weights that correct for tokens of another policy, such as an older version
STEP_SIZE = "step_size"  # name of what is remembered, in the algorithm's state
OFTEN = 0.1  # of the limit: the mean KL of recent training steps above which the rate is lowered
LATEST = 0.25  # weight of the latest training step in that mean
LOWER, HIGHER = 0.5, 2 ** (1 / 16)  # factors of the rate after a training step
PART, SMALL = 1 / 8, 2048  # the measured share of a batch's tokens, with context; the least number


@dataclass(slots=True)
class KlLimit:
    """The limits of one policy's training steps. limit: largest KL; 0: no step is undone."""

    learner: Learner
    limit: float = MAX_KL
    seed: int = 0
    policy: str = POLICY
    told: bool = False  # whether the console knows that steps are undone
    recent: float = 0.0  # mean KL of recent training steps
    rate: float = 1.0  # of the learning rate, with which a training step begins

    def __post_init__(self) -> None:
        if not getattr(self.learner, "undoable", False):
            self.limit = 0.0

    def begin(self, batch: Batch, weight: Tensor, minibatches: int) -> Movement:
        """Before a training step. weight [N]: of the batch's tokens in the loss. minibatches:
        optimizer steps per pass over the batch."""
        rows = measured_rows(batch, f"{self.seed}/{batch.step}", minibatches)
        part, tokens = (batch, torch.arange(batch.n_tokens)) if rows is None else batch.cut(rows)
        return Movement(self, part, tokens, weight[tokens].double(), share=self.rate)

    def end(self, kl: float) -> None:
        """After a training step: lower the rate if recent ones went far, else raise it again. The
        KL is about quadratic in the rate."""
        self.recent += LATEST * (kl - self.recent)
        far = min(kl, self.recent) / (OFTEN * self.limit) if self.limit else 0.0
        self.rate = min(1.0, self.rate * (max(LOWER, far**-0.5) if far > 1 else HIGHER))

    def dump(self) -> Json:
        return {"recent": self.recent, "rate": self.rate}

    def restore(self, data: Json) -> None:
        """Load the output of `dump`. Raises msgspec.ValidationError for anything else."""
        found = msgspec.convert(data, dict[str, float])
        self.recent, self.rate = found.get("recent", 0.0), found.get("rate", 1.0)

    def tell(self, step: int, kl: float, share: float) -> None:
        """Say on the console, once, that a step was undone."""
        if self.told:
            return
        self.told = True
        again = f"made again with 1/{1 / share:.0f} of its learning rate" if share else "not made"
        log.warning(
            "step %d would have moved policy %r by %.3g nats per token, and algorithm.max_kl is "
            "%g: it was undone and %s. The metric update/undone counts this from now on; if it "
            "happens often, lower algorithm.lr",
            *(step + 1, self.policy, kl, self.limit, again),
        )


@dataclass(slots=True)
class Movement:
    """The way of the policy in one training step."""

    owner: KlLimit
    batch: Batch  # what is measured
    tokens: Tensor  # int64 [n], its tokens in the batch of the step
    weight: Tensor  # [n]
    before: Tensor | None = None  # log-probs [n] before the first optimizer step
    kl: float | None = None  # after the last one; None: there was none
    share: float = 1.0  # of the learning rate, for this and the next optimizer steps
    undone: int = 0  # halvings

    def start(self, *, only: bool) -> None:
        """Before an optimizer step. only: it is the only one on the batch."""
        if self.before is None and not only:
            self.before = self.owner.learner.logprobs(self.batch)
        if self.owner.limit:
            self.owner.learner.mark()  # type: ignore[attr-defined]

    def finish(self, logprobs: Tensor) -> bool:
        """After an optimizer step that saw these log-probs [N] of its minibatch: shorten it until
        the policy is within the limit. Returns whether anything of it is left."""
        if self.before is None:
            self.before = logprobs[self.tokens]
        earlier, moved = self.kl or 0.0, self.measure()
        self.kl = moved
        while self.owner.limit and not self.kl <= self.owner.limit:  # NaN is beyond it, too
            self.undone += 1
            kept = 0.5 if self.undone <= HALVINGS else 0.0
            self.share *= kept
            self.owner.learner.shrink(kept)  # type: ignore[attr-defined]
            self.kl = self.measure() if kept else earlier
            if not kept:
                break
        if self.kl is not moved:
            self.owner.tell(self.batch.step, moved, self.share)
        return self.share > 0

    def measure(self) -> float:
        """The KL so far."""
        assert self.before is not None
        sampled = ratio(self.before.double().cpu() - self.batch.behaviour.double())
        weight = self.weight * sampled.clamp(max=MOST)
        now = self.owner.learner.logprobs(self.batch)
        return mean_kl(self.before, now, weight, self.weight.sum())

    def metrics(self) -> dict[str, float]:
        found = {"update/undone": float(self.undone)}
        return found if self.kl is None else {"update/kl": self.kl, **found}


def largest_kl(config: AlgorithmConfig) -> float:
    """The KL beyond which a step is undone; 0: none is."""
    if config.max_kl is not None:
        return config.max_kl
    return max(MAX_KL * config.minibatches * config.epochs, config.target_kl or 0.0)


def mean_kl(old: Tensor, now: Tensor, weight: Tensor, whole: Tensor | None = None) -> float:
    """KL(old || now) in nats per token, by the k3 estimator. weight: of each token; whole: their
    sum, without the weights that correct for the sampler."""
    live, weight = weight > 0, weight.double()
    d = (old.double().cpu() - now.double().cpu())[live]
    total = weight.sum() if whole is None else whole
    return float(kl_value(d, "k3") @ weight[live] / total) if d.numel() else 0.0


def measured_rows(batch: Batch, seed: str, minibatches: int) -> Tensor | None:
    """Indices [r], ascending, of neighbouring rows with PART of the tokens of a minibatch, or SMALL
    if that is more; None: all rows."""
    lengths = torch.tensor([len(row.tokens) for row in batch.rows])
    enough = max(SMALL, math.ceil(PART * int(lengths.sum()) / minibatches))
    if enough >= lengths.sum():
        return None
    first = random.Random(seed).randrange(len(lengths))
    around = (first + torch.arange(len(lengths))) % len(lengths)
    count = int((lengths[around].cumsum(0) < enough).sum()) + 1
    return around[:count].sort().values
