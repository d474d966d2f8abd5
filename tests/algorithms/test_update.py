"""A training step against a learner that records what it is asked to do."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms import presets
from agentrl.algorithms.batch import Batch
from agentrl.algorithms.learners.base import Psi, StepReport, ValueTerms
from agentrl.algorithms.update import Updater
from agentrl.config import AlgorithmConfig
from agentrl.errors import TrainingError
from agentrl.types import (
    Group,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    float32,
    int32,
)


@dataclasses.dataclass
class Recorder:
    """A learner whose log-probs are the sampler's plus `shift` after each step."""

    shift: float = 0.0
    batches: list[Batch] = dataclasses.field(default_factory=list)
    coefficients: list[Tensor] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)

    def logprobs(self, batch: Batch) -> Tensor:
        return batch.behaviour + self.shift * len(self.batches)

    def step(
        self, batch: Batch, psi: Psi, *, lr: float, critic: ValueTerms | None = None
    ) -> StepReport:
        logprobs = self.logprobs(batch)
        self.coefficients.append(psi(logprobs, torch.arange(batch.n_tokens)))
        self.batches.append(batch)
        self.rates.append(lr)
        return StepReport(loss=0.0, grad_norm=1.0, logprobs=logprobs, tokens=9, applied=True)

    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


def rollout(group: str, index: int, reward: float | None) -> Rollout:
    name = f"{group}/{index}"
    call = Transition(
        id=name,
        attempt=name,
        index=0,
        prompt=int32([1, 2, 3]),
        completion=int32([4 + index, 5]),
        logprobs=float32([-0.5, -1.0]),
    )
    return Rollout(
        id=name,
        run="r",
        group=group,
        index=index,
        task={},
        purpose=Purpose.TRAIN,
        state=RolloutState.FAILED if reward is None else RolloutState.SUCCEEDED,
        step=0,
        attempts=1,
        attempt=name,
        result=None,
        failure=None,
        rewards=[] if reward is None else [Reward(value=reward)],
        transitions=[call],
    )


def group(name: str, *rewards: float | None) -> Group:
    rollouts = [rollout(name, index, reward) for index, reward in enumerate(rewards)]
    return Group(id=name, run="r", step=0, rollouts=rollouts)


def updater(learner: Recorder, **settings: object) -> Updater:
    config = AlgorithmConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    return Updater(config, presets.make("grpo", {}), learner, steps=5)


def test_one_step_pushes_the_better_rollouts() -> None:
    learner = Recorder()
    metrics = updater(learner).update(0, [group("a", 1.0, 0.0), group("b", 0.0, 1.0)])
    signs = learner.coefficients[0].sign().tolist()
    assert signs == [1, 1, -1, -1, -1, -1, 1, 1]
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["rollouts"] == 4
    assert metrics["tokens/completion"] == 8
    assert metrics["logprob_difference/max"] == 0.0
    assert metrics["update/steps"] == 1
    assert metrics["update/skipped"] == 0


def test_difference_of_trainer_and_sampler_is_measured() -> None:
    learner = Recorder(shift=0.25)
    learner.batches.append(None)  # type: ignore[arg-type]  # as if one step had moved the weights
    metrics = updater(learner).update(0, [group("a", 1.0, 0.0)])
    assert metrics["logprob_difference/max"] == pytest.approx(0.25)


def test_nothing_to_learn_changes_nothing_and_says_so() -> None:
    learner = Recorder()
    metrics = updater(learner).update(0, [group("a", 1.0, 1.0), group("b", 0.0, 0.0)])
    assert learner.batches == []
    assert metrics["update/skipped"] == 1


def test_missing_rewards_are_not_zeros() -> None:
    learner = Recorder()
    metrics = updater(learner).update(0, [group("a", 1.0, 0.0, None), group("b", None, 1.0)])
    assert metrics["groups/dropped"] == 1  # b has one valid rollout, fewer than min_group
    assert metrics["rollouts/failed"] == 2
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert learner.batches[0].rollouts == ["a/0", "a/1"]
    assert not any(math.isnan(value) for value in metrics.values())


def test_inexact_calls_are_refused_and_counted() -> None:
    ours = group("a", 1.0, 0.0)
    (call,) = ours.rollouts[0].transitions
    more = [
        replace(call, id="inexact", exact=False),
        replace(call, id="judge", exact=False, policy="judge"),
    ]
    rollouts = [replace(ours.rollouts[0], transitions=[call, *more]), ours.rollouts[1]]
    learner = Recorder()
    metrics = updater(learner).update(0, [replace(ours, rollouts=rollouts)])
    assert learner.batches[0].transitions == ["a/0", "a/1"]
    assert (metrics["calls"], metrics["calls/inexact"], metrics["calls/refused"]) == (3, 1, 1)


def test_everything_failed() -> None:
    learner = Recorder()
    metrics = updater(learner).update(0, [group("a", None, None)])
    assert learner.batches == []
    assert "reward/mean" not in metrics
    assert not any(math.isnan(value) for value in metrics.values())


def test_minibatches_and_epochs_take_the_old_policy_from_before_the_first() -> None:
    groups = [group(name, 1.0, 0.0, 0.0) for name in "abcd"]
    whole, cut = Recorder(), Recorder()
    updater(whole).update(0, groups)
    metrics = updater(cut, minibatches=2, epochs=2).update(0, groups)
    assert [batch.groups for batch in cut.batches] == [["a", "b"], ["c", "d"]] * 2
    assert metrics["update/steps"] == 4
    halves = torch.cat(cut.coefficients[:2])
    # Each half averages over half the rows, and its credit is that of the whole batch.
    assert torch.allclose(halves, 2 * whole.coefficients[0], rtol=1e-6)


def test_learning_rate_warms_up() -> None:
    learner = Recorder()
    step = updater(learner, warmup=3)
    for number in range(5):
        step.update(number, [group("a", 1.0, 0.0)])
    assert learner.rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_learning_rate_falls_to_zero() -> None:
    learner = Recorder()
    step = updater(learner, warmup=1, schedule="linear")
    for number in range(5):
        step.update(number, [group("a", 1.0, 0.0)])
    assert learner.rates == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])


def test_a_reward_that_no_rollout_carries_stops_the_run() -> None:
    learner = Recorder()
    step = updater(learner)
    algo = presets.make("grpo", {"reward": "transition:quality"})
    with pytest.raises(TrainingError, match=r"2 rollouts of step 0.*'transition:quality'"):
        dataclasses.replace(step, algo=algo).update(0, [group("a", 1.0, 0.0)])
    assert learner.batches == []


def test_a_filter_sees_the_whole_batch_however_it_is_cut() -> None:
    """No call of the first half is a critic's, which is no mistake in a name."""
    groups = [group(name, 1.0, 0.0) for name in "ab"]
    last = groups[1]
    rollouts = [
        replace(row, transitions=[replace(call, role="critic") for call in row.transitions])
        for row in last.rollouts
    ]
    groups[1] = replace(last, rollouts=rollouts)
    learner = Recorder()
    step = updater(learner, minibatches=2)
    algo = presets.make("grpo+only", {"only_roles": ["critic"]})
    metrics = dataclasses.replace(step, algo=algo).update(0, groups)
    assert (metrics["update/steps"], metrics["update/skipped"]) == (2, 1)
    assert learner.batches[0].groups == ["b"]
