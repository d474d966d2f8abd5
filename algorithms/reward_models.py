"""Reward models: their scores are rewards of the groups of a step, read by name like a verifier's.

scalar: a Bradley-Terry model, arXiv 2203.02155: a checkpoint of
`AutoModelForSequenceClassification` with one label, the score of the state after a call's last
token. implicit: the sum over a call's tokens of beta * (log pi - log pi of a reference), for a
model trained on outcomes alone; PRIME, arXiv 2502.01456, iStar, 2509.19199. Invariant: a score
depends on its call alone; only training rollouts that succeeded are scored, on calls whose every
token the policy sampled; a call longer than the model's context has no score (missing, not 0).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.data.merge import trainable, valid
from agentrl.algorithms.learners.auxiliary import check_vocabulary, freeze, load_auxiliary
from agentrl.algorithms.learners.optimizer import (
    Optimizer,
    OptimizerKind,
    read_trained,
    save_trained,
)
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.forward import forward_logprobs, hidden_states, supported_packing
from agentrl.algorithms.model.packing import Pack, Packing, pack_rows
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import RunConfig, TorchLearnerConfig
from agentrl.core.config.rewards import ImplicitRewardModelConfig
from agentrl.core.errors import ConfigError, PolicyError, TrainingError
from agentrl.core.types import Group, Reward, Rollout, RolloutState, Scope, Transition, one_line

BETA = 0.05  # reward of an implicit reward model per nat of the log ratio, as in PRIME
SOURCE = "model:{}"  # `Reward.source`, with the model's name
PADDING = "<|reward_model_padding|>"  # the padding token, for a policy without one
Scorer = Callable[[Sequence[Transition]], Tensor]
"""Calls -> scores, float64 [calls]."""


@dataclass(frozen=True, slots=True)
class ScalarScorer:
    """The score of the state after a call's last token."""

    model: PreTrainedModel
    packing: Packing = "trie"
    token_budget: int = 4096

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        return self.scores([[*call.prompt, *call.completion] for call in calls])

    def scores(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The score of the state after each text's last token, float64 [texts]."""
        scores = torch.empty(len(texts), dtype=torch.float64)
        with torch.no_grad():
            for pack in self.packs(texts):
                scores[pack.index] = self.score(pack).double().cpu()
        return scores

    def packs(self, texts: Sequence[Sequence[int]]) -> list[Pack]:
        # A dummy action after the last token selects the state before it.
        rows = [_row([*tokens, 0], 1) for tokens in texts]
        return pack_rows(rows, self.packing, self.token_budget)

    def score(self, pack: Pack) -> Tensor:
        """Scores [n] of the texts `pack.index`, differentiable."""
        scores: Tensor = self.model.score(hidden_states(self.model, pack))
        return scores.squeeze(-1)


@dataclass(frozen=True, slots=True)
class ImplicitScorer:
    """beta times the log-ratio of model and reference, summed over a call, at temperature 1."""

    model: PreTrainedModel
    reference: PreTrainedModel
    beta: float
    packing: Packing = "trie"
    token_budget: int = 4096

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        rows = list(map(_row_of, calls))
        counts = torch.tensor([len(call.completion) for call in calls])
        of_call = torch.arange(len(calls)).repeat_interleave(counts)
        gap = self._logprobs(self.model, rows) - self._logprobs(self.reference, rows)
        return torch.zeros(len(calls), dtype=torch.float64).index_add(0, of_call, self.beta * gap)

    def _logprobs(self, model: PreTrainedModel, rows: Sequence[TokenRow]) -> Tensor:
        logprobs = torch.empty(sum(len(row.actions) for row in rows), dtype=torch.float64)
        with torch.no_grad():
            for pack in pack_rows(rows, self.packing, self.token_budget):
                logprobs[pack.index] = forward_logprobs(model, pack).double().cpu()
        return logprobs


@dataclass(frozen=True, slots=True)
class RewardModel:
    """A source of rewards for rollouts or calls.

    A rollout's reward is the score of its last call, whose prompt contains the earlier ones, for a
    scalar model, and the sum over its calls for an implicit one."""

    name: str
    scorer: Scorer
    scope: Scope = Scope.ROLLOUT
    # Whether a rollout's reward is the sum over its calls; false: the score of the last call.
    sums: bool = False
    context: int | None = None  # maximum of tokens that the scorer can read; None: no limit

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """Add this model's rewards to the rollouts of the groups. Raises TrainingError for rewards
        of the same name from another source, and for scores that are not finite."""
        scored = {
            rollout.id: calls
            for group in groups
            for rollout in group.rollouts
            if (calls := self.scored_calls(rollout))
        }
        calls = [call for calls_of_rollout in scored.values() for call in calls_of_rollout]
        scores = self.scorer(calls).tolist() if calls else []
        self._check(groups, scores)
        of_call = dict(zip((call.id for call in calls), scores, strict=True))

        def completed(rollout: Rollout) -> Rollout:
            new = self._rewards(scored[rollout.id], of_call) if rollout.id in scored else []
            return replace(rollout, rewards=[*rollout.rewards, *new])

        return [replace(group, rollouts=list(map(completed, group.rollouts))) for group in groups]

    def scored_calls(self, rollout: Rollout) -> list[Transition]:
        """The calls that a rollout's rewards are computed from."""
        if rollout.state is not RolloutState.SUCCEEDED or not valid(rollout):
            return []
        calls = [call for call in rollout.transitions if trainable(call) and len(call.completion)]
        if self.scope is Scope.TRANSITION:
            return list(filter(self._fits, calls))
        scored_calls = calls if self.sums else calls[-1:]
        return scored_calls if all(map(self._fits, scored_calls)) else []

    def _fits(self, call: Transition) -> bool:
        return self.context is None or len(call.prompt) + len(call.completion) <= self.context

    def _rewards(self, calls: Sequence[Transition], of_call: dict[str, float]) -> list[Reward]:
        scored = [(call.id, of_call[call.id]) for call in calls]
        source = SOURCE.format(self.name)
        if self.scope is Scope.ROLLOUT:
            total = sum(score for _, score in scored)
            return [Reward(value=total, name=self.name, source=source)]
        return [
            Reward(value=score, name=self.name, scope=self.scope, target=id, source=source)
            for id, score in scored
        ]

    def _check(self, groups: Sequence[Group], scores: Sequence[float]) -> None:
        rewards = [r for group in groups for row in group.rollouts for r in row.rewards]
        twice = sum(row.name == self.name and row.scope is self.scope for row in rewards)
        if twice:
            raise TrainingError(
                f"reward_models.{self.name}: {twice} rewards of that name come from elsewhere, "
                "such as the verifier; give the model another name"
            )
        if bad := sum(not torch.tensor(score).isfinite() for score in scores):
            raise TrainingError(
                f"reward_models.{self.name}: {bad} of {len(scores)} scores are NaN or infinite; "
                "check the model, or load it in float32"
            )


@dataclass(slots=True)
class ImplicitTrainer:
    """Trains an implicit reward model while the policy learns.

    The score s of a rollout is the sum over its calls. loss = "outcome": cross-entropy of
    sigmoid(s) to outcomes between 0 and 1; PRIME, arXiv 2502.01456. loss = "pairs":
    -log sigmoid(s_better - s_worse) over pairs of rollouts in one group, DPO of whole rollouts;
    iStar, arXiv 2509.19199, whose reference is the policy of the previous step, not a fixed one.
    Either gradient reaches the log-probs as one number per rollout, beta * d loss / d s.

    Owns the model's weights and their optimizer. Invariant: a batch is scored before the model
    learns from it, so no reward depends on its own outcome; a gradient that is not finite changes
    nothing."""

    source: RewardModel
    scorer: ImplicitScorer
    lr: float
    max_grad_norm: float = 1.0
    kind: OptimizerKind = "adamw"
    loss: Literal["outcome", "pairs"] = "outcome"
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.scorer.model.requires_grad_(True)
        parameters = dict(self.scorer.model.named_parameters())
        self.optimizer = Optimizer(parameters, kind=self.kind)

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """One optimizer step on the scored rollouts whose outcome is known.

        Returns reward_models/<name>/loss, nats; accuracy, the fraction of rollouts predicted on the
        right side of 1/2, or of pairs in the right order; grad_norm. Empty if there is no such
        rollout or pair. Raises TrainingError for outcomes outside 0 to 1."""
        scored = [
            (group.id, row, calls)
            for group in groups
            for row in group.rollouts
            if not math.isnan(row.reward()) and (calls := self.source.scored_calls(row))
        ]
        y = torch.tensor([row.reward() for _, row, _ in scored], dtype=torch.float64)
        s = torch.tensor([self._score(row) for _, row, _ in scored], dtype=torch.float64)
        # margin: logits of the cross-entropy; target: their labels
        margin, target = s.requires_grad_(), y
        if self.loss == "pairs":
            better, worse = _pairs([id for id, _, _ in scored], y)
            margin = s[better] - s[worse]
            target = torch.ones_like(margin)
        if not margin.numel():
            return {}
        self._check(target)
        loss = binary_cross_entropy_with_logits(margin, target)
        gradient = self.scorer.beta * torch.autograd.grad(loss, s)[0]
        try:
            self._backward([calls for _, _, calls in scored], gradient)
            norm = self.optimizer.clip(self.max_grad_norm)
            if math.isfinite(norm):
                self.optimizer.step(self.lr)
        finally:
            self.optimizer.zero_grad()
        name = f"reward_models/{self.source.name}"
        return {
            f"{name}/loss": loss.item(),
            f"{name}/accuracy": ((margin > 0) == (target > 0.5)).double().mean().item(),
            f"{name}/grad_norm": norm,
        }

    def save(self, directory: Path) -> None:
        """Write weights and optimizer into a checkpoint."""
        save_trained(self.scorer.model, self.optimizer, self._file(directory))

    def read(self, directory: Path) -> Callable[[], None]:
        """Read a checkpoint; returns a function that restores it. Raises PolicyError."""
        return read_trained(self.scorer.model, self.optimizer, self._file(directory))

    def _file(self, directory: Path) -> Path:
        return directory / "reward_models" / self.source.name / "model.safetensors"

    def _score(self, rollout: Rollout) -> float:
        """The model's current score of the rollout, from its rewards."""
        rows = (row for row in rollout.rewards if row.name == self.source.name)
        return sum(row.value for row in rows if row.source == SOURCE.format(row.name))

    def _backward(self, rollouts: Sequence[Sequence[Transition]], gradient: Tensor) -> None:
        """Accumulate the weights' gradient. gradient [rollouts]: d loss / d log-prob, the same for
        every token of a rollout."""
        model, scorer = self.scorer.model, self.scorer
        rows = [_row_of(call) for calls in rollouts for call in calls]
        counts = torch.tensor([sum(len(c.completion) for c in calls) for calls in rollouts])
        of_token = gradient.repeat_interleave(counts)
        small = model.device.type == "cpu"
        for pack in pack_rows(rows, scorer.packing, scorer.token_budget, small=small):
            logprobs = forward_logprobs(model, pack)
            torch.autograd.backward(logprobs, of_token[pack.index].to(logprobs))

    def _check(self, outcomes: Tensor) -> None:
        if outside := int(((outcomes < 0) | (outcomes > 1)).sum()):
            raise TrainingError(
                f"reward_models.{self.source.name}.lr: {outside} of {len(outcomes)} outcomes "
                "are not between 0 and 1, so they are not probabilities of success; let the "
                "verifier return such numbers, or leave train out"
            )


def _pairs(groups: Sequence[str], y: Tensor) -> tuple[Tensor, Tensor]:
    """Index pairs (better, worse) of rollouts in the same group, two int64 tensors [P]."""
    numbers = {id: number for number, id in enumerate(groups)}
    group = torch.tensor([numbers[id] for id in groups], dtype=torch.int64)
    better, worse = ((group[:, None] == group) & (y[:, None] > y)).nonzero(as_tuple=True)
    return better, worse


def load_scalar(
    key: str, name: str, policy: PreTrainedModel, tokenizer: Tokenizer
) -> PreTrainedModel:
    """Load a decoder with one score and the policy's vocabulary, on its device and in its dtype.
    Raises PolicyError for anything else."""
    try:
        own_tokenizer = AutoTokenizer.from_pretrained(name)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=policy.dtype, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors document no types
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {one_line(str(error))}") from error
    if fault := _head_problem(model, sorted(loading["missing_keys"])):
        raise PolicyError(
            f"{key} = {name!r}: {fault}; give a checkpoint of a decoder with a head of one label, "
            "as reward trainers save it"
        )
    check_vocabulary(key, name, own_tokenizer, tokenizer, added=PADDING)
    model.eval().requires_grad_(False)
    return model.to(policy.device)


def _head_problem(model: PreTrainedModel, missing: list[str]) -> str | None:
    if not hasattr(model, "score"):
        return f"{type(model).__name__} is not a decoder with a score head"
    if model.config.num_labels != 1:
        return f"it has {model.config.num_labels} labels"
    return f"it has no weights for {', '.join(missing)}" if missing else None


def _row_of(call: Transition) -> TokenRow:
    """The row of a call. Actions: its sampled tokens, at temperature 1."""
    return _row([*call.prompt, *call.completion], len(call.completion))


def _row(tokens: list[int], actions: int) -> TokenRow:
    """A row whose last `actions` tokens are actions."""
    ids = torch.tensor(tokens)
    return TokenRow(
        tokens=ids,
        actions=torch.arange(len(tokens) - actions, len(tokens)),
        logprobs=torch.zeros(actions),
        temperature=torch.ones(actions),
        transition=torch.zeros(actions, dtype=torch.int64),
    )


def with_reward_models(updater: Updater, model: LoadedModel) -> Updater:
    """The updater of a policy with rewards of reward models, which also trains the models that
    learn."""
    if not updater.config.reward_models:
        return updater
    models, trainers = make_reward_models(
        updater.config, model.model, model.tokenizer, model.source
    )
    if isinstance(updater.learner, TorchLearner):
        updater.learner.keep(*trainers)
    before = updater.preprocessor
    completers = (*before.completers, *models)
    return dataclasses.replace(
        updater, preprocessor=dataclasses.replace(before, completers=completers, trainers=trainers)
    )


def check_reward_models(config: RunConfig, algo: Algo) -> None:
    """Raise ConfigError for a setting without effect, and for a reward model that learns with a
    learner that cannot save it."""
    for key, why in _unused_settings(config, algo):
        raise ConfigError(f"{key} is set, {why}; leave it out")
    _refuse_training_elsewhere(config)


def _unused_settings(config: RunConfig, algo: Algo) -> Iterator[tuple[str, str]]:
    preset = f"and algorithm.preset = {algo.name!r}"
    for name, model in config.reward_models.items():
        reward = name if model.scope == "rollout" else f"{model.scope}:{name}"
        if reward not in algo.rewards:
            why = f"{preset} reads no reward {reward!r}; name it in algorithm.options, or"
            yield f"reward_models.{name}", why
        if isinstance(model, ImplicitRewardModelConfig) and not model.lr:
            changed = {
                field.name
                for field in msgspec.structs.fields(model)
                if getattr(model, field.name) != field.default
            }
            if "loss" in changed:
                yield f"reward_models.{name}.loss", "and it does not learn without lr"


def _refuse_training_elsewhere(config: RunConfig) -> None:
    """Raise ConfigError for a reward model that learns, with a learner that cannot save it."""
    for name, section in config.reward_models.items():
        learns = isinstance(section, ImplicitRewardModelConfig) and section.lr > 0
        if learns and not isinstance(config.learner, TorchLearnerConfig):
            raise ConfigError(
                f"reward_models.{name}.lr: checkpoints of learner.kind = "
                f"{config.learner.kind!r} hold no reward model; leave it out"
            )


def make_reward_models(
    config: RunConfig, policy: PreTrainedModel, tokenizer: Tokenizer, start: str
) -> tuple[tuple[RewardModel, ...], tuple[ImplicitTrainer, ...]]:
    """Load the reward models, with trainers for those that learn. Raises PolicyError for a model
    that cannot be loaded, has another vocabulary or the wrong kind.
    """
    models: list[RewardModel] = []
    trainers: list[ImplicitTrainer] = []
    packing, budget = config.learner.packed, config.learner.token_budget
    for name, settings in config.reward_models.items():
        key, scope = f"reward_models.{name}", Scope(settings.scope)
        if not isinstance(settings, ImplicitRewardModelConfig):
            source = config.model_source(settings.model)
            model = load_scalar(f"{key}.model", source, policy, tokenizer)
            packed = supported_packing(model, packing)
            scalar = ScalarScorer(model, packed, budget)
            models.append(RewardModel(name, scalar, scope, context=context_length(model)))
            continue
        source = config.model_source(settings.model) if settings.model else start
        model = freeze(load_auxiliary(f"{key}.model", source, policy, tokenizer))
        against = freeze(load_auxiliary(f"{key}.model", start, policy, tokenizer))
        scorer = ImplicitScorer(model, against, BETA, supported_packing(model, packing), budget)
        limits = [
            limit for scored in (model, against) if (limit := context_length(scored)) is not None
        ]
        context = min(limits, default=None)
        models.append(RewardModel(name, scorer, scope, sums=True, context=context))
        if settings.lr and isinstance(config.learner, TorchLearnerConfig):
            norm, kind = config.algorithm.max_grad_norm, config.learner.optimizer
            trainers.append(
                ImplicitTrainer(models[-1], scorer, settings.lr, norm, kind, settings.loss)
            )
    return tuple(models), tuple(trainers)
