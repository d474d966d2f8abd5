"""Training of reward models on pairs, labels and labels of steps.

A decoder gets a linear head, which begins at 0: first scores are equal, and the first loss is ln 2.
A text's score is that of the state after its last token, by position, whatever the padding token.
Always true: the gradient does not depend on how texts are packed, because the loss of a step is
differentiated by its scores first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import comb, isfinite
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from agentrl.algorithms.learners.optimizer import Optimizer
from agentrl.algorithms.learners.reward_models import ENSEMBLE, ScalarScorer
from agentrl.algorithms.model.load import Tokenizer, no_progress_bars
from agentrl.errors import PolicyError, TrainingError

Text = tuple[int, ...]  # token ids up to what is scored


@dataclass(frozen=True, slots=True)
class Example:
    """A pair of texts, the better one first, or one text whose label is 0 to 1."""

    id: str
    texts: tuple[Text, ...]
    label: float = 1.0
    margin: float = 0.0
    weight: float = 1.0
    length: int = 0  # tokens that `texts[0]` has more than the other, beside what both begin with


@dataclass(slots=True)
class RewardTrainer:
    """Owns the model's weights and their optimizer."""

    scorer: ScalarScorer
    tokenizer: Tokenizer
    centre: float = 0.01
    margin: float = 0.0
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.scorer.model.requires_grad_(True)
        self.optimizer = Optimizer(dict(self.scorer.model.named_parameters()))

    def step(self, examples: Sequence[Example], lr: float) -> float:
        """One optimizer step; returns the loss in nats. Raises TrainingError for one that is not
        finite, with nothing changed."""
        texts = [text for example in examples for text in example.texts]
        scores = self.scorer.heads(texts).requires_grad_()
        loss = self.loss(examples, scores)
        (pull,) = torch.autograd.grad(loss, scores)
        try:
            for pack in self.scorer.packs(texts):
                score = self.scorer.score(pack)
                torch.autograd.backward(score, pull[pack.index].to(score))
            if not isfinite(float(loss.detach()) + self.optimizer.clip(1.0)):
                raise TrainingError("the reward model's loss is not finite; lower reward_model.lr")
            self.optimizer.step(lr)
        finally:
            self.optimizer.zero_grad()
        return float(loss.detach())

    def loss(self, examples: Sequence[Example], scores_TH: Tensor) -> Tensor:
        """Mean over examples and heads of -log sigmoid(r_w - r_l - margin) + centre (r_w + r_l)^2,
        arXiv 2203.02155, 2307.09288, 2312.09244, and of the cross-entropy to labels."""
        paired, r, other = _of_texts(examples, scores_TH)
        margin = torch.tensor([self.margin * example.margin for example in examples])[:, None]
        label = torch.tensor([e.label for e in examples], dtype=torch.float64)[:, None]
        pairs = -logsigmoid(r - other - margin) + self.centre * (r + other).square()
        alone = binary_cross_entropy_with_logits(r, label.expand_as(r), reduction="none")
        each = torch.where(paired[:, None], pairs, alone)
        weight = torch.tensor([bootstrap_weights(e, r.shape[1]) for e in examples]).double()
        return (weight * each).sum() / weight.sum().clamp(min=1e-9)

    def save(self, directory: Path) -> None:
        """An ordinary checkpoint of `AutoModelForSequenceClassification` with its tokenizer."""
        with no_progress_bars():
            self.scorer.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


def _of_texts(examples: Sequence[Example], scores_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which examples are pairs, and the scores [E, H] of the first and the last text of each."""
    first = torch.tensor([0, *(len(example.texts) for example in examples)]).cumsum(0)[:-1]
    paired = torch.tensor([len(example.texts) == 2 for example in examples])
    return paired, scores_TH[first], scores_TH[first + paired.long()]


def bootstrap_weights(example: Example, heads: int) -> list[float]:
    """How much an example counts for each head: of several, how often a sample with replacement
    would have it (Poisson of mean 1), by its id."""
    if heads == 1:
        return [example.weight]
    dice = random.Random(example.id)
    shares = (0.3679, 0.3679, 0.1839, 0.0613, 0.019)
    return [example.weight * dice.choices(range(5), shares)[0] for _ in range(heads)]


def make_scorer(
    policy: PreTrainedModel, tokenizer: Tokenizer, heads: int, token_budget: int
) -> ScalarScorer:
    """The decoder of a policy with a new head that gives `heads` scores of 0."""
    config = deepcopy(policy.config)
    config.num_labels, config.pad_token_id = heads, tokenizer.pad_token_id
    setattr(config, ENSEMBLE, heads)
    model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    if not hasattr(model, "score"):
        raise PolicyError(f"policy.model: {type(model).__name__} has no scalar head")
    model.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    return ScalarScorer(model.eval().to(policy.device), token_budget=token_budget)


def preference_metrics(scorer: ScalarScorer, examples: Sequence[Example]) -> dict[str, float]:
    """How well a model orders examples. accuracy: of pairs in the right order, ties count half,
    or of labels on the right side of 1/2; accuracy_shorter: of pairs whose shorter text is better;
    margin: mean difference; ece: expected calibration error of its sigmoid, in ten bins; length:
    correlation of the difference in score with that in tokens; disagreement: of an ensemble, the
    standard deviation of its differences."""
    scores_TH = scorer.heads([text for example in examples for text in example.texts])
    paired, r, other = _of_texts(examples, scores_TH)
    gap_EH = r - torch.where(paired[:, None], other, 0.0)
    gap = gap_EH.mean(1)
    label = torch.tensor([example.label for example in examples], dtype=torch.float64)
    right = torch.where(gap == 0, 0.5, ((gap > 0) == (label > 0.5)).double())
    more = torch.tensor([float(example.length) for example in examples], dtype=torch.float64)
    metrics = {"accuracy": right.mean(), "margin": gap.mean(), "ece": calibration_error(gap, label)}
    if (shorter := (more < 0) & paired).any():
        metrics["accuracy_shorter"] = right[shorter].mean()
    if more.std() > 0 and gap.std() > 0:
        metrics["length"] = torch.corrcoef(torch.stack([gap, more]))[0, 1]
    if gap_EH.shape[1] > 1:
        metrics["disagreement"] = gap_EH.std(1).mean()
    return {name: float(value) for name, value in metrics.items()}


def calibration_error(logit: Tensor, label: Tensor) -> Tensor:
    """Mean |confidence - frequency| over ten bins of the probability of what is predicted."""
    p = logit.sigmoid()
    sure = torch.maximum(p, 1 - p)
    right = ((p > 0.5) == (label > 0.5)).double()
    bins = ((sure - 0.5) * 20).long().clamp(max=9)
    gap = torch.zeros(10, dtype=torch.float64).index_add(0, bins, sure - right)
    return gap.abs().sum() / len(p)


def best_of_n(scores: Sequence[float], truth: Sequence[float], n: int) -> float:
    """The mean truth of the best-scored of n, over all subsets of n of these rollouts; of equal
    scores any."""
    total, left = 0.0, len(scores)
    for score in sorted(set(scores), reverse=True):
        same = [value for own, value in zip(scores, truth, strict=True) if own == score]
        total += (comb(left, n) - comb(left - len(same), n)) * fmean(same)
        left -= len(same)
    return total / comb(len(scores), n)
