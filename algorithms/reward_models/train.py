"""`agentrl rm`: trains a reward model on a data set, and evaluates one.

Owns `<output>/reward_model`. The items of a step are a function of the data set's version, the seed
and the step, so the same command gives the same model, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isnan
from pathlib import Path
from statistics import fmean

import msgspec
import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl import run_owner
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.chat import Chat
from agentrl.algorithms.model.load import Tokenizer, load_model
from agentrl.algorithms.model.text import Codec
from agentrl.algorithms.preferences.pin import pin_dataset
from agentrl.algorithms.reward_models.scorers import ScalarScorer, load_scalar
from agentrl.algorithms.reward_models.trainer import (
    Example,
    RewardTrainer,
    Text,
    best_of_n,
    make_scorer,
    preference_metrics,
)
from agentrl.algorithms.train.checkpoint import save_policy
from agentrl.algorithms.train.load_policies import policy_directory
from agentrl.algorithms.train.optimize import learning_rate
from agentrl.config import AlgorithmConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.store.base import Store
from agentrl.store.records import Item
from agentrl.types import Purpose, Transition

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
        items = await self.store.items(data.name, data.version, split=split)
        sides = await self.store.sides([side for item in items for side in item.sides])
        if any(call.images for calls in sides.values() for call in calls):
            raise ConfigError(
                f"data.name = {data.name!r}: its calls show images, and reward models read text "
                "only; train on a data set without images"
            )
        every = [example for item in items for example in self._of(item, sides)]
        kept = [e for e in every if all(0 < len(t) <= (self.context or len(t)) for t in e.texts)]
        if not kept:
            raise ConfigError(
                f"data.name = {data.name!r}: of {len(items)} items of split {split!r} none is a "
                f"pair, a label or steps within the model's context of {self.context} tokens"
            )
        return kept

    def _of(self, item: Item, sides: dict[str, list[Transition]]) -> Iterable[Example]:
        """The examples of an item. A rollout has the text of its last call; a labelled step that of
        its call."""
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
        """The tokens of a call; if it has no ids, those of the chat template."""
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
    examples = await reader.examples(config, config.data.split)
    heldout = await reader.examples(config, config.data.heldout)
    scorer = make_scorer(model, tokenizer, settings.heads, config.learner.token_budget)
    trainer = RewardTrainer(scorer, tokenizer, settings.centre, settings.margin)
    order = [
        example
        for epoch in range(settings.epochs)
        for example in random.Random(f"{config.seed}/{epoch}").sample(examples, len(examples))
    ]
    starts = range(0, len(order), settings.batch)
    schedule = AlgorithmConfig(lr=settings.lr, warmup=len(starts) // 10, schedule="linear")
    async with run_owner.hold(store, config.name, msgspec.to_builtins(config)) as held:
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
    """Load the policy that a reward model starts from, and whose tokens it reads."""
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
        known = [row for row in members if not isnan(row.reward())]
        calls = await store.calls([row.id for row in known]) if len(known) >= max(sizes) else {}
        last = [calls[row.id][-1] for row in known if calls.get(row.id)]
        if len(last) == len(known) and last and all(call.exact for call in last):
            groups.append((scorer(last).tolist(), [row.reward() for row in known]))
    if not groups:
        raise ConfigError(f"--best-of: run {run!r} has no group of {max(sizes)} scored rollouts")
    return {
        n: (
            fmean(best_of_n(scores, truth, n) for scores, truth in groups),
            fmean(best_of_n(truth, truth, n) for _, truth in groups),
        )
        for n in sizes
    }
