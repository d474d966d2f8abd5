"""Reward models, whose rewards are read by name like those of a verifier.

scalar: a checkpoint with one score (`AutoModelForSequenceClassification`), that of the state after
the last token of a call; a Bradley-Terry model, arXiv 2203.02155. implicit: the sum over a call's
tokens of beta * (log pi - log pi of a reference), which a model trained on outcomes alone gives;
PRIME, arXiv 2502.01456, iStar, 2509.19199. Always true: a score depends on the call alone, not on
what is scored beside it; only training rollouts that succeeded are scored, by their calls of which
the policy sampled every token. A call longer than the model's context has no score: it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.data.merge import trainable, valid
from agentrl.algorithms.learners.auxiliary import check_vocabulary
from agentrl.algorithms.learners.optimizer import (
    Optimizer,
    OptimizerKind,
    read_trained,
    save_trained,
)
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.packing import (
    Pack,
    Packing,
    forward_logprobs,
    hidden_states,
    pack_rows,
)
from agentrl.errors import PolicyError, TrainingError
from agentrl.failures import brief
from agentrl.types import Group, Reward, Rollout, RolloutState, Scope, Transition

SOURCE = "model:{}"  # of the rewards, with the name of the model
ENSEMBLE = "reward_heads"  # in a checkpoint's configuration: that its labels are an ensemble's
Scorer = Callable[[Sequence[Transition]], Tensor]
"""Scores calls: float64 [calls]."""


@dataclass(frozen=True, slots=True)
class ScalarScorer:
    """Reads the score of a call after its last token; of an ensemble the mean score less
    `disagreement` times the standard deviation, arXiv 2310.02743."""

    model: PreTrainedModel
    packing: Packing = "trie"
    token_budget: int = 4096
    disagreement: float = 0.0

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        scores_CH = self.heads([[*call.prompt, *call.completion] for call in calls])
        if scores_CH.shape[1] == 1:
            return scores_CH[:, 0]
        return scores_CH.mean(1) - self.disagreement * scores_CH.std(1)

    def heads(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Every score of the state after each text's last token, float64 [texts, heads]."""
        scores = torch.empty(len(texts), self.model.config.num_labels, dtype=torch.float64)
        with torch.no_grad():
            for pack in self.packs(texts):
                scores[pack.index] = self.score(pack).double().cpu()
        return scores

    def packs(self, texts: Sequence[Sequence[int]]) -> list[Pack]:
        # A dummy action behind the last token asks for the state after it.
        rows = [_row([*tokens, 0], 1) for tokens in texts]
        return pack_rows(rows, self.packing, self.token_budget)

    def score(self, pack: Pack) -> Tensor:
        """Scores [n, heads] of the texts `pack.index`, differentiable."""
        scores: Tensor = self.model.score(hidden_states(self.model, pack))
        return scores


@dataclass(frozen=True, slots=True)
class ImplicitScorer:
    """Scores a call by the log-ratio of its model to the reference, at temperature 1."""

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
    """One source of rewards: of rollouts, or of calls.

    A scalar model judges a rollout by its last call, which shows what came before; an implicit one
    by the sum over its calls."""

    name: str
    scorer: Scorer
    scope: Scope = Scope.ROLLOUT
    sums: bool = False  # a rollout is scored by the sum over its calls; false: by its last call
    context: int | None = None  # tokens that the scorer can read

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with its rewards in their rollouts. Raises TrainingError where a verifier gave
        one of the same name, and for scores that are not finite."""
        scored = {
            row.id: calls
            for group in groups
            for row in group.rollouts
            if (calls := self.scored_calls(row))
        }
        calls = [call for each in scored.values() for call in each]
        scores = self.scorer(calls).tolist() if calls else []
        self._check(groups, scores)
        of_call = dict(zip((call.id for call in calls), scores, strict=True))

        def completed(row: Rollout) -> Rollout:
            own = self._rewards(scored[row.id], of_call) if row.id in scored else []
            return replace(row, rewards=[*row.rewards, *own])

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

    The score s of a rollout is the sum over its calls. The model learns from outcomes, numbers from
    0 to 1, by the cross-entropy of sigmoid(s) to them: PRIME, arXiv 2502.01456. Or from pairs of
    rollouts of one group, the better of which is to have the larger s, by
    -log sigmoid(s_better - s_worse): DPO of whole rollouts, as in iStar, arXiv 2509.19199, whose
    reference is the policy of the step before, not a fixed one. Either loss reaches the log-probs
    as one number per rollout, beta * d loss / d s.

    Owns the model's weights and their optimizer. Always true: a batch is scored before the model
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
        """One optimizer step on the rollouts that the source has scored and whose outcome is known.

        Returns reward_models/<name>/loss, nats; accuracy, the share of rollouts that it put on the
        right side of 1/2, or of pairs in the right order; grad_norm. Nothing where there is no such
        rollout or pair. Raises TrainingError for an outcome to learn from that is no number from 0
        to 1."""
        scored = [
            (group.id, row, calls)
            for group in groups
            for row in group.rollouts
            if not math.isnan(row.reward()) and (calls := self.source.scored_calls(row))
        ]
        y = torch.tensor([row.reward() for _, row, _ in scored], dtype=torch.float64)
        s = torch.tensor([self._score(row) for _, row, _ in scored], dtype=torch.float64)
        # margin: logit of each judgement; target: its label
        margin, target = s.requires_grad_(), y
        if self.loss == "pairs":
            better, worse = _pairs([id for id, _, _ in scored], y)
            margin = s[better] - s[worse]
            target = torch.ones_like(margin)
        if not margin.numel():
            return {}
        self._check(target)
        loss = binary_cross_entropy_with_logits(margin, target)
        pull = self.scorer.beta * torch.autograd.grad(loss, s)[0]
        try:
            self._backward([calls for _, _, calls in scored], pull)
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
        """Write into a checkpoint."""
        save_trained(self.scorer.model, self.optimizer, self._file(directory))

    def read(self, directory: Path) -> Callable[[], None]:
        """What `save` wrote, to be restored by a call. Raises PolicyError if it does not fit."""
        return read_trained(self.scorer.model, self.optimizer, self._file(directory))

    def _file(self, directory: Path) -> Path:
        return directory / "reward_models" / self.source.name / "model.safetensors"

    def _score(self, rollout: Rollout) -> float:
        """The reward that the model has just given the rollout."""
        mine = (row for row in rollout.rewards if row.name == self.source.name)
        return sum(row.value for row in mine if row.source == SOURCE.format(row.name))

    def _backward(self, rollouts: Sequence[Sequence[Transition]], pull: Tensor) -> None:
        """Accumulate the gradient of the loss, whose derivative by every log-prob of a rollout is
        `pull` [rollouts]."""
        model, scorer = self.scorer.model, self.scorer
        rows = [_row_of(call) for calls in rollouts for call in calls]
        counts = torch.tensor([sum(len(c.completion) for c in calls) for calls in rollouts])
        of_token = pull.repeat_interleave(counts)
        for pack in pack_rows(rows, scorer.packing, scorer.token_budget):
            logprobs = forward_logprobs(model, pack)
            torch.autograd.backward(logprobs, of_token[pack.index].to(logprobs))

    def _check(self, outcomes: Tensor) -> None:
        if odd := int(((outcomes < 0) | (outcomes > 1)).sum()):
            raise TrainingError(
                f"reward_models.{self.source.name}.train: {odd} of {len(outcomes)} outcomes are "
                "not between 0 and 1, so they are no probability of success; let the verifier "
                "give such a number, or leave train out"
            )


def _pairs(groups: Sequence[str], y: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [P] each: every two rollouts of one group, the first of which ended better."""
    numbers = {id: number for number, id in enumerate(groups)}
    of = torch.tensor([numbers[id] for id in groups], dtype=torch.int64)
    better, worse = ((of[:, None] == of) & (y[:, None] > y)).nonzero(as_tuple=True)
    return better, worse


def load_scalar(
    key: str, name: str, policy: PreTrainedModel, tokenizer: Tokenizer
) -> PreTrainedModel:
    """A decoder with one score that reads the token ids of the policy, on its device and in its
    dtype. Raises PolicyError for anything else."""
    try:
        own = AutoTokenizer.from_pretrained(name)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=policy.dtype, output_loading_info=True
        )
    except Exception as error:  # transformers and safetensors document no types
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {brief(str(error))}") from error
    if fault := _head_problem(model, sorted(loading["missing_keys"])):
        raise PolicyError(
            f"{key} = {name!r}: {fault}; give a checkpoint of a decoder with a head of one label, "
            "as reward trainers save it"
        )
    check_vocabulary(key, name, own, tokenizer)
    model.eval().requires_grad_(False)
    return model.to(policy.device)


def _head_problem(model: PreTrainedModel, missing: list[str]) -> str | None:
    if not hasattr(model, "score"):
        return f"{type(model).__name__} is no decoder with a score"
    if model.config.num_labels != getattr(model.config, ENSEMBLE, 1):
        return f"it has {model.config.num_labels} labels"
    return f"it has no weights for {', '.join(missing)}" if missing else None


def _row_of(call: Transition) -> TokenRow:
    """A call as a row whose actions are its sampled tokens, at temperature 1."""
    return _row([*call.prompt, *call.completion], len(call.completion))


def _row(tokens: list[int], actions: int) -> TokenRow:
    """A sequence whose last `actions` tokens are actions."""
    ids = torch.tensor(tokens)
    return TokenRow(
        tokens=ids,
        actions=torch.arange(len(tokens) - actions, len(tokens)),
        logprobs=torch.zeros(actions),
        temperature=torch.ones(actions),
        transition=torch.zeros(actions, dtype=torch.int64),
    )
