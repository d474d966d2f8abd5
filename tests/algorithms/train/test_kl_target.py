"""The coefficient of a KL penalty follows the KL to the reference."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.objective.core import KLPenalty
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train.kl_target import (
    AdaptiveControl,
    KlController,
    make_kl_controller,
    with_kl_target,
)
from agentrl.core.errors import ConfigError
from agentrl.core.types import RolloutState
from tests.algorithms.learners.test_ppo import VALUES, Recorder, example, group, updater
from tests.algorithms.worlds import EVERY_OUTPUT


def test_the_penalty_adapts_in_proportion_to_the_rollouts() -> None:
    # beta *= 1 + clip(KL / target - 1, -.2, .2) * n / horizon
    kl = KlController(beta=0.1, target=0.05, horizon=100)
    kl.observe(0.055, rollouts=50)
    assert kl.beta == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    kl = KlController(beta=0.1, target=0.05, horizon=100)
    kl.observe(10.0, rollouts=50)
    assert kl.beta == pytest.approx(0.1 * 1.1)
    kl.observe(-1.0, rollouts=100)
    assert kl.beta == pytest.approx(0.1 * 1.1 * 0.8)
    # More rollouts than the horizon would make it negative.
    kl.observe(-1.0, rollouts=1000)
    assert kl.beta == pytest.approx(0.1 * 1.1 * 0.8 * 0.8)
    again = KlController(beta=1.0, target=0.05, horizon=100)
    again.restore(msgspec.json.decode(msgspec.json.encode(kl.dump())))
    assert again.beta == kl.beta
    with pytest.raises(msgspec.ValidationError):
        again.restore("much")


@pytest.mark.parametrize("option", ["kl", "kl_reward"])
def test_the_penalty_is_in_the_loss_or_in_the_reward(option: str) -> None:
    algo = registry.make("ppo", {option: 0.1}, supplies=EVERY_OUTPUT)
    kl = make_kl_controller(algo, target=0.05, horizon=100)
    assert kl.beta == 0.1
    kl.beta = 0.3
    assert kl.tuned(algo) == registry.make("ppo", {option: 0.3}, supplies=EVERY_OUTPUT)


def test_a_penalty_that_is_about_something_else_stays() -> None:
    kl = make_kl_controller(registry.make("ppo", {"kl": 0.1}, supplies=EVERY_OUTPUT), 0.05, 100)
    kl.beta = 0.3
    other = registry.make("kimi", {})
    assert kl.tuned(other) == other


def test_one_penalty_is_adapted() -> None:
    for options, number in (({}, 0), ({"kl": 0.1, "kl_reward": 0.1}, 2)):
        algo = registry.make("ppo", options, supplies=EVERY_OUTPUT)
        with pytest.raises(
            ConfigError, match=rf"reference\.target_kl: .* has {number} KL penalties"
        ):
            make_kl_controller(algo, target=0.05, horizon=100)
    algo = registry.make("ppo", {"kl": 0.1}, supplies=EVERY_OUTPUT)
    assert algo.penalties == (KLPenalty("k3", 0.1),)


def test_the_penalty_of_the_next_step_is_the_adapted_one() -> None:
    algo = registry.make("ppo", {"kl": 0.1}, supplies=EVERY_OUTPUT)
    kl = make_kl_controller(algo, target=0.1, horizon=40)
    learner = Recorder(VALUES)
    steps = updater(learner, kl=0.1, reference_control=AdaptiveControl(kl=kl))
    first = steps.update(0, example())
    second = steps.update(1, example())
    # A drift of .25 is more than 20 % beyond .1; 4 rollouts of 40.
    assert first["reference/beta"] == 0.1
    assert second["reference/beta"] == pytest.approx(0.1 * (1 + 0.2 * 4 / 40))
    assert kl.beta == pytest.approx(0.1 * (1 + 0.2 * 4 / 40) ** 2)
    state = AlgorithmState((), {"kl": kl})
    other = KlController(1.0, 0.1, 40)
    AlgorithmState((), {"kl": other}).restore(state.dump())
    assert other.beta == kl.beta


def test_a_step_without_tokens_says_nothing_of_the_drift() -> None:
    algo = registry.make("grpo", {"kl": 0.1}, supplies=EVERY_OUTPUT)
    kl = make_kl_controller(algo, target=0.1, horizon=40)
    steps = updater(Recorder(VALUES), "grpo", kl=0.1, reference_control=AdaptiveControl(kl=kl))
    lost = [replace(row, state=RolloutState.FAILED, rewards=[]) for row in example()[0].rollouts]
    for groups in ([], [group(*lost)]):
        assert "reference/drift" not in steps.update(0, groups)
    assert kl.beta == 0.1


def test_a_step_without_tokens_says_nothing_about_the_penalty() -> None:
    kl = make_kl_controller(
        registry.make("grpo", {"kl": 0.1}, supplies=EVERY_OUTPUT), target=0.1, horizon=40
    )
    steps = updater(Recorder(VALUES), "grpo", kl=0.1, reference_control=AdaptiveControl(kl=kl))
    lost = [
        replace(group, rollouts=[replace(row, transitions=[]) for row in group.rollouts])
        for group in example()
    ]
    metrics = steps.update(0, lost)
    assert "reference/drift" not in metrics
    assert metrics["reference/beta"] == kl.beta == 0.1


def test_a_policy_has_it_if_its_settings_ask_for_it() -> None:
    plain = updater(Recorder(VALUES), kl=0.1)
    assert with_kl_target(plain) is plain
    config = replace(plain.config, reference=replace(plain.config.reference, target_kl=0.1))
    asked = with_kl_target(dataclasses.replace(plain, config=config))
    assert isinstance(asked.reference_control, AdaptiveControl)
    assert asked.state.parts["kl"] is asked.reference_control.kl
