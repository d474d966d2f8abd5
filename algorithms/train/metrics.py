"""The metrics of a training step: pure functions of its groups, batch, terms and reports; and
records of failed optimizer steps (too many end the run) and of credit.

Invariant: an unknown metric is absent, never NaN or 0. Standard deviations are those of the
population. `docs/reference/metrics.md` has the table of names.

"Tokens in the loss" are the tokens of an optimizer step with a weight above 0, without those whose
reward is missing, filtered out or masked. A token that a gate clips is in the loss.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import inf, isfinite, isnan
from statistics import fmean, pstdev
from typing import Protocol

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import has_variance, level_of
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by, units
from agentrl.algorithms.data.merge import counterfactual, own_calls, reward_reference
from agentrl.algorithms.learners.base import StepReport
from agentrl.algorithms.objective.core import (
    Algo,
    Terms,
    effective_share,
    entropy_weights,
    gate_factors,
    kl_value,
    logprobs_at,
)
from agentrl.algorithms.objective.ratios import LogProbs, ratio
from agentrl.core.errors import TrainingError
from agentrl.core.types import (
    POLICY,
    Credit,
    Group,
    Rollout,
    RolloutState,
    Scope,
    Transition,
    step_number,
)

Metrics = dict[str, float]
"""Values by name, such as `reward/mean`."""
RULES: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max, "peak": max, "min": min, "forwarded": sum, "retries": sum
}  # fmt: skip
"""How to merge the optimizer steps of a training step, by a word of the metric's last part."""
LAGS = (0, 1, 2, 4, 8)  # lower bounds of the lag classes
COUNTS = frozenset(
    f"{noun}/{what}"
    for noun, whats in {
        "calls": ("inexact", "refused", "too_long", "tools_unseen", "processed"),
        "tokens": ("completion", "prompt", "trained", "forwarded"),
        "update": ("steps", "skipped", "bad", "undone"),
        "rollouts": ("usable",),
    }.items()
    for what in whats
) | {"calls", "rows"}
"""Metrics that are summed over the policies that learn in a step."""


# -- collected groups ------------------------------------------------------------------------------


def group_metrics(groups: Sequence[Group]) -> Metrics:
    """Counts of groups, and rewards without counterfactual rollouts; the same for every policy."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    played = [rollout for rollout in rollouts if not counterfactual(rollout)]
    kinds = Counter(row.failure.kind for row in rollouts if row.failure)
    return {
        "rollouts": len(rollouts),
        "rollouts/failed": sum(row.state is not RolloutState.SUCCEEDED for row in rollouts),
        **{f"rollouts/failed/{kind}": count for kind, count in kinds.items()},
        "groups": len(groups),
        **rewards(played),
        **agreement(groups),
        **by_role(played),
    }


def batch_metrics(groups: Sequence[Group], batch: Batch, policy: str = POLICY) -> Metrics:
    """Counts, rewards and completions of a step's groups. batch: the policy's batch of them."""
    calls = own_calls(groups, policy)
    return {
        **group_metrics(groups),
        "groups/dropped": len(groups) - len(batch.groups),
        "rollouts/usable": len(batch.rollouts),
        "calls": len(calls),
        "calls/refused": sum(not call.exact for call in calls),
        "tokens/completion": sum(len(call.completion) for call in calls),
        "tokens/prompt": sum(len(call.prompt) for call in calls),
        "tokens/trained": batch.n_tokens,
        "rows": len(batch.rows),
        **comparisons(batch),
        **completions(calls),
    }


def rewards(rollouts: Sequence[Rollout]) -> Metrics:
    """reward/mean, std of the outcomes; reward/<reference>/mean, std of every other reward; and
    reward/<reference>/<role>/mean, std of rewards of roles and calls."""
    by_reward: dict[str, list[float]] = {}
    for rollout in rollouts:
        roles = {call.id: call.role for call in rollout.transitions}
        for row in rollout.rewards:
            name = reward_reference(row)
            by_reward.setdefault(name, []).append(row.value)
            if row.scope is not Scope.ROLLOUT and row.target is not None:
                role = row.target if row.scope is Scope.ROLE else roles.get(row.target)
                if role is not None:
                    by_reward.setdefault(f"{name}/{role}", []).append(row.value)
    metrics: Metrics = {}
    for name, values in by_reward.items():
        finite = list(filter(isfinite, values))
        key = "reward" if name == "outcome" else f"reward/{name}"
        if finite:
            metrics |= {f"{key}/mean": fmean(finite), f"{key}/std": pstdev(finite)}
    return metrics


def agreement(groups: Sequence[Group]) -> Metrics:
    """reward/<name>/agreement of rewards from a model or judge: the share of pairs of a group's
    rollouts with different outcomes that the reward orders alike; equal rewards count half."""
    scores: dict[str, list[float]] = {}
    for group in groups:
        rewarded = [row for row in group.rollouts if not isnan(row.reward())]
        names = {
            r.name
            for row in rewarded
            for r in row.rewards
            if r.source.startswith(("model:", "judge:"))
        }
        for better, worse in permutations(rewarded, 2):
            for name in names if better.reward() > worse.reward() else ():
                gap = better.reward(name) - worse.reward(name)
                if not isnan(gap):
                    scores.setdefault(name, []).append((gap > 0) + (gap == 0) / 2)
    return {f"reward/{name}/agreement": fmean(shares) for name, shares in scores.items()}


def by_role(rollouts: Sequence[Rollout]) -> Metrics:
    """role/<role>/reward, if there are several roles: the mean of the role's own outcome or, if the
    verifier gives none, of the outcome of the rollouts in which it made a call. Includes roles of a
    game that ended before their first call; excludes roles played by a snapshot."""
    outcomes: dict[str, list[float]] = {}
    for rollout in rollouts:
        own_outcomes = {
            row.target: row.value
            for row in rollout.rewards
            if row.scope is Scope.ROLE and row.name == "outcome"
        }
        called = {call.role for call in rollout.transitions}
        for role in called | (rollout.seats.keys() & own_outcomes.keys()):
            value = own_outcomes.get(role, rollout.reward())
            if isfinite(value) and "@" not in rollout.seats.get(role, ""):
                outcomes.setdefault(role, []).append(value)
    if len(outcomes) < 2:
        return {}
    return {f"role/{role}/reward": fmean(values) for role, values in sorted(outcomes.items())}


def comparisons(batch: Batch) -> Metrics:
    """reward/<reference>/frac_* of the rewards that the algorithm reads: the share of groups with
    one known value (solo), of groups with several equal values (zero_std), of missing values."""
    metrics: Metrics = {}
    if not batch.groups:
        return metrics
    for name, x in batch.rewards.items():
        group = units(batch, level_of(name), "group")
        count = reduce_by(~x.isnan(), group, len(batch.groups))
        alike = reduce_by(has_variance(batch, name), group, len(batch.groups)) == 0
        metrics[f"reward/{name}/frac_solo"] = _mean(count == 1)
        metrics[f"reward/{name}/frac_zero_std"] = _mean(alike & (count > 1))
        if x.numel():
            metrics[f"reward/{name}/frac_missing"] = _mean(x.isnan())
    return metrics


def completions(calls: Sequence[Transition]) -> Metrics:
    """completion/length_mean, length_max in tokens, and completion/truncated, the share truncated
    by a token limit; with several roles also completion/<role>/*."""
    roles = sorted({call.role for call in calls})
    parts = {"completion": list(calls)} if calls else {}
    if len(roles) > 1:
        parts |= {f"completion/{role}": [c for c in calls if c.role == role] for role in roles}
    metrics: Metrics = {}
    for name, part in parts.items():
        lengths = [len(call.completion) for call in part]
        metrics[f"{name}/length_mean"] = fmean(lengths)
        metrics[f"{name}/length_max"] = max(lengths)
        metrics[f"{name}/truncated"] = fmean(call.finish == "length" for call in part)
    return metrics


def call_tokens(groups: Iterable[Group], policy: str = POLICY) -> dict[str, int]:
    """Number of prompt and completion tokens of each call, by id."""
    return {call.id: len(call.prompt) + len(call.completion) for call in own_calls(groups, policy)}


# -- one optimizer step ----------------------------------------------------------------------------


def optimizer_step(
    algo: Algo,
    batch: Batch,
    terms: Terms,
    report: StepReport,
    sizes: Mapping[str, int],
    lag: Tensor | None = None,
) -> Metrics:
    """Metrics of one optimizer step. sizes: from `call_tokens`. lag: `Batch.lag`, [N].
    policy/entropy: mean over tokens in the loss. policy/entropy_bonus: subtracted from the loss."""
    metrics = {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "tokens/forwarded": float(report.tokens),
        **ratio_metrics(algo, terms, report.current, lag),
        **report.metrics,
    }
    if terms.added is not None:
        metrics |= terms.added.metrics(report.current)
    live = terms.weight > 0
    if report.entropy is not None and live.any():
        metrics["policy/entropy"] = _mean(report.entropy[live])
        if (bonus := entropy_weights(algo, terms)) is not None:
            metrics["policy/entropy_bonus"] = float(bonus[live] @ report.entropy[live].double())
    metrics |= observation_metrics(batch, report.observations)
    if per_call := sum(sizes.get(call, 0) for call in batch.transitions):
        metrics["tokens/unique_fraction"] = report.tokens / per_call
    return metrics


def observation_metrics(batch: Batch, logprobs: Tensor) -> Metrics:
    """echo/loss, the cross-entropy of the observations before the update, in nats per token;
    echo/<source>/loss, if there are several sources. logprobs: [O], or none."""
    if not len(logprobs):
        return {}
    metrics = {"echo/loss": -_mean(logprobs), "echo/tokens": float(len(logprobs))}
    for number, source in enumerate(batch.sources if len(batch.sources) > 1 else ()):
        metrics[f"echo/{source}/loss"] = -_mean(logprobs[batch.observation_source == number])
    return metrics


def ratio_metrics(algo: Algo, terms: Terms, p: Tensor, lag: Tensor | None = None) -> Metrics:
    """Ratios and KL between the log-probs of models. p: of the policy before the update, [N] or
    [N, K].

    policy/clip_fraction: share of the tokens in the loss with an advantage other than 0 and a gate
    that is neither 1 nor the plain ratio; _low, _high: those with a ratio below, and above, 1.
    old/*: current policy against the policy before the first update of the batch. reference/*:
    current policy against the reference. sampler/*: policy before the first update against the
    sampler. Each has the mean and maximum ratio and the k1 and k3 estimates of the KL
    (joschu.net/blog/kl-approx.html). sampler/ess: effective sample size, as a share, of the weights
    that correct for the sampler, or of the plain ratios without correction. sampler/lag_<k>/*: the
    same and the share of clipped tokens, over tokens with a lag in [k, next of `LAGS`), if any lag
    is above 0. logprob_difference/*: |trainer - sampler| over all tokens, before the first update.
    """
    live, all_tokens = terms.weight > 0, torch.arange(len(p))
    logprobs = logprobs_at(terms, p.detach().double().cpu(), all_tokens)
    now = logprobs.current
    metrics: Metrics = {}
    low, high = torch.zeros_like(live), torch.zeros_like(live)
    correction = ratio(logprobs.old - logprobs.sampler)
    corrected = torch.ones_like(correction)
    for gate, lr, factor in gate_factors(algo, terms, logprobs, all_tokens):
        plain = torch.isclose(factor, ratio(lr), rtol=1e-9, atol=0.0)
        clipped = (factor != 1) & ~plain & (terms.advantage != 0)
        low, high = low | (clipped & (lr < 0)), high | (clipped & (lr >= 0))
        if (gate.num, gate.den) == ("old", "sampler"):
            corrected = correction = corrected * factor
    if live.any():
        metrics["policy/clip_fraction"] = _mean((low | high)[live])
        metrics["policy/clip_fraction_low"] = _mean(low[live])
        metrics["policy/clip_fraction_high"] = _mean(high[live])
    metrics |= _distance("old", now, terms.given.old, live)
    metrics |= _sampler(logprobs, correction, live)
    if lag is not None and (lag > 0).any():
        metrics |= _by_lag(logprobs, correction, low | high, live, lag)
    metrics |= _distance("reference", now, logprobs.reference, live, sampled=False)
    return metrics


def _by_lag(
    logprobs: LogProbs, correction: Tensor, clipped: Tensor, live: Tensor, lag: Tensor
) -> Metrics:
    metrics: Metrics = {}
    for first, end in pairwise((*LAGS, inf)):
        in_class, name = live & (lag >= first) & (lag < end), f"sampler/lag_{first}"
        if in_class.any():
            metrics |= _distance(name, logprobs.old, logprobs.sampler, in_class)
            metrics[f"{name}/ess"] = effective_share(correction[in_class])
            metrics[f"{name}/clip_fraction"] = _mean(clipped[in_class])
    return metrics


def _sampler(logprobs: LogProbs, correction: Tensor, live: Tensor) -> Metrics:
    metrics = _distance("sampler", logprobs.old, logprobs.sampler, live)
    if (weights := correction[live]).any():
        metrics["sampler/ess"] = effective_share(weights)
    if (gap := (logprobs.old - logprobs.sampler).abs()).numel():
        metrics["logprob_difference/mean"] = _mean(gap)
        metrics["logprob_difference/max"] = float(gap.max())
    return metrics


def _distance(
    word: str, p: Tensor, other: Tensor | None, live: Tensor, *, sampled: bool = True
) -> Metrics:
    """Ratio and KL of p to another model over live tokens. sampled: `other`, or a policy close to
    it, sampled the tokens; else p did, and the KL is KL(p || other)."""
    if other is None or not live.any():
        return {}
    d = (p - other)[live]
    if not d.isfinite().all():
        return {}
    toward = -d if sampled else d
    return {
        f"{word}/ratio_mean": _mean(ratio(d)),
        f"{word}/ratio_max": float(ratio(d).max()),
        f"{word}/kl_k1": _mean(kl_value(toward, "k1")),
        f"{word}/kl": _mean(kl_value(toward, "k3")),
    }


# -- a training step -------------------------------------------------------------------------


def advantages(planned: Sequence[Terms]) -> Metrics:
    """advantage/mean, std, min, max and frac_positive over the tokens in the loss of all planned
    optimizer steps."""
    live = [terms.advantage[terms.weight > 0] for terms in planned]
    x = torch.cat(live) if live else torch.empty(0)
    if not x.numel():
        return {}
    return {
        "advantage/mean": _mean(x),
        "advantage/std": float(x.std(correction=0)),
        "advantage/min": float(x.min()),
        "advantage/max": float(x.max()),
        "advantage/frac_positive": _mean(x > 0),
    }


def merge_optimizer_steps(steps: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of a training step's optimizer steps: by `RULES`, else the mean. Steps in
    which a metric is absent or not finite are left out."""
    by_metric: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            if isfinite(value):
                by_metric.setdefault(name, []).append(float(value))
    merged = {}
    for name, values in by_metric.items():
        words = name.rpartition("/")[2].split("_")
        rule = next((RULES[word] for word in words if word in RULES), fmean)
        merged[name] = rule(values)
    return merged


def merge_policies(shared: Metrics, measured: Mapping[str, Metrics]) -> Metrics:
    """The metrics of a step with several policies: `shared` ones, sums of counts, and the metrics
    of each policy under `<policy>/`."""
    metrics = dict(shared)
    for policy, policy_metrics in measured.items():
        for name, value in policy_metrics.items():
            if name in COUNTS:
                metrics[name] = metrics.get(name, 0.0) + value
            if name not in shared:
                metrics[f"{policy}/{name}"] = value
    return metrics


def throughput(metrics: Mapping[str, float]) -> Metrics:
    """Tokens per second. throughput/update: tokens forwarded by optimizer steps per second of the
    update. throughput/step: prompt and completion tokens of all calls per second of the step."""
    update_seconds = metrics.get("time/update", 0.0)
    step_seconds = update_seconds + metrics.get("time/rollouts", 0.0)
    calls = metrics.get("tokens/prompt", 0.0) + metrics.get("tokens/completion", 0.0)
    rates: Metrics = {}
    if update_seconds > 0 and "tokens/forwarded" in metrics:
        rates["throughput/update"] = metrics["tokens/forwarded"] / update_seconds
    if step_seconds > 0 and calls:
        rates["throughput/step"] = calls / step_seconds
    return rates


def _mean(x: Tensor) -> float:
    return float(x.double().mean())


# Consecutive; one may be caused by its batch, three mean that the policy has diverged.
MAX_BAD_STEPS = 3


class StepRecorder(Protocol):
    """Records the credit of the calls of a training step."""

    def open(self, algo: Algo, batch: Batch) -> None:
        """Begin a step. batch: the whole batch, from which baselines are computed."""

    def record(self, algo: Algo, part: Batch, terms: Terms, logprobs: Tensor) -> None:
        """Record an optimizer step on the batch or a part of it. logprobs: of the policy before the
        step, [N], or of the top-k tokens, [N, K]."""

    def stored(self) -> list[Credit]:
        """The recorded credit, for the commit of the step."""


@dataclass(frozen=True, slots=True)
class Dump:
    """All inputs of psi and the loss of one optimizer step, except the weights."""

    batch: Batch
    terms: Terms
    logprobs: Tensor  # float32 [N], of the policy; NaN also if it was not computed
    loss: float
    grad_norm: float


@dataclass(slots=True)
class BadSteps:
    """Counts consecutive optimizer steps that changed no weight; a restart begins at 0."""

    limit: int
    keep: Callable[[str, Dump], str] | None = None  # (name, batch) -> where it was stored
    streak: int = 0

    def bad(self, step: int, number: int, dump: Dump) -> None:
        """Keep optimizer step `number` of training step `step`, both from 0, and warn.
        Raises TrainingError after `limit` in a row."""
        self.streak += 1
        unknown = int((~dump.logprobs.isfinite()).sum())
        problem = (
            f"step {step_number(step)}: {unknown} of {dump.logprobs.numel()} log-probs of the "
            f"policy are not finite, the loss is {dump.loss:.3g}, the gradient norm "
            f"{dump.grad_norm:.3g}"
        )
        where = self.keep(f"{step:06d}.{number}", dump) if self.keep else ""
        if self.streak >= self.limit:
            location = f"; {where}" if where else ""
            raise TrainingError(
                f"{problem}, in {self.streak} consecutive optimizer steps{location}. Continue from "
                "the last checkpoint with a smaller algorithm.lr or policy.dtype = 'float32'"
            )
        location = f", and {where}" if where else ""
        warnings.warn(f"{problem}; it is skipped{location}", RuntimeWarning, stacklevel=3)
