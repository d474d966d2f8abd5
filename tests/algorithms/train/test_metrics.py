"""Every metric against what the definition says, computed the slow way."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.base import StepReport
from agentrl.algorithms.objective.core import Algo, Gate, loss_terms, staleness_metrics
from agentrl.algorithms.objective.ratios import Clip, GivenLogProbs, Ratio, Truncate
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.algorithms.train.metrics import (
    advantages,
    batch_metrics,
    by_role,
    call_tokens,
    completions,
    group_metrics,
    merge_optimizer_steps,
    optimizer_step,
    ratio_metrics,
    throughput,
)
from agentrl.core.config import resolve
from agentrl.core.types import ErrorKind, Failure, Reward, Rollout, RolloutState, Scope, Transition
from tests import factories
from tests.algorithms.objective.test_objective import three_rows


def call(name: str, tokens: int, **more: Any) -> Transition:
    known = {"attempt": name, "role": "agent", "version": 0, "logprob": -0.5}
    return factories.call(name, (1, 2, 3), range(tokens), **known | more)


def rollout(name: str, rewards: Sequence[Reward], *calls: Transition, **more: Any) -> Rollout:
    return factories.rollout(name, calls, rewards, **more)


def outcome(value: float) -> Reward:
    return Reward(value=value)


# -- what was collected ----------------------------------------------------------------------------


def test_counts_of_what_was_collected() -> None:
    lost = {
        "state": RolloutState.FAILED,
        "failure": Failure(kind=ErrorKind.TIMEOUT, message="late"),
    }
    good = factories.group(
        rollout("a", [outcome(1)], call("a", 2), call("judged", 9, policy="judge")),
        rollout("b", [outcome(0)], call("b", 4)),
        rollout("c", [], call("c", 1), **lost),
        id="good",
    )
    poor = factories.group(rollout("d", [outcome(1)], call("d", 5)), id="poor")
    groups = [good, poor]
    metrics = batch_metrics(groups, build_batch(groups, min_group=2))
    expected = {
        "rollouts": 4,
        "rollouts/failed": 1,
        "rollouts/failed/timeout": 1,
        "groups": 2,
        "rollouts/usable": 2,
        "groups/dropped": 1,
        "calls": 4,
        "calls/refused": 0,
        "tokens/completion": 12,
        "tokens/prompt": 12,
        "tokens/trained": 6,
        "rows": 2,
        "reward/mean": pytest.approx(2 / 3),
        "reward/std": pytest.approx(pstdev([1, 0, 1])),
        "reward/outcome/frac_solo": 0,
        "reward/outcome/frac_zero_std": 0,
        "reward/outcome/frac_missing": 0,
        "completion/length_mean": 3,
        "completion/length_max": 5,
        "completion/truncated": 0,
    }
    assert metrics == expected


def test_a_repeated_call_is_counted_where_it_was_sampled() -> None:
    first, second = call("a", 2, version=1), call("b", 4, version=2)
    again = call("c", 2, version=1, repeats="a")
    rollouts = [rollout("a", [outcome(1)], first, second), rollout("b", [outcome(0)], again)]
    own = factories.group(*rollouts[:1], step=2)
    both = factories.group(*rollouts, step=2)
    alone, together = (
        {**batch_metrics([g], build_batch([g])), **staleness_metrics(2, [g])} for g in (own, both)
    )
    same = ("calls", "tokens/completion", "tokens/prompt", "completion/length_mean")
    assert all(alone[name] == together[name] for name in (*same, "staleness/version_mean"))
    assert (together["rollouts"], together["calls"]) == (2, 2)


def test_rewards_by_reference_and_by_role() -> None:
    def about(scope: Scope, target: str, value: float, name: str) -> Reward:
        return Reward(value=value, name=name, scope=scope, target=target)

    rewards = [
        outcome(0.5),
        Reward(value=2.0, name="format"),
        about(Scope.ROLE, "critic", 3.0, "tact"),
        about(Scope.ROLE, "actor", 1.0, "tact"),
        about(Scope.TRANSITION, "c1", 4.0, "process"),
        about(Scope.TRANSITION, "c2", 8.0, "process"),
    ]
    calls = [call("c1", 2, role="actor"), call("c2", 6, role="critic", finish="length")]
    group = factories.group(rollout("a", rewards, *calls))
    metrics = batch_metrics([group], build_batch([group]))
    found = {
        name: (metrics[f"{name}/mean"], metrics[f"{name}/std"])
        for name in metrics
        for name in [name.rpartition("/")[0]]
        if f"{name}/std" in metrics
    }
    assert found == {
        "reward": (0.5, 0),
        "reward/format": (2, 0),
        "reward/role:tact": (2, 1),
        "reward/role:tact/critic": (3, 0),
        "reward/role:tact/actor": (1, 0),
        "reward/transition:process": (6, 2),
        "reward/transition:process/actor": (4, 0),
        "reward/transition:process/critic": (8, 0),
    }
    assert metrics["completion/actor/length_mean"] == 2
    assert metrics["completion/critic/length_max"] == 6
    assert metrics["completion/critic/truncated"] == 1
    assert metrics["completion/truncated"] == 0.5


def test_the_learning_curve_of_each_role() -> None:
    def row(name: str, value: float, *roles: str, **more: Any) -> Rollout:
        own = Reward(value=-value, scope=Scope.ROLE, target="solver")
        calls = [call(f"{name}-{role}", 1, role=role) for role in roles]
        return rollout(name, [outcome(value), own], *calls, **more)

    rows = [
        row("a", 1.0, "planner", "solver"),
        row("b", 0.5, "planner"),
        row("c", 4.0, "planner", "solver", seats={"solver": "policy@000010", "planner": "policy"}),
    ]
    found = by_role(rows)
    assert found == {"role/planner/reward": pytest.approx(5.5 / 3), "role/solver/reward": -1.0}
    assert by_role(rows[1:2]) == {}
    early = row("d", 2.0, "planner", seats={"planner": "policy", "solver": "policy"})
    assert by_role([early]) == {"role/planner/reward": 2.0, "role/solver/reward": -2.0}
    assert group_metrics([factories.group(*rows)]).items() >= found.items()


def test_nothing_collected_is_no_numbers() -> None:
    group = factories.group(rollout("a", [], state=RolloutState.FAILED))
    metrics = batch_metrics([group], build_batch([group]))
    assert not [name for name in metrics if name.startswith(("reward", "completion"))]
    assert completions([]) == {}
    assert staleness_metrics(0, []) == {}


def test_groups_that_teach_nothing() -> None:
    def shares(*args: Any) -> list[float]:
        group = factories.group()
        metrics = batch_metrics([group], three_rows(*args))
        return [metrics[f"reward/outcome/frac_{n}"] for n in ("solo", "zero_std", "missing")]

    assert shares((1, 0)) == [0, 0, 0]
    assert shares((0.7, 0.7)) == [0, 1, 0]
    assert shares((0.7, math.nan)) == [1, 0, 0.5]
    assert shares((0.7, 0.7), (0, 1)) == [1, 0, 0]


def test_the_age_of_a_group_counts_from_its_planned_step() -> None:
    """Requested ahead or not: in their order groups are trained in that step, and with order =
    "ready" before or after it."""
    config = resolve({"name": "r", "algorithm": {"groups": 2}}, source="test")
    asked = TaskSampler(config, [{"id": "t"}]).groups(6, 4)  # of steps 3 and 4
    planned = {row.group: row.step for row in asked}
    groups = [factories.group(id=id, step=step) for id, step in planned.items()]
    for step, mean, most in ((3, -0.5, 0), (4, 0.5, 1), (2, -1.5, -1)):
        found = staleness_metrics(step, groups)
        assert (found["staleness/steps_mean"], found["staleness/steps_max"]) == (mean, most)
    assert set(staleness_metrics(3, groups[:2]).values()) == {0}


def test_staleness_counts_sampled_tokens() -> None:
    calls = [
        call("a", 3, version=2, spans=[(0, 2), (1, 4)]),
        call("b", 1, version=5),
        call("c", 9, version=None),
    ]
    old, new = (
        factories.group(rollout("a", [], *part), id=str(step), step=step)
        for step, part in ((3, calls[:1]), (5, calls[1:]))
    )
    lags = [5 - 2, 5 - 4, 5 - 4, 5 - 5]
    assert staleness_metrics(5, [old, new]) == {
        "staleness/steps_mean": 1,
        "staleness/steps_max": 2,
        "staleness/version_mean": fmean(lags),
        "staleness/version_p95": max(lags),
        "staleness/version_max": max(lags),
        "staleness/mixed": 1,
    }


# -- what an optimizer step did --------------------------------------------------------------------


def test_distances_against_a_loop() -> None:
    batch = three_rows()
    algo = Algo(GroupRelative(), (Gate(Clip()), Gate(Truncate(0, 1.5), "old", "sampler")))
    b = batch.sampler_logprobs.double()
    old = b + torch.tensor([0.1, 0, 0.5, 0, 0, -0.2])  # one token is capped
    p = old + torch.tensor([0.4, 0, 0, 0, -0.4, 0.1])  # two are clipped
    q = p + torch.tensor([0.3, -0.1, 0, 0, 0, 0])
    metrics = ratio_metrics(algo, loss_terms(algo, batch, GivenLogProbs(old=old, reference=q)), p)
    expected = {
        "policy/clip_fraction": 3 / 6,
        "policy/clip_fraction_low": 1 / 6,
        "policy/clip_fraction_high": 2 / 6,
        **distance("old", p, old, sampled_by_other=True),
        **distance("sampler", old, b, sampled_by_other=True),
        **distance("reference", p, q, sampled_by_other=False),
        "logprob_difference/mean": 0.8 / 6,
        "logprob_difference/max": 0.5,
    }
    weights = [min(1.5, math.exp(x)) for x in (old - b).tolist()]
    expected["sampler/ess"] = sum(weights) ** 2 / sum(w * w for w in weights) / 6
    assert metrics == pytest.approx(expected, rel=1e-6)


def distance(word: str, p: Tensor, other: Tensor, *, sampled_by_other: bool) -> dict[str, float]:
    """KL(other || p) from other's samples, or KL(p || other) from p's: k1 = -log r, k3 = r - 1 -
    log r with r the probability of the second over that of the first."""
    d = (p - other).tolist()
    log_r = d if sampled_by_other else [-x for x in d]
    return {
        f"{word}/ratio_mean": fmean(map(math.exp, d)),
        f"{word}/ratio_max": max(map(math.exp, d)),
        f"{word}/kl_k1": fmean(-x for x in log_r),
        f"{word}/kl": fmean(math.exp(x) - 1 - x for x in log_r),
    }


def test_only_tokens_in_the_loss_are_measured() -> None:
    batch = three_rows([1, math.nan])  # the last two tokens have no reward
    algo = Algo(GroupRelative(base="none"), (Gate(Clip()),))
    p = batch.sampler_logprobs.double() + torch.tensor([0, 0, 0, 0, 1.0, 1.0])
    terms = loss_terms(algo, batch, GivenLogProbs(), fresh=True)
    metrics = ratio_metrics(algo, terms, p)
    assert metrics["sampler/kl"] == metrics["policy/clip_fraction"] == 0
    assert metrics["logprob_difference/max"] == pytest.approx(1)  # disagreement is of all tokens
    report = StepReport(
        loss=0.5,
        grad_norm=2.0,
        logprobs=p.float(),
        tokens=9,
        applied=True,
        entropy=torch.tensor([1.0, 2, 3, 4, math.nan, 90]),
    )
    metrics = optimizer_step(algo, batch, terms, report, {"0": 5, "1": 6, "2": 7, "other": 99})
    assert metrics["tokens/unique_fraction"] == 9 / 18
    assert (metrics["loss"], metrics["grad_norm"], metrics["policy/entropy"]) == (0.5, 2.0, 2.5)
    assert "policy/entropy_bonus" not in metrics
    algo = replace(algo, entropy=0.1)  # rows of 1 and 3 tokens have a reward
    metrics = optimizer_step(algo, batch, terms, report, {})
    bonus = 0.1 * float(terms.weight[:4] @ torch.tensor([1.0, 2, 3, 4]).double())
    assert metrics["policy/entropy_bonus"] == pytest.approx(bonus)


def test_on_the_sampled_policy_all_is_quiet() -> None:
    batch = three_rows()
    algo = Algo(GroupRelative(), (Gate(Clip(0, 0)), Gate(Truncate(1, 1), "old", "sampler")))
    metrics = ratio_metrics(
        algo, loss_terms(algo, batch, GivenLogProbs(), fresh=True), batch.sampler_logprobs
    )
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["sampler/ratio_mean"] == metrics["sampler/ratio_max"] == 1
    assert metrics["sampler/kl"] == metrics["sampler/kl_k1"] == 0
    assert metrics["sampler/ess"] == pytest.approx(1)
    assert not [name for name in metrics if name.startswith(("old", "reference"))]


def test_without_a_correction_the_weights_are_the_plain_ratios() -> None:
    batch = three_rows()
    p = batch.sampler_logprobs.double() + torch.tensor([1.0, 0, 0, 0, 0, 0])
    expected = (math.e + 5) ** 2 / (math.e**2 + 5) / 6
    for algo in (Algo(GroupRelative()), Algo(GroupRelative(), (Gate(Ratio(), "old", "sampler"),))):
        metrics = ratio_metrics(algo, loss_terms(algo, batch, GivenLogProbs(), fresh=True), p)
        assert metrics["sampler/ess"] == pytest.approx(expected)


def test_call_tokens_are_those_of_training_per_call() -> None:
    calls = [call("a", 2), call("b", 4), call("judged", 9, policy="judge")]
    calls.append(call("c", 2, repeats="a"))
    group = factories.group(rollout("a", [], *calls))
    assert call_tokens([group]) == {"a": 5, "b": 7}


# -- over a whole step -----------------------------------------------------------------------------


def test_advantages_of_minibatches_are_those_of_the_batch() -> None:
    draw = random.Random(0)
    parts, values = [], []
    for _ in range(3):
        rewards = [draw.random(), draw.choice([draw.random(), math.nan])]
        terms = loss_terms(Algo(GroupRelative(base="none")), three_rows(rewards), GivenLogProbs())
        parts.append(terms)
        values += [rewards[0]] * 4 + [r for r in rewards[1:] if not math.isnan(r) for _ in "ab"]
    assert advantages(parts) == pytest.approx(
        {
            "advantage/mean": fmean(values),
            "advantage/std": pstdev(values),
            "advantage/min": min(values),
            "advantage/max": max(values),
            "advantage/frac_positive": fmean(value > 0 for value in values),
        }
    )
    assert advantages([]) == {}
    assert advantages([replace(parts[0], weight=torch.zeros(6))]) == {}


def test_optimizer_steps_are_merged_by_a_word_of_the_name() -> None:
    first = {"loss": 1.0, "a/ratio_max": 5.0, "a/x_min": 5.0, "tokens/forwarded": 3.0}
    second = {
        "memory/peak_mb": 2.0,
        "loss": 2.0,
        "a/ratio_max": 4.0,
        "a/x_min": 4.0,
        "tokens/forwarded": 4.0,
    }
    third = {"loss": math.nan, "grad_norm": math.inf, "kl": 1.0, "memory/peak_mb": 1.0}
    assert merge_optimizer_steps([first, second, third]) == {
        "loss": 1.5,
        "a/ratio_max": 5.0,
        "a/x_min": 4.0,
        "tokens/forwarded": 7.0,
        "kl": 1.0,
        "memory/peak_mb": 2.0,
    }
    assert merge_optimizer_steps([]) == {}


def test_throughput() -> None:
    metrics = {
        "time/update": 2.0,
        "time/rollouts": 3.0,
        "tokens/forwarded": 10.0,
        "tokens/prompt": 40.0,
        "tokens/completion": 60.0,
    }
    assert throughput(metrics) == {"throughput/update": 5, "throughput/step": 20}
    assert throughput({"time/update": 0.0}) == {}


def test_agreement_is_the_share_of_correctly_ordered_pairs() -> None:
    def row(id: str, outcome: float, guess: float, source: str = "model:rm") -> Rollout:
        rewards = [Reward(value=outcome), Reward(value=guess, name="rm", source=source)]
        return factories.rollout(id, rewards=rewards)

    rows = [row("a", 1, 0.9), row("b", 0, 0.9), row("c", 0.5, 0.1), row("d", 0.5, 3.0)]
    found = group_metrics([factories.group(*rows)])
    # a>b tie, a>c right, a>d wrong, c>b wrong, d>b right
    assert found["reward/rm/agreement"] == (0.5 + 1 + 0 + 0 + 1) / 5
    own = [row("a", 1, 0, "verifier"), row("b", 0, 1, "verifier")]
    assert not any("agreement" in name for name in group_metrics([factories.group(*own)]))
