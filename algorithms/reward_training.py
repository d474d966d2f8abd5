"""Training and evaluation of reward models (`agentrl reward-model`) on preference pairs, labels and
step labels.

A decoder gets a linear head initialised to 0, so the first scores are equal and the first loss is
ln 2. The score of a text is that of the state after its last token, found by position, not by
padding token. Invariant: the gradient does not depend on packing, because the loss of a step is
first differentiated with respect to all its scores.

Owns `<output>/reward_model`. The items of a step are a function of the data set's version, the seed
and the step, so the same command gives the same model, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import groupby
from math import comb, isfinite, isnan
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.learners.optimizer import Optimizer
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.chat import Chat, Codec, Tokenizer
from agentrl.algorithms.model.load import end_tokens, load_model, no_progress_bars, vocabulary_size
from agentrl.algorithms.preferences.draft import TEST, TRAIN, pin_dataset
from agentrl.algorithms.reward_models import PADDING, ScalarScorer, load_scalar
from agentrl.algorithms.train.checkpoint import save_policy
from agentrl.algorithms.train.load_policies import policy_directory
from agentrl.algorithms.train.optimize import learning_rate
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import ConfigError, PolicyError, TrainingError
from agentrl.core.files import share_weights
from agentrl.core.types import Purpose, Transition
from agentrl.store import run_folder
from agentrl.store.base import Store
from agentrl.store.records import Item

Text = tuple[int, ...]  # token ids; the state after the last is scored


@dataclass(frozen=True, slots=True)
class Example:
    """A pair of texts, the better one first, or one text with a label from 0 to 1."""

    id: str
    texts: tuple[Text, ...]
    label: float = 1.0
    margin: float = 0.0
    weight: float = 1.0
    length: int = 0  # tokens of `texts[0]` minus those of the other text


CENTRE = 0.01  # weight of (sum of a pair's scores)^2, which keeps scores around 0


@dataclass(slots=True)
class RewardTrainer:
    """Trains a scalar reward model. Owns its weights and their optimizer."""

    scorer: ScalarScorer
    tokenizer: Tokenizer
    margin: float = 0.0  # coefficient of a pair's margin in the loss
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        if self.tokenizer.pad_token_id != self.scorer.model.config.pad_token_id:
            self.tokenizer = deepcopy(self.tokenizer)
            self.tokenizer.add_special_tokens({"pad_token": PADDING})
        self.scorer.model.requires_grad_(True)
        self.optimizer = Optimizer(dict(self.scorer.model.named_parameters()))

    def step(self, examples: Sequence[Example], lr: float) -> float:
        """One optimizer step; returns the loss in nats. Raises TrainingError, with nothing changed,
        if loss or gradient is not finite."""
        texts = [text for example in examples for text in example.texts]
        scores = self.scorer.scores(texts).requires_grad_()
        loss = self.loss(examples, scores)
        (gradient,) = torch.autograd.grad(loss, scores)
        try:
            for pack in self.scorer.packs(texts):
                score = self.scorer.score(pack)
                torch.autograd.backward(score, gradient[pack.index].to(score))
            if not isfinite(float(loss.detach()) + self.optimizer.clip(1.0)):
                raise TrainingError("the reward model's loss is not finite; lower reward_model.lr")
            self.optimizer.step(lr)
        finally:
            self.optimizer.zero_grad()
        return float(loss.detach())

    def loss(self, examples: Sequence[Example], scores: Tensor) -> Tensor:
        """Weighted mean over examples. Pairs: -log sigmoid(r_w - r_l - margin) +
        CENTRE (r_w + r_l)^2, arXiv 2203.02155, 2307.09288, 2312.09244; labels: cross-entropy.
        scores: of their texts, [T]."""
        paired, r, last = _of_texts(examples, scores)
        label = torch.tensor([example.label for example in examples], dtype=torch.float64)
        margin = torch.tensor([self.margin * example.margin for example in examples])
        pairs = -logsigmoid(r - last - margin) + CENTRE * (r + last).square()
        alone = binary_cross_entropy_with_logits(r, label, reduction="none")
        weight = torch.tensor([example.weight for example in examples], dtype=torch.float64)
        return (weight * torch.where(paired, pairs, alone)).sum() / weight.sum().clamp(min=1e-9)

    def save(self, directory: Path) -> None:
        """Write a checkpoint of `AutoModelForSequenceClassification` with its tokenizer."""
        with no_progress_bars():
            self.scorer.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        share_weights(directory)


def _of_texts(examples: Sequence[Example], scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which examples are pairs, bool [E], and the scores [E] of their first and last texts."""
    first = torch.tensor([0, *(len(example.texts) for example in examples)]).cumsum(0)[:-1]
    paired = torch.tensor([len(example.texts) == 2 for example in examples])
    return paired, scores[first], scores[first + paired.long()]


def make_scorer(policy: PreTrainedModel, tokenizer: Tokenizer, token_budget: int) -> ScalarScorer:
    """A copy of a policy's decoder with a new head of one score, initialised to 0.

    transformers takes the score of the last token that is not padding. So if the padding token also
    ends answers, the model gets a separate padding token, which `RewardTrainer` adds to its
    tokenizer."""
    config = deepcopy(policy.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    if not hasattr(model, "score"):
        raise PolicyError(f"policy.model: {type(model).__name__} has no scalar head")
    model.base_model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    padding = tokenizer.pad_token_id
    if padding is None or padding in end_tokens(policy, tokenizer):
        padding = len(tokenizer)
        if padding >= vocabulary_size(model):
            model.resize_token_embeddings(padding + 1, mean_resizing=False)
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = padding
    return ScalarScorer(model.eval().to(policy.device), token_budget=token_budget)


def preference_metrics(scorer: ScalarScorer, examples: Sequence[Example]) -> dict[str, float]:
    """Metrics of a reward model on examples. accuracy: fraction of pairs in the right order (ties
    count half) or of labels on the right side of 1/2; accuracy_shorter: that of pairs whose shorter
    text is better; margin: mean score difference; ece: expected calibration error of its sigmoid,
    ten bins; length: correlation of score difference and length difference."""
    scores = scorer.scores([text for example in examples for text in example.texts])
    paired, r, last = _of_texts(examples, scores)
    gap = r - torch.where(paired, last, 0.0)
    label = torch.tensor([example.label for example in examples], dtype=torch.float64)
    right = torch.where(gap == 0, 0.5, ((gap > 0) == (label > 0.5)).double())
    more = torch.tensor([float(example.length) for example in examples], dtype=torch.float64)
    metrics = {"accuracy": right.mean(), "margin": gap.mean(), "ece": calibration_error(gap, label)}
    if (shorter := (more < 0) & paired).any():
        metrics["accuracy_shorter"] = right[shorter].mean()
    if more.std() > 0 and gap.std() > 0:
        metrics["length"] = torch.corrcoef(torch.stack([gap, more]))[0, 1]
    return {name: float(value) for name, value in metrics.items()}


def calibration_error(logit: Tensor, label: Tensor) -> Tensor:
    """Mean |confidence - accuracy| over ten bins of the predicted class's probability."""
    p = logit.sigmoid()
    confidence = torch.maximum(p, 1 - p)
    right = ((p > 0.5) == (label > 0.5)).double()
    bins = ((confidence - 0.5) * 20).long().clamp(max=9)
    gap = torch.zeros(10, dtype=torch.float64).index_add(0, bins, confidence - right)
    return gap.abs().sum() / len(p)


def best_of_n(scores: Sequence[float], truth: Sequence[float], n: int) -> float:
    """Expected truth of the best-scored rollout in a random subset of n, ties broken at random."""
    total, remaining = 0.0, len(scores)
    for score in sorted(set(scores), reverse=True):
        same = [
            value
            for score_of_one, value in zip(scores, truth, strict=True)
            if score_of_one == score
        ]
        total += (comb(remaining, n) - comb(remaining - len(same), n)) * fmean(same)
        remaining -= len(same)
    return total / comb(len(scores), n)


Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the items of a data set as token ids of one tokenizer."""

    store: Store
    tokenizer: Tokenizer
    context: int | None  # tokens

    async def examples(self, config: RunConfig, split: str) -> list[Example]:
        """The examples of a split that fit into the context. Raises ConfigError if there are none,
        or no such data set."""
        data = (await pin_dataset(self.store, config)).data
        items = await self.store.items(data.set_name, data.version, split=split)
        sides = await self.store.sides([side for item in items for side in item.sides])
        if any(call.images for calls in sides.values() for call in calls):
            raise ConfigError(
                f"data.name = {data.name!r}: its calls show images, and reward models read text "
                "only; train on a data set without images"
            )
        all_examples = [example for item in items for example in self._of(item, sides)]
        fitting = [
            e for e in all_examples if all(0 < len(t) <= (self.context or len(t)) for t in e.texts)
        ]
        if not fitting:
            raise ConfigError(
                f"data.name = {data.name!r}: of {len(items)} items of split {split!r} none is a "
                f"pair, a label or steps within the model's context of {self.context} tokens"
            )
        return fitting

    def _of(self, item: Item, sides: dict[str, list[Transition]]) -> Iterable[Example]:
        """The examples of an item. The text of a rollout is that of its last call, the text of a
        labelled step that of its call."""
        if item.kind == "steps":
            for call, label in zip(sides[item.chosen], item.steps, strict=False):
                if label is not None:
                    text = self.text(call)
                    yield Example(f"{item.id}/{call.id}", (text,), label, weight=item.weight)
        elif item.kind in ("pair", "label"):
            texts = tuple(self.text(sides[side][-1]) for side in item.sides)
            label = 1.0 if item.label is None else item.label
            more = len(texts[0]) - (len(texts[1]) if len(texts) > 1 else 0)
            yield Example(item.id, texts, label, item.margin or 0.0, item.weight, more)

    def text(self, call: Transition) -> Text:
        """The tokens of a call; if it has no token ids, as rendered by the chat template."""
        if call.exact:
            return (*call.prompt, *call.completion)
        messages = [*call.messages, *([call.answer] if call.answer else [])]
        chat = Chat(self.tokenizer, Codec(self.tokenizer))
        return chat.encode(messages, call.tools, add_generation_prompt=False)


async def train_reward_model(config: RunConfig, store: Store) -> Metrics:
    """Train and write the reward model of a run; returns its metrics on the held-out items.

    Raises ConfigError for a data set without usable items."""
    settings = config.reward_model
    model, tokenizer = _policy(config)
    reader = Reader(store, tokenizer, context_length(model))
    examples = await reader.examples(config, TRAIN)
    heldout = await reader.examples(config, TEST)
    scorer = make_scorer(model, tokenizer, config.learner.token_budget)
    trainer = RewardTrainer(scorer, tokenizer, margin=settings.margin)
    order = [
        example
        for epoch in range(settings.epochs)
        for example in random.Random(f"{config.seed}/{epoch}").sample(examples, len(examples))
    ]
    starts = range(0, len(order), settings.batch)
    schedule = AlgorithmConfig(lr=settings.lr, warmup=len(starts) // 10, schedule="linear")
    async with run_folder.hold(store, config.name, msgspec.to_builtins(config)) as held:
        for step, first in enumerate(starts):
            batch = order[first : first + settings.batch]
            loss = trainer.step(batch, learning_rate(schedule, step, len(starts)))
            await store.log(config.name, step, {"rm/loss": loss}, epoch=held.state.epoch)
        save_policy(Path(config.output, "reward_model"), trainer)
        metrics = preference_metrics(scorer, heldout)
        named = {f"rm/{name}": value for name, value in metrics.items()}
        await store.log(config.name, len(starts), named, epoch=held.state.epoch)
    return {"pairs and labels": len(examples), "held out": len(heldout), **metrics}


def _policy(config: RunConfig) -> tuple[PreTrainedModel, Tokenizer]:
    """Load the policy with which a reward model starts, and its tokenizer."""
    disable_progress_bar()
    torch.manual_seed(config.seed)
    source = policy_directory(config)[0]
    return load_model(source, config.policy.dtype, config.policy.device, config=config)


def load_reward_model(config: RunConfig, name: str) -> tuple[ScalarScorer, Tokenizer]:
    """Load a reward model with the vocabulary of the run's policy."""
    model, tokenizer = _policy(config)
    scalar = load_scalar("reward model", name, model, tokenizer)
    return ScalarScorer(scalar, token_budget=config.learner.token_budget), tokenizer


async def best_of_curve(
    store: Store, run: str, scorer: ScalarScorer, sizes: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Expected outcomes, by n, of the best-scored and of the truly best of n stored rollouts of a
    group, for groups with at least the largest n. Raises ConfigError if there is none."""
    rows = await store.rollouts(run, purpose=Purpose.TRAIN)
    groups = []
    for _, members in groupby(rows, key=lambda row: row.group):
        scored = [row for row in members if not isnan(row.reward())]
        calls = await store.calls([row.id for row in scored]) if len(scored) >= max(sizes) else {}
        last = [calls[row.id][-1] for row in scored if calls.get(row.id)]
        if len(last) == len(scored) and last and all(call.exact for call in last):
            groups.append((scorer(last).tolist(), [row.reward() for row in scored]))
    if not groups:
        raise ConfigError(f"--best-of: run {run!r} has no group of {max(sizes)} scored rollouts")
    return {
        n: (
            fmean(best_of_n(scores, truth, n) for scores, truth in groups),
            fmean(best_of_n(truth, truth, n) for _, truth in groups),
        )
        for n in sizes
    }
