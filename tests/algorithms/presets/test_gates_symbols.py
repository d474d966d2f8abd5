"""Trust regions on the most probable tokens: the head, the learner, the step and the preset."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from agentrl.algorithms.credit.dump import CreditRecorder, load_dump, save_dump
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.lm_head import action_logprobs, other_logprobs, top_tokens
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import Packing
from agentrl.algorithms.objective.core import compute_advantages, loss_coefficients, loss_terms
from agentrl.algorithms.objective.ratios import GivenLogProbs
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.metrics import Dump, ratio_metrics
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import ConfigError, TrainingError
from tests.algorithms.learners.test_learner import make_batch
from tests.algorithms.model.test_lm_head import HEADS, make_inputs
from tests.algorithms.train.test_update import Recorder, group
from tests.algorithms.worlds import random_plays, world

CASES: dict[str, dict[str, Any]] = {
    "dppo-topk": {"k": 3},
    "dppo-topk kl": {"k": 3, "kind": "kl"},
    "dppo-topk bounds": {"k": 2, "low": 0.01, "high": 0.2, "cap": 1.5},
    "dppo-topk+tis": {"k": 3, "tis_cap": 1.1},
}
VOCABULARY = 6


def logits(batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
    """[N, V] before the first update and now; each token sampled is 0."""
    draw = torch.Generator().manual_seed(seed)
    old = torch.randn(batch.n_tokens, VOCABULARY, generator=draw, dtype=torch.float64)
    return old, old + 0.5 * torch.randn(old.shape, generator=draw, dtype=torch.float64)


def symbols(old: Tensor, k: int) -> Tensor:
    first = torch.zeros((len(old), 1), dtype=torch.int64)
    return old.scatter(1, first, torch.inf).topk(k).indices


def published(batch: Batch, case: str, old: Tensor, now: Tensor) -> Tensor:
    """-d loss / d logits [N, V], a token at a time."""
    options = CASES[case]
    k, kl, cap = options["k"], options.get("kind") == "kl", options.get("cap", 20.0)
    low, high = (options.get(name, 0.05 if kl else 0.15) for name in ("low", "high"))
    advantage = compute_advantages(make("dr-grpo", {}), batch).tolist()
    leaf = now.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    rows = {r for r, a in zip(batch.token_row.tolist(), advantage, strict=True) if a == a}
    for t, a in enumerate(advantage):
        if a != a:
            continue
        mu, pi = (row.softmax(0).tolist() for row in (old[t], now[t]))
        ranked = sorted(range(1, VOCABULARY), key=lambda i: -mu[i])
        shown = [0, *ranked[: k - 1]]
        pairs = [(mu[i], pi[i]) for i in shown]
        pairs.append((1 - sum(x for x, _ in pairs), 1 - sum(y for _, y in pairs)))
        if kl:
            distance = sum(x * math.log(x / y) for x, y in pairs)
        else:
            distance = 0.5 * sum(abs(x - y) for x, y in pairs)
        far = (a > 0 and pi[0] > mu[0] and distance > high) or (
            a < 0 and pi[0] < mu[0] and distance > low
        )
        weight = 0.0 if far else min(pi[0] / mu[0], cap)
        if "tis_cap" in options:
            weight *= min(mu[0] / math.exp(batch.sampler_logprobs[t].item()), options["tis_cap"])
        loss = loss - weight * a * leaf[t].log_softmax(0)[0] / 1024 / len(rows)
    loss.backward()
    assert leaf.grad is not None
    return -leaf.grad


@pytest.mark.parametrize("case", CASES)
def test_psi_is_minus_the_gradient_of_the_published_loss(case: str) -> None:
    algo = make(case.split()[0], CASES[case], supplies=("old", "sampler", "top_tokens"))
    dropped = 0
    for seed in range(3):
        batch = world(*random_plays(seed))
        old, now = logits(batch, seed)
        ids, leaf = symbols(old, algo.topk), now.clone().requires_grad_()
        o_NK = old.log_softmax(-1).gather(1, ids)
        terms = loss_terms(algo, batch, GivenLogProbs(old=o_NK[:, 0], old_candidates=o_NK))
        p_NK = leaf.log_softmax(-1).gather(1, ids)
        found = loss_coefficients(algo, terms, p_NK, torch.arange(batch.n_tokens))
        p_NK[:, 0].backward(found)
        assert leaf.grad is not None
        expected = published(batch, case, old, now)
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-10, atol=1e-12)
        dropped += int(((found == 0) & (terms.advantage != 0) & (terms.weight > 0)).sum())
        # A micro-batch sees what the whole does.
        part = (batch.token_row % 2 == 0).nonzero().squeeze(1)
        assert torch.equal(loss_coefficients(algo, terms, p_NK[part], part), found[part])
    assert dropped


def test_the_first_step_needs_no_symbols_and_trusts_everything() -> None:
    batch = world(*random_plays(0))
    algo = make("dppo-topk", {}, supplies=("old", "sampler", "top_tokens"))
    terms, p = loss_terms(algo, batch, GivenLogProbs(), fresh=True), batch.sampler_logprobs.double()
    assert torch.equal(
        loss_coefficients(algo, terms, p, torch.arange(len(p))), terms.weight * terms.advantage
    )
    with pytest.raises(TrainingError, match=r"old policy's most probable tokens, and there"):
        loss_terms(algo, batch, GivenLogProbs(old=p))
    both = GivenLogProbs(old=p, old_candidates=torch.stack((p, p), 1))
    with pytest.raises(TrainingError, match="of the top-k tokens"):
        loss_coefficients(algo, loss_terms(algo, batch, both), p, torch.arange(len(p)))
    bad = torch.stack((p, torch.full_like(p, math.nan)), 1)
    with pytest.raises(TrainingError, match="log-probs of the current policy"):
        loss_coefficients(algo, loss_terms(algo, batch, both), bad, torch.arange(len(p)))


@pytest.mark.parametrize("name", HEADS)
def test_log_probs_of_tokens_are_those_of_all_logits(name: str) -> None:
    module, (hidden, tokens, temperature) = HEADS[name](), make_inputs()
    logprobs, _ = action_logprobs(module, hidden, tokens, temperature)
    ids = top_tokens(module, hidden, tokens, 5)
    whole = (module(hidden) / temperature.to(hidden)[:, None]).log_softmax(-1).detach()
    for t, token in enumerate(tokens.tolist()):
        likely = [i for i in whole[t].argsort(descending=True).tolist() if i != token]
        assert ids[t].tolist() == [token, *likely[:4]]
    found = other_logprobs(module, hidden, ids, logprobs, temperature)
    torch.testing.assert_close(found.detach(), whole.gather(1, ids), atol=1e-12, rtol=0)


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_log_probs_of_tokens_are_rounded_like_all_logits(name: str, fp32: bool) -> None:
    module, (hidden, tokens, temperature) = HEADS[name]().bfloat16(), make_inputs(torch.bfloat16)
    every = torch.arange(40).expand(len(tokens), -1)
    ids = torch.cat((tokens[:, None], every), 1)
    logprobs, _ = action_logprobs(module, hidden, tokens, temperature, fp32=fp32)
    found = other_logprobs(module, hidden, ids, logprobs, temperature, fp32=fp32)
    for t in range(len(tokens)):
        one = hidden[t : t + 1].expand(40, -1), every[t], temperature[t : t + 1].expand(40)
        expected, _ = action_logprobs(module, *one, fp32=fp32)
        torch.testing.assert_close(found[t, 1:], expected.detach(), atol=1e-5, rtol=0)


def test_a_small_vocabulary_is_all_symbols() -> None:
    module, (hidden, tokens, _) = HEADS["plain"](), make_inputs()
    ids = top_tokens(module, hidden, tokens, 99)
    assert [sorted(row) for row in ids.tolist()] == [list(range(40))] * len(tokens)


@pytest.mark.parametrize("packing", ["rows", "trie"])
def test_a_learner_gives_psi_the_likeliest_tokens(tiny_model_dir: Path, packing: Packing) -> None:
    model, _ = load_model(tiny_model_dir, device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    learner = TorchLearner(model, tokenizer, packing=packing, token_budget=40)
    batch = make_batch()
    ids, before = learner.top(batch, 4)
    sampled = torch.cat([row.tokens[row.actions] for row in batch.rows])
    assert torch.equal(ids[:, 0], sampled)
    torch.testing.assert_close(before[:, 0], learner.logprobs(batch), atol=1e-6, rtol=0)
    assert (before[:, 1:].diff(dim=1) <= 1e-6).all()
    assert (before.exp().sum(1) < 1).all()
    seen: list[tuple[Tensor, Tensor]] = []

    def recorded(logprobs: Tensor, index: Tensor) -> Tensor:
        seen.append((logprobs, index))
        return torch.ones(len(index)) / batch.n_tokens

    report = learner.step(replace(batch, topk_tokens=ids), recorded, lr=1e-3)
    assert report.topk_logprobs is not None
    assert report.current is report.topk_logprobs
    torch.testing.assert_close(report.topk_logprobs, before, atol=1e-5, rtol=0)
    torch.testing.assert_close(report.topk_logprobs[:, 0], report.logprobs)
    for logprobs, index in seen:
        torch.testing.assert_close(logprobs.float(), report.topk_logprobs[index], atol=0, rtol=0)
    assert learner.step(batch, lambda p, _: torch.zeros_like(p), lr=0.0).topk_logprobs is None


class Symbolic(Recorder):
    supplies = frozenset({"old", "sampler", "top_tokens"})

    def top(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(batch.n_tokens)[:, None] + torch.arange(k)
        return ids, self.logprobs(batch)[:, None] - torch.arange(k)

    def step(self, batch: Batch, loss_coefficients: Any, **rest: Any) -> Any:
        if not batch.topk_tokens.numel():
            return super().step(batch, loss_coefficients, **rest)
        shown = self.logprobs(batch)[:, None] - torch.arange(batch.topk_tokens.shape[1])
        report = super().step(
            batch, lambda _, index: loss_coefficients(shown[index], index), **rest
        )
        return msgspec.structs.replace(report, topk_logprobs=shown)


def test_minibatches_and_epochs_carry_their_symbols(tmp_path: Path) -> None:
    learner, recorder = Symbolic(shift=0.05), CreditRecorder("policy")
    algo = make("dppo-topk", {"k": 2, "high": 0.01}, supplies=learner.supplies)
    config = AlgorithmConfig(lr=1.0, epochs=2, minibatches=2)
    updater = Updater(RunConfig(steps=5, algorithm=config), algo, learner, recorder=recorder)
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 1.0)]
    found = updater.update(0, groups)
    assert [batch.topk_tokens.tolist() for batch in learner.batches[:2]] in (
        [[[0, 1], [1, 2], [2, 3], [3, 4]], [[4, 5], [5, 6], [6, 7], [7, 8]]],
        [[[4, 5], [5, 6], [6, 7], [7, 8]], [[0, 1], [1, 2], [2, 3], [3, 4]]],
    )
    assert (learner.coefficients[0] != 0).all()
    assert any((x == 0).any() for x in learner.coefficients[1:])
    assert found["policy/clip_fraction"] > 0
    batch = learner.batches[0]
    o_NK = learner.top(batch, 2)[1]
    terms = loss_terms(algo, batch, GivenLogProbs(old=o_NK[:, 0], old_candidates=o_NK))
    assert ratio_metrics(algo, terms, o_NK)["policy/clip_fraction"] == 0


def test_steps_of_a_real_learner_are_held_and_can_be_dumped(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model, _ = load_model(tiny_model_dir, device="cpu")
    learner = TorchLearner(model, AutoTokenizer.from_pretrained(tiny_model_dir))
    algo = make("dppo-topk", {"k": 5, "low": 0.01, "high": 0.01}, supplies=learner.supplies)
    seen: list[Batch] = []

    class Watched(TorchLearner):
        def step(self, batch: Batch, loss_coefficients: Any, **rest: Any) -> Any:
            seen.append(batch)
            return super().step(batch, loss_coefficients, **rest)

    learner.__class__ = Watched
    config = AlgorithmConfig(lr=1e-2, epochs=2, minibatches=2)
    found = Updater(RunConfig(steps=5, algorithm=config), algo, learner).update(
        0, [group("a", 1.0, 0.0, 0.5), group("b", 0.0, 1.0, 0.2)]
    )
    assert (found["update/steps"], found["update/skipped"]) == (4, 0)
    assert 0 < found["policy/clip_fraction"] < 1
    o_NK = learner.top(seen[0], 5)[1]
    terms = loss_terms(algo, seen[0], GivenLogProbs(old=o_NK[:, 0], old_candidates=o_NK))
    save_dump(tmp_path / "dump", Dump(seen[0], terms, o_NK[:, 0], 1.0, 1.0))
    read = load_dump(tmp_path / "dump")
    assert torch.equal(read.batch.topk_tokens, seen[0].topk_tokens)
    kept = read.terms.given.old_candidates, terms.given.old_candidates
    assert torch.equal(*kept)  # type: ignore[arg-type]


def test_one_optimizer_step_asks_for_no_symbols() -> None:
    learner = Symbolic()
    algo = make("dppo-topk", {}, supplies=learner.supplies)
    Updater(RunConfig(steps=5, algorithm=AlgorithmConfig(lr=1.0)), algo, learner).update(
        0, [group("a", 1.0, 0.0)]
    )
    assert not learner.batches[0].topk_tokens.numel()


def test_a_learner_without_symbols_is_refused_before_the_run() -> None:
    learner = Recorder()
    learner.supplies = frozenset({"old", "sampler"})  # type: ignore[attr-defined]
    algo = make("dppo-topk", {}, supplies=("old", "sampler", "top_tokens"))
    with pytest.raises(ConfigError, match="'dppo-topk' needs the most probable tokens"):
        Updater(RunConfig(steps=5, algorithm=AlgorithmConfig(lr=1.0)), algo, learner)
