"""Tasks drawn by how often they were solved, as a function of seed and history."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentrl.algorithms.credit.calls import CountedMeans
from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.sampling.collect import Collector
from agentrl.algorithms.sampling.curriculum import DIFFICULTY, Curriculum, TaskDifficulty, task_name
from agentrl.algorithms.sampling.tasks import TaskSampler
from agentrl.core.config import resolve
from agentrl.core.types import Branch, Reward
from agentrl.store import open_store
from tests import factories
from tests.algorithms.sampling.test_collect import asked, ids, running
from tests.algorithms.train.test_update import group
from tests.factories import rollout

TASKS = [{"input": word} for word in ("easy", "good", "hard")]


def stream(difficulty: TaskDifficulty, **algorithm: object) -> TaskSampler:
    settings = {"groups": 4, "group_size": 2, **algorithm}
    config = resolve({"name": "r", "algorithm": settings, "steps": 9}, source="test")
    return TaskSampler(config, TASKS, order=difficulty.choose)


def test_a_history_is_the_mean_outcome_of_what_is_known() -> None:
    difficulty = TaskDifficulty()
    assert difficulty.weight({}) == 0.25
    difficulty.record_outcomes([group("a", 1.0, 0.0, None), group("b", 1.0)])  # all of the task {}
    assert difficulty.means.values == {task_name({}): (pytest.approx(2 / 3), 3)}
    assert difficulty.weight({}) == pytest.approx(3 / 5 * 2 / 5)


def test_a_solved_task_is_drawn_no_more_while_others_are_left() -> None:
    difficulty = TaskDifficulty(solved=0.9)
    tables = {"algorithm": {"groups": 6}, "tasks": {"order": "unsolved"}, "steps": 9}
    sampler = TaskSampler(resolve(tables, source="test"), TASKS, order=difficulty.choose)

    def drawn() -> set[str]:
        rows = [*sampler.rollouts(0), *sampler.replacements(0, 0, 6)]
        return {row.task["input"] for row in rows}

    assert drawn() == {"easy", "good", "hard"}
    for solved, left in (("easy", {"good", "hard"}), ("good", {"hard"}), ("hard", {"hard"})):
        difficulty.means.values[task_name({"input": solved})] = (0.95, 20)
        assert drawn() >= left
        assert drawn() == left or solved == "hard"  # all are solved: all are drawn


def test_a_branch_is_no_try_at_the_task() -> None:
    difficulty, tried = TaskDifficulty(), group("a", 1.0, 0.0)
    branch = replace(tried.rollouts[0], branch=Branch(rollout="a/1", calls=1))
    difficulty.record_outcomes([replace(tried, rollouts=[*tried.rollouts, branch])])
    assert difficulty.means.values == {task_name({}): (0.5, 2)}


@pytest.mark.parametrize("outcome", [0.0, 1.0, -7.0, 7.0])
def test_flat_tasks_are_drawn_ever_less_but_still_drawn(outcome: float) -> None:
    difficulty, weights = TaskDifficulty(), []
    for _ in range(4):
        weights.append(difficulty.weight({}))
        difficulty.record_outcomes([group("a", outcome, outcome)])
    assert weights == sorted(weights, reverse=True)
    assert 0 < weights[-1] < 0.15


def test_tasks_that_are_solved_sometimes_come_most_often() -> None:
    means = CountedMeans(
        {
            task_name(TASKS[0]): (1.0, 50),
            task_name(TASKS[1]): (0.5, 50),
            task_name(TASKS[2]): (0.0, 50),
        }
    )
    drawn = Counter(task["input"] for task in TaskDifficulty(means).draw(TASKS, "seed", 500))
    assert drawn["good"] > 400
    assert drawn["easy"] > 0
    assert drawn["hard"] > 0


def test_a_task_is_known_by_its_id_or_its_content() -> None:
    assert task_name({"id": 7, "input": "a"}) == task_name({"id": 7, "input": "b"}) == "7"
    assert (
        task_name({"input": "a", "x": 1})
        == task_name({"x": 1, "input": "a"})
        != task_name({"input": "b"})
    )


def test_requests_follow_seed_and_checkpoint() -> None:
    means = CountedMeans({task_name(TASKS[1]): (0.5, 9), task_name(TASKS[0]): (1 / 3, 7)})
    state = AlgorithmState((), {DIFFICULTY: means})
    saved = json.dumps(state.dump())
    again = CountedMeans()
    AlgorithmState((), {DIFFICULTY: again}).restore(json.loads(saved))
    part = state.parts[DIFFICULTY]
    assert isinstance(part, CountedMeans)
    one, other = stream(TaskDifficulty(part)), stream(TaskDifficulty(again))
    for step in range(3):
        assert one.rollouts(step) == other.rollouts(step)
        assert one.replacements(step, 0, 5)[:4] == other.replacements(step, 0, 2)
    fresh = stream(TaskDifficulty())
    assert [one.rollouts(step) for step in range(9)] != [fresh.rollouts(step) for step in range(9)]


async def test_what_was_requested_ahead_survives_a_restart(tmp_path: Path) -> None:
    """A process that dies before the commit of step 1, and begins again from the checkpoint."""
    found = []
    for lives in (1, 2):
        url = f"sqlite:///{tmp_path / str(lives)}.db"
        async with open_store(url) as store, running(store):
            curriculum, checkpoint = Curriculum(resolve({}, source="test")), "{}"
            difficulty = curriculum.difficulty
            for step in (0, 1):
                for _ in range(lives if step else 1):
                    difficulty.means.restore(json.loads(checkpoint))
                    epoch = (await store.open_run("r", {})).epoch
                    tasks = stream(difficulty, max_staleness=2)
                    collector = Collector(
                        tasks.config, store, epoch, tasks, observers=[curriculum.claimed]
                    )
                    collected = await collector.collect(step)
                await store.commit_step(
                    factories.commit(step, ids(collected.groups), epoch=epoch, checkpoint="c")
                )
                checkpoint = json.dumps(difficulty.means.dump())
            found.append((await asked(store), checkpoint))
    assert found[0] == found[1]
    assert sum(count for _, count in json.loads(found[0][1]).values()) == 16
    assert not any(math.isnan(mean) for mean, _ in json.loads(found[0][1]).values())


def test_difficulty_is_that_of_a_task_with_a_candidate() -> None:
    task, difficulty = {"id": "t"}, TaskDifficulty()
    rows = [rollout(f"r{i}", task=task, candidate="c", rewards=[Reward(value=1.0)]) for i in "01"]
    difficulty.record_outcomes([factories.group(*rows)])
    assert difficulty.weight(task, "c") < difficulty.weight(task, "d") == difficulty.weight(task)
