"""The objective shared by all algorithms: an `Algo` record defines psi, the weight of each token.

    c_t   = prod_g fn_g(pool(logprob_num - logprob_den))
    psi_t = u_t * (c_t * A_t - sum_r beta_r * k'_r(current_t - logprob_r))
    loss  = - sum_t sg[psi_t] * log pi_t - sum_t eta_t * H_t,  eta_t = entropy * u_t

H is the entropy of the current policy's distribution at token t, with its exact gradient. `ratios`
names the models whose log-probs are compared, and k' is the derivative of a penalty (see
`kl_gradient`). A loss of whole rollouts (see `added_loss`) adds its own psi. `Terms` holds the
constants of one optimizer step, normalised over the whole step, so the gradient does not depend on
how the step is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, Credit, CriticValues, TokenKLPenalty
from agentrl.algorithms.credit.records import nested_records
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import How, Unit, reduce_by, units
from agentrl.algorithms.data.state import RememberedColumn
from agentrl.algorithms.objective.added_loss import AddedLoss, AddedTerms
from agentrl.algorithms.objective.distill import TopKDistillation
from agentrl.algorithms.objective.prepare import Prepare
from agentrl.algorithms.objective.ratios import (
    LOG_LIMIT,
    GateFn,
    GivenLogProbs,
    LogProbs,
    Model,
)
from agentrl.errors import TrainingError
from agentrl.plugins import where

IN_WORDS: dict[str, str] = {
    "current": "current policy", "old": "old policy", "sampler": "sampler",
    "reference": "reference model", "teacher": "teacher",
    "old_candidates": "old policy's most probable tokens",
}  # fmt: skip
Inner = Literal["mean", "sum", "const"]
KLEstimator = Literal["k1", "k2", "k3", "abs"]


@dataclass(frozen=True, slots=True)
class Gate:
    """A factor of the advantage: fn of the log-ratio num - den, pooled over a call or row.

    pre: changes a token's log-ratio before pooling; a changed token gets factor 0."""

    fn: GateFn
    num: Model = "current"
    den: Model = "old"
    by: Literal["transition", "row"] | None = None  # micro-batches do not split these units
    how: How = "mean"
    pre: GateFn | None = None


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """A penalty beta * k(current - den) on the divergence from a model, in the loss."""

    kind: KLEstimator
    beta: float
    den: Model = "reference"


@dataclass(frozen=True, slots=True)
class Average:
    """Aggregation of the token losses: mean over units, within a unit mean over its `parts` (empty:
    the unit is one part), and within a part by `inner`."""

    unit: tuple[Unit, ...] = ("row",)
    inner: Inner = "mean"
    const: float = 1.0  # the number of tokens to divide by, for inner = "const"
    parts: tuple[Unit, ...] = ()


TOKENS = Average(("all",))
ROW_SUMS = Average(("row",), "sum")


@dataclass(frozen=True)
class Algo:
    """An algorithm.

    keep: bool [N], the tokens in the loss; default all. rewards: references of the rewards that it
    reads; a batch may lack the `optional` ones. resample: replace groups in which all values of
    this reward are equal. side: an additional loss of whole rollouts or pairs. distill: imitation
    of a teacher over several tokens per position. prepare: changes of the claimed groups before
    credit, in this order."""

    credit: Credit
    gates: tuple[Gate, ...] = ()
    penalties: tuple[KLPenalty, ...] = ()
    agg: Average = Average()
    keep: Column | None = None
    entropy: float = 0.0  # coefficient of the policy's entropy in nats
    side: AddedLoss | None = None
    distill: TopKDistillation | None = None
    rewards: tuple[str, ...] = ("outcome",)
    optional: tuple[str, ...] = ()
    resample: str | None = None
    prepare: tuple[Prepare, ...] = ()
    old_from_versions: bool = False  # interpolate the old policy: see `staleness`
    name: str = "custom"

    @cached_property
    def needs(self) -> frozenset[Model]:
        """The models whose log-probs it reads, without the current policy."""
        read: set[Model] = {s for gate in self.gates for s in (gate.num, gate.den)}
        read |= {reg.den for reg in self.penalties}
        if any(isinstance(part, TokenKLPenalty) for part in nested_records(self.credit)):
            read.add("reference")
        if self.side is not None and self.side.reference:
            read.add("reference")
        if self.distill is not None:
            read.add("teacher")
        return frozenset(read) - {"current"}

    @cached_property
    def symbols(self) -> int:
        """Number of tokens whose log-probs it reads per position; 0: only the sampled one."""
        of_gates = max((getattr(gate.fn, "symbols", 0) for gate in self.gates), default=0)
        return of_gates if self.distill is None else self.distill.k

    @property
    def min_group_size(self) -> int:
        """The smallest group size that it can learn from."""
        return max(getattr(part, "min_group", 1) for part in (None, *nested_records(self.credit)))

    @cached_property
    def reads_critic(self) -> bool:
        """Whether it reads the values of a critic."""
        return any(isinstance(part, CriticValues) for part in nested_records(self.credit))

    @property
    def remembered(self) -> tuple[RememberedColumn, ...]:
        """The columns that it remembers between steps."""
        parts = nested_records((self.credit, self.keep))
        return tuple(dict.fromkeys(p for p in parts if isinstance(p, RememberedColumn)))

    @property
    def needs_greedy(self) -> bool:
        """Whether each group must contain a greedy rollout."""
        return any(getattr(part, "needs_greedy", False) for part in nested_records(self.credit))


@dataclass(frozen=True, slots=True)
class Terms:
    """The constants of one optimizer step on N tokens."""

    advantage: Tensor  # float64 [N]
    weight: Tensor  # float64 [N], 0: not in the loss
    sampler: Tensor  # float64 [N], its log-probs
    given: GivenLogProbs  # float64
    ids: dict[str, Tensor]  # int64 [N] each, units that gates pool over
    skip: str | None  # the reason why this batch has no gradient
    added: AddedTerms | None = None


def loss_terms(
    algo: Algo,
    batch: Batch,
    given: GivenLogProbs,
    *,
    fresh: bool = False,
    advantage: Tensor | None = None,
) -> Terms:
    """Terms of one optimizer step on the whole of `batch`.

    given: for an algorithm with `symbols` also those of the batch's symbols: before the first
    update, or of the teacher, without which `distill` has no effect. fresh: the old policy's are
    not needed, because this is the only step on the batch or because they are interpolated.
    advantage [N]: from `compute_advantages` of a larger batch that contains this one; default:
    computed here.

    Raises TrainingError for missing or non-finite log-probs, or infinite credit."""
    given, sampler = given.exact(), batch.behaviour.detach().double().cpu()
    who = f"algorithm {algo.name!r}, step {batch.step},"
    columns, read = {"sampler": sampler, **given.computed()}, set[str](algo.needs)
    if algo.symbols and not algo.distill:
        read.add("old_candidates")
    for name in sorted(read - ({"old", "old_candidates"} if fresh else set())):
        known = len(columns.get(name, ()))
        if name not in columns or known != batch.n_tokens:
            raise TrainingError(
                f"{who} needs {batch.n_tokens} log-probs of the {IN_WORDS[name]}, and there are "
                f"{known or 'none'}; choose a preset or options that do not read them"
            )
        _check_finite(columns[name], name, who)
    credit = compute_advantages(algo, batch) if advantage is None else advantage
    live = ~credit.isnan()
    credit = torch.where(live, credit, 0.0)
    added = None if algo.side is None else algo.side.terms(batch, given.reference)
    return Terms(
        advantage=credit,
        weight=loss_weights(algo, batch, live),
        sampler=sampler,
        given=given,
        ids={gate.by: units(batch, "token", gate.by) for gate in algo.gates if gate.by},
        skip=_skip(algo, batch, live, credit, added),
        added=added,
    )


def loss_weights(algo: Algo, batch: Batch, live: Tensor) -> Tensor:
    """The weight u of each token in the loss, float64 [N]. live [N]: tokens with an advantage."""
    agg = algo.agg
    unit, part = (units(batch, "token", *by) for by in (agg.unit, agg.unit + agg.parts))
    return weights(unit, agg.inner, agg.const, live, part)


def compute_advantages(algo: Algo, batch: Batch) -> Tensor:
    """Advantages float64 [N]; NaN for tokens that are missing or filtered out.

    Raises TrainingError for a credit that is infinite or not one number per token."""
    credit = algo.credit(batch)
    who = f"algorithm {algo.name!r}, step {batch.step}:"
    if not isinstance(credit, Tensor) or credit.shape != (batch.n_tokens,):
        found = f"{tuple(credit.shape)}" if isinstance(credit, Tensor) else type(credit).__name__
        raise TrainingError(
            f"{who} {where(algo.credit)} returned {found}; return a tensor with one advantage for "
            f"each of the {batch.n_tokens} tokens of the batch"
        )
    credit = credit.detach().double()
    if infinite := int(credit.isinf().sum()):
        raise TrainingError(f"{who} {infinite} of {credit.numel()} advantages are infinite")
    return credit if algo.keep is None else torch.where(algo.keep(batch), credit, torch.nan)


def loss_coefficients(algo: Algo, terms: Terms, p: Tensor, index: Tensor) -> Tensor:
    """psi of a micro-batch of whole rows, detached, with the dtype and device of p.

    p: current log-probs of the tokens `index` [n], or [n, K] of their symbols. Returns [n], or
    [n, K] for a `distill` on symbols. Raises TrainingError if p is not finite."""
    now, index = p.detach().double().cpu(), index.cpu()
    _check_finite(now, "current", f"algorithm {algo.name!r}")
    logprobs = logprobs_at(terms, now, index)
    total = terms.advantage[index]
    for _, _, factor in gate_factors(algo, terms, logprobs, index):
        total = total * factor
    for reg in algo.penalties:
        total = total - reg.beta * kl_gradient(logprobs.current - logprobs.of(reg.den), reg.kind)
    total = terms.weight[index] * total
    if terms.added is not None:
        total = total + terms.added.coefficients(logprobs.current, index)
    now_K, teacher_K = logprobs.candidates.current, logprobs.candidates.teacher
    if algo.distill is None or now_K is None or teacher_K is None:
        return total.to(p)
    pull_K = terms.weight[index, None] * algo.distill.pull(now_K, teacher_K)
    pull_K[:, 0] += total
    return pull_K.to(p)


def entropy_weights(algo: Algo, terms: Terms) -> Tensor | None:
    """Coefficient of the entropy at each token, float64 [N]; None without an entropy bonus."""
    return algo.entropy * terms.weight if algo.entropy else None


def pool(lr: Tensor, ids: Tensor | None, how: How = "mean") -> Tensor:
    """lr [n] reduced per unit and copied back to the tokens, float64 [n]; lr itself without ids."""
    return lr if ids is None else reduce_by(lr, ids, how=how)[ids]


def weights(
    unit: Tensor,
    inner: Inner = "mean",
    const: float = 1.0,
    mask: Tensor | None = None,
    part: Tensor | None = None,
) -> Tensor:
    """u float64 [N] = mask / live units / live parts of the unit / (tokens of the part | 1 |
    const).

    A unit or part is live if the mask keeps one of its tokens; the others are in no denominator.
    part: ids of the parts of the units; default: each unit is one part."""
    kept = torch.ones_like(unit, dtype=torch.bool) if mask is None else mask
    part = unit if part is None else part
    tokens = reduce_by(kept, part)[part].clamp(min=1)
    parts = reduce_by(kept / tokens, unit).round()  # every live part sums to 1
    u = kept.double() / (parts > 0).sum().clamp(min=1) / parts[unit].clamp(min=1)
    if inner == "mean":
        return u / tokens
    return u / const if inner == "const" else u


def kl_gradient(d: Tensor, kind: KLEstimator) -> Tensor:
    """Derivative d k / d p [n] of penalty k at d = p - s."""
    d = d.clamp(-LOG_LIMIT, LOG_LIMIT)
    return {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp(), "abs": d.sign()}[kind]


def kl_value(d: Tensor, kind: KLEstimator) -> Tensor:
    """Penalty k [n] at d = p - s: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d, abs = |d|."""
    d = d.clamp(-LOG_LIMIT, LOG_LIMIT)
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).expm1() + d, "abs": d.abs()}[kind]


def logprobs_at(terms: Terms, now: Tensor, index: Tensor) -> LogProbs:
    """The log-probs of the tokens `index` [n]. now: the current ones [n], or those of their symbols
    [n, K]."""
    if terms.given.old_candidates is not None and now.dim() == 1:
        raise TrainingError(
            "the learner returned the current log-probs of the sampled tokens, not of the symbols"
        )
    return terms.given.at(index).during(now, terms.sampler[index])


def gate_factors(
    algo: Algo, terms: Terms, logprobs: LogProbs, index: Tensor
) -> list[tuple[Gate, Tensor, Tensor]]:
    """Each gate with its pooled log-ratios [n] and factors [n]."""
    advantage = terms.advantage[index]
    found = []
    for gate in algo.gates:
        ids = terms.ids[gate.by][index] if gate.by else None
        raw = logprobs.of(gate.num) - logprobs.of(gate.den)
        kept = raw if gate.pre is None else gate.pre(raw, advantage, logprobs)
        lr = pool(kept, ids, gate.how)
        found.append((gate, lr, gate.fn(lr, advantage, logprobs) * (kept == raw)))
    return found


def _check_finite(x: Tensor, model: str, where: str) -> None:
    if bad := int((~x.isfinite()).sum()):
        raise TrainingError(
            f"{where} cannot compute psi: {bad} of {x.numel()} log-probs of the "
            f"{IN_WORDS[model]} are NaN or infinite"
        )


def _skip(
    algo: Algo, batch: Batch, live: Tensor, credit: Tensor, added: AddedTerms | None
) -> str | None:
    if not batch.n_tokens:
        return "the batch has no sampled tokens"
    if added is not None and added.count:
        return None
    if not live.any():
        return f"every token of {len(batch.groups)} groups is missing its reward or filtered out"
    # A critic learns from every known return, even if all advantages are 0.
    learns_without_credit = algo.penalties or algo.distill or algo.reads_critic or algo.entropy
    if not (learns_without_credit or credit.any()):
        return f"no rollout of {len(batch.groups)} groups did better or worse than the others"
    return None


class FrozenModel(Protocol):
    """A model of a learner that does not learn."""

    def finish(self, step: int) -> None:
        """Called after training step number `step`: copies the policy if it is time."""


@dataclass(frozen=True, slots=True)
class ReferenceControl:
    """The reference model, which may be updated during the run."""

    reference: FrozenModel | None = None  # None: not read, or the model without its adapter

    def tuned(self, algo: Algo) -> Algo:
        """The algorithm with the coefficient that its KL penalty has now."""
        return algo

    def observe(self, batch: Batch | None, rollouts: int) -> dict[str, float]:
        """Called after a training step on `rollouts` rollouts.

        batch: with reference log-probs; None if the algorithm reads none. Returns the metric
        reference/drift, if the batch has tokens."""
        if batch is None or not batch.n_tokens:
            return {}
        return {"reference/drift": kl_to_reference(batch)}

    def finish(self, step: int) -> None:
        """Called after the policy's training step `step`, before its checkpoint: updates the
        reference."""
        if self.reference is not None:
            self.reference.finish(step)


def kl_to_reference(batch: Batch) -> float:
    """Mean of sampler - reference over the tokens of a nonempty batch, in nats."""
    return float((batch.behaviour.double() - batch.reference.double()).mean())
