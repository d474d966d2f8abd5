"""Reasons about tasks, verifiers and samplers, each with runs that only look like it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.algorithms import verdict, why
from agentrl.algorithms.hack_signs import Sign
from agentrl.algorithms.run_record import Alike, PolicyRun, _alike, read
from agentrl.algorithms.verdict import HELD_OUT, SAMPLED, TRAINING, Change
from agentrl.core.config import resolve
from agentrl.core.types import (
    Attempt,
    ErrorKind,
    FailureCount,
    NewRollout,
    Outcome,
    Purpose,
    Reward,
    Rollout,
)
from agentrl.store import open_store
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
    return next((reason.text for reason in why.reasons(record)), "")


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
def test_tasks_that_repeat_within_an_epoch_are_duplicates(inputs: list[str], repeats: bool) -> None:
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
    assert (why.learned(record) == "") == leaks


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
    assert not (exploited and why.learned(record))


@pytest.mark.parametrize(
    ("gap", "age", "dtype", "named"),
    [
        (0.5, 0.0, "float32", True),
        (0.042, 0.0, "float32", True),
        (0.01, 0.0, "float32", False),
        (0.5, 2.0, "float32", False),
        (0.057, 0.0, "bfloat16", False),
        (0.15, 0.0, "bfloat16", True),
    ],
)
def test_log_probs_differ_at_the_same_weights(
    gap: float, age: float, dtype: str, named: bool
) -> None:
    """The threshold is one of the dtype, and the sentence names it."""
    step = {"logprob_difference/mean": gap, "staleness/version_mean": age}
    first = said(run([step], settings={"policy": {"model": "m", "dtype": dtype}}))
    assert first.startswith("sampler and learner differ") == named
    if named:
        assert gap >= float(first.rpartition("(from ")[2].split()[0])


def ends(
    before: Sequence[float], after: Sequence[float], texts: tuple[str, str] = ("{}", "{}")
) -> dict[str, Any]:
    """Rollouts of the same tasks before and after training, with these rewards and answers."""

    def played_by(rewards: Sequence[float], text: str) -> list[Rollout]:
        return [
            factories.rollout(f"e/{i}", rewards=[Reward(x)], task={"input": f"question {i}"},
                              result=text.format(i))
            for i, x in enumerate(rewards)
        ]  # fmt: skip

    return {"before": played_by(before, texts[0]), "after": played_by(after, texts[1])}


def test_partial_rewards_that_rise_without_full_ones_are_a_hack() -> None:
    """As those of answers that contain the right one among others."""
    counting = ends([1.0] * 6 + [0.0] * 14, [0.5] * 19 + [1.0])
    record = run(changes={HELD_OUT: ROSE}, **counting)
    assert said(record).startswith("partial rewards rose, 0.3 to 0.525, and full ones did not, 30%")
    assert why.learned(record) == ""
    never = run(changes={HELD_OUT: ROSE}, **ends([0.01] * 20, [0.2] * 20))
    assert "no rollout ever got the full reward (the best of 40: 0.2 of 1)" in said(never)
    assert why.opening(never, why.reasons(never)).startswith("The scores rose, but they are no")
    graded = ends([0.2] * 20, [0.6] * 4 + [1.0] * 16)
    assert why.learned(run(changes={HELD_OUT: ROSE}, **graded)).startswith("it learned")
    beyond = ends([0.2] * 20, [1.6] * 20)  # nobody knows what is full
    assert why.learned(run(changes={HELD_OUT: ROSE}, **beyond)).startswith("it learned")


@pytest.mark.parametrize(
    ("text", "what"), [("yes", "answer"), ("{0} {0}1 {0}2 {0}3", "template"), ("it is {}", "")]
)
def test_one_answer_for_many_tasks_is_a_hack(text: str, what: str) -> None:
    rose = ends([0.0, 1.0] * 5 + [0.0] * 10, [0.0, 1.0, 1.0] * 6 + [0.0] * 2, ("is {}", text))
    record = run(changes={HELD_OUT: ROSE}, **rose)
    assert (f"one {what} for many tasks: " in said(record)) == bool(what)
    assert bool(why.learned(record)) == (not what)
    solved = run(changes={HELD_OUT: ROSE}, **ends([0.0] * 20, [1.0] * 20, ("is {}", text)))
    assert why.learned(solved).startswith("it learned")  # it is right for all


def test_answers_that_grow_digits_without_being_right_are_a_hack() -> None:
    spray = ("is {}", "".join(f"{{0}}{n} or" * (n % 3) for n in range(9)))
    found = ends([0.3, 0.0] * 10, [0.4, 0.3] * 10, spray)
    texts = [reason.text for reason in why.reasons(run(changes={HELD_OUT: ROSE}, **found))]
    assert any(text.startswith("answers grow by digits, 1.5 to ") for text in texts)
    longer = ends([1.0, 0.0] * 10, [1.0, 1.0] * 10, spray)  # as who reasons before answering
    assert why.learned(run(changes={HELD_OUT: ROSE}, **longer)).startswith("it learned")


async def test_scores_are_those_of_tasks_that_were_not_trained(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("r", {})
        for step in (0, 5):
            group = f"r/eval/{step:06d}/score"
            asked = [
                NewRollout(id=f"{group}/{i}", run="r", group=group, index=i,
                           purpose=Purpose.EVAL, task={"input": f"q{i}"})
                for i in range(8)
            ]  # fmt: skip
            await store.enqueue(asked)
            for one in await store.claim(8, runner="w", lease=60.0):
                seen = one.rollout.index < 4
                rewards = [Reward(value=float(bool(step) and seen))]
                await store.finish([Outcome(attempt=one.id, fence=one.fence, rewards=rewards)])
        measured, steps = {HELD_OUT: Change(0.0, 0.5, 0.5, 0.1)}, {HELD_OUT: [0, 5]}
        seen = {f'"q{i}"' for i in range(4)}
        found = await verdict.paired(store, "r", measured, steps, without=seen)
        assert (found[HELD_OUT].first, found[HELD_OUT].last) == (0.0, 0.0)
        assert not found[HELD_OUT].risen
        every = await verdict.paired(store, "r", measured, steps, without=["other"])
        assert every[HELD_OUT].last == 0.5


def test_what_else_is_true_is_said_beside_other_reasons() -> None:
    """That the model does not get better, success is rare, and nothing was left to explore."""
    rare = [factories.rollout(rewards=[Reward(x)]) for x in [0.0] * 15 + [1.0]]
    step = {
        "update/steps": 1.0, "update/kl": 0.1, "lr": 1e-3, "completion/truncated": 1.0,
        "reward/mean": 0.02, "reward/std": 0.14, "reward/outcome/frac_zero_std": 0.1,
    }  # fmt: skip
    record = run([step] * 6, newest=rare, start={"policy/entropy": 0.005},
                 settings={"warmup": {"data": "d.jsonl"}})  # fmt: skip
    texts = [reason.text for reason in why.reasons(record)]
    assert texts[0].startswith("entropy was gone before the first update (after the warm-up)")
    assert any(text.startswith("success is rare: 2.0%") for text in texts)
    assert any(text.startswith("the model does not get better") for text in texts)


def test_a_change_names_settings_that_the_run_has() -> None:
    steps = [{"reward/mean": 0.0, "reward/std": 0.0}] * 3
    settings = {"environment": "reasoning_gym:letter_counting"}
    (reason,) = why.reasons(run(steps, changes={}, settings=settings))
    assert reason.change.startswith("environment reasoning_gym:letter_counting: its comparison")
    assert "tasks.train" not in reason.change


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
    (none,) = why.reasons(run(steps, failure=kinds[ErrorKind.NO_CALL]))
    assert none.text.startswith("the agent makes no call at the gateway in 100%")
    assert (none.example, "OPENAI_BASE_URL" in none.change) == ("r/1", True)
    assert said(run(steps, failure=kinds[ErrorKind.AGENT])).startswith("rollouts fail: 100%")


def test_nothing_else_is_found_in_a_run_that_does_not_get_better() -> None:
    steps = [{"update/steps": 1.0, "update/kl": 0.1, "lr": 1e-3}] * 6
    assert said(run(steps)).startswith("the model does not get better: held-out 0.500 to 0.520")
    assert why.reasons(run(steps, changes={HELD_OUT: ROSE})) == []
    assert why.reasons(run(steps[:3])) == []  # too early
    fallen = run(steps, changes={HELD_OUT: Change(0.2, 0.1, 0.9, 0.2)})
    assert said(fallen).startswith("the policy collapsed: held-out 0.200 to 0.100")


def test_a_training_reward_alone_is_no_improvement() -> None:
    """A held-out score has to rise, by more than chance."""
    for held in (Change(0.5, 0.5, 0.5, 0.1), Change(0.5, 0.6, 0.6, 0.6)):
        record = run(changes={HELD_OUT: held, TRAINING: ROSE})
        assert why.learned(record) == ""
        assert why.opening(record, []) == "Training reward rose, held-out did not."
    alone = run(changes={TRAINING: ROSE})
    assert why.learned(alone) == ""
    assert why.opening(alone, []).startswith("The training reward rose, and no score of held-out")


async def test_equal_rollouts_with_other_rewards_are_noise(tmp_path: Path) -> None:
    """Equal by task, result and calls; where calls differ, something else may have happened."""

    async def filled(name: str, prompts: list[int], rewards: list[float]) -> Alike | None:
        async with open_store(f"sqlite:///{tmp_path / name}.db") as store:
            await store.open_run("r", {})

            def played(one: Attempt) -> Any:
                i = one.rollout.index
                call = factories.call(f"{one.id}-0", [prompts[i]], attempt=one.id)
                return [call], {"result": "x", "rewards": [Reward(value=rewards[i])]}

            await factories.play(store, factories.queue("g", 4), played)
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
            found += verdict.change_of(values, same_tasks=False).risen
        return found / 400

    assert share(0.0) < 0.02
    assert share(0.25) > 0.8


def test_training_is_compared_at_its_own_temperature() -> None:
    steps = [{"reward/mean": 0.3 + 0.1 * i, "reward/std": 0.4} for i in range(7)]
    rise, greedy = Change(0.3, 0.9, 0.9, 0.1), Change(0.7, 0.88, 0.88, 0.1)
    known = {HELD_OUT: greedy, TRAINING: rise}
    assert said(run(steps, changes=known)).startswith("training rises, held-out does not as much")
    assert why.reasons(run(steps, changes=known | {SAMPLED: Change(0.2, 0.86, 0.86, 0.1)})) == []


def test_zero_sum_games_are_no_constant_verifier() -> None:
    level = {"reward/mean": 0.0, "reward/std": 0.0}
    assert said(run([level] * 3, changes={})).startswith("the verifier gives one reward to all")
    assert why.reasons(run([level | {"selfplay/games": 8.0}] * 3, changes={})) == []


def test_a_run_that_began_solved_had_nothing_left_to_learn() -> None:
    solved = {HELD_OUT: Change(1.0, 1.0, 1.0, 0.1, share=True)}
    step = {"reward/mean": 0.95, "reward/std": 0.2, "update/steps": 1.0, "lr": 1e-3}
    record = run([step] * 30, changes=solved, logprobs=[-0.001])
    assert why.reasons(record) == []
    assert why.opening(record, []).startswith("Nothing was left to learn")
    constant = run([step | {"reward/mean": 1.0, "reward/std": 0.0}] * 30, changes=solved)
    assert said(constant).startswith("the verifier gives one reward to all: 100.0%")
    failing = run([step | {"reward/mean": 0.0, "reward/std": 0.0}] * 30, changes=solved)
    assert not failing.solved  # training has another verifier, or harder tasks
    assert not why.opening(failing, []).startswith("Nothing was left to learn")


@pytest.mark.parametrize(("settings", "named"), [({}, True), ({"live": {"running": True}}, False)])
def test_sessions_of_a_live_agent_may_repeat(settings: dict[str, Any], named: bool) -> None:
    record = run(listed=played(["a", "a", "a", "b"] * 4), settings=settings)
    assert said(record).startswith("training tasks repeat") == named


async def test_signs_of_a_hack_are_read_from_the_last_steps(tmp_path: Path) -> None:
    """As they were measured while it trained: one step alone may have too few rollouts."""
    config = resolve({"name": "r", "policy": {"model": "m"}}, source="test")
    report = {"answer": "answer", "verdict": "no hole found", "findings": []}
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        state = await store.open_run("r", msgspec.to_builtins(config))
        await store.put_documents("r", "audit", {"report": report})
        for step in range(3):
            group = f"r/train/{step:07d}"
            task = {"input": f"What is {step} plus 90?", "answer": f"{step + 90}"}
            asked = factories.queue(group, 2, task=task, step=step)
            paid = {"result": "certainly", "rewards": [Reward(1.0)]}
            await factories.play(store, asked, lambda _, paid=paid: ([], paid))  # type: ignore[misc]
            await store.claim_groups("r", state.epoch, 1)
            await store.commit_step(factories.commit(step, [group], epoch=state.epoch))
        for last in (0, 2):
            (found,) = (await read(store, "r", last)).values()
            named = {sign.metric for sign in found.hacked}
            assert named == {"reward/same_answer", "reward/without_answer"}, last


def test_a_hacked_run_has_not_learned() -> None:
    sign = Sign("reward/same_answer", 1.0, 0.3, "one answer, 'ok', is paid on all tasks", ["r/0"])
    assert why.learned(run(changes={HELD_OUT: ROSE}))
    assert not why.learned(run(changes={HELD_OUT: ROSE}, hacked=[sign]))
