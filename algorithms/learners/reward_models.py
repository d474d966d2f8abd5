"""Reward models: rewards that a model gives, read by name like those of a verifier.

scalar: a checkpoint with one score (`AutoModelForSequenceClassification`), that of the state after
the last token of a call; a Bradley-Terry model, arXiv 2203.02155. implicit: the sum over a call's
tokens of beta * (log pi - log pi of a reference), which a model trained on outcomes alone gives;
PRIME, arXiv 2502.01456, iStar, 2509.19199. Always true: a score depends on the call alone, not on
what is scored beside it; only training rollouts that succeeded are scored, by their calls of which
the policy sampled every token. What its model cannot read to the end has no score: it is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.data.merge import trainable, valid
from agentrl.algorithms.learners.reference import check_vocabulary
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.packing import Packing, forward_logprobs, hidden_states, pack_rows
from agentrl.errors import PolicyError, TrainingError
from agentrl.types import Group, Reward, Rollout, RolloutState, Scope, Transition

SOURCE = "model:{}"  # of the rewards, with the name of the model


class Scorer(Protocol):
    """Scores calls."""

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        """float64, one per call."""
        ...


@dataclass(frozen=True, slots=True)
class ScalarScorer:
    """Reads the score of a call after its last token."""

    model: PreTrainedModel
    packing: Packing = "trie"
    token_budget: int = 4096

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        scores = torch.empty(len(calls), dtype=torch.float64)
        # A token behind the last one asks for the state after it; what it is does not matter.
        rows = [_row([*call.prompt, *call.completion, 0], 1) for call in calls]
        with torch.no_grad():
            for pack in pack_rows(rows, self.packing, self.token_budget):
                score = self.model.score(hidden_states(self.model, pack))
                scores[pack.index] = score.squeeze(-1).double().cpu()
        return scores


@dataclass(frozen=True, slots=True)
class ImplicitScorer:
    """Reads how much likelier than the reference its model finds a call, at temperature 1."""

    model: PreTrainedModel
    reference: PreTrainedModel
    beta: float
    packing: Packing = "trie"
    token_budget: int = 4096

    def __call__(self, calls: Sequence[Transition]) -> Tensor:
        rows = list(map(row_of, calls))
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
    sums: bool = False  # whether that of a rollout is the sum over its calls, or that of the last
    context: int | None = None  # tokens that the scorer can read

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with its rewards in their rollouts. Raises TrainingError where a verifier gave
        one of the same name, and for scores that are not finite."""
        scored = [
            (rollout, calls)
            for group in groups
            for rollout in group.rollouts
            if (calls := self.scored_calls(rollout))
        ]
        calls = [call for _, each in scored for call in each]
        scores = self.scorer(calls).tolist() if calls else []
        self._check(groups, scores)
        of_call = dict(zip((call.id for call in calls), scores, strict=True))
        made = {rollout.id: self._rewards(each, of_call) for rollout, each in scored}
        return [
            replace(
                group,
                rollouts=[
                    replace(row, rewards=[*row.rewards, *made.get(row.id, [])])
                    for row in group.rollouts
                ],
            )
            for group in groups
        ]

    def scored_calls(self, rollout: Rollout) -> list[Transition]:
        """The calls whose scores its rewards are made of."""
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
        reason = " ".join(str(error).split())[:300]
        raise PolicyError(f"{key} = {name!r}: cannot be loaded: {reason}") from error
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
    if model.config.num_labels != 1:
        return f"it has {model.config.num_labels} labels"
    return f"it has no weights for {', '.join(missing)}" if missing else None


def row_of(call: Transition) -> TokenRow:
    """A call whose sampled tokens are asked about, at temperature 1."""
    return _row([*call.prompt, *call.completion], len(call.completion))


def _row(tokens: list[int], actions: int) -> TokenRow:
    """A sequence of which the last so many tokens are asked about."""
    ids = torch.tensor(tokens)
    return TokenRow(
        tokens=ids,
        actions=torch.arange(len(tokens) - actions, len(tokens)),
        logprobs=torch.zeros(actions),
        temperature=torch.ones(actions),
        transition=torch.zeros(actions, dtype=torch.int64),
    )
