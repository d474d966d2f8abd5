"""Reasons about tasks, verifiers and samplers, each with runs that only look like it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl import changes
from agentrl.algorithms.why import rules
from agentrl.algorithms.why.record import Alike, PolicyRun, _alike
from agentrl.changes import HELD_OUT, SAMPLED, TRAINING, Change
from agentrl.config import resolve
from agentrl.store import open_store
from agentrl.types import ErrorKind, FailureCount, NewRollout, Outcome, Reward, Rollout
from tests import factories

CHANCE = {HELD_OUT: Change(0.5, 0.52, 0.52, 0.1)}
ROSE, FELL = Change(0.4, 0.9, 0.9, 0.1), Change(0.5, 0.1, 0.5, 0.1)


def run(steps: Sequence[dict[str, float]] = (), **given: Any) -> PolicyRun:
    settings = given.pop("settings", {})
    config = resolve({"policy": {"model": "m"}, **settings}, source="test")
    own: dict[str, Any] = {"scores": [], "failure": None, "silent": [], "logprobs": [-1.0]}
    own |= {"changes": CHANCE} | given
    return PolicyRun(config=config, steps=steps or [{}], **own)


def said(record: PolicyRun) -> str:
    """What is said first."""
    return next((reason.text for reason in rules.reasons(record)), "")


def played(inputs: Sequence[Any], *, size: int = 2) -> list[Rollout]:
    """Training rollouts, in groups of tasks with these inputs."""
    return [
        factories.rollout(f"r/train/{number:07d}/{i:04d}", group=f"r/train/{number:07d}",
                          task={"input": text, "id": f"{number}"})
        for number, text in enumerate(inputs)
        for i in range(size)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "repeats"),
    [
        (["a", "b", "a", "b", "c"], True),  # before c comes
        ([*"abcdefgh", *"hgfedcba"], False),  # two epochs of eight
        ([*"aabbccddee"], True),
        (["play"] * 9, False),  # a game reads alike every time
    ],
)
def test_tasks_that_come_again_before_all_have_come_are_duplicates(
    inputs: list[str], repeats: bool
) -> None:
    record = run(listed=played(inputs))
    assert said(record).startswith("training tasks repeat") == repeats
    drawn = run(listed=played(inputs), settings={"tasks": {"order": "difficulty"}})
    assert "repeat" not in said(drawn)


@pytest.mark.parametrize(("held", "leaks"), [("abcdef", True), ("ghijkl", False), ("", False)])
def test_a_held_out_task_that_was_trained_is_no_evidence(held: str, leaks: bool) -> None:
    """Also by an input in other clothes: the agent reads no id."""
    heldout = [factories.rollout(f"e/{x}", task={"input": x, "id": f"h{x}"}) for x in held]
    record = run(listed=played([*"abcdef"]), heldout=heldout, changes={HELD_OUT: ROSE})
    assert said(record).startswith("held-out tasks are training tasks: 6 of 6") == leaks
    assert (rules.learned(record) == "") == leaks


@pytest.mark.parametrize(
    ("trained", "held", "exploited"),
    [(ROSE, FELL, True), (ROSE, ROSE, False), (FELL, FELL, False), (ROSE, CHANCE[HELD_OUT], False)],
)
def test_what_is_trained_rises_and_what_is_wanted_falls(
    trained: Change, held: Change, exploited: bool
) -> None:
    record = run(changes={HELD_OUT: held, TRAINING: trained})
    assert said(record).startswith("the reward is exploited") == exploited
    proxy = run(
        changes={HELD_OUT: held}, trained=trained,
        settings={"algorithm": {"options": {"reward": "proxy"}}},
    )  # fmt: skip
    assert said(proxy).startswith("the reward is exploited: 'proxy' rises") == exploited
    assert not (exploited and rules.learned(record))


@pytest.mark.parametrize(
    ("gap", "age", "named"), [(0.5, 0.0, True), (0.01, 0.0, False), (0.5, 2.0, False)]
)
def test_log_probs_differ_at_the_same_weights(gap: float, age: float, named: bool) -> None:
    step = {"logprob_difference/mean": gap, "staleness/version_mean": age}
    assert said(run([step])).startswith("sampler and learner differ") == named


def answers(cut: list[float], whole: list[float]) -> list[Rollout]:
    return [
        factories.rollout(f"r/{i}", [factories.call(f"c{i}", finish=end)], [Reward(value=x)])
        for i, (x, end) in enumerate([(x, "length") for x in cut] + [(x, "stop") for x in whole])
    ]


@pytest.mark.parametrize(
    ("cut", "whole", "std", "named"),
    [
        ([0.0] * 8, [1.0] * 7 + [0.0], 0.5, True),
        ([0.0, 1.0] * 4, [0.0, 1.0] * 4, 0.5, False),  # as good as others
        ([0.0] * 8, [], 0.0, True),  # none ever came to an end, or to anything
        ([0.3] * 8, [], 0.2, False),  # of some use
    ],
)
def test_answers_are_cut_off_only_where_that_costs_reward(
    cut: list[float], whole: list[float], std: float, named: bool
) -> None:
    step = {"completion/truncated": 0.6, "reward/mean": 0.0, "reward/std": std}
    record = run([step] * 6, newest=answers(cut, whole))
    assert said(record).startswith("answers are cut off: 60%") == named


def test_no_call_is_the_agents_address_and_not_any_failure() -> None:
    steps = [{"rollouts": 8.0, "rollouts/failed": 8.0, f"rollouts/failed/{ErrorKind.NO_CALL}": 8.0}]
    kinds = {
        kind: FailureCount(kind=kind, attempts=8, rollout="r/1", message="it broke")
        for kind in (ErrorKind.NO_CALL, ErrorKind.AGENT)
    }
    (none,) = rules.reasons(run(steps, failure=kinds[ErrorKind.NO_CALL]))
    assert none.text.startswith("the agent makes no call at the gateway in 100%")
    assert (none.example, "OPENAI_BASE_URL" in none.change) == ("r/1", True)
    assert said(run(steps, failure=kinds[ErrorKind.AGENT])).startswith("rollouts fail: 100%")


def test_nothing_else_is_found_in_a_run_that_does_not_get_better() -> None:
    steps = [{"update/steps": 1.0, "update/kl": 0.1, "lr": 1e-3}] * 6
    assert said(run(steps)).startswith("the model does not get better: held-out 0.500 to 0.520")
    assert rules.reasons(run(steps, changes={HELD_OUT: ROSE})) == []
    assert rules.reasons(run(steps[:3])) == []  # too early
    fallen = run(steps, changes={HELD_OUT: Change(0.2, 0.1, 0.9, 0.2)})
    assert said(fallen).startswith("the policy collapsed: held-out 0.200 to 0.100")


def test_a_training_reward_that_held_out_scores_contradict_is_no_improvement() -> None:
    level = {HELD_OUT: Change(0.5, 0.5, 0.5, 0.1), TRAINING: ROSE}
    assert rules.learned(run(changes=level)) == ""
    unknown = {HELD_OUT: Change(0.5, 0.6, 0.6, 0.6), TRAINING: ROSE}
    assert rules.learned(run(changes=unknown)).startswith("it learned: training reward 0.400 to")


async def test_equal_rollouts_with_other_rewards_are_the_verifiers_noise(tmp_path: Path) -> None:
    """Equal by task, result and calls; where calls differ, something else may have happened."""

    async def filled(name: str, prompts: list[int], rewards: list[float]) -> Alike | None:
        async with open_store(f"sqlite:///{tmp_path / name}.db") as store:
            await store.open_run("r", {})
            asked = [
                NewRollout(id=f"r/{i}", run="r", group="g", index=i, task={}) for i in range(4)
            ]
            await store.enqueue(asked)
            claimed = await store.claim(4, runner="w", lease=60.0)
            for one, prompt, value in zip(claimed, prompts, rewards, strict=True):
                call = factories.call(f"{one.id}-0", [prompt], attempt=one.id)
                await store.add_transitions([call])
                end = Outcome(
                    attempt=one.id, fence=one.fence, result="x", rewards=[Reward(value=value)]
                )
                await store.finish([end])
            return await _alike(store, await store.rollouts("r"))

    found = await filled("noisy", [1, 1, 1, 1], [0.0, 1.0, 0.0, 1.0])
    assert found is not None
    assert found.share == 1.0
    assert said(run(alike=found)).startswith("the verifier is noisy: 100%")
    assert said(run(alike=found, changes={HELD_OUT: ROSE})) == ""
    assert await filled("same", [1, 1, 1, 1], [1.0] * 4) is None
    assert await filled("other", [1, 2, 3, 4], [0.0, 1.0, 0.0, 1.0]) is None


def test_what_chance_does_to_scores_that_do_not_change() -> None:
    """Of 400 flat runs few have risen; of those that rise by three of their errors, most."""
    dice = random.Random(1)

    def share(rise: float) -> float:
        found = 0
        for _ in range(400):
            values = [(dice.gauss(0.4 + rise * i / 19, 0.08), math.inf) for i in range(20)]
            found += changes.change_of(values, same_tasks=False).risen
        return found / 400

    assert share(0.0) < 0.02
    assert share(0.25) > 0.8


def test_training_is_compared_with_held_out_answers_at_its_own_temperature() -> None:
    steps = [{"reward/mean": 0.3 + 0.1 * i, "reward/std": 0.4} for i in range(7)]
    rise, greedy = Change(0.3, 0.9, 0.9, 0.1), Change(0.7, 0.88, 0.88, 0.1)
    known = {HELD_OUT: greedy, TRAINING: rise}
    assert said(run(steps, changes=known)).startswith("training rises, held-out does not as much")
    assert rules.reasons(run(steps, changes=known | {SAMPLED: Change(0.2, 0.86, 0.86, 0.1)})) == []


def test_games_in_which_one_seat_wins_what_another_loses_are_no_constant_verifier() -> None:
    level = {"reward/mean": 0.0, "reward/std": 0.0}
    assert said(run([level] * 3, changes={})).startswith("the verifier gives one reward to all")
    assert rules.reasons(run([level | {"selfplay/games": 8.0}] * 3, changes={})) == []


def test_a_run_that_began_with_every_task_solved_had_nothing_left_to_learn() -> None:
    solved = {HELD_OUT: Change(1.0, 1.0, 1.0, 0.1, share=True)}
    step = {"reward/mean": 0.95, "reward/std": 0.2, "update/steps": 1.0, "lr": 1e-3}
    record = run([step] * 30, changes=solved, logprobs=[-0.001])
    assert rules.reasons(record) == []
    assert rules.opening(record, []).startswith("Nothing was left to learn")
    constant = run([step | {"reward/mean": 1.0, "reward/std": 0.0}] * 30, changes=solved)
    assert said(constant).startswith("the verifier gives one reward to all: 100.0%")
    failing = run([step | {"reward/mean": 0.0, "reward/std": 0.0}] * 30, changes=solved)
    assert not failing.solved  # training has another verifier, or harder tasks
    assert not rules.opening(failing, []).startswith("Nothing was left to learn")


@pytest.mark.parametrize(("settings", "named"), [({}, True), ({"live": {"running": True}}, False)])
def test_sessions_of_a_live_agent_may_repeat(settings: dict[str, Any], named: bool) -> None:
    record = run(listed=played(["a", "a", "a", "b"] * 4), settings=settings)
    assert said(record).startswith("training tasks repeat") == named
