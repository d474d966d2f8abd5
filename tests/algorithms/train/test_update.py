"""A training step against a learner that records what it is asked to do."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.learners.base import LearnerDefaults, LossCoefficients, StepReport
from agentrl.algorithms.objective.values import ValueTerms
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.metrics import BadSteps
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.stages import load_algorithm
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig, resolve
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import Group, Reward, Rollout, RolloutState, float32, int32
from tests import factories


@dataclasses.dataclass
class Recorder(LearnerDefaults):
    """A learner whose log-probs are the sampler's plus `shift` after each step."""

    supplies = frozenset({"old", "sampler", "entropy"})

    shift: float = 0.0
    batches: list[Batch] = dataclasses.field(default_factory=list)
    coefficients: list[Tensor] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    etas: list[Tensor | None] = dataclasses.field(default_factory=list)
    broken: set[int] = dataclasses.field(default_factory=set)  # optimizer steps that change nothing

    def logprobs(self, batch: Batch) -> Tensor:
        return batch.sampler_logprobs + self.shift * len(self.batches)

    def step(
        self,
        batch: Batch,
        psi: LossCoefficients,
        *,
        lr: float,
        critic: ValueTerms | None = None,
        entropy_weights: Tensor | None = None,
    ) -> StepReport:
        logprobs = self.logprobs(batch)
        self.coefficients.append(psi(logprobs, torch.arange(batch.n_tokens)))
        self.batches.append(batch)
        self.etas.append(entropy_weights)
        self.rates.append(lr)
        if len(self.batches) - 1 in self.broken:
            lost = torch.full_like(logprobs, math.nan)
            return StepReport(loss=math.nan, grad_norm=0, logprobs=lost, tokens=9, applied=False)
        return StepReport(
            loss=0.0, grad_norm=1.0, logprobs=logprobs, tokens=9, applied=True, metrics={"own": 3.0}
        )

    def save(self, directory: Path) -> None: ...
    def load(self, directory: Path) -> None: ...


def test_an_entropy_bonus_learns_where_credit_does_not() -> None:
    learner = Recorder()
    algo = registry.make("grpo", {"entropy": 0.25}, supplies=learner.supplies)
    config = RunConfig(steps=5, algorithm=AlgorithmConfig(lr=1.0))
    found = Updater(config, algo, learner).update(0, [group("a", 1.0, 1.0)])
    assert found["update/skipped"] == 0
    assert (learner.coefficients[0] == 0).all()
    assert learner.etas[0].tolist() == pytest.approx([0.25 / len(learner.etas[0])] * 4)
    algo = registry.make("grpo", {})
    Updater(config, algo, learner).update(0, [group("a", 1.0, 0.0)])
    assert learner.etas[1] is None


def test_an_entropy_bonus_needs_its_gradient() -> None:
    settings: dict[str, Any] = {"algorithm": {"options": {"entropy": 0.01}}}
    assert load_algorithm(resolve(settings, source="run.toml")).entropy == 0.01
    settings["learner"] = {"kind": "verl"}
    with pytest.raises(ConfigError, match=r"options.entropy = 0.01: .* learner.kind = 'torch'"):
        load_algorithm(resolve(settings, source="run.toml"))


def rollout(group: str, index: int, reward: float | None) -> Rollout:
    name = f"{group}/{index}"
    known = {"attempt": name, "logprobs": float32([-0.5, -1.0])}
    calls = [factories.call(name, (1, 2, 3), (4 + index, 5), **known)]
    rewards = [] if reward is None else [Reward(value=reward)]
    state = RolloutState.FAILED if reward is None else RolloutState.SUCCEEDED
    return factories.rollout(name, calls, rewards, group=group, index=index, state=state)


def group(name: str, *rewards: float | None) -> Group:
    rollouts = [rollout(name, index, reward) for index, reward in enumerate(rewards)]
    return factories.group(*rollouts, id=name)


def updater(learner: Recorder, seed: int = 0, **settings: object) -> Updater:
    algorithm = AlgorithmConfig(lr=1.0, **settings)  # type: ignore[arg-type]
    config = RunConfig(steps=5, seed=seed, algorithm=algorithm)
    return Updater(config, registry.make("grpo", {}), learner)


def test_a_loss_of_pairs_learns_from_pairs_of_each_group() -> None:
    learner = Recorder()
    algo = registry.make("simpo", {"how": "all"})
    made = dataclasses.replace(updater(learner), algo=algo)
    groups = [group("a", 1.0, 0.0, 0.5), group("b", 0.5, 0.5), group("c", 1.0)]
    metrics = made.update(0, groups)
    assert (metrics["preferences/pairs"], metrics["preferences/ties"]) == (3, 1)
    assert learner.coefficients[0].sign().tolist() == [1, 1, -1, -1, 0, 0, 0, 0, 0, 0]
    assert made.update(1, groups[1:])["update/skipped"] == 1


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


def test_nothing_to_learn_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    learner = Recorder()
    metrics = updater(learner).update(0, [group("a", 1.0, 1.0), group("b", 0.0, 0.0)])
    assert learner.batches == []
    assert "step 1 changes no weight: no rollout of 2 groups did better" in caplog.text
    assert metrics["update/skipped"] == 1


def test_many_steps_without_a_change_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    made = updater(Recorder())
    for step in range(101):
        made.update(step, [group("a", 1.0, 1.0)])
    said = [line for line in caplog.messages if "no weight" in line]
    starts = [line.split(":")[0] for line in said]
    assert starts == [
        "step 1 changes no weight",
        "10 steps changed no weight; step 10",
        "100 steps changed no weight; step 100",
    ]


def test_a_minibatch_without_credit_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    groups = [group("a", 1.0, 0.0), group("b", 0.0, 0.0)]
    metrics = updater(Recorder(), minibatches=2).update(0, groups)
    assert (metrics["update/steps"], metrics["update/skipped"]) == (2, 1)
    assert "changes no weight" not in caplog.text


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


def test_minibatches_and_epochs_share_the_old_policy() -> None:
    groups = [group(name, 1.0, 0.0, 0.0) for name in "abcd"]
    whole, cut = Recorder(), Recorder()
    updater(whole).update(0, groups)
    metrics = updater(cut, minibatches=2, epochs=2).update(0, groups)
    epochs = [[*one.groups, *two.groups] for one, two in (cut.batches[:2], cut.batches[2:])]
    assert [sorted(epoch) for epoch in epochs] == [list("abcd")] * 2
    assert epochs[0] != epochs[1]
    assert metrics["update/steps"] == 4
    for batch, coefficients in zip(cut.batches, cut.coefficients, strict=True):
        for position, name in enumerate(batch.groups):
            own, first = slice(6 * position, 6 * position + 6), 6 * "abcd".index(name)
            # Each half averages over half the rows, and its credit is that of the whole batch.
            expected = 2 * whole.coefficients[0][first : first + 6]
            assert torch.allclose(coefficients[own], expected, rtol=1e-6)


def test_minibatches_are_dealt_the_same_way_again() -> None:
    groups = [group(name, 1.0, 0.0) for name in "abcdefgh"]
    dealt = []
    for seed in (0, 0, 1):
        learner = Recorder()
        updater(learner, seed, minibatches=3, epochs=2).update(0, groups)
        dealt.append([batch.groups for batch in learner.batches])
    assert dealt[0] == dealt[1] != dealt[2]
    assert [len(names) for names in dealt[0]] == [2, 3, 3] * 2


def test_a_group_that_is_left_out_shifts_no_tokens() -> None:
    groups = [group(name, 1.0, 0.0, 0.0) for name in "abcd"]
    groups[1] = group("b", 1.0, None)  # one rollout with a reward is no group
    learner = Recorder()
    updater(learner, minibatches=4).update(0, groups)
    for batch, coefficients in zip(learner.batches, learner.coefficients, strict=True):
        assert batch.groups != ["b"]
        assert coefficients.sign().tolist() == [1, 1, -1, -1, -1, -1]


def test_what_the_learner_measures_is_kept() -> None:
    metrics = updater(Recorder()).update(0, [group("a", 1.0, 0.0)])
    assert metrics["own"] == 3.0
    assert metrics["update/early_stop"] == metrics["update/bad"] == 0


def test_a_step_that_is_not_finite_is_dumped_and_the_run_goes_on(tmp_path: Path) -> None:
    from agentrl.algorithms.credit.dump import keep_in, load_dump

    groups = [group(name, 1.0, 0.0) for name in "ab"]
    learner = Recorder(broken={1, 3, 4})
    bad = BadSteps(limit=2, keep=partial(keep_in, tmp_path / "dumps"))
    step = dataclasses.replace(updater(learner, minibatches=2), bad_steps=bad)
    with pytest.warns(RuntimeWarning, match=r"4 of 4 log-probs .*000000\.1\.safetensors") as said:
        metrics = step.update(0, groups)
    assert len(said) == 1
    assert (metrics["update/bad"], metrics["update/skipped"], metrics["loss"]) == (1, 1, 0)
    assert not any(math.isnan(value) for value in metrics.values())
    with pytest.warns(RuntimeWarning, match="skipped"):
        step.update(1, groups)  # a good step came between
    with pytest.raises(
        TrainingError, match=r"2 consecutive optimizer steps.*000002\.0.*algorithm\.lr"
    ):
        step.update(2, groups)
    names = [f"{name}.safetensors" for name in ("000000.1", "000001.1", "000002.0")]
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == names
    dump = load_dump(tmp_path / "dumps" / names[0])
    assert dump.batch.groups == learner.batches[1].groups
    assert math.isnan(dump.loss)


def test_one_number_names_a_step_whatever_its_groups(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the console counts, from 1: with group_order = "completed" a step trains groups of
    other steps."""

    def of_steps(*planned: int) -> list[Group]:
        named = zip("abcd", planned, strict=False)
        return [replace(group(name, 1.0, 0.0), step=step) for name, step in named]

    def infinite(batch: Batch) -> Tensor:
        return torch.full((batch.n_tokens,), math.inf)

    for planned in ((0, 9), (9, 0)):
        made = updater(Recorder(broken={0}))
        with pytest.warns(RuntimeWarning, match="step 5: 8 of 8 log-probs"):
            dataclasses.replace(made, bad_steps=BadSteps(limit=2)).update(4, of_steps(*planned))
        algo = dataclasses.replace(made.algo, credit=infinite)
        with pytest.raises(TrainingError, match="step 5: 8 of 8 advantages are infinite"):
            dataclasses.replace(made, algo=algo).update(4, of_steps(*planned))
        algo = registry.make("grpo", {"reward": "quality"})
        with pytest.raises(TrainingError, match="4 rollouts of step 5, 4 of which"):
            dataclasses.replace(made, algo=algo).update(4, of_steps(*planned))
    orders = []
    for planned in ((4, 4, 4, 4), (1, 2, 9, 3)):
        learner = Recorder()
        updater(learner, minibatches=4).update(4, of_steps(*planned))
        assert {batch.step for batch in learner.batches} == {5}
        orders.append([batch.groups for batch in learner.batches])
    assert orders[0] == orders[1]


def test_minibatches_split_the_groups_that_are_trained() -> None:
    """Of a group with fewer than `min_group` scored rollouts nothing is in the batch."""
    poor = [group(name, 1.0) for name in "wxyz"]
    for kept, sizes in (("ab", [1, 1]), ("abcd", [2, 2]), ("a", [1])):
        learner = Recorder()
        groups = [*poor, *(group(name, 1.0, 0.0) for name in kept)]
        metrics = updater(learner, minibatches=2).update(3, groups)
        assert [len(batch.groups) for batch in learner.batches] == sizes
        assert metrics["update/steps"] == len(sizes)
        assert metrics["groups/dropped"] == 4


def test_calls_longer_than_the_context_are_left_out_and_counted() -> None:
    ours = group("a", 1.0, 0.0)
    (call,) = ours.rollouts[0].transitions
    long = replace(call, id="long", prompt=int32(range(9)))
    rollouts = [replace(ours.rollouts[0], transitions=[call, long]), ours.rollouts[1]]
    groups = [replace(ours, rollouts=rollouts)]
    learner = Recorder()
    step = updater(learner)
    assert (
        dataclasses.replace(step, preprocessor=Preprocessor(context=11)).update(0, groups)[
            "calls/too_long"
        ]
        == 0
    )
    with pytest.warns(RuntimeWarning, match="1 calls are longer than the 10 tokens"):
        metrics = dataclasses.replace(step, preprocessor=Preprocessor(context=10)).update(0, groups)
    assert (metrics["calls/too_long"], metrics["calls/refused"]) == (1, 1)
    assert [len(batch.transitions) for batch in learner.batches] == [3, 2]
    assert learner.batches[1].rollouts == ["a/0", "a/1"]


def test_the_learning_rate_is_that_of_the_step() -> None:
    learner = Recorder()
    step = updater(learner, warmup=1, schedule="linear")
    metrics = [step.update(number, [group("a", 1.0, 0.0)]) for number in range(5)]
    assert learner.rates == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])
    assert [row["lr"] for row in metrics] == learner.rates


def test_a_reward_that_no_rollout_carries_stops_the_run() -> None:
    learner = Recorder()
    step = updater(learner)
    algo = registry.make("grpo", {"reward": "transition:quality"})
    with pytest.raises(TrainingError, match=r"2 rollouts of step 1.*'transition:quality'"):
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
    algo = registry.make("grpo+only", {"only_roles": ["critic"]})
    metrics = dataclasses.replace(step, algo=algo).update(0, groups)
    assert (metrics["update/steps"], metrics["update/skipped"]) == (2, 1)
    assert learner.batches[0].groups == ["b"]
