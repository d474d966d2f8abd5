"""Rewards that a model gives."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from agentrl.algorithms import reward_models
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.presets import registry
from agentrl.algorithms.reward_models import ImplicitScorer, RewardModel, ScalarScorer, load_scalar
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, PolicyError, TrainingError
from agentrl.core.types import Group, Reward, Rollout, RolloutState, Scope, Transition
from tests import factories
from tests.factories import call


@pytest.fixture(scope="module")
def score_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a head of one label, beside the policy's tokenizer."""
    folder = tmp_path_factory.mktemp("scores")
    shutil.copytree(tiny_model_dir, folder, dirs_exist_ok=True)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1)
    model.config.pad_token_id = None
    model.save_pretrained(folder)
    return folder


def rollout(
    id: str, calls: list[Transition], state: RolloutState = RolloutState.SUCCEEDED
) -> Rollout:
    return factories.rollout(id, calls, [Reward(value=1.0)], state=state, attempt="a")


def groups() -> list[Group]:
    """Two rollouts whose calls begin alike, one that failed and one whose tokens are unknown."""
    first = [call("a0", [1, 2, 3], [4, 5]), call("a1", [1, 2, 3, 4, 5, 6], [7])]
    second = [call("b0", [1, 2, 3], [8, 0]), call("b1", [9], [])]
    failed = rollout("c", [call("c0", [1, 2], [3])], RolloutState.FAILED)
    inexact = rollout("d", [call("d0", [1, 2], [3], exact=False)])
    rows = [rollout("a", first), rollout("b", second), failed, inexact]
    return [factories.group(*rows)]


def given(made: list[Group], name: str) -> dict[tuple[str, str | None], float]:
    return {
        (row.id, reward.target): reward.value
        for group in made
        for row in group.rollouts
        for reward in row.rewards
        if reward.name == name and reward.source == "model:" + name
    }


def forward(model: PreTrainedModel, tokens: list[int]) -> float:
    """The score as transformers computes it, of one sequence."""
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([tokens])).logits[0, 0])


@pytest.mark.parametrize("budget", [1, 4096])
def test_a_scalar_model_scores_as_transformers_does(
    tiny_model_dir: Path, score_dir: Path, budget: int
) -> None:
    policy, tokenizer = load_model(tiny_model_dir, device="cpu")
    model = load_scalar("reward_models.rm.model", str(score_dir), policy, tokenizer)
    naive = AutoModelForSequenceClassification.from_pretrained(score_dir)
    whole = RewardModel("rm", ScalarScorer(model, token_budget=budget)).complete(groups())
    assert given(whole, "rm") == {
        ("a", None): pytest.approx(forward(naive, [1, 2, 3, 4, 5, 6, 7]), abs=1e-5),
        ("b", None): pytest.approx(forward(naive, [1, 2, 3, 8, 0]), abs=1e-5),
    }
    # What the verifier gave stays, first.
    assert [row.rewards[0] for row in whole[0].rollouts] == [Reward(value=1.0)] * 4
    scorer = ScalarScorer(model, token_budget=budget)
    calls = RewardModel("rm", scorer, Scope.TRANSITION).complete(groups())
    assert given(calls, "rm") == {
        ("a", "a0"): pytest.approx(forward(naive, [1, 2, 3, 4, 5]), abs=1e-5),
        ("a", "a1"): pytest.approx(forward(naive, [1, 2, 3, 4, 5, 6, 7]), abs=1e-5),
        ("b", "b0"): pytest.approx(forward(naive, [1, 2, 3, 8, 0]), abs=1e-5),
    }


def logprob(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> float:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
    scored = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return float(scored.gather(1, torch.tensor(completion)[:, None]).sum())


def test_an_implicit_model_scores_the_log_ratio(tiny_model_dir: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)

    def gap(prompt: list[int], completion: list[int]) -> float:
        return logprob(model, prompt, completion) - logprob(reference, prompt, completion)

    expected = {
        "a0": gap([1, 2, 3], [4, 5]),
        "a1": gap([1, 2, 3, 4, 5, 6], [7]),
        "b0": gap([1, 2, 3], [8, 0]),
    }
    scorer = ImplicitScorer(model, reference, beta=0.05)
    calls = given(RewardModel("p", scorer, Scope.TRANSITION, sums=True).complete(groups()), "p")
    assert calls == {
        (id[0], id): pytest.approx(0.05 * value, abs=1e-6) for id, value in expected.items()
    }
    whole = given(RewardModel("p", scorer, sums=True).complete(groups()), "p")
    assert whole["a", None] == pytest.approx(0.05 * (expected["a0"] + expected["a1"]), abs=1e-6)
    # D12: a log-ratio of 2 at beta .05 is .1.
    unchanged = RewardModel("p", ImplicitScorer(reference, reference, 0.05), sums=True)
    assert set(given(unchanged.complete(groups()), "p").values()) == {0.0}


class Fixed:
    """Scores calls in order."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def __call__(self, calls: object) -> torch.Tensor:
        return torch.tensor(self.scores, dtype=torch.float64)


def test_non_finite_scores_and_taken_names_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"reward_models\.rm: 1 of 2 scores are NaN or inf"):
        RewardModel("rm", Fixed(1.0, math.nan)).complete(groups())
    with pytest.raises(TrainingError, match=r"reward_models\.outcome: 4 rewards of that name"):
        RewardModel("outcome", Fixed(1.0, 2.0)).complete(groups())
    assert RewardModel("rm", Fixed()).complete([]) == []


def test_models_that_give_no_score_are_refused(
    tiny_model_dir: Path, score_dir: Path, tmp_path: Path
) -> None:
    policy, tokenizer = load_model(tiny_model_dir, device="cpu")
    key = "reward_models.rm.model"
    bare, two = tmp_path / "bare", tmp_path / "two"
    shutil.copytree(tiny_model_dir, bare)
    text = (bare / "config.json").read_text()
    labels = '"id2label": {"0": "x"}, "label2id": {"x": 0}, '
    (bare / "config.json").write_text(text.replace("{", "{" + labels, 1))
    shutil.copytree(score_dir, two)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=2)
    model.save_pretrained(two)
    with pytest.raises(PolicyError, match=r"reward_models\.rm\.model = .*no weights for score"):
        load_scalar(key, str(bare), policy, tokenizer)
    with pytest.raises(PolicyError, match="it has 2 labels"):
        load_scalar(key, str(two), policy, tokenizer)
    with pytest.raises(PolicyError, match=r"reward_models\.rm\.model = .* cannot be loaded"):
        load_scalar(key, str(tmp_path / "missing"), policy, tokenizer)


def test_the_run_file_names_them(tiny_model_dir: Path, score_dir: Path) -> None:
    policy, tokenizer = load_model(tiny_model_dir, device="cpu")
    table = {
        "taste": {"model": str(score_dir)},
        "hunch": {"model": str(tiny_model_dir), "kind": "implicit", "scope": "transition"},
    }
    config = resolve({"reward_models": table}, source="run.toml")
    models, _ = reward_models.make_reward_models(config, policy, tokenizer, str(tiny_model_dir))
    made = groups()
    for model in models:
        made = model.complete(made)
    assert len(given(made, "taste")) == 2
    assert set(given(made, "hunch").values()) == {0.0}
    streams = {"taste": {}, "hunch": {"scope": "transition"}}
    algo = registry.make("streams", {"streams": streams})
    reward_models.check_reward_models(config, algo)
    with pytest.raises(ConfigError, match=r"reward_models\.taste is set, .* no reward 'taste'"):
        reward_models.check_reward_models(config, registry.make("grpo", {}))
    odd = {"taste": {"model": "x", "lr": 0.1}}
    with pytest.raises(ConfigError, match=r"reward_models\.taste\.lr is for .*kind = 'implicit'"):
        resolve({"reward_models": odd}, source="run.toml")


def test_an_unknown_key_of_one_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'reward_models\.rm\.scop'.*did you mean 'scope'"):
        resolve({"reward_models": {"rm": {"model": "x", "scop": "rollout"}}}, source="run.toml")


@pytest.mark.parametrize("kind", ["scalar", "implicit"])
def test_what_the_model_cannot_read_has_no_score(
    tiny_model_dir: Path, score_dir: Path, kind: str
) -> None:
    """512 tokens are its context: a call of so many has a score, a longer one takes that of its
    rollout away and nobody else's."""
    policy, tokenizer = load_model(tiny_model_dir, device="cpu")
    source = str(score_dir if kind == "scalar" else tiny_model_dir)
    for scope in ("rollout", "transition"):
        table = {"rm": {"model": source, "kind": kind, "scope": scope}}
        config = resolve({"reward_models": table}, source="run.toml")
        (model,), _ = reward_models.make_reward_models(
            config, policy, tokenizer, str(tiny_model_dir)
        )
        full = [call("a0", [1] * 510, [4, 5])]
        long = [call("b0", [1], [2]), call("b1", [1] * 511, [4, 5])]
        rows = [rollout("a", full), rollout("b", long)]
        made = model.complete([factories.group(*rows)])
        whole, calls = {("a", None)}, {("a", "a0"), ("b", "b0")}
        assert set(given(made, "rm")) == (whole if scope == "rollout" else calls)
