"""A reward model that learns from outcomes, against the cross-entropy written down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from agentrl.algorithms import reward_models
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets import registry
from agentrl.algorithms.reward_models import ImplicitTrainer, RewardModel
from agentrl.algorithms.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig, resolve
from agentrl.core.errors import ConfigError, PolicyError, TrainingError
from agentrl.core.types import Group, Reward
from tests import factories
from tests.algorithms.test_reward_models import call, rollout

Made = tuple[RewardModel, ImplicitTrainer]


@pytest.fixture(autouse=True)
def steep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that a few steps change."""
    monkeypatch.setattr(reward_models, "BETA", 0.5)


def make(directory: Path, scope: str = "rollout", **more: object) -> Made:
    table = {"model": str(directory), "kind": "implicit", "scope": scope}
    config = resolve({"reward_models": {"prm": table | {"lr": 1e-6} | more}}, source="run.toml")
    policy, tokenizer = load_model(directory, device="cpu")
    (model,), (trainer,) = reward_models.make_reward_models(
        config, policy, tokenizer, str(directory)
    )
    return model, trainer


def groups(*outcomes: float | None) -> list[Group]:
    """Rollouts of two calls each, which begin alike."""
    rows = []
    for n, outcome in enumerate(outcomes):
        calls = [call(f"{n}/0", [1, 2, 3], [4, 5 + n]), call(f"{n}/1", [1, 2, 3, 4, 5 + n, 6], [7])]
        rewards = [] if outcome is None else [Reward(value=outcome)]
        rows.append(replace(rollout(str(n), calls), rewards=rewards))
    return [factories.group(*rows)]


def logprob(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double()
    scored = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return scored.gather(1, torch.tensor(completion)[:, None]).sum()


def stirred(model: PreTrainedModel) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)


@pytest.mark.parametrize(
    ("scope", "budget", "kind"),  # each two of them together
    [("rollout", 1, "outcome"), ("rollout", 4096, "pairs"), ("transition", 1, "pairs"),
     ("transition", 4096, "outcome")],
)  # fmt: skip
def test_the_gradient_is_that_of_the_cross_entropy(
    tiny_model_dir: Path, scope: str, budget: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, trainer = make(tiny_model_dir, scope, loss=kind)
    object.__setattr__(trainer.scorer, "token_budget", budget)
    stirred(trainer.scorer.model)
    naive, reference = (load_model(tiny_model_dir, device="cpu")[0] for _ in range(2))
    stirred(naive)
    outcomes = (1.0, 0.0, None, 0.25)  # one nobody knows, one in between
    scores = []
    for n, outcome in enumerate(outcomes):
        if outcome is not None:
            parts = [([1, 2, 3], [4, 5 + n]), ([1, 2, 3, 4, 5 + n, 6], [7])]
            gaps = [logprob(naive, *p) - logprob(reference, *p).detach() for p in parts]
            scores.append(0.5 * (gaps[0] + gaps[1]))
    s, y = torch.stack(scores), torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)
    if kind == "pairs":  # of four rollouts three are comparable
        s, y = torch.stack([s[0] - s[1], s[0] - s[2], s[2] - s[1]]), torch.ones(3).double()
    loss = binary_cross_entropy_with_logits(s, y)
    expected = torch.autograd.grad(loss, list(naive.parameters()))
    seen: list[torch.Tensor] = []
    masters = trainer.optimizer.masters.values()
    monkeypatch.setattr(
        trainer.optimizer, "clip", lambda _: seen.extend(p.grad.clone() for p in masters) or 1.0
    )
    metrics = trainer.learn(model.complete(groups(*outcomes)))
    assert metrics["reward_models/prm/loss"] == pytest.approx(loss.item(), abs=1e-6)
    right = ((s > 0) == (y > 0.5)).double().mean()
    assert metrics["reward_models/prm/accuracy"] == pytest.approx(float(right))
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine, theirs.float(), atol=1e-6, rtol=1e-4)
    assert all(p.grad is None for p in trainer.scorer.model.parameters())


def test_it_learns_the_outcome_after_it_gave_its_rewards(tiny_model_dir: Path) -> None:
    model, trainer = make(tiny_model_dir, lr=1e-3)
    algo = registry.make("streams", {"streams": {"outcome": {}, "prm": {}}})
    learner = TorchLearner(*load_model(tiny_model_dir, device="cpu"), threads=1)
    config = RunConfig(steps=20, algorithm=AlgorithmConfig(group_size=1))
    steps = Updater(config, algo, learner, preprocessor=Preprocessor((model,), (trainer,)))
    found = [steps.update(step, groups(1.0, 0.0)) for step in range(8)]
    assert found[0]["reward/prm/std"] == 0.0  # it begins as its reference
    assert found[-1]["reward_models/prm/accuracy"] == 1.0
    assert found[-1]["reward_models/prm/loss"] < 0.1 < found[0]["reward_models/prm/loss"]
    assert not any(p.requires_grad for p in trainer.scorer.reference.parameters())


def test_it_resumes_bit_for_bit_or_refuses_a_damaged_file(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    def made() -> tuple[RewardModel, ImplicitTrainer, TorchLearner]:
        model, trainer = make(tiny_model_dir, lr=1e-3)
        policy, tokenizer = load_model(tiny_model_dir, device="cpu")
        learner = TorchLearner(policy, tokenizer, threads=1)
        learner.keep(trainer)
        return model, trainer, learner

    def train(model: RewardModel, trainer: ImplicitTrainer) -> list[dict[str, float]]:
        return [trainer.learn(model.complete(groups(1.0, 0.0, 1.0))) for _ in range(2)]

    model, trainer, learner = made()
    train(model, trainer)
    save_checkpoint(tmp_path / "1", learner, {})
    again, resumed, other = made()
    load_checkpoint(tmp_path / "1", other)
    assert train(again, resumed) == train(model, trainer)
    before = [p.detach().clone() for p in resumed.scorer.model.parameters()]
    for name in ("model", "optimizer"):
        file = tmp_path / "1" / "reward_models" / "prm" / f"{name}.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-9])
        with pytest.raises(PolicyError, match=rf"{name}\.safetensors is damaged, by the digests"):
            load_checkpoint(tmp_path / "1", other)
        file.write_bytes(content)
    assert all(map(torch.equal, before, resumed.scorer.model.parameters()))


def test_outcomes_that_are_no_probability_are_refused(tiny_model_dir: Path) -> None:
    model, trainer = make(tiny_model_dir)
    with pytest.raises(TrainingError, match=r"reward_models\.prm\.lr: 1 of 2 outcomes are not"):
        trainer.learn(model.complete(groups(-1.0, 1.0)))
    assert trainer.learn(model.complete(groups(None))) == {}
    trainer.loss = "pairs"  # any scale will do, and groups are not compared with each other
    assert trainer.learn(model.complete(groups(-1.0, 1.0)))["reward_models/prm/accuracy"] == 0.0
    (one,), (other,) = groups(1.0), groups(0.0)
    assert trainer.learn(model.complete([one, replace(other, id="h")])) == {}


def test_a_scalar_model_does_not_learn() -> None:
    algo = registry.make("streams", {"streams": {"prm": {}}})
    for settings, why in (
        ({"lr": 1e-3}, r"prm\.lr is for .*kind = 'implicit', and it is 'scalar'"),
        ({"kind": "implicit", "loss": "pairs"}, r"prm\.loss is set, and it .* learn without lr"),
    ):
        table = {"prm": {"model": "x"} | settings}
        with pytest.raises(ConfigError, match=why):
            reward_models.check_reward_models(
                resolve({"reward_models": table}, source="run.toml"), algo
            )


@pytest.mark.parametrize("kind", ["verl", "mine.py:learner"])
def test_it_learns_beside_the_torch_learner_only(kind: str) -> None:
    algo = registry.make("streams", {"streams": {"prm": {}}})
    table = {"prm": {"model": "m", "kind": "implicit", "lr": 1e-6}}
    tables = {"reward_models": table, "learner": {"kind": kind}}
    with pytest.raises(ConfigError, match=r"reward_models\.prm\.lr: .* hold no reward model"):
        reward_models.check_reward_models(resolve(tables, source="test"), algo)
    reward_models.check_reward_models(resolve({"reward_models": table}, source="test"), algo)
