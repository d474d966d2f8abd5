"""PPO through the whole step: values into credit, returns into the critic, in any minibatches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.auxiliary import Reference, ValueModel, load_auxiliary
from agentrl.algorithms.learners.base import LearnerDefaults, LossCoefficients, Scored, StepReport
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.objective import core as objective
from agentrl.algorithms.objective import values as targets
from agentrl.algorithms.objective.core import ReferenceControl
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.checkpoint import load_checkpoint, save_checkpoint
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig
from agentrl.core.errors import TrainingError
from agentrl.core.types import Group, Reward, Rollout
from tests import factories
from tests.algorithms.worlds import EVERY_OUTPUT


@dataclasses.dataclass
class Recorder(LearnerDefaults):
    """A learner with values given by token, which records the critic's terms."""

    supplies = frozenset({"old", "sampler", "reference", "values"})

    by_token: dict[int, float]
    critics: list[ValueTerms | None] = dataclasses.field(default_factory=list)
    psis: list[Tensor] = dataclasses.field(default_factory=list)

    def logprobs(self, batch: Batch, of: Scored = "current") -> Tensor:
        return batch.sampler_logprobs - (0.25 if of == "reference" else 0.0)

    def values(self, batch: Batch) -> Tensor:
        tokens = torch.cat([row.tokens[row.actions] for row in batch.rows]).tolist()
        return torch.tensor([self.by_token.get(t, 0.0) for t in tokens], dtype=torch.float64)

    def step(
        self,
        batch: Batch,
        psi: LossCoefficients,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        entropy_weights: Tensor | None = None,
    ) -> StepReport:
        self.critics.append(critic)
        self.psis.append(psi(batch.sampler_logprobs, torch.arange(batch.n_tokens)))
        return StepReport(
            loss=0.0, grad_norm=1.0, logprobs=batch.sampler_logprobs, tokens=1, applied=True
        )


def play(
    name: str, calls: list[tuple[list[int], list[int]]], reward: float, logprob: float = -1.0
) -> Rollout:
    made = [
        factories.call(
            f"{name}.{number}", prompt, completion, attempt=name, index=number, logprob=logprob
        )
        for number, (prompt, completion) in enumerate(calls)
    ]
    return factories.rollout(name, made, [Reward(value=reward)], group=name[0], index=int(name[1:]))


def group(*rollouts: Rollout) -> Group:
    return factories.group(*rollouts, id=rollouts[0].group)


def example() -> list[Group]:
    """A2: one call of three tokens whose values are .5, .6, .7, and one that is worth nothing."""
    return [
        group(play("a0", [([1], [5, 6, 7])], 1.0), play("a1", [([1], [8, 9])], 0.0)),
        group(play("b0", [([2], [6, 9])], 1.0), play("b1", [([2], [9])], 1.0)),
    ]


def updater(learner: object, preset: str = "ppo", **settings: object) -> Updater:
    options = {key: settings.pop(key) for key in ("kl", "kl_reward") if key in settings}
    algo = registry.make(preset, options, supplies=EVERY_OUTPUT)
    reference_control = settings.pop("reference_control", ReferenceControl())
    preprocessor = Preprocessor(settings.pop("scorers", ()))
    config = replace(AlgorithmConfig(group_size=1, lr=1e-2), **settings)
    run = RunConfig(steps=10, algorithm=config)
    return Updater(
        run, algo, learner, reference_control=reference_control, preprocessor=preprocessor
    )  # type: ignore[arg-type]


VALUES = {5: 0.5, 6: 0.6, 7: 0.7}


def test_the_catalogue_s_returns_reach_the_learner() -> None:
    learner = Recorder(VALUES)
    metrics = updater(learner).update(0, example())
    (critic,) = learner.critics
    assert critic is not None
    assert critic.returns[:3].tolist() == pytest.approx([0.96575, 0.985, 1.0])
    assert critic.old[:3].tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert critic.weight.tolist() == pytest.approx([1 / 8] * 8)
    assert critic.clip == 0.2
    assert "critic/explained_variance" in metrics
    # The advantage that psi was made of is whitened, and its order that of [.46575, .385, .3].
    psi = learner.psis[0][:3].tolist()
    assert psi[0] > psi[1] > psi[2]


def test_minibatches_see_values_and_returns_of_the_batch() -> None:
    whole, cut = Recorder(VALUES), Recorder(VALUES)
    updater(whole).update(0, example())
    updater(cut, minibatches=2, epochs=2).update(0, example())
    assert len(cut.critics) == 4
    (one,) = whole.critics
    assert one is not None
    for critic in cut.critics:
        assert critic is not None
        first = critic.returns.numel() == 5  # the group a
        mine = slice(0, 5) if first else slice(5, 8)
        assert torch.equal(critic.returns, one.returns[mine])
        assert torch.equal(critic.old, one.old[mine])
        assert float(critic.weight.sum()) == pytest.approx(1.0)


def test_a_critic_learns_from_rewards_that_are_all_equal() -> None:
    """One-token rollouts that all earn 1: the critic is wrong about every one of them."""
    same = [group(*(play(f"a{n}", [([1], [5 + n])], 1.0) for n in range(3)))]
    learner = Recorder({})
    metrics = updater(learner).update(0, same)
    assert metrics["update/skipped"] == 0
    (critic,) = learner.critics
    assert critic is not None
    assert critic.returns.tolist() == [1.0] * 3
    assert not learner.psis[0].any()
    assert updater(learner, "grpo").update(2, same)["update/skipped"] == 1


@pytest.mark.parametrize("critic", ["shared", "copy"])
def test_momentum_does_not_move_a_policy_that_learns_nothing(
    tiny_model_dir: Path, critic: str
) -> None:
    learner = make_learner(tiny_model_dir, critic)
    steps = updater(learner)
    steps.update(0, sampled(learner, 0))
    before = [p.detach().clone() for p in learner.model.parameters()]
    head = learner.critic.head.weight.detach().clone()  # type: ignore[union-attr]
    batch = steps.batch(sampled(learner, 1))
    terms = targets.value_terms(torch.ones(batch.n_tokens), learner.values(batch), clip=0.2)
    report = learner.step(batch, lambda p, _: torch.zeros_like(p), lr=1e-2, critic=terms)
    assert report.applied
    assert not torch.equal(head, learner.critic.head.weight)  # type: ignore[union-attr]
    still = all(map(torch.equal, before, learner.model.parameters()))
    assert still == (critic == "copy")  # the values of a shared one are its own layers' as well


def test_a_preset_without_a_critic_asks_for_no_values() -> None:
    learner = Recorder({})
    updater(learner, "grpo").update(0, example())
    assert learner.critics == [None]


def test_the_reference_reaches_loss_and_reward() -> None:
    plain, loss, reward = (Recorder(VALUES) for _ in range(3))
    updater(plain).update(0, example())
    metrics = updater(loss, kl=0.1).update(0, example())
    assert metrics["reference/drift"] == pytest.approx(0.25)
    # k3 at d = p - q = .25 pulls every token by beta * (1 - e^-.25) * u.
    pull = 0.1 * (1 - torch.tensor(-0.25).exp()) / 8
    torch.testing.assert_close(loss.psis[0], plain.psis[0] - pull, atol=1e-6, rtol=0)
    updater(reward, kl_reward=0.1).update(0, example())
    assert reward.critics[0] is not None
    # Every token costs .1 * .25; the last returns 1 - .025.
    assert reward.critics[0].returns[2].item() == pytest.approx(0.975)


def test_a_reward_model_s_rewards_are_credited() -> None:
    from agentrl.algorithms.reward_models import RewardModel

    def count(calls: object) -> Tensor:
        return torch.tensor([float(len(call.completion)) for call in calls])  # type: ignore[attr-defined]

    algo = registry.make("grpo", {"reward": "length"})
    learner = Recorder({})
    config = RunConfig(algorithm=AlgorithmConfig(group_size=1))
    with pytest.raises(TrainingError, match="a reward 'length'"):
        Updater(config, algo, learner).update(0, example())  # type: ignore[arg-type]
    preprocessor = Preprocessor((RewardModel("length", count),))
    steps = Updater(config, algo, learner, preprocessor=preprocessor)  # type: ignore[arg-type]
    steps.update(0, example())
    # Longer than the other of the group is better.
    assert learner.psis[0][0] > 0 > learner.psis[0][3]


def make_learner(directory: Path, critic: str, seed: int = 0) -> TorchLearner:
    torch.manual_seed(seed)
    model, tokenizer = load_model(directory, device="cpu")
    decoder = None
    if critic == "copy":
        decoder = load_auxiliary("critic.model", str(directory), model, tokenizer).base_model
    frozen = load_auxiliary("reference.model", str(directory), model, tokenizer)
    return TorchLearner(
        model,
        tokenizer,
        critic=ValueModel(model, decoder, lr=1e-2, coefficient=0.5),
        frozen={"reference": Reference(frozen, model)},
        threads=1,
    )


PROMPTS = {"a": [1, 2, 3], "b": [4, 5]}
GOOD = {"a": 10, "b": 11}  # the token that is worth 1, by prompt
ACTIONS = list(range(8, 14))


def sampled(learner: TorchLearner, seed: int, size: int = 12) -> list[Group]:
    """A bandit of two prompts: rollouts of one token each, sampled among the six actions."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for name, prompt in PROMPTS.items():
        with torch.no_grad():
            logits = learner.model(input_ids=torch.tensor([prompt])).logits[0, -1]
        full = logits.log_softmax(-1)
        picks = torch.multinomial(full[ACTIONS].exp(), size, replacement=True, generator=generator)
        found.append(
            group(
                *(
                    play(
                        f"{name}{number}",
                        [(prompt, [ACTIONS[pick]])],
                        float(ACTIONS[pick] == GOOD[name]),
                        float(full[ACTIONS[pick]]),
                    )
                    for number, pick in enumerate(picks.tolist())
                )
            )
        )
    return found


def score(groups: list[Group]) -> float:
    rewards = [row.reward() for each in groups for row in each.rollouts]
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize("critic", ["shared", "copy"])
def test_ppo_learns_a_bandit_and_its_values(tiny_model_dir: Path, critic: str) -> None:
    learner = make_learner(tiny_model_dir, critic)
    steps = updater(learner, minibatches=2, epochs=2, lr=3e-3)
    before = score(sampled(learner, 0, 64))
    metrics = {}
    for step in range(25):
        metrics = steps.update(step, sampled(learner, 100 + step))
    after = score(sampled(learner, 1, 64))
    assert before < 0.4
    assert after > 0.9
    # What it expects is what it gets by now.
    assert metrics["critic/value_mean"] > 0.5
    assert metrics["critic/loss"] < 0.1


@pytest.mark.parametrize("critic", ["shared", "copy"])
def test_a_resumed_run_continues_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path, critic: str
) -> None:
    from agentrl.algorithms.train.kl_target import AdaptiveControl, KlController

    def start(learner: TorchLearner) -> Updater:
        kl = KlController(0.1, 0.01, 100)
        steps = updater(
            learner, kl=0.1, reference_control=AdaptiveControl(kl=kl), minibatches=2, lr=1e-3
        )
        steps.state.parts["kl"] = kl
        return steps

    def train(steps: Updater, first: int, last: int) -> list[float]:
        return [
            steps.update(step, sampled(steps.learner, step, 6))["loss"]
            for step in range(first, last)
        ]

    learners = [make_learner(tiny_model_dir, critic, seed) for seed in range(3)]
    whole, half, other = map(start, learners)
    losses = train(whole, 0, 4)
    assert train(half, 0, 2) == losses[:2]
    save_checkpoint(tmp_path / "here", learners[1], half.state.dump())
    other.state.restore(load_checkpoint(tmp_path / "here", learners[2]))
    assert train(other, 2, 4) == losses[2:]
    kept = [steps.state.parts["kl"] for steps in (whole, other)]
    assert kept[0].dump() == kept[1].dump() != KlController(0.1, 0.01, 100).dump()
    models = [one.model.parameters() for one in (learners[0], learners[2])]
    for mine, theirs in zip(*models, strict=True):
        assert torch.equal(mine, theirs)


def test_scored_batches_give_what_the_algorithm_reads(tiny_model_dir: Path) -> None:
    learner = make_learner(tiny_model_dir, "shared")
    steps = updater(learner, kl=0.1)
    batch, scored = steps.score(steps.algo, steps.batch(example()))
    assert scored.computed().keys() == {"reference"}
    assert batch.values.numel() == batch.reference.numel() == batch.n_tokens
    assert not batch.values.any()
    advantage = objective.compute_advantages(steps.algo, batch)
    assert advantage.isfinite().all()
    assert targets.critic_terms(steps.algo, batch, clip=0.2) is not None
