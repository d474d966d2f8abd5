"""Training on a data set instead of an agent's rollouts: the data set is the source of a run's
groups.

A completion becomes a rollout, and a pair a group of two, with the reward `LABEL`: 1 for the better
one. So loop, credit and learner are the usual ones. Invariant: the items of a step are a pure
function of the data set's version, the seed and the step; the reference's log-probs are computed
once, before the first step, and read from the store, so it is not in memory during training.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.auxiliary import load_auxiliary
from agentrl.algorithms.learners.base import Learner, Scored
from agentrl.algorithms.learners.factory import caches_reference
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import vocabulary_size
from agentrl.algorithms.model.scaled import Inputs, inputs_of
from agentrl.algorithms.objective.core import Algo, loss_terms
from agentrl.algorithms.preferences.completions import WEIGHT, CompletionLoss, mismatched_rollout
from agentrl.algorithms.preferences.draft import TEST, TRAIN
from agentrl.algorithms.sampling.collect import Collected, unreadable_reason
from agentrl.algorithms.sampling.tasks import shuffled
from agentrl.algorithms.train.features import Feature, LoadedRun
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.prepare import Retokenizer
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import (
    POLICY,
    Float32,
    Group,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Transition,
    float32,
)
from agentrl.store.base import Store
from agentrl.store.records import Item

LABEL = "label"  # the reward of a completion: 1 or 0 in a pair, else the label of the item
ITEMS_PER_READ = 64  # items per read
log = logging.getLogger("agentrl.algorithm")


def on_dataset(config: RunConfig, algo: Algo) -> Algo:
    """The algorithm with the items' labels as its reward. Raises ConfigError for an algorithm that
    learns from rewards of rollouts, and if a reward is set."""
    side = loss_of(algo)
    if side is None and algo.rewards:
        raise ConfigError(
            f"algorithm.preset = {config.algorithm.preset!r} learns from rewards of rollouts, and "
            "[data] has none; choose a preset of pairs or labels, see `agentrl algorithms`"
        )
    if "reward" in config.algorithm.options:
        raise ConfigError("algorithm.options.reward: items of [data] have labels; leave it out")
    if side is None:
        return algo
    labelled = dataclasses.replace(side, reward=LABEL)
    return dataclasses.replace(algo, rewards=(LABEL,), side=labelled)


def loss_of(algo: Algo) -> CompletionLoss | None:
    """The loss of pairs or labels; None for imitation."""
    return algo.side if isinstance(algo.side, CompletionLoss) else None


@dataclass(slots=True)
class StoredReference:
    """The reference's log-probs of the items that were collected, or evaluated, last: as
    `Updater.reference`, float64 [N]."""

    logprobs: Mapping[str, Float32] = field(default_factory=dict)  # by rollout id

    def __call__(self, batch: Batch) -> Tensor:
        columns = [torch.tensor(self.logprobs[id], dtype=torch.float64) for id in batch.rollouts]
        return torch.cat(columns) if columns else torch.empty(0)


def from_dataset(updater: Updater) -> Updater:
    """The updater for items: groups have one rollout per completion and are not in the store. The
    reference's log-probs are read from the store, if possible."""
    config, algo, side = updater.config, updater.algo, loss_of(updater.algo)
    sides = 2 if side is not None and side.paired else 1
    settings = replace(config.algorithm, group_size=sides)
    return dataclasses.replace(
        updater,
        config=replace(config, algorithm=settings),
        recorder=None,
        reference=StoredReference() if caches_reference(config, algo) else None,
        limit=None,
    )


def step_items(count: int, seed: int, step: int, size: int) -> list[int]:
    """The indices of a step's items. Each epoch has another random order of all `count` items."""
    positions = (divmod(n, count) for n in range(step * size, (step + 1) * size))
    return [shuffled(f"{seed}/data/{epoch}", count)[at] for epoch, at in positions]


@dataclass(slots=True)
class DatasetCollector:
    """Provides the items of each step as groups, and the reference's log-probs for them."""

    config: RunConfig
    store: Store
    epoch: int
    updater: Updater
    loaded: LoadedModel
    reference: str = ""  # digest of its weights
    items: dict[str, list[Item]] = field(default_factory=dict)  # split -> usable items
    tokenizer: Retokenizer = field(init=False)
    inputs: Inputs | None = field(init=False)  # reader of images, for an image-text model
    serves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        limit, learner = self.updater.preprocessor.context, self.updater.learner
        self.inputs = inputs_of(self.loaded.model)
        self.tokenizer = Retokenizer(self.loaded.tokenizer, learner, limit, inputs=self.inputs)

    async def prepare(self) -> None:
        """Read every item once, while the policy is still the initial one: drop unusable items, and
        compute missing log-probs of the reference. Raises ConfigError if no item is usable."""
        data, side = self.config.data, loss_of(self.updater.algo)
        kind = "demonstration" if side is None else "pair" if side.paired else "label"
        scorer = self._reference() if self.updater.reference is not None else None
        for split in (TRAIN, TEST):
            all_items = await self.store.items(data.set_name, data.version, split=split)
            items, lost = [item for item in all_items if item.kind == kind], Counter[str]()
            parts = [
                items[first : first + ITEMS_PER_READ]
                for first in range(0, len(items), ITEMS_PER_READ)
            ]
            self.items[split] = [i for part in parts for i in await self._readable(part, lost)]
            if lost:
                counted = ", ".join(f"{count} {why}" for why, count in lost.most_common())
                log.warning("%s items of split %r are left out: %s", lost.total(), split, counted)
            if split == TRAIN and not self.items[split]:
                counts = Counter(item.kind for item in all_items)
                kinds = ", ".join(f"{count} of kind {name}" for name, count in counts.items())
                raise ConfigError(
                    f"data.name = {data.name!r}: split {split!r} has "
                    f"{kinds or 'no items'}, and algorithm.preset = {self.updater.algo.name!r} "
                    f"learns from items of kind {kind}; none can be used"
                )
            good = sum(item.label == 1 for item in self.items[split])
            bad = sum(item.label == 0 for item in self.items[split])
            if good and bad and not 1 / 3 < good / bad < 3 and split == TRAIN:
                why = "let algorithm.options.desirable and undesirable make up for it"
                log.warning("%d items are good and %d are not: %s (2402.01306)", good, bad, why)
            indices = range(len(self.items[split]))
            if scorer is not None:
                for first in indices[::ITEMS_PER_READ]:
                    groups = await self._groups(split, indices[first : first + ITEMS_PER_READ], 0)
                    await self._score(scorer, groups)

    async def collect(self, step: int) -> Collected:
        """The items of a step as groups, which are not in the store."""
        split, size = TRAIN, self.config.algorithm.groups
        chosen = step_items(len(self.items[split]), self.config.seed, step, size)
        groups = await self._groups(split, chosen, step)
        await self._read_reference(groups)
        epochs = (step + 1) * size / len(self.items[split])
        return Collected(groups, [], {"data/epochs": epochs}, stored=False)

    async def evaluate(self, step: int, limit: int) -> None:
        """Log the metrics of the loss on at most `limit` held-out items (0: all)."""
        updater, items = self.updater, self.items[TEST][: limit or None]
        if not items or updater.algo.side is None:
            return
        groups = await self._groups(TEST, range(len(items)), step)
        await self._read_reference(groups)
        batch, logprobs = updater.score(
            updater.algo, updater.batch(await self._with_images(groups))
        )
        terms = loss_terms(updater.algo, batch, logprobs, fresh=True)
        assert terms.added is not None
        p = updater.learner.logprobs(batch).double()
        metrics = terms.added.metrics(p)
        named = {f"eval/{name}": value for name, value in metrics.items()}
        await self.store.log(self.config.name, step, named, epoch=self.epoch)

    def _reference(self) -> Callable[[Batch], Tensor]:
        """The function that computes the reference's log-probs. Sets the digest of its weights."""
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        scorer: Learner = self.updater.learner
        of: Scored = "reference" if self.loaded.adapters else "current"
        if name := self.config.reference.model:
            source = self.config.model_source(name)
            model = load_auxiliary("reference.model", source, model, tokenizer)
            budget = self.config.learner.token_budget
            scorer, of = TorchLearner(model, tokenizer, token_budget=budget), "current"
        state = blake2b(str(tokenizer.chat_template).encode(), digest_size=16)
        for key, tensor in model.state_dict().items():
            state.update(f"{key} {tensor.dtype}".encode())
            state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        self.reference = state.hexdigest()
        return partial(scorer.logprobs, of=of)

    async def _read_reference(self, groups: Sequence[Group]) -> None:
        """Read the reference's log-probs of these completions."""
        if isinstance(stored := self.updater.reference, StoredReference):
            names = [rollout.id for group in groups for rollout in group.rollouts]
            stored.logprobs = await self.store.logprobs(self.reference, names)

    async def _score(self, scorer: Callable[[Batch], Tensor], groups: Sequence[Group]) -> None:
        """Compute and store the reference's log-probs of completions that have none."""
        rows = {row.id: row for group in groups for row in group.rollouts}
        stored = await self.store.logprobs(self.reference, list(rows))
        missing = [replace(row, group=id) for id, row in rows.items() if id not in stored]
        if missing:
            alone = [Group(id=row.id, run="", step=0, rollouts=[row]) for row in missing]
            batch = self.updater.batch(await self._with_images(alone), 0)
            q = scorer(batch)
            logprobs = {
                id: float32(q[batch.token_rollout == u].tolist())
                for u, id in enumerate(batch.rollouts)
            }
            await self.store.add_logprobs(self.reference, logprobs)

    async def _readable(self, items: Sequence[Item], lost: Counter[str]) -> list[Item]:
        """The items whose completions can all be trained; completions are never truncated. lost:
        counts of dropped items by reason, updated in place."""
        sides = await self._sides(items)
        wrong = {name: self._defect(name, calls) for name, calls in sides.items()}
        for name in await self._unseen({name: sides[name] for name in sides if not wrong[name]}):
            wrong[name] = "with images, which the policy cannot read: see policy.vision"
        good = []
        for item in items:
            if why := next(filter(None, (wrong[side] for side in item.sides)), ""):
                lost[why] += 1
            else:
                good.append(item)
        return good

    def _defect(self, name: str, calls: Sequence[Transition | None]) -> str:
        """Why a completion cannot be trained; empty if it can."""
        rendered, limit = [call for call in calls if call], self.tokenizer.context
        if len(rendered) < len(calls) or not rendered:
            return "that the chat template does not render, or renders by rewriting earlier turns"
        if limit and any(len(call.prompt) + len(call.completion) > limit for call in rendered):
            return f"longer than the {limit} tokens that the model reads"
        bos = self.loaded.tokenizer.bos_token_id
        if bos is not None and list(rendered[0].prompt[:2]) == [bos, bos]:
            return "that begin with BOS twice: the chat template adds one, and the text has another"
        if not any(call.completion for call in rendered):
            return "with a completion without sampled tokens"
        group = Group(id=name, run="", step=0, rollouts=[_rollout(name, name, rendered, {})])
        sizes = {POLICY: vocabulary_size(self.loaded.model)}
        return "with tokens of another tokenizer" if unreadable_reason(group, sizes) else ""

    async def _with_images(self, groups: list[Group]) -> list[Group]:
        """The groups with the image tokens of their calls."""
        calls = [
            call for group in groups for rollout in group.rollouts for call in rollout.transitions
        ]
        if not any(call.images for call in calls):
            return groups
        if self.inputs:
            await self.inputs.fetch(self.store, self.config.name, calls)
        return self.updater.preprocessor.process(groups)[0]

    async def _unseen(self, sides: Mapping[str, Sequence[Transition | None]]) -> list[str]:
        """The completions with images that the model does not read."""
        shown = {name: [call for call in calls if call] for name, calls in sides.items()}
        shown = {
            name: shown_calls
            for name, shown_calls in shown.items()
            if any(call.images for call in shown_calls)
        }
        if self.inputs is None:
            return list(shown)
        alone = [
            Group(id=name, run="", step=0, rollouts=[_rollout(name, name, calls, {})])
            for name, calls in shown.items()
        ]
        rollouts = [group.rollouts[0] for group in await self._with_images(alone)]
        return [
            rollout.id
            for rollout in rollouts
            if not all(call.exact for call in rollout.transitions)
        ]

    async def _sides(self, items: Sequence[Item]) -> dict[str, list[Transition | None]]:
        """The calls of each completion with token ids, at temperature 1, at which the losses are
        defined; None for a call that the chat template cannot render."""
        names = [side for item in items for side in item.sides]
        sides = await self.store.sides(names)
        if self.inputs and (
            text := [c for side_calls in sides.values() for c in side_calls if not c.exact]
        ):
            await self.inputs.fetch(self.store, self.config.name, text)

        def with_tokens(call: Transition) -> Transition | None:
            exact = call if call.exact else self.tokenizer.tokenized(call)
            return exact and replace(exact, sampling=Sampling(), policy=POLICY)

        return {name: [with_tokens(call) for call in sides.get(name, [])] for name in names}

    async def _groups(self, split: str, chosen: Sequence[int], step: int) -> list[Group]:
        """Items by index as groups; single completions with the completion of the previous item."""
        all_items, loss = self.items[split], loss_of(self.updater.algo)
        moved = loss is not None and not loss.paired
        items, before = [all_items[i] for i in chosen], [all_items[i - 1] for i in chosen if moved]
        sides = await self._sides([*items, *before])

        def side(name: str, group: str, **rewards: float) -> Rollout:
            return _rollout(name, group, [call for call in sides[name] if call], rewards)

        groups = []
        for number, item in enumerate(items):
            id, label = f"{step}/{number}", 1.0 if item.label is None else item.label
            rows = [side(item.chosen, id, **{LABEL: label, WEIGHT: item.weight})]
            rows += [side(item.rejected, id, **{LABEL: 0.0})] if item.rejected else []
            rows += [mismatched_rollout(rows[0], side(before[number].chosen, id))] if moved else []
            groups.append(Group(id=id, run=self.config.name, step=step, rollouts=rows))
        return groups


def _rollout(
    id: str, group: str, calls: Sequence[Transition], rewards: Mapping[str, float]
) -> Rollout:
    """The rollout of a side."""
    return Rollout(
        id=id, run="", group=group, index=0, task={}, purpose=Purpose.TRAIN, step=0, attempts=1,
        state=RolloutState.SUCCEEDED, attempt=id, result=None, failure=None,
        transitions=list(calls),
        rewards=[Reward(value=value, name=name) for name, value in rewards.items()],
    )  # fmt: skip


class DataSet(Feature):
    """Training on a data set."""

    collector: DatasetCollector

    async def prepare(self, run: LoadedRun) -> None:
        updater, (model,) = run.policies.updaters[POLICY], run.models
        self.collector = DatasetCollector(run.config, run.store, run.state.epoch, updater, model)
        await self.collector.prepare()
        self.source = self.collector

    async def evaluate(self, step: int, limit: int) -> None:
        await self.collector.evaluate(step, limit)
