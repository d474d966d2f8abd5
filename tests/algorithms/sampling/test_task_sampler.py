from dataclasses import replace

from agentrl.algorithms.sampling.tasks import TaskSampler, evaluation_rollouts
from agentrl.core.config import resolve
from agentrl.core.types import Purpose, Sampling

TASKS = [{"input": str(i)} for i in range(5)]


def stream(seed: int = 0) -> TaskSampler:
    settings = {"name": "r", "seed": seed, "algorithm": {"groups": 3, "group_size": 2}}
    return TaskSampler(resolve(settings, source="test"), TASKS)


def test_every_task_once_an_epoch_in_an_order_of_its_own() -> None:
    order = [stream().task(i)["input"] for i in range(10)]
    assert sorted(order[:5]) == sorted(order[5:]) == ["0", "1", "2", "3", "4"]
    assert order[:5] != order[5:]
    assert order != [stream(seed=1).task(i)["input"] for i in range(10)]


def test_a_restart_asks_for_the_same_rollouts() -> None:
    assert stream().rollouts(4) == stream().rollouts(4)


def test_steps_ask_for_groups_of_their_own() -> None:
    first, second = stream().rollouts(0), stream().rollouts(1)
    assert len(first) == len(second) == 6
    assert len({row.id for row in (*first, *second)}) == 12
    assert [row.group for row in first] == sorted(row.group for row in first)
    assert max(row.group for row in first) < min(row.group for row in second)
    for row in first:
        assert row.purpose is Purpose.TRAIN
    assert [row.index for row in first] == [0, 1] * 3
    assert first[0].task == first[1].task


def test_an_evaluation_is_one_group_of_single_rollouts() -> None:
    rows = evaluation_rollouts(stream().config, 7, "score", TASKS, Sampling(temperature=0.0))
    assert {row.group for row in rows} == {"r/eval/000007/score"}
    assert {row.purpose for row in rows} == {Purpose.EVAL}
    assert [row.task for row in rows] == TASKS
    assert rows[0].sampling.temperature == 0.0
    assert rows[0].priority > stream().rollouts(0)[0].priority


def test_a_greedy_baseline_is_one_rollout_of_each_group() -> None:
    rows = replace(stream(), greedy=True).rollouts(0)
    assert [row.sampling.temperature == 0 for row in rows] == [True, False] * 3
    assert [row.id for row in rows] == [row.id for row in stream().rollouts(0)]
