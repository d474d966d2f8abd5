"""A critic on the policy's hidden states or on a decoder of its own, in the learner."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.auxiliary import CRITIC, ValueModel, load_auxiliary
from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import Packing
from agentrl.algorithms.objective.values import ValueTerms, value_terms
from agentrl.algorithms.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.core.errors import PolicyError
from tests.algorithms.learners.test_learner import make_batch, psi_for

Make = Callable[..., TorchLearner]


@pytest.fixture(params=["shared", "copy"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make(tiny_model_dir: Path, kind: str) -> Make:
    """Learners with a critic, all from the same weights, whose head is not 0."""

    def build(
        dtype: torch.dtype = torch.float64,
        coefficient: float = 0.3,
        packing: Packing = "trie",
        token_budget: int = 4096,
    ) -> TorchLearner:
        model, tokenizer = load_model(tiny_model_dir, device="cpu")
        model = model.to(dtype)
        decoder = None
        if kind == "copy":
            decoder = load_auxiliary(
                "critic.model", str(tiny_model_dir), model, tokenizer
            ).base_model
        critic = ValueModel(model, decoder, lr=1e-2, coefficient=coefficient, max_grad_norm=1e9)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(3))
        return TorchLearner(
            model,
            tokenizer,
            critic=critic,
            packing=packing,
            token_budget=token_budget,
            max_grad_norm=1e9,
            threads=1,
        )

    return build


def terms_for(batch: Batch, clip: float = 0.2) -> ValueTerms:
    target = torch.linspace(-1, 2, batch.n_tokens, dtype=torch.float64)
    target[::5] = math.nan
    return value_terms(target, torch.linspace(1, -1, batch.n_tokens), clip=clip)


def naive(learner: TorchLearner, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and values [N] by running each row alone, differentiable."""
    critic = learner.critic
    assert critic is not None
    logprobs, values = [], []
    for row in batch.rows:
        inputs = {"input_ids": row.tokens[None], "use_cache": False}
        hidden = learner.model.model(**inputs).last_hidden_state[0][row.actions - 1]
        logits = learner.model.lm_head(hidden) / row.temperature[:, None]
        actions = row.tokens[row.actions][:, None]
        logprobs.append(logits.log_softmax(-1).gather(1, actions)[:, 0])
        if critic.decoder is not None:
            hidden = critic.decoder(**inputs).last_hidden_state[0][row.actions - 1]
        values.append(critic.head(hidden)[:, 0])
    return torch.cat(logprobs), torch.cat(values)


def naive_loss(terms: ValueTerms, v: Tensor) -> Tensor:
    near = torch.clamp(v, terms.old - terms.clip, terms.old + terms.clip)
    larger = torch.maximum((v - terms.returns) ** 2, (near - terms.returns) ** 2)
    return 0.5 * (terms.weight * larger).sum()


@pytest.mark.parametrize("packing", ["rows", "trie"])
def test_values_are_those_of_the_states_before_each_action(make: Make, packing: Packing) -> None:
    learner, batch = make(packing=packing, token_budget=60), make_batch()
    assert "values" in learner.supplies
    values = learner.values(batch)
    assert values.dtype == torch.float64
    assert not values.requires_grad
    _, expected = naive(learner, batch)
    torch.testing.assert_close(values, expected.detach(), atol=1e-10, rtol=0)


def test_the_gradient_is_that_of_both_losses(make: Make, kind: str) -> None:
    """One forward and one backward per micro-batch, against two losses of a naive model."""
    batch, psi = make_batch(), psi_for(make_batch())
    terms = terms_for(batch)
    start = make()
    p, v = naive(start, batch)
    policy_loss = -(psi(p.detach(), torch.arange(batch.n_tokens)) * p).sum()
    value_loss = naive_loss(terms, v)
    critic = start.critic
    assert critic is not None
    own = dict(critic.modules.named_parameters())
    shared = dict(start.model.named_parameters())
    wanted = torch.autograd.grad(
        policy_loss + 0.3 * value_loss, [*shared.values(), *own.values()], materialize_grads=True
    )
    for budget in (1, 10_000):
        learner = make(token_budget=budget)
        assert learner.critic is not None
        report = learner.step(batch, psi, lr=1e-9, critic=terms)
        assert report.applied
        assert report.metrics["critic/loss"] == pytest.approx(value_loss.item(), rel=1e-10)
        assert report.loss == pytest.approx(policy_loss.item(), rel=1e-10)
        assert 0 < report.metrics["critic/clip_fraction"] < 1
        moments = [
            learner.optimizer.inner.state[parameter]["exp_avg"]
            for parameter in learner.model.parameters()
        ]
        moments += [
            learner.critic.optimizer.inner.state[parameter]["exp_avg"]
            for parameter in learner.critic.modules.parameters()
        ]
        for moment, gradient in zip(moments, wanted, strict=True):
            # The first moment after one step is (1 - beta) times the gradient.
            torch.testing.assert_close(moment, 0.1 * gradient, atol=1e-11, rtol=1e-8)


def test_a_fresh_head_says_0(tiny_model_dir: Path) -> None:
    model, tokenizer = load_model(tiny_model_dir, device="cpu")
    learner = TorchLearner(model, tokenizer, critic=ValueModel(model, lr=1e-2))
    assert not learner.values(make_batch()).any()


def test_without_a_critic_there_are_no_values(tiny_model_dir: Path) -> None:
    learner = TorchLearner(*load_model(tiny_model_dir, device="cpu"))
    batch = make_batch()
    assert "values" not in learner.supplies
    with pytest.raises(PolicyError, match="no critic"):
        learner.values(batch)
    with pytest.raises(PolicyError, match="no critic"):
        learner.step(batch, psi_for(batch), lr=1e-3, critic=terms_for(batch))


def test_values_approach_their_targets(make: Make) -> None:
    learner, batch = make(coefficient=1.0), make_batch()
    target = torch.linspace(0, 1, batch.n_tokens, dtype=torch.float64)

    def nothing(logprobs: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(logprobs)

    def error() -> float:
        return float((learner.values(batch) - target).square().mean())

    before = error()
    for _ in range(20):
        terms = value_terms(target, learner.values(batch), clip=math.inf)
        learner.step(batch, nothing, lr=1e-3, critic=terms)
    assert error() < 0.1 * before


def test_a_value_that_is_not_finite_changes_nothing(make: Make) -> None:
    learner, batch = make(), make_batch()
    critic = learner.critic
    assert critic is not None
    with torch.no_grad():
        critic.head.weight[0, 0] = math.inf
    before = [each.clone() for each in learner.model.parameters()]
    report = learner.step(batch, psi_for(batch), lr=1e-2, critic=terms_for(batch))
    assert not report.applied
    assert all(map(torch.equal, before, learner.model.parameters()))
    assert not critic.optimizer.inner.state
    assert all(each.grad is None for each in critic.modules.parameters())


def states(learner: Learner) -> list[Tensor]:
    assert isinstance(learner, TorchLearner)
    assert learner.critic is not None
    own = learner.critic.modules.parameters()
    return [each.detach().clone() for each in (*learner.model.parameters(), *own)]


def test_a_resumed_critic_continues_bit_for_bit(make: Make, tmp_path: Path) -> None:
    batch = make_batch()

    def train(learner: TorchLearner, steps: int) -> None:
        for _ in range(steps):
            terms = value_terms(terms_for(batch).returns, learner.values(batch), clip=0.2)
            learner.step(batch, psi_for(batch), lr=1e-3, critic=terms)

    whole, first, second = (make(torch.float32) for _ in range(3))
    train(whole, 4)
    train(first, 2)
    save_checkpoint(tmp_path / "here", first, state={})
    load_checkpoint(tmp_path / "here", second)
    train(second, 2)
    for mine, theirs in zip(states(whole), states(second), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_without_the_critic_is_refused(make: Make, tmp_path: Path) -> None:
    learner, batch = make(torch.float32), make_batch()
    save_checkpoint(tmp_path / "here", learner, state={})
    (tmp_path / "here" / CRITIC).unlink()
    learner.step(batch, psi_for(batch), lr=1e-2, critic=terms_for(batch))
    before = states(learner)
    with pytest.raises(PolicyError, match=r"critic\.safetensors is missing"):
        load_checkpoint(tmp_path / "here", learner)
    assert all(map(torch.equal, before, states(learner)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_of_it_at_once(tiny_model_dir: Path, kind: str, dtype: torch.dtype) -> None:
    """Adapter, critic, recomputed layers and shared prefixes learn what each row by itself does,
    also after memory ran out: two steps, the second of which sees what the first has changed."""
    from agentrl.algorithms.model.lora import LoraAdapters

    batch = make_batch()

    def build(**settings: object) -> TorchLearner:
        model, tokenizer = load_model(tiny_model_dir, device="cpu")
        model = model.to(dtype)
        adapters = LoraAdapters(model)
        adapters.add("policy", rank=4, alpha=8.0)
        decoder = None
        if kind == "copy":
            decoder = load_auxiliary(
                "critic.model", str(tiny_model_dir), model, tokenizer
            ).base_model
        critic = ValueModel(model, decoder, lr=1e-3)
        return TorchLearner(model, tokenizer, adapters=adapters, critic=critic, **settings)  # type: ignore[arg-type]

    def train(learner: TorchLearner) -> list[float]:
        found = []
        for _ in range(3):
            report = learner.step(batch, psi_for(batch), lr=1e-2, critic=terms_for(batch))
            assert report.applied
            values = report.loss, report.grad_norm, *map(report.metrics.get, KEYS)
            found += [value for value in values if value is not None]
        return found

    alone = train(build(packing="rows", token_budget=1))
    whole = build(packing="trie", token_budget=64, gradient_checkpointing=True)
    failing, forward = [True], whole._forward

    def once(*given: object) -> object:
        if failing and failing.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*given)  # type: ignore[arg-type]

    whole._forward = once  # type: ignore[assignment, method-assign]
    with pytest.warns(RuntimeWarning, match="ran out of memory"):
        together = train(whole)
    assert whole.token_budget == 32
    close = 1e-3 if dtype is torch.float32 else 0.05
    assert together == pytest.approx(alone, rel=close, abs=close / 100)


KEYS = ("critic/loss", "critic/grad_norm")
