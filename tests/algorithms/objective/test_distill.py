"""Imitation of a teacher at several tokens: the divergence, the learner and the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from agentrl.algorithms.learners.auxiliary import Reference
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import Packing
from agentrl.algorithms.objective.core import TopKDistillation, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import ConfigError
from tests.algorithms.learners.test_learner import make_batch
from tests.algorithms.train.test_update import group

Whose = Literal["teacher", "policy"]
VOCABULARY = 12


def logits(n: int = 40) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, n, VOCABULARY, generator=draw, dtype=torch.float64)
    return policy, teacher


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Of distributions given by log-probs [n, V]."""
    return (first.exp() * (first - second)).sum()


def binned(logprobs: Tensor, ids: Tensor) -> Tensor:
    """[n, K + 1], the last of all other tokens, by summing them."""
    others = torch.ones_like(logprobs).scatter(1, ids, 0.0).bool()
    rest = logprobs.exp().where(others, torch.zeros(())).sum(1, keepdim=True)
    return torch.cat((logprobs.gather(1, ids), rest.log()), 1)


@pytest.mark.parametrize("of", ["teacher", "policy"])
@pytest.mark.parametrize("k", [1, 3, VOCABULARY - 1])
def test_the_pull_is_minus_the_gradient_of_the_divergence(of: Whose, k: int) -> None:
    policy, teacher = logits()
    ids = (teacher if of == "teacher" else policy).topk(k).indices
    leaf, t = policy.clone().requires_grad_(), teacher.log_softmax(-1)
    p = leaf.log_softmax(-1)
    both = binned(t, ids), binned(p, ids)
    (0.7 * kl(*(both if of == "teacher" else both[::-1]))).backward()
    expected, leaf.grad = leaf.grad, None
    pull = TopKDistillation(k, 0.7, of).pull(p.gather(1, ids), t.gather(1, ids))
    leaf.log_softmax(-1).gather(1, ids).backward(-pull)
    assert expected is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("of", ["teacher", "policy"])
def test_over_the_whole_vocabulary_it_is_the_divergence_itself(of: Whose) -> None:
    policy, teacher = logits()
    leaf, t = policy.clone().requires_grad_(), teacher.log_softmax(-1)
    p = leaf.log_softmax(-1)
    kl(*((t, p) if of == "teacher" else (p, t))).backward()
    expected, leaf.grad = leaf.grad, None
    leaf.log_softmax(-1).backward(-TopKDistillation(VOCABULARY, 1.0, of).pull(p, t))
    assert expected is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-9, atol=1e-12)


def learners(folder: Path, packing: Packing = "trie") -> TorchLearner:
    """A policy whose teacher is the same model with other weights."""
    model, _ = load_model(folder, device="cpu")
    teacher, _ = load_model(folder, device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    frozen = {"teacher": Reference(teacher, model)}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TorchLearner(model, tokenizer, packing=packing, token_budget=40, frozen=frozen)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["rows", "trie"])
@pytest.mark.parametrize("of", ["teacher", "policy"])
def test_a_learner_learns_from_all_the_tokens(
    tiny_model_dir: Path, packing: Packing, of: Whose
) -> None:
    """Its gradient is that of the divergence over all 512 tokens, computed row by row."""
    learner, batch = learners(tiny_model_dir, packing), make_batch()
    algo = make("distill", {"top": 512, "of": of}, supplies=learner.supplies)
    assert algo.distill is not None
    ids, t_NK = learner.top(batch, 512, "teacher")
    batch = replace(batch, topk_tokens=ids)
    torch.testing.assert_close(learner.topk_logprobs(batch, "teacher"), t_NK, atol=1e-5, rtol=0)
    logprobs = GivenLogProbs(teacher=t_NK[:, 0], teacher_candidates=t_NK)
    terms = loss_terms(algo, batch, logprobs, fresh=True)
    given: dict[str, Tensor] = {}

    class Kept(type(learner.optimizer)):  # type: ignore[misc]
        def clip(self, most: float) -> float:
            given.update({n: w.grad.clone() for n, w in learner.model.named_parameters()})
            return float(super().clip(most))

    learner.optimizer.__class__ = Kept
    learner.step(batch, lambda p, index: loss_coefficients(algo, terms, p, index), lr=0.0)
    loss, at = torch.zeros(()), 0
    for row in batch.rows:
        tokens = torch.as_tensor(row.tokens)[None]
        both = [
            m(tokens).logits[0].float() for m in (learner.model, learner.frozen["teacher"].model)
        ]
        places = row.actions - 1
        scale = torch.as_tensor(row.temperature)[:, None]
        policy, teacher = ((x[places] / scale).log_softmax(-1) for x in both)
        teacher = teacher.detach()
        first, second = (teacher, policy) if of == "teacher" else (policy, teacher)
        weight = terms.weight[at : at + len(places)].float()
        loss = loss + weight @ (first.exp() * (first - second)).sum(-1)
        at += len(places)
    learner.model.zero_grad()
    loss.backward()
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(given[name], parameter.grad, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("options", [{"top": 8}, {"top": 8, "of": "policy"}])
@pytest.mark.parametrize("epochs", [1, 2])
def test_updates_bring_the_policy_to_its_teacher(
    tiny_model_dir: Path, options: dict[str, Any], epochs: int
) -> None:
    learner = learners(tiny_model_dir)
    algo = make("distill", options, supplies=learner.supplies)
    settings = AlgorithmConfig(lr=1e-3, epochs=epochs, minibatches=epochs)
    updater = Updater(RunConfig(steps=40, algorithm=settings), algo, learner)
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    whole = updater.batch(groups)

    def distance() -> float:
        p = learner.top(whole, 512)
        t = learner.topk_logprobs(replace(whole, topk_tokens=p[0]), "teacher")
        return float(kl(p[1].double(), t.double())) / whole.n_tokens

    before = distance()
    for step in range(8):
        found = updater.update(step, groups)
        assert found["update/bad"] == 0
    assert distance() < 0.95 * before


def test_it_is_mixed_with_rewards() -> None:
    mixed = make(
        "grpo+distill",
        {"distill_top": 4, "distill_beta": 0.5},
        supplies=("teacher", "top_tokens", "sampler", "old"),
    )
    assert mixed.distill == TopKDistillation(4, 0.5, "teacher")
    assert "teacher" in mixed.needs
    with pytest.raises(ConfigError, match="top = 4 imitates several tokens"):
        make(
            "dppo-topk+distill",
            {"distill_top": 4},
            supplies=("teacher", "top_tokens", "sampler", "old"),
        )
    with pytest.raises(ConfigError, match="top = 4 imitates several tokens"):
        make(
            "dpo+distill",
            {"distill_top": 4},
            supplies=("teacher", "top_tokens", "sampler", "old", "reference"),
        )
