# ruff: noqa: E741  # w and l, as in the papers
"""Losses of completions against their formulas, written here for one pair at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import build_batch
from agentrl.algorithms.learners.base import StepReport
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.objective.core import Algo, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.preferences.completions import MISMATCHED, WEIGHT, with_mismatched
from agentrl.algorithms.preferences.draft import choose_pairs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.metrics import optimizer_step
from agentrl.core.errors import TrainingError
from agentrl.core.types import Group, Reward
from tests import factories
from tests.factories import call

NAMES = ("outcome", WEIGHT, MISMATCHED)


def pairs(count: int = 3, size: int = 2, prompt: int = 9) -> list[Group]:
    """Groups of rollouts, better ones last; every second has a second call after a tool's tokens,
    which nobody sampled."""
    dice = torch.Generator().manual_seed(count)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, 60, (n,), generator=dice).tolist()

    groups = []
    for k in range(count):
        start, rollouts = tokens(prompt), []
        for j in range(size):
            calls = [call(f"{k}/{j}/0", start, tokens(2 + (5 * k + 3 * j) % 7))]
            if (k + j) % 2:
                before = [*start, *calls[0].completion, *tokens(4)]
                calls.append(call(f"{k}/{j}/1", before, tokens(2 + j)))
            reward = [Reward(value=j / (size - 1))]
            made = factories.rollout(f"{k}/{j}", calls, reward, group=f"g{k}", index=j)
            rollouts.append(made)
        groups.append(factories.group(*rollouts, id=f"g{k}"))
    return groups


def batch_of(groups: list[Group]) -> Batch:
    return build_batch(groups, reward_names=NAMES)


def columns(batch: Batch, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probs of a policy and of a reference close to it, in token order."""
    dice = torch.Generator().manual_seed(seed)
    p = -3 * torch.rand(batch.n_tokens, generator=dice, dtype=torch.float64)
    return p, p - 0.3 * torch.rand(batch.n_tokens, generator=dice, dtype=torch.float64)


def log_s(x: Tensor) -> Tensor:
    return -torch.log1p(torch.exp(-x))


def d(w: Any, l: Any) -> Tensor:
    return (w.S - w.q) - (l.S - l.q)


class One:
    """A side: sums over its tokens, and their number."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.S, self.q, self.n, self.h = p.sum(), q.sum(), len(p), (p - q).sum()


def odds(mean: Tensor) -> Tensor:
    return mean - torch.log(1 - torch.exp(mean))


def exo(x: Tensor, e: float) -> Tensor:
    s = torch.sigmoid(x)
    return s * torch.log(s / (1 - e)) + (1 - s) * torch.log((1 - s) / e)


PUBLISHED: dict[str, Callable[[One, One], Tensor]] = {
    "dpo": lambda w, l: -log_s(0.1 * d(w, l)),
    "cdpo": lambda w, l: -0.9 * log_s(0.1 * d(w, l)) - 0.1 * log_s(-0.1 * d(w, l)),
    "robust": lambda w, l: (-0.9 * log_s(0.1 * d(w, l)) + 0.1 * log_s(-0.1 * d(w, l))) / 0.8,
    "ipo": lambda w, l: (w.h / w.n - l.h / l.n - 5.0) ** 2,
    "hinge": lambda w, l: torch.clamp(1 - 0.1 * d(w, l), min=0),
    "simpo": lambda w, l: -log_s(2.0 * (w.S / w.n - l.S / l.n) - 1.0),
    "cpo": lambda w, l: -log_s(0.1 * (w.S - l.S)),
    "orpo": lambda w, l: -0.1 * log_s(odds(w.S / w.n) - odds(l.S / l.n)),
    "apo-zero": lambda w, l: 1 - torch.sigmoid(0.1 * w.h) + torch.sigmoid(0.1 * l.h),
    "apo-down": lambda w, l: torch.sigmoid(0.1 * w.h) + 1 - torch.sigmoid(0.1 * d(w, l)),
    "nca": lambda w, l: -log_s(0.1 * w.h) - 0.5 * log_s(-0.1 * w.h) - 0.5 * log_s(-0.1 * l.h),
    "bco": lambda w, l: -log_s(0.1 * w.h) - log_s(-0.1 * l.h),
    "exo": lambda w, l: exo(0.1 * d(w, l), 1e-3),
    "sppo": lambda w, l: (w.h - 5.0) ** 2 + (l.h + 5.0) ** 2,
    "dpo+nll": lambda w, l: -log_s(0.1 * d(w, l)),
}
IMITATES = {"cpo": 1.0, "orpo": 1.0, "dpo+nll": 1.0}


def build(name: str, **options: Any) -> Algo:
    return make(name, options, supplies=("old", "sampler", "reference"))


def current(algo: Algo, batch: Batch, p: Tensor, q: Tensor) -> Tensor:
    terms = loss_terms(algo, batch, GivenLogProbs(reference=q), fresh=True)
    return loss_coefficients(algo, terms, p, torch.arange(batch.n_tokens))


def one_by_one(batch: Batch, p: Tensor, q: Tensor) -> list[tuple[One, One]]:
    """Better and worse completion of each group of two."""
    own = [batch.token_rollout == u for u in range(len(batch.rollouts))]
    return [
        (One(p[own[u + 1]], q[own[u + 1]]), One(p[own[u]], q[own[u]]))
        for u in range(0, len(batch.rollouts), 2)
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_psi_is_minus_the_gradient_of_the_formula(name: str) -> None:
    batch = batch_of(pairs())
    p, q = columns(batch)
    leaf = p.clone().requires_grad_()
    sides = one_by_one(batch, leaf, q)
    loss = sum(PUBLISHED[name](w, l) for w, l in sides) / len(sides)
    imitated = sum(w.S for w, _ in sides) / sum(w.n for w, _ in sides)
    (gradient,) = torch.autograd.grad(loss - IMITATES.get(name, 0.0) * imitated, leaf)
    assert torch.allclose(current(build(name), batch, p, q), -gradient, rtol=1e-9, atol=1e-12)


def test_aot_compares_sorted_margins_of_all_pairs() -> None:
    batch = batch_of(pairs(4))
    p, q = columns(batch)
    leaf = p.clone().requires_grad_()
    sides = one_by_one(batch, leaf, q)
    now = sorted((w.S - l.S for w, l in sides), key=lambda x: float(x.detach()))
    then = sorted((w.q - l.q for w, l in sides), key=lambda x: float(x.detach()))
    loss = sum(-log_s(0.1 * (a - b)) for a, b in zip(now, then, strict=True)) / 4
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert torch.allclose(current(build("aot"), batch, p, q), -gradient, rtol=1e-9)


@pytest.mark.parametrize("closer", [1.0, -1.0])
def test_kto_reads_the_kl_of_completions_of_other_prompts(closer: float) -> None:
    batch = batch_of(with_mismatched(pairs(2)))
    assert batch.rollouts == [
        "0/0", "0/1", "0/0~1/1", "0/1~0/0", "1/0", "1/1", "1/0~0/1", "1/1~1/0",
    ]  # fmt: skip
    p, q = columns(batch)
    q = p + closer * (q - p)
    leaf = p.clone().requires_grad_()
    one = {u: One(leaf[own], q[own]) for u in range(8) if (own := batch.token_rollout == u).any()}
    kl = max(0.0, float(sum(one[u].h.detach() for u in (2, 3, 6, 7)) / 4))
    assert (kl > 0) == (closer > 0)
    good = [1 - torch.sigmoid(0.1 * (one[u].h - kl)) for u in (1, 5)]
    bad = [1.5 * (1 - torch.sigmoid(0.1 * (kl - one[u].h))) for u in (0, 4)]
    (gradient,) = torch.autograd.grad(sum([*good, *bad]) / 4, leaf)
    found = current(build("kto", undesirable=1.5), batch, p, q)
    assert torch.allclose(found, -gradient, rtol=1e-9, atol=1e-12)


def test_a_mismatched_rollout_has_the_completion_before_it() -> None:
    (group,) = with_mismatched(pairs(1))
    own, other, _, moved = group.rollouts
    first, second = other.transitions
    assert moved.transitions[0].prompt == first.prompt
    assert moved.transitions[0].completion == own.transitions[0].completion
    assert with_mismatched([group]) == [group]
    assert len(second.prompt) > len(first.prompt)


def test_a_pair_counts_as_much_as_its_weight() -> None:
    groups = pairs(2)
    groups[0].rollouts[1].rewards.append(Reward(value=3.0, name=WEIGHT))
    batch, plain = batch_of(groups), batch_of(pairs(2))
    p, q = columns(batch)
    heavy, light = (current(build("dpo"), each, p, q) for each in (batch, plain))
    factor = heavy / light
    assert torch.allclose(factor[batch.token_group == 0], torch.tensor(3.0).double())
    assert torch.allclose(factor[batch.token_group == 1], torch.tensor(1.0).double())


def test_a_loss_of_pairs_adds_to_kl_and_to_a_policy_gradient() -> None:
    batch = batch_of(pairs(2, size=4))
    p, q = columns(batch)
    side = current(build("dpo"), batch, p, q)
    grpo = current(build("grpo", kl=0.2), batch, p, q)
    both = current(build("grpo+pairs", kl=0.2, pairs_share=0.5), batch, p, q)
    assert torch.allclose(both, grpo + 0.5 * side)
    penalty = current(build("dpo", kl=0.2), batch, p, q) - side
    assert penalty.abs().sum() > 0


def test_pairs_are_ranked_by_the_reward_of_the_host() -> None:
    assert build("grpo+pairs", reward="style").side.reward == "style"
    assert build("prime+pairs", reward="style").side.reward == "style"
    assert build("marti+pairs").side.reward == "outcome"  # not by marti's reward of calls
    assert build("grpo+pairs+nll").side.nll == 1.0


def test_ties_are_no_pairs() -> None:
    groups = pairs(2)
    groups[1].rollouts[1].rewards[:] = groups[1].rollouts[0].rewards
    batch = batch_of(groups)
    p, q = columns(batch)
    terms = loss_terms(build("dpo"), batch, GivenLogProbs(reference=q), fresh=True)
    assert (terms.added.count, terms.added.ties) == (1, 1)
    assert not current(build("dpo"), batch, p, q)[batch.token_group == 1].any()
    tied = loss_terms(
        build("dpo"), batch_of(groups[1:]), GivenLogProbs(reference=q[batch.token_group == 1])
    )
    assert "did better or worse" in (tied.skip or "")


def test_the_pairs_of_a_group() -> None:
    values = [0.0, 1.0, math.nan, 0.5, 1.0]
    assert choose_pairs(values, "extremes", 0.0, 0, "x") == [(1, 0)]
    assert choose_pairs(values, "all", 0.5, 0, "x") == [(1, 0), (4, 0), (1, 3), (4, 3), (3, 0)]
    assert choose_pairs(values, "all", 0.6, 1, "x") == [(1, 0)]
    drawn = {choose_pairs(values, "best-of", 0.1, 0, str(seed))[:1] == [] for seed in range(9)}
    assert drawn == {False, True}  # the other best is a tie
    assert choose_pairs([1.0], "all", 0.0, 0, "x") == []


# -- packs and learners ----------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["rows", "trie"])
@pytest.mark.parametrize("budget", [1, 40, 80, 10**6])
def test_no_pack_has_a_part_of_a_unit(packing: Any, budget: int) -> None:
    batch = batch_of(pairs(5, size=3, prompt=4))
    unit = build("dpo").side.row_unit(batch)
    packs = pack_rows(batch.rows, packing, budget, unit)
    found = [set(unit[batch.token_row[pack.index]].tolist()) for pack in packs]
    assert sum(map(len, found)) == 5
    assert sorted(torch.cat([pack.index for pack in packs]).tolist()) == list(range(batch.n_tokens))
    assert all(
        len(pack.tokens) <= budget for pack, own in zip(packs, found, strict=True) if len(own) > 1
    )


def gradients(learner: TorchLearner, name: str, budget: int) -> tuple[dict[str, Tensor], Tensor]:
    algo = build(name)
    batch = batch_of(with_mismatched(pairs(4)) if name == "kto" else pairs(4))
    batch = replace(batch, row_unit=algo.side.row_unit(batch))
    _, noise = columns(batch)
    q = learner.logprobs(batch).double() + 0.1 * noise
    terms = loss_terms(algo, batch, GivenLogProbs(reference=q), fresh=True)
    learner.token_budget = budget
    report = learner._backward(
        batch, lambda p, i: loss_coefficients(algo, terms, p, i), None, None, None
    )
    found = {n: x.grad.clone() for n, x in learner.model.named_parameters() if x.grad is not None}
    learner._zero_grad()
    return found, report.logprobs


@pytest.mark.parametrize("name", ["dpo", "kto", "aot", "simpo"])
def test_the_gradient_does_not_depend_on_how_rows_are_packed(
    name: str, tiny_llama_dir: Path
) -> None:
    """Packs of whole pairs, and budgets below a pair, where psi is computed first."""
    learner = TorchLearner(*load_model(tiny_llama_dir, device="cpu"), threads=1)
    whole, _ = gradients(learner, name, 10**6)
    for budget in (60, 16):
        cut, _ = gradients(learner, name, budget)
        for key, gradient in whole.items():
            assert torch.allclose(
                cut[key], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max())
            )


def test_a_pack_with_one_side_of_a_pair_is_refused() -> None:
    batch = batch_of(pairs(2))
    p, q = columns(batch)
    terms = loss_terms(build("dpo"), batch, GivenLogProbs(reference=q), fresh=True)
    index = (batch.token_rollout == 0).nonzero().flatten()
    with pytest.raises(TrainingError, match="one completion of a pair"):
        loss_coefficients(build("dpo"), terms, p[index], index)


def test_metrics_have_the_names_of_trl() -> None:
    batch = batch_of(pairs(2))
    p, q = columns(batch)
    algo = build("dpo")
    terms = loss_terms(algo, batch, GivenLogProbs(reference=q), fresh=True)
    found = optimizer_step(algo, batch, terms, StepReport(logprobs=p), {})
    sides = one_by_one(batch, p, q)
    margins = [float(0.1 * d(w, l)) for w, l in sides]
    assert found["rewards/margins"] == pytest.approx(sum(margins) / 2)
    assert found["rewards/accuracies"] == sum(x > 0 for x in margins) / 2
    assert found["logps/chosen"] == pytest.approx(sum(float(w.S) for w, _ in sides) / 2)
    assert found["logps/chosen_drop"] == pytest.approx(sum(-float(w.h) for w, _ in sides) / 2)
    assert found["preferences/loss"] == pytest.approx(
        sum(math.log1p(math.exp(-x)) for x in margins) / 2
    )
    assert (found["preferences/pairs"], found["preferences/ties"]) == (2, 0)
