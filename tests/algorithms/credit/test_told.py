"""Weights of an advantage by what calls are worth once the policy is told more, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative, ZeroAdvantage, weighted_sum
from agentrl.algorithms.credit.told import (
    EVIDENCE,
    STYLE,
    TOLD,
    Evidence,
    GapState,
    ToldBelief,
    ToldCredit,
    ToldGap,
    ToldScale,
    ToldShare,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.objective.core import (
    TOKENS,
    Algo,
    TopKDistillation,
    loss_coefficients,
    loss_terms,
)
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.core.errors import TrainingError
from agentrl.core.types import Reward
from tests import factories

NAN = math.nan
# One trace: of a success three calls of 1, 2 and 1 tokens, of a failure two of 1 and 3.
SIZES, GAPS = [[1, 2, 1], [1, 3]], [[0.4, -1.0, 0.02], [0.5, NAN]]


def trace(style: list[float] | None = None, evidence: list[float] | None = None) -> Batch:
    rows = []
    for number, sizes in enumerate(SIZES):
        calls = [
            factories.call(f"{number}/{n}", [9, number, n], range(10, 10 + size), index=n)
            for n, size in enumerate(sizes)
        ]
        rows.append(factories.rollout(str(number), calls, [Reward(value=1.0 - number)]))
    batch = build_batch([factories.group(*rows)])
    by_call = {
        TOLD: [gap for gaps in GAPS for gap in gaps],
        STYLE: style or [NAN] * 5,
        EVIDENCE: evidence or [NAN] * 5,
    }
    told = {name: torch.tensor(each, dtype=torch.float64) for name, each in by_call.items()}
    return replace(batch, rewards={**batch.rewards, **told})


HOST = GroupRelative("outcome")  # A = .5 of the success, -.5 of the failure


def by_call(batch: Batch, values: Tensor) -> list[float]:
    first = [values[batch.token_transition == n] for n in range(len(batch.transitions))]
    assert all((some == some[0]).all() for some in first)
    return [float(some[0]) for some in first]


def test_the_reward_of_a_call_is_its_credit_within_the_limit() -> None:
    batch = trace()
    found = by_call(batch, ToldCredit(0.6)(batch).nan_to_num(nan=7.0))
    assert found == pytest.approx([0.4, -0.6, 0.02, 0.5, 7.0])


def test_the_host_keeps_its_whole_credit_where_nothing_is_told() -> None:
    batch = trace()
    share = ToldShare(0.25)(batch)
    assert by_call(batch, share) == [0.25, 0.25, 0.25, 0.25, 1.0]
    found = weighted_sum((HOST, ToldShare(0.25)))(batch)
    assert torch.equal(found, HOST(batch) * share)


def test_a_weight_by_call_is_of_the_mean_gap_and_keeps_the_sign() -> None:
    batch = trace()
    # exp(.4) is above 1.2; exp(-1 / 2) below .8; exp(.02); exp(-.5) below .8; nothing told.
    weights = [1.2, 0.8, math.exp(0.02), 0.8, 1.0]
    expected = [s * 0.5 * (0.25 + 0.75 * w)
                for s, w in zip([1, 1, 1, -1, -1], weights, strict=True)]  # fmt: skip
    expected[4] = -0.5
    found = by_call(batch, ToldScale(HOST, 0.25, 0.2)(batch))
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_weight_by_token_is_of_its_own_gap() -> None:
    batch = trace()
    gap = torch.tensor([0.1, -0.05, NAN, 3.0, 0.1, -9.0, 0.0, 0.15], dtype=torch.float64)
    sign = batch.rewards["outcome"][batch.token_rollout] * 2 - 1
    found = ToldScale(HOST, 0.0, 0.2, by_token=True)(replace(batch, told=gap))
    expected = [
        0.5 * s * (1 if math.isnan(g) else min(max(math.exp(s * g), 0.8), 1.2))
        for s, g in zip(sign.tolist(), gap.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    with pytest.raises(TrainingError, match="nothing was told to the tokens"):
        ToldScale(HOST, 0.0, 0.2, by_token=True)(batch)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_belief_weighs_calls_by_what_each_changes() -> None:
    """As loops over calls, from a prior of one success in two."""
    batch, band, blend = trace(), 0.3, 0.4
    expected: list[float] = []
    for gaps, sign in zip(GAPS, (1, -1), strict=True):
        total, belief, changes = 0.0, 0.5, []
        for gap in gaps:
            total = 0.95 * total + (0 if math.isnan(gap) else gap)
            changes.append(NAN if math.isnan(gap) else sign * (logistic(total) - belief))
            belief = logistic(total)
        known = [x for x in changes if not math.isnan(x)]
        mean = sum(known) / len(known)
        std = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known))
        for x in changes:
            z = 0.0 if math.isnan(x) or std < 1e-9 else (x - mean) / std
            w = 1.0 if math.isnan(x) else blend + (1 - blend) * min(max(1 + band * z, 0.7), 1.3)
            expected.append(sign * 0.5 * w)
    found = by_call(batch, ToldBelief(HOST, blend, band, 1.0, "outcome")(batch))
    assert found == pytest.approx(expected, abs=1e-12)
    assert found[3:] == [-0.5, -0.5]  # a single change has nothing to be compared with
    assert len({*found[:3]}) == 3


def test_the_belief_begins_with_the_rate_of_success() -> None:
    batch = trace()
    credit = ToldBelief(HOST, 0.5, 0.2, 1.0, "outcome")
    assert credit.prior(batch).tolist() == [0.5, 0.5]
    lost = replace(batch, rewards={**batch.rewards, "outcome": torch.tensor([NAN, 0.0]).double()})
    assert credit.prior(lost).tolist() == pytest.approx([0.01, 0.01])


def test_weights_never_change_the_sign_of_an_advantage() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        batch = trace()
        told = 20 * torch.randn(5, generator=draw).double()
        batch = replace(batch, rewards={**batch.rewards, TOLD: told})
        for credit in (ToldScale(HOST, 0.0, 0.9), ToldBelief(HOST, 0.0, 0.9, 1.0, "outcome")):
            assert torch.equal(credit(batch).sign(), HOST(batch).sign())


def test_the_gap_is_per_token_and_its_style_what_any_text_changes() -> None:
    batch, column = trace([0.1, 0.4, NAN, NAN, NAN]), ToldGap(2)
    values, after = column.recall(column.part(0), batch, [])
    assert values.numel() == 0
    assert isinstance(after, GapState)
    assert after.average == pytest.approx((1.0 - 0.4 - 0.02 - 0.5) / 5)
    assert after.metrics()["told/style"] == pytest.approx(0.5 / 1.4)
    assert after.metrics()["told/calls"] == 4


def test_the_policy_is_told_no_more_once_the_gap_stops_falling() -> None:
    state = GapState(patience=2)
    for gap in (1.0, 0.8, 0.6):
        state = state.after(gap, {})
    assert (state.since, state.retired) == (0, False)
    state = state.after(None, {})  # a step in which nothing was told
    copied = GapState(patience=2)
    copied.restore(state.dump())
    assert copied.dump() == state.dump()
    state = copied.after(0.9, {}).after(0.95, {})
    assert state.retired
    assert state.after(0.1, {}).retired
    forever = GapState()
    for gap in (1.0, *[1.5] * 9):
        forever = forever.after(gap, {})
    assert not forever.retired


def test_a_text_is_not_used_until_evidence_shows_that_it_is_followed() -> None:
    """By hand: of n groups with mean m and variance v the z-score is m / sqrt(v / (n - 1)); earlier
    groups count for .9 a step. The calls of a group are one value."""
    column = ToldGap()
    assert not Evidence().is_missing  # without a success nothing can be measured
    _, state = column.recall(column.part(0), trace(evidence=[0.5, -0.5, 0.3, NAN, NAN]), [])
    assert isinstance(state, GapState)
    assert state.evidence == Evidence(1.0, pytest.approx(0.1), pytest.approx(0.01))
    values = torch.tensor([0.3, 0.1], dtype=torch.float64)
    for groups, missing in ((1.0, True), (2.9, True), (4.61, False)):
        assert state.evidence.groups == pytest.approx(groups)
        assert state.evidence.is_missing == missing
        state = state.measured(values)
    copied = GapState()
    copied.restore(state.dump())
    assert copied.evidence == state.evidence
    found = Evidence(10.0, 0.0, 0.1).after(values.repeat(4))
    mean = 1.6 / 17
    variance = (0.09 + 4 * (0.09 + 0.01)) / 17 - mean**2
    assert found.z_score == pytest.approx(mean / math.sqrt(variance / 16))
    assert not found.is_missing
    assert Evidence(10.0, 0.0, 0.1).after(-values.repeat(4)).is_missing
    assert Evidence(8.0, 0.0, 0.0).is_missing  # a wrong text changes just as much
    assert found.after(torch.zeros(0)) == found  # a step in which nothing was measured


def test_on_all_sequences_the_credit_is_minus_the_gradient_of_the_divergence() -> None:
    """Of a tabular policy with two tokens after one another, told and untold; a call's credit is
    its log-ratio, and each sequence counts as often as it is sampled."""
    draw = torch.Generator().manual_seed(0)
    first, told_first = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    second, told_second = torch.randn(2, 4, 4, generator=draw, dtype=torch.float64)
    leaves = [first.clone().requires_grad_(), second.clone().requires_grad_()]

    def joint(a: Tensor, b: Tensor) -> Tensor:
        return a.log_softmax(-1)[:, None] + b.log_softmax(-1)

    p, q = joint(*leaves), joint(told_first, told_second)
    expected = torch.autograd.grad((p.exp() * (p - q)).sum(), leaves, retain_graph=True)
    calls = [factories.call(f"{i}{j}", [9], [i, j], index=4 * i + j)
             for i in range(4) for j in range(4)]  # fmt: skip
    batch = build_batch([factories.group(factories.rollout("r", calls, [Reward(value=1.0)]))])
    ratio = (q - p).detach().flatten()
    batch = replace(batch, rewards={TOLD: ratio})
    credit, often = ToldCredit(100.0)(batch), p.detach().exp().flatten()
    tokens = torch.cat([row.tokens[row.actions] for row in batch.rows]).view(-1, 2)
    logprobs = torch.stack(
        (leaves[0].log_softmax(-1)[tokens[:, 0]],
         leaves[1].log_softmax(-1)[tokens[:, 0], tokens[:, 1]]), 1,
    ).flatten()  # fmt: skip
    weight = often[batch.token_transition]
    found = torch.autograd.grad(-(weight * credit * logprobs).sum(), leaves)
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("of", ["policy", "teacher"])
def test_tokens_that_are_told_nothing_are_pulled_nowhere(of: Literal["policy", "teacher"]) -> None:
    """Full-vocabulary divergence of a table of logits, one for each token, of which every other one
    has a teacher."""
    batch = trace()
    draw, n, size = torch.Generator().manual_seed(1), batch.n_tokens, 5
    logits, told = torch.randn(2, n, size, generator=draw, dtype=torch.float64)
    known = torch.arange(n) % 2 == 0
    leaf = logits.clone().requires_grad_()
    p, q = leaf.log_softmax(-1), told.log_softmax(-1)
    first, second = (p, q) if of == "policy" else (q, p)
    each = (first.exp() * (first - second)).sum(-1)
    (expected,) = torch.autograd.grad(0.7 * each[known].sum() / n, leaf, retain_graph=True)
    algo = Algo(
        ZeroAdvantage(), agg=TOKENS, rewards=(), distill=TopKDistillation(size, 0.7, of, told=True)
    )
    given = GivenLogProbs(teacher_candidates=torch.where(known[:, None], q, NAN))
    terms = loss_terms(algo, batch, given, fresh=True)
    psi = loss_coefficients(algo, terms, p, torch.arange(n))
    (found,) = torch.autograd.grad(-(psi * p).sum(), leaf)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert not psi[~known].any()
