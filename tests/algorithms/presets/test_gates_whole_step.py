"""Gates that compare the tokens of a step with one another, against losses written out for a
tabular policy: a row of logits for each token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import Packing
from agentrl.algorithms.objective.core import compute_advantages, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import ConfigError
from tests.algorithms.presets.padded import flat, padded
from tests.algorithms.train.test_update import group

VOCABULARY = 6
Numbers = list[float]
# Of each token in the loss, in order: advantage, log-probs of the policy now (with a gradient),
# before the first update, and of the sampler -> its loss.
Published = Callable[[Numbers, Sequence[Tensor], Numbers, Numbers], list[Tensor]]


def logits(batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """[N, V] before the first update and now; each token sampled is 0."""
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(batch.n_tokens, VOCABULARY, generator=draw, dtype=torch.float64)
    return old, old + 0.6 * torch.randn(old.shape, generator=draw, dtype=torch.float64)


def clipped(r: Tensor, a: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))


def stale(a: Numbers, now: Sequence[Tensor], old: Numbers, sampler: Numbers) -> list[Tensor]:
    drift = [p.item() - b for p, b in zip(now, sampler, strict=True)]
    ordered = sorted(abs(d) for d in drift)
    at = 0.7 * (len(ordered) - 1)
    low, share = ordered[math.floor(at)], at - math.floor(at)
    q = low + share * (ordered[math.ceil(at)] - low)
    losses = []
    for i, d in enumerate(drift):
        narrow = 1 / (1 + (abs(d) / q) ** 2) if abs(d) > q else 1.0
        bounds = (0.2, 0.2 * narrow) if d > 0 else (0.2 * narrow, 0.2)
        losses.append(clipped((now[i] - sampler[i]).exp(), a[i], *bounds))
    return losses


def covariances(a: Numbers, now: Sequence[Tensor]) -> Numbers:
    mean_a, mean_p = sum(a) / len(a), sum(p.item() for p in now) / len(now)
    return [(x - mean_a) * (p.item() - mean_p) for x, p in zip(a, now, strict=True)]


def masked(a: Numbers, now: Sequence[Tensor], old: Numbers, sampler: Numbers) -> list[Tensor]:
    losses = [clipped((p - o).exp(), x) for x, p, o in zip(a, now, old, strict=True)]
    free = [-x * (p - o).exp().item() >= loss.item() - 1e-12
            for x, p, o, loss in zip(a, now, old, losses, strict=True)]  # fmt: skip
    cov = covariances(a, now)
    able = [i for i, c in enumerate(cov) if 0.01 < c < 5 and free[i]]
    draw = torch.Generator().manual_seed(len(able))
    order = torch.randperm(len(able), generator=draw).tolist()
    out = {able[i] for i in order[: max(1, int(0.2 * len(a)))]}
    return [0 * loss if i in out else loss for i, loss in enumerate(losses)]


def penalised(a: Numbers, now: Sequence[Tensor], old: Numbers, sampler: Numbers) -> list[Tensor]:
    cov = covariances(a, now)
    most = sorted(range(len(a)), key=lambda i: -cov[i])[: max(1, int(0.2 * len(a)))]
    return [-x * (p - o).exp() + (0.7 * (p - o).abs() if i in most else 0)
            for i, (x, p, o) in enumerate(zip(a, now, old, strict=True))]  # fmt: skip


CASES: dict[str, tuple[dict[str, Any], Published]] = {
    "dr-grpo+sat": ({"sat_quantile": 0.7}, stale),
    "dr-grpo+clip-cov": ({"clip_cov_share": 0.2, "clip_cov_low": 0.01}, masked),
    "dr-grpo+kl-cov": ({"kl_cov_share": 0.2, "kl_cov_beta": 0.7}, penalised),
}


@pytest.mark.parametrize("name", CASES)
def test_psi_is_minus_the_gradient_of_the_published_loss(name: str) -> None:
    options, published = CASES[name]
    algo, plain = make(name, options), make("dr-grpo", {})
    other = 0
    for seed in range(4):
        batch = flat(padded(seed))
        old, now = logits(batch, seed)
        o = old.log_softmax(-1)[:, 0]
        advantage = compute_advantages(plain, batch)
        live = (~advantage.isnan()).nonzero().flatten().tolist()
        rows = {int(batch.token_row[t]) for t in live}
        leaf = now.clone().requires_grad_()
        p = leaf.log_softmax(-1)[:, 0]
        losses = published(
            advantage[live].tolist(), [p[t] for t in live], o[live].tolist(),
            batch.sampler_logprobs[live].double().tolist(),
        )  # fmt: skip
        (torch.stack(losses).sum() / 1024 / len(rows)).backward(retain_graph=True)
        expected, leaf.grad = leaf.grad, None
        terms = loss_terms(algo, batch, GivenLogProbs(old=o))
        # However the tokens are packed.
        order = torch.randperm(batch.n_tokens, generator=torch.Generator().manual_seed(seed))
        found = loss_coefficients(algo, terms, p[order], order)
        p[order].backward(-found)
        assert leaf.grad is not None
        assert expected is not None
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-8, atol=1e-12)
        without = loss_terms(plain, batch, GivenLogProbs(old=o))
        other += not torch.allclose(found, loss_coefficients(plain, without, p[order], order))
    assert other == 4


@pytest.mark.parametrize(
    ("name", "packing"),
    [("gspo+sat", "trie"), ("grpo+clip-cov", "rows"), ("grpo+kl-cov", "trie")],
)
def test_micro_batches_change_nothing(name: str, packing: Packing, tiny_llama_dir: Path) -> None:
    def trained(budget: int) -> list[Tensor]:
        model, tokenizer = load_model(str(tiny_llama_dir), "float32", "cpu")
        model.double()  # Adam makes a step of the rounding errors of a gradient near 0
        learner = TorchLearner(model, tokenizer, packing=packing, token_budget=budget)
        settings = AlgorithmConfig(preset=name, epochs=2, minibatches=2, lr=1e-2)
        updater = Updater(RunConfig(algorithm=settings), make(name, {}), learner)
        groups = [group("a", 1.0, 0.0, 0.5), group("b", 0.0, 1.0, 0.2)]
        assert (updater.batch(groups).row_unit == 0).all()
        updater.update(0, groups)
        return [p.detach().clone() for p in model.parameters()]

    before = list(load_model(str(tiny_llama_dir), "float32", "cpu")[0].double().parameters())
    moved = 0
    for start, one, several in zip(before, trained(4096), trained(16), strict=True):
        torch.testing.assert_close(one, several, rtol=1e-8, atol=1e-8)
        moved += not torch.equal(start, one)
    assert moved


def test_the_bound_shrinks_only_on_the_side_that_was_left() -> None:
    fn = make("grpo+sat", {"sat_quantile": 0.5}).gates[0].fn
    lr = torch.tensor([0.15, -0.15, 0.01, -0.01, 0.0]).double()
    batch_logprobs = GivenLogProbs().during(lr, 0 * lr)
    up = fn(lr, torch.ones(5), batch_logprobs)
    down = fn(lr, -torch.ones(5), batch_logprobs)
    assert up.tolist()[0] == 0  # within PPO's bound, and further away
    assert up[1:].tolist() == pytest.approx(lr[1:].exp().tolist())
    assert down.tolist()[1] == 0
    assert float(down[0]) == pytest.approx(math.exp(0.15))  # the way back


@pytest.mark.parametrize("name", ["cispo+sat", "scalerl+kl-cov"])
def test_what_changes_the_clip_needs_one(name: str) -> None:
    with pytest.raises(ConfigError, match="changes PPO's clip, which this preset does not have"):
        make(name, {})


def test_a_step_on_which_no_group_differs_has_no_gates() -> None:
    batch = flat(padded(0))
    same = replace(batch, rewards={"outcome": torch.ones(len(batch.rollouts)).double()})
    for name in CASES:
        terms = loss_terms(make(name, {}), same, GivenLogProbs(old=same.sampler_logprobs.double()))
        psi = loss_coefficients(
            make(name, {}), terms, same.sampler_logprobs.double(), torch.arange(same.n_tokens)
        )
        assert not psi.any()
