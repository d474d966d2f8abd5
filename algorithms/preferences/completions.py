"""Preference losses: functions of the summed log-probs of whole rollouts, alone or in pairs.

    S_u = sum of log pi over the tokens of completion u     h_u = S_u - S_ref,u     n_u tokens
    psi_t = -d L / d S_u(t)

A completion is a rollout of the batch; S sums over its action tokens only. Means are over all pairs
(or labelled completions) of an optimizer step, so the gradient does not depend on how rows are
packed, as long as both completions of a pair are in one pack: see `Batch.row_unit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms.credit.core import rollout_rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.objective.prepare import KEEPS_PROMPTS, TrainedPolicy
from agentrl.algorithms.preferences.draft import How, choose_pairs
from agentrl.core.errors import TrainingError
from agentrl.core.types import Group, Reward, Rollout

WEIGHT, MISMATCHED = "weight", "mismatched"
"""Names of two further rewards: the weight of a pair or label (default 1), and 1 for rollouts whose
completion belongs to another prompt, from which a loss of labels estimates the KL."""


class LogProbSums(NamedTuple):
    """Sums of the log-probs of completions, and their numbers of tokens, float64 [U]."""

    current: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.current - self.reference

    def at(self, index: Tensor) -> LogProbSums:
        return LogProbSums(*(column[index] for column in self))


@dataclass(frozen=True, slots=True)
class CompletionLoss:
    """A loss over completions.

    fn: maps the `LogProbSums` of the better and the worse completions of P pairs to losses
    [P]; not paired: maps those of U completions, their labels and the mean KL estimate to losses
    [U]. reference: whether it reads log-probs of the reference. whole: whether it needs all
    completions of the step at once. nll: weight of the mean negative log-prob of the better ones'
    tokens. share: weight of the loss in psi. how, least, per_group: see `choose_pairs`. threshold:
    minimum reward of a desirable completion, if not paired."""

    fn: Callable[..., Tensor]
    options: Mapping[str, float]
    reward: str = "outcome"
    paired: bool = True
    reference: bool = True
    whole: bool = False
    nll: float = 0.0
    share: float = 1.0
    how: How = "extremes"
    least: float = 0.0
    per_group: int = 0
    threshold: float = 0.5

    @property
    def columns(self) -> tuple[str, ...]:
        return WEIGHT, MISMATCHED

    def terms(self, batch: Batch, reference: Tensor | None) -> CompletionTerms:
        return completion_terms(self, batch, reference)

    def row_unit(self, batch: Batch) -> Tensor:
        """One unit per group, because both completions of a pair must be in one micro-batch."""
        group = batch.rollout_group[batch.row_rollout]
        return torch.zeros_like(group) if self.whole else group

    def sampled(self, batch: Batch) -> Tensor:
        return (batch.rewards[MISMATCHED] != 1)[batch.token_rollout]


@dataclass(frozen=True, slots=True)
class CompletionTerms:
    """The constants of the U completions and P pairs of one optimizer step."""

    loss: CompletionLoss
    completion: Tensor  # int64 [N], completion of each token
    reference: Tensor  # float64 [U], sums of log-probs
    tokens: Tensor  # float64 [U], their numbers
    better: Tensor  # int64 [P]
    worse: Tensor  # int64 [P]
    label: Tensor  # float64 [U], 1 or 0; NaN: unknown
    weight: Tensor  # float64 [U]; the weight of a pair is that of its better completion
    mismatched: Tensor  # bool [U]
    ties: int  # groups without a pair

    @property
    def count(self) -> int:
        """Number of pairs, or of labels."""
        return len(self.better) or int((~self.label.isnan()).sum())

    def coefficients(self, current: Tensor, index: Tensor) -> Tensor:
        of = self.completion[index]
        sums = reduce_by(current, of, len(self.tokens)).requires_grad_()
        present = (self.tokens == 0).index_fill(0, of, True)
        (gradient,) = torch.autograd.grad(loss_value(self.loss, self, sums, present), sums)
        return -self.loss.share * gradient[of]

    def metrics(self, current: Tensor) -> dict[str, float]:
        """The metrics in `algorithms/PREFERENCES.md`."""
        return completion_metrics(self.loss, self, current)


def completion_terms(loss: CompletionLoss, batch: Batch, q: Tensor | None) -> CompletionTerms:
    """Choose the pairs or labels of a batch. q: reference log-probs [N] if the loss reads them."""
    U, completion = len(batch.rollouts), batch.token_rollout
    none = torch.full((U,), torch.nan, dtype=torch.float64)
    values = rollout_rewards(batch, loss.reward)
    mismatched = batch.rewards.get(MISMATCHED, none) == 1
    pairs: list[tuple[int, int]] = []
    ties = 0
    for number, name in enumerate(batch.groups if loss.paired else ()):
        members = (batch.rollout_group == number).nonzero().flatten().tolist()
        rewards = [float(values[i]) for i in members]
        chosen = choose_pairs(rewards, loss.how, loss.least, loss.per_group, name)
        pairs += [(members[a], members[b]) for a, b in chosen]
        ties += not chosen
    better, worse = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    label = torch.where(mismatched | values.isnan(), torch.nan, (values >= loss.threshold).double())
    return CompletionTerms(
        loss=loss,
        completion=completion,
        reference=torch.zeros_like(none) if q is None else reduce_by(q, completion, U),
        tokens=reduce_by(torch.ones(len(completion)), completion, U),
        better=better,
        worse=worse,
        label=none if loss.paired else label,
        weight=batch.rewards.get(WEIGHT, none).nan_to_num(nan=1.0),
        mismatched=mismatched,
        ties=ties,
    )


def loss_value(
    loss: CompletionLoss, terms: CompletionTerms, sums: Tensor, present: Tensor
) -> Tensor:
    """The scalar contribution to the loss of the completions with sums [U] that are `present` [U].

    Raises TrainingError if one completion of a pair is absent, or any completion of a `whole`
    loss."""
    a, b = terms.better, terms.worse
    if (present[a] != present[b]).any() or (loss.whole and not present.all()):
        raise TrainingError(
            "a micro-batch has only one completion of a pair: the learner must keep rows of one "
            "Batch.row_unit together, or compute psi before it splits them"
        )
    now = LogProbSums(sums, terms.reference, terms.tokens.clamp(min=1))
    if not loss.paired:
        labelled = (present & ~terms.label.isnan()).nonzero().flatten()
        kl = torch.zeros((), dtype=sums.dtype)
        if terms.mismatched.any():
            kl = now.log_ratio[terms.mismatched].detach().mean().clamp(min=0)
        losses = loss.fn(now.at(labelled), terms.label[labelled], kl, **loss.options)
        return (losses * terms.weight[labelled]).sum() / max(1, terms.count)
    a, b = a[present[a]], b[present[a]]
    losses = loss.fn(now.at(a), now.at(b), **loss.options)
    total = (losses * terms.weight[a]).sum() / max(1, terms.count)
    return total - loss.nll * sums[a].sum() / terms.tokens[terms.better].sum().clamp(min=1)


def completion_metrics(loss: CompletionLoss, terms: CompletionTerms, p: Tensor) -> dict[str, float]:
    sums = reduce_by(p, terms.completion, len(terms.tokens))
    beta, tokens = loss.options.get("beta", 1.0), terms.tokens.clamp(min=1)
    reward = beta * (sums - terms.reference if loss.reference else sums / tokens)
    a, b = terms.better, terms.worse
    if not loss.paired:
        a, b = (terms.label == 1).nonzero().flatten(), (terms.label == 0).nonzero().flatten()
    present = torch.ones_like(terms.tokens, dtype=torch.bool)
    values = {"preferences/loss": loss_value(loss, terms, sums, present)}
    values |= {f"rewards/{k}": reward[i].mean() for k, i in (("chosen", a), ("rejected", b))}
    values |= {f"logps/{k}": sums[i].mean() for k, i in (("chosen", a), ("rejected", b))}
    if loss.reference:
        values["logps/chosen_drop"] = (terms.reference - sums)[a].mean()
    if loss.paired:
        values["rewards/accuracies"] = (reward[a] > reward[b]).double().mean()
        values["rewards/margins"] = (reward[a] - reward[b]).mean()
        values["preferences/length_gap"] = (terms.tokens[a] - terms.tokens[b]).mean()
    metrics = {name: float(x) for name, x in values.items() if not x.isnan()}
    counted = {"preferences/pairs" if loss.paired else "preferences/labels": terms.count}
    return metrics | counted | {"preferences/ties": terms.ties}


def with_mismatched(groups: list[Group], _: TrainedPolicy | None = None) -> list[Group]:
    """Add to each group, for every rollout, a mismatched one with the completions of the previous
    rollout, to estimate the KL divergence; unchanged if they exist already."""
    rows = [row for group in groups for row in group.rollouts if row.transitions]
    if any(reward.name == MISMATCHED for row in rows for reward in row.rewards):
        return groups
    added: dict[str, list[Rollout]] = {}
    for i, row in enumerate(rows):
        added.setdefault(row.group, []).append(mismatched_rollout(row, rows[i - 1]))
    return [replace(g, rollouts=[*g.rollouts, *added.get(g.id, [])]) for g in groups]


KEEPS_PROMPTS.add(with_mismatched)


def mismatched_rollout(row: Rollout, other: Rollout) -> Rollout:
    """The first prompt of `row` with the completions of `other`. Drops calls that do not continue
    their rollout's first prompt."""
    first_call, first = row.transitions[0], other.transitions[0]
    moved = [
        replace(
            call,
            prompt=first_call.prompt + call.prompt[len(first.prompt) :],
            images=first_call.images + call.images[len(first.images) :],
        )
        for call in other.transitions
        if call.prompt[: len(first.prompt)] == first.prompt
        and call.images[: len(first.images)] == first.images
    ]
    mark = [Reward(value=1.0, name=MISMATCHED)]
    return replace(row, id=f"{row.id}~{other.id}", rewards=mark, transitions=moved)
