"""The objective shared by all algorithms: an `Algo` record defines psi, the weight of each token.

    c_t   = prod_g fn_g(pool(logprob_num - logprob_den))
    psi_t = u_t * (c_t * A_t - sum_r beta_r * k'_r(current_t - logprob_r))
    loss  = - sum_t sg[psi_t] * log pi_t - sum_t eta_t * H_t,  eta_t = entropy * u_t

H is the entropy of the current policy's distribution at token t, with its exact gradient. `ratios`
names the models whose log-probs are compared, and k' is the derivative of a penalty (see
`kl_gradient`). A loss of whole rollouts, such as a loss of pairs (`AddedLoss`), adds its own psi,
and `Echo` adds the cross-entropy of observations. `Terms` holds the constants of one optimizer
step, normalised over the whole step, so the gradient does not depend on the split into
micro-batches.

A token's lag is the number of policy updates since it was sampled; 0 if its version is unknown.
Filters (`RecentTokens`), weights and metrics of tokens that older versions sampled depend on it.
`TopKDistillation` compares several tokens per position, with less noise than the sampled token
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from statistics import fmean
from typing import Literal, Protocol

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    CriticValues,
    TokenKLPenalty,
    nested_records,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import How, Unit, reduce_by, units
from agentrl.algorithms.data.merge import own_calls, token_versions
from agentrl.algorithms.data.state import RememberedColumn
from agentrl.algorithms.objective.prepare import Prepare, TrainedPolicy
from agentrl.algorithms.objective.ratios import (
    LOG_LIMIT,
    GateFn,
    GivenLogProbs,
    LogProbs,
    Model,
)
from agentrl.core.errors import TrainingError
from agentrl.core.plugins import where
from agentrl.core.types import POLICY, Group

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
    """A penalty beta * k(current - den) on the divergence from a model, in the loss. on: the tokens
    that have it; default: all."""

    kind: KLEstimator
    beta: float
    den: Model = "reference"
    on: GateFn | None = None


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


@dataclass(frozen=True, slots=True)
class Echo:
    """The cross-entropy of answers of tools and the environment, mean over the observations of an
    optimizer step, times `weight`. roles: of messages; tools: names, empty: all."""

    weight: float = 0.1
    roles: tuple[str, ...] = ("tool",)
    tools: tuple[str, ...] = ()


@dataclass(frozen=True)
class Algo:
    """An algorithm.

    gates: factors of the advantage. penalties: subtracted from it. agg: how the loss is averaged
    over tokens. keep: bool [N], the tokens in the loss; default all. rewards: references of the
    rewards that it reads; a batch may lack the `optional` ones. resample: replace groups in
    which all values of this reward are equal. side: an additional loss of whole rollouts or pairs.
    distill: imitation of a teacher over several tokens per position. echo: imitation of
    observations. telling: prompts with privileged text, which only training has. prepare: changes
    of the claimed groups before credit, in this order."""

    credit: Credit
    gates: tuple[Gate, ...] = ()
    penalties: tuple[KLPenalty, ...] = ()
    agg: Average = Average()
    keep: Column | None = None
    entropy: float = 0.0  # coefficient of the policy's entropy in nats
    side: AddedLoss | None = None
    distill: TopKDistillation | None = None
    echo: Echo | None = None
    telling: PrivilegedPrompts | None = None
    rewards: tuple[str, ...] = ("outcome",)
    optional: tuple[str, ...] = ()
    resample: str | None = None
    prepare: tuple[Prepare, ...] = ()
    old_from_versions: bool = False  # interpolate the old policy: see `old_policy_share`
    name: str = "custom"

    @cached_property
    def needs(self) -> frozenset[Model]:
        """The models whose log-probs the algorithm reads, except the current policy."""
        read: set[Model] = {s for gate in self.gates for s in (gate.num, gate.den)}
        read |= {reg.den for reg in self.penalties}
        if any(isinstance(part, TokenKLPenalty) for part in nested_records(self.credit)):
            read.add("reference")
        if self.side is not None and self.side.reference:
            read.add("reference")
        if self.distill is not None and not self.distill.told:
            read.add("teacher")
        if self.telling is not None and self.telling.teacher == "reference":
            read.add("reference")
        return frozenset(read) - {"current"}

    @cached_property
    def topk(self) -> int:
        """Number of tokens per position whose log-probs the algorithm reads; 0: only the sampled
        one."""
        of_gates = max((getattr(gate.fn, "topk", 0) for gate in self.gates), default=0)
        return of_gates if self.distill is None else self.distill.k

    @cached_property
    def reads_whole_step(self) -> bool:
        """Whether psi of a token depends on the log-probs of all tokens of the optimizer step."""
        functions = [g.fn for g in self.gates] + [reg.on for reg in self.penalties]
        return any(map(_of_whole_step, functions))

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
        parts = nested_records((self.credit, self.keep, self.telling))
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
    logprobs: GivenLogProbs,
    *,
    fresh: bool = False,
    advantage: Tensor | None = None,
) -> Terms:
    """Terms of one optimizer step on the whole of `batch`. logprobs: for an algorithm with `topk`
    also those of `Batch.topk_tokens`, before the first update or by the teacher; without them
    `distill` has no effect. fresh: whether log-probs of the old policy are not needed, because
    this is the only step on the batch or because they are interpolated. advantage [N]: from
    `compute_advantages` of a larger batch that contains this one; default: computed here.

    Raises TrainingError for missing or non-finite log-probs, or infinite credit."""
    logprobs, sampler = logprobs.exact(), batch.sampler_logprobs.detach().double().cpu()
    who = f"algorithm {algo.name!r}, step {batch.step},"
    columns, read = {"sampler": sampler, **logprobs.computed()}, set[str](algo.needs)
    if algo.topk and not algo.distill:
        read.add("old_candidates")
    for name in sorted(read - ({"old", "old_candidates"} if fresh else set())):
        count = len(columns.get(name, ()))
        if name not in columns or count != batch.n_tokens:
            raise TrainingError(
                f"{who} needs {batch.n_tokens} log-probs of the {IN_WORDS[name]}, and there are "
                f"{count or 'none'}; choose a preset or options that do not read them"
            )
        _check_finite(columns[name], name, who)
    credit = compute_advantages(algo, batch) if advantage is None else advantage
    live = ~credit.isnan()
    credit = torch.where(live, credit, 0.0)
    added = None if algo.side is None else algo.side.terms(batch, logprobs.reference)
    return Terms(
        advantage=credit,
        weight=loss_weights(algo, batch, live),
        sampler=sampler,
        given=logprobs,
        ids={gate.by: units(batch, "token", gate.by) for gate in algo.gates if gate.by},
        skip=_skip(algo, batch, live, credit, added, logprobs),
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
        returned = f"{tuple(credit.shape)}" if isinstance(credit, Tensor) else type(credit).__name__
        raise TrainingError(
            f"{who} {where(algo.credit)} returned {returned}; return a tensor with one advantage "
            f"for each of the {batch.n_tokens} tokens of the batch"
        )
    credit = credit.detach().double()
    if infinite := int(credit.isinf().sum()):
        raise TrainingError(f"{who} {infinite} of {credit.numel()} advantages are infinite")
    return credit if algo.keep is None else torch.where(algo.keep(batch), credit, torch.nan)


def loss_coefficients(algo: Algo, terms: Terms, p: Tensor, index: Tensor) -> Tensor:
    """psi of a micro-batch of whole rows, detached, with the dtype and device of p.

    p: current log-probs of the tokens `index` [n], or [n, K] of their top-k tokens. Returns [n], or
    [n, K] for a `distill` over several tokens. Raises TrainingError if p is not finite."""
    now, index = p.detach().double().cpu(), index.cpu()
    _check_finite(now, "current", f"algorithm {algo.name!r}")
    logprobs = logprobs_at(terms, now, index)
    total = terms.advantage[index]
    for _, _, factor in gate_factors(algo, terms, logprobs, index):
        total = total * factor
    for reg in algo.penalties:
        pull = reg.beta * kl_gradient(logprobs.current - logprobs.of(reg.den), reg.kind)
        if reg.on is not None:
            lr = logprobs.current - logprobs.of(reg.den)
            pull = pull * _factors(reg.on, lr, terms, logprobs, index)
        total = total - pull
    total = terms.weight[index] * total
    if terms.added is not None:
        total = total + terms.added.coefficients(logprobs.current, index)
    now_K, teacher_K = logprobs.candidates.current, logprobs.candidates.teacher
    if algo.distill is None or now_K is None or teacher_K is None:
        return total.to(p)
    has_teacher = ~teacher_K.isnan().any(-1)  # a call without privileged text has no teacher
    pull_K = torch.zeros_like(now_K)
    pull_K[has_teacher] = algo.distill.pull(now_K[has_teacher], teacher_K[has_teacher])
    pull_K = terms.weight[index, None] * pull_K
    pull_K[:, 0] += total
    return pull_K.to(p)


def entropy_weights(algo: Algo, terms: Terms) -> Tensor | None:
    """Coefficient of the entropy at each token, float64 [N]; None without an entropy bonus."""
    return algo.entropy * terms.weight if algo.entropy else None


def observation_weights(algo: Algo, batch: Batch) -> Tensor | None:
    """omega of each observation, float64 [O]; None if the algorithm learns from none."""
    count = len(batch.observation_row)
    if algo.echo is None or not count:
        return None
    return torch.full((count,), algo.echo.weight / count, dtype=torch.float64)


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

    A unit or part is live if the mask keeps one of its tokens; others are not in any denominator.
    part: ids of the parts of the units; default: each unit is one part."""
    live = torch.ones_like(unit, dtype=torch.bool) if mask is None else mask
    part = unit if part is None else part
    tokens = reduce_by(live, part)[part].clamp(min=1)
    parts = reduce_by(live / tokens, unit).round()  # every live part sums to 1
    u = live.double() / (parts > 0).sum().clamp(min=1) / parts[unit].clamp(min=1)
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
    """The log-probs of the tokens `index` [n]. now: the current log-probs [n], or those of the
    top-k tokens [n, K]."""
    if terms.given.old_candidates is not None and now.dim() == 1:
        raise TrainingError(
            "the learner returned the current log-probs of the sampled tokens, not of the top-k "
            "tokens"
        )
    return terms.given.at(index).during(now, terms.sampler[index])


def gate_factors(
    algo: Algo, terms: Terms, logprobs: LogProbs, index: Tensor
) -> list[tuple[Gate, Tensor, Tensor]]:
    """Each gate with its pooled log-ratios [n] and factors [n]."""
    advantage = terms.advantage[index]
    factors = []
    for gate in algo.gates:
        ids = terms.ids[gate.by][index] if gate.by else None
        raw = logprobs.of(gate.num) - logprobs.of(gate.den)
        changed = raw if gate.pre is None else gate.pre(raw, advantage, logprobs)
        lr = pool(changed, ids, gate.how)
        factor = _factors(gate.fn, lr, terms, logprobs, index)
        factors.append((gate, lr, factor * (changed == raw)))
    return factors


def _of_whole_step(fn: GateFn | None) -> bool:
    """Whether the gate compares the tokens of an optimizer step with one another."""
    return getattr(fn, "whole_step", False)


def _factors(fn: GateFn, lr: Tensor, terms: Terms, logprobs: LogProbs, index: Tensor) -> Tensor:
    """Factors [n]. A function of the whole step gets the tokens in the loss, in their order,
    independent of the packing; other tokens have factor 1."""
    advantage = terms.advantage[index]
    if not _of_whole_step(fn):
        return fn(lr, advantage, logprobs)
    order = index.argsort()
    order = order[terms.weight[index[order]] > 0]
    factor = torch.ones_like(lr)
    factor[order] = fn(lr[order], advantage[order], logprobs.at(order)).double()
    return factor


def _check_finite(x: Tensor, model: str, where: str) -> None:
    if bad := int((~x.isfinite()).sum()):
        raise TrainingError(
            f"{where} cannot compute psi: {bad} of {x.numel()} log-probs of the "
            f"{IN_WORDS[model]} are NaN or infinite"
        )


def _skip(
    algo: Algo,
    batch: Batch,
    live: Tensor,
    credit: Tensor,
    added: AddedTerms | None,
    logprobs: GivenLogProbs,
) -> str | None:
    if not batch.n_tokens:
        return "the batch has no sampled tokens"
    if (added is not None and added.count) or observation_weights(algo, batch) is not None:
        return None
    if not live.any():
        return f"every token of {len(batch.groups)} groups is missing its reward or filtered out"
    # A critic learns from every known return, even if all advantages are 0.
    others = algo.penalties or algo.reads_critic or algo.entropy
    if not (others or _is_taught(algo, logprobs) or credit.any()):
        return f"no rollout of {len(batch.groups)} groups did better or worse than the others"
    return None


def _is_taught(algo: Algo, logprobs: GivenLogProbs) -> bool:
    """Whether a distillation has a teacher: the policy without privileged text has none."""
    if algo.distill is None or not algo.distill.told:
        return algo.distill is not None
    teacher_K = logprobs.teacher_candidates
    return teacher_K is not None and not bool(teacher_K.isnan().all())


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
    return float((batch.sampler_logprobs.double() - batch.reference.double()).mean())


class PrivilegedPrompts(Protocol):
    """Prompts with privileged text, which the policy does not see when it acts; its calls are
    scored with them."""

    @property
    def teacher(self) -> Literal["current", "reference"]:
        """The stream with log-probs given the privileged text."""

    @property
    def by_token(self) -> bool:
        """Whether credit reads `Batch.told`, the gap of each token."""

    def token_gap(self, batch: Batch, groups: list[Group], policy: TrainedPolicy) -> Tensor:
        """`Batch.told`."""

    def told(
        self, batch: Batch, groups: list[Group], policy: TrainedPolicy
    ) -> tuple[Batch, Tensor, Tensor]:
        """The batch of calls with privileged text, and the indices of the same tokens in `batch`
        and in it, int64 [n] each."""


class AddedTerms(Protocol):
    """The constants of the loss in one optimizer step."""

    @property
    def count(self) -> int:
        """The number of its examples; 0: it has no gradient."""

    def coefficients(self, current: Tensor, index: Tensor) -> Tensor:
        """psi float64 [n] of a micro-batch of whole units. current [n]: log-probs of the
        tokens `index`."""

    def metrics(self, current: Tensor) -> dict[str, float]:
        """Metrics of the step. current [N]: log-probs before the update."""


class AddedLoss(Protocol):
    """A loss that is added to the policy gradient."""

    @property
    def reference(self) -> bool:
        """Whether it reads the log-probs of the reference."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Further rewards that it reads, which rollouts may lack."""

    def terms(self, batch: Batch, reference: Tensor | None) -> AddedTerms:
        """reference: its log-probs [N], if it reads them."""

    def row_unit(self, batch: Batch) -> Tensor:
        """Ids of the rows, int64 [R]; rows with one id must be in one micro-batch."""

    def sampled(self, batch: Batch) -> Tensor:
        """Whether each token was sampled after its prompt, bool [N]."""


@dataclass(frozen=True, slots=True)
class RecentTokens:
    """Filter, bool [N]: the tokens of version `oldest` or later that `keep` (None: all) keeps. The
    reward of a rollout without such tokens still counts in its group's baseline."""

    oldest: int
    keep: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        recent = ~batch.too_old(self.oldest)
        return recent if self.keep is None else recent & self.keep(batch)


def withhold(algo: Algo, batch: Batch, oldest: int) -> Algo:
    """`algo`, with tokens of versions before `oldest` filtered out if the batch has any."""
    if not batch.too_old(oldest).any():
        return algo
    return replace(algo, keep=RecentTokens(oldest, algo.keep))


def old_policy_share(lag: Tensor) -> Tensor:
    """The fraction s = (lag - 1) / lag in the interpolated old policy, whose log-probs are
    sampler + s (current - sampler), float64 [N]; 1 at lag 0, where the sampler is the policy
    itself. A-3PO, arXiv 2512.06547."""
    return torch.where(lag > 0, (lag - 1).double() / lag.clamp(min=1), 1.0)


def effective_share(weights: Tensor) -> float:
    """Effective sample size of n weights divided by n, (sum w)^2 / (n sum w^2); 1 if all are 0."""
    total = weights.square().sum()
    return float(weights.sum().square() / total) / weights.numel() if total > 0 else 1.0


def staleness_metrics(
    step: int, groups: Sequence[Group], policy: str = POLICY, *, version: int | None = None
) -> dict[str, float]:
    """Age of the data of step `step`. staleness/steps_mean, steps_max: steps from the one that a
    group was planned for to this one; below 0 if it is trained earlier, which only
    `algorithm.group_order = "completed"` allows. staleness/version_mean, version_p95, version_max:
    updates of the policy since a token was sampled, over tokens with a known version.
    staleness/mixed: number of calls during which weights changed. version: the policy's current
    version, default `step`."""
    now = step if version is None else version
    metrics: dict[str, float] = {}
    if ages := [step - group.step for group in groups]:
        metrics |= {"staleness/steps_mean": fmean(ages), "staleness/steps_max": max(ages)}
    calls = [c for c in own_calls(groups, policy) if c.version is not None and c.completion]
    if calls:
        lags = now - torch.cat(list(map(token_versions, calls)))
        metrics["staleness/version_mean"] = float(lags.double().mean())
        metrics["staleness/version_p95"] = float(lags.kthvalue(ceil(0.95 * lags.numel())).values)
        metrics["staleness/version_max"] = float(lags.max())
        metrics["staleness/mixed"] = sum(bool(call.spans) for call in calls)
    return metrics


MIN_REST = 1e-6  # probability of all other tokens; smaller values are rounding errors


@dataclass(frozen=True, slots=True)
class TopKDistillation:
    """beta times the KL divergence between teacher and policy over k tokens and one symbol for all
    others; without that symbol, probability outside of the k tokens would cost nothing. The k
    tokens are the sampled one and the most probable ones of the teacher (of = "teacher": KL(teacher
    || policy)) or of the policy before the first update (of = "policy": KL(policy || teacher)).
    GKD, arXiv 2306.13649."""

    k: int
    beta: float
    of: Literal["teacher", "policy"]
    told: bool = False  # the teacher is the policy with other prompts: see `Algo.telling`

    def pull(self, current_K: Tensor, teacher_K: Tensor) -> Tensor:
        """psi = -d beta KL / d current_K, float64. current_K, teacher_K: log-probs of policy and
        teacher, [n, K]."""
        with torch.enable_grad():
            leaf_K = current_K.detach().double().requires_grad_()
            policy, teacher = with_rest(leaf_K), with_rest(teacher_K.double())
            first, second = (teacher, policy) if self.of == "teacher" else (policy, teacher)
            loss = self.beta * (first.exp() * (first - second)).sum()
        return -torch.autograd.grad(loss, leaf_K)[0]


def with_rest(logprobs_K: Tensor) -> Tensor:
    """Log-probs [n, K + 1] with that of all other tokens appended."""
    rest = (1 - logprobs_K.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST)
    return torch.cat((logprobs_K, rest.log()), -1)
