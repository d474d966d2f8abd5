"""What the rollouts of an evaluation come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import combinations
from math import nan
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from agentrl import trainer
from agentrl.algorithms.sampling import evaluate
from agentrl.algorithms.sampling.evaluate import (
    common_score,
    confidence_interval,
    evaluate_heldout,
    few_tasks,
    heldout_scores,
    pass_at,
    score_metrics,
    spread_metrics,
    temperatures,
)
from agentrl.algorithms.train.checkpoint import mark_best, prune
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import (
    ErrorKind,
    Failure,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Scope,
)
from agentrl.runners.scoring import VerifierError, as_rewards, failure_of
from agentrl.store import Store, open_store
from tests import factories


def played(outcome: float, **roles: float) -> Rollout:
    """With an outcome of its own for each role; NaN: the rollout has none."""
    rewards = [Reward(value=x, scope=Scope.ROLE, target=role) for role, x in roles.items()]
    rewards.append(Reward(value=-9.0, name="invalid", scope=Scope.ROLE, target="first"))
    return factories.rollout(
        "g/0",
        task={"input": "x"},
        purpose=Purpose.EVAL,
        attempt="a",
        rewards=rewards + ([Reward(value=outcome)] if outcome == outcome else []),
    )


def test_the_mean_of_all_and_of_each_role_of_what_is_known() -> None:
    rows = [played(1.0, first=2.0, second=0.0), played(0.5, first=1.0), played(nan)]
    assert score_metrics("score", rows) == {
        "score": 0.75, "score/first": 1.5, "score/second": 0.0, "score_missing": 1.0,
    }  # fmt: skip
    assert score_metrics("sampled", [played(nan)]) == {"sampled_missing": 1.0}


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int, c: int, k: int) -> None:
    choices = [any(i < c for i in some) for some in combinations(range(n), k)]
    assert pass_at(k, n, c) == pytest.approx(sum(choices) / len(choices))


def test_samples_of_each_task_give_pass_at_k_and_intervals(tmp_path: Path) -> None:
    config = factories.config(tmp_path, eval={"samples": 3}, tasks={"train": "t.py:t"})
    outcomes = (1.0, 0.0, 0.4, 0.0, 1.0, nan)  # of two tasks: first, second, first ...
    rows = [msgspec.structs.replace(played(x), index=i) for i, x in enumerate(outcomes)]
    found = spread_metrics("sampled", rows, 2, config)
    assert found["sampled/pass@1"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["sampled/pass@2"] == pytest.approx((1 + 0) / 2)
    assert found["sampled/pass@3"] == 1.0  # of the first alone: the second has two that are known
    assert "sampled/pass@3_low" not in found
    assert found["sampled_low"] < (0.8 + 0) / 2 < found["sampled_high"]
    assert "score/pass@1" not in spread_metrics("score", rows[:2], 2, config)


def test_ninety_five_of_a_hundred_intervals_hold_the_mean() -> None:
    random = Random(0)

    def holds(p: float, n: int) -> bool:
        low, high = confidence_interval([float(random.random() < p) for _ in range(n)])
        return low <= p <= high

    for p, n in ((0.5, 30), (0.05, 30), (0.9, 100)):
        assert 0.92 < sum(holds(p, n) for _ in range(1000)) / 1000 < 0.99
    low, high = confidence_interval([1.0] * 10)
    assert (round(low, 3), high) == (0.722, 1.0)  # Wilson's
    assert confidence_interval([-1.0, 1.0, 3.0]) == pytest.approx((1 - 2.263, 1 + 2.263), abs=1e-3)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'out' / 'store.db'}", create=True) as store:
        await store.open_run("r", {})
        yield store


async def test_only_first_and_last_sampled_scores_take_samples(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"tasks": {"train": "t.py:t", "heldout": "t.py:t"}}
    config = factories.config(tmp_path, steps=9, eval={"every": 5, "samples": 2}, **tasks)
    counts: list[dict[str, int]] = []

    async def play(store: Store, asked: dict[str, list[Any]]) -> dict[str, list[Rollout]]:
        counts.append({name: len(rows) for name, rows in asked.items()})
        return {
            name: [msgspec.structs.replace(played(1.0), index=row.index) for row in rows]
            for name, rows in asked.items()
        }

    monkeypatch.setattr(evaluate, "play", play)
    for step in (0, 5, 9):
        await evaluate_heldout(store, config, 1, step, [{"input": "a"}, {"input": "b"}])
    assert counts == [{"score": 2, "sampled": 4}, {"score": 2}, {"score": 2, "sampled": 4}]
    first, second, _ = [row.metrics for row in await store.steps("r")]
    assert (first["eval/sampled/pass@2"], first["eval/score_high"]) == (1.0, 1.0)
    assert not any("pass@" in name for name in second)
    alone = factories.config(tmp_path, steps=9, eval={"samples": 0}, **tasks)
    assert temperatures(alone, 0) == temperatures(alone, 9) == {"score": 0.0}


async def test_a_verifier_without_a_number_ends_the_run_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"tasks": {"train": "t.py:t", "heldout": "t.py:t"}, "verifier": {"path": "v.py:verify"}}
    config = factories.config(tmp_path, steps=9, **tasks)
    with pytest.raises(VerifierError) as wrong:
        as_rewards(None)
    failure = failure_of(ErrorKind.VERIFIER, wrong.value)
    failed = msgspec.structs.replace(played(nan), state=RolloutState.FAILED, failure=failure)
    rows = [failed, failed]

    async def play(store: Store, asked: Any) -> dict[str, list[Rollout]]:
        return dict.fromkeys(asked, rows)

    monkeypatch.setattr(evaluate, "play", play)
    with pytest.raises(TrainingError) as error:
        await evaluate_heldout(store, config, 1, 0, [{"input": "a"}])
    assert str(error.value) == (
        "all 4 rollouts failed, because of v.py:verify: the verifier returned None as 'outcome';"
        f" return a number. Example: agentrl show {failed.id}. Correct it, and rerun the command"
    )
    rows[1] = played(0.0)
    await evaluate_heldout(store, config, 1, 0, [{"input": "a"}])


@pytest.mark.parametrize(
    ("kinds", "reward", "cure"),
    [
        ("agent_error", nan, r"by agent_error: no luck\. .* Correct the agent \(agent\.path"),
        ("timeout", nan, r"by timeout: no luck\. .* Raise agent\.timeout"),
        ("no_model_call", nan, r"by no_model_call: .* Let the agent call the policy"),
        ("agent_error timeout", nan, ""),  # two causes
        ("agent_error", 0.0, ""),  # agent.error_reward: something can be learned
        ("agent_error none", nan, ""),
    ],
)
async def test_a_failed_first_evaluation_ends_the_run_with_one_fix(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: str,
    reward: float,
    cure: str,
) -> None:
    tasks = {"tasks": {"train": "t.py:t", "heldout": "t.py:t"}}
    config = factories.config(tmp_path, steps=9, **tasks)
    rows = [
        msgspec.structs.replace(
            played(1.0 if kind == "none" else reward),
            failure=None if kind == "none" else Failure(kind=ErrorKind(kind), message="no luck"),
        )
        for kind in (kinds.split() * 2)[:2]
    ]

    async def play(store: Store, asked: Any) -> dict[str, list[Rollout]]:
        return dict.fromkeys(asked, rows)

    monkeypatch.setattr(evaluate, "play", play)
    if cure:
        with pytest.raises(TrainingError, match=f"^all 4 rollouts failed {cure}") as error:
            await evaluate_heldout(store, config, 1, 0, [{"input": "a"}])
        assert str(error.value).endswith("and rerun the command")
        monkeypatch.setattr(evaluate, "MIN_ALIKE_FAILURES", 5)  # so few may fail alike by chance
    await evaluate_heldout(store, config, 1, 0, [{"input": "a"}])


async def evaluated(store: Store, config: RunConfig, *, broken: bool) -> None:
    """An evaluation before the first step, whose agent is broken or always right."""
    tasks = [{"input": word} for word in "abcd"]
    work = asyncio.create_task(evaluate_heldout(store, config, 2, 0, tasks))
    while not work.done():
        claimed = await store.claim(99, runner="w", run="r", lease=60.0, timeout=0.05)
        failure = Failure(kind=ErrorKind.AGENT, message="no module named 'x'") if broken else None
        rewards = [] if broken else [Reward(value=1.0)]
        for one in claimed:
            done = Outcome(attempt=one.id, fence=one.fence, failure=failure, rewards=rewards)
            await store.finish([done])
    await work


async def test_a_repaired_agent_is_evaluated_anew_without_fresh(
    store: Store, tmp_path: Path
) -> None:
    """Twice: the first repair was none. Settings may change, as the cause may be one of them."""
    tasks = {"tasks": {"train": "t.py:t", "heldout": "t.py:t"}}
    config = factories.config(tmp_path, steps=9, **tasks)
    other = factories.config(tmp_path, steps=9, sampling={"max_tokens": 7}, **tasks)
    await store.open_run("r", msgspec.to_builtins(config))
    for trial in ("score", "score.01"):
        with pytest.raises(TrainingError, match=rf"agentrl show r/eval/000000/{trial}/0000"):
            await evaluated(store, config, broken=True)
        await trainer.refuse_changes(store, other)
    await evaluated(store, config, broken=False)
    (row,) = await store.steps("r")
    assert (row.metrics["eval/score"], row.metrics["eval/score_missing"]) == (1.0, 0.0)
    with pytest.raises(ConfigError, match=r"other settings \(sampling.max_tokens"):
        await trainer.refuse_changes(store, other)
    before = (await store.counts("r")).succeeded
    await evaluated(store, config, broken=True)  # what is scored is not played again
    assert (await store.counts("r")).succeeded == before


def test_few_held_out_tasks_say_what_a_score_of_them_is_worth() -> None:
    assert few_tasks(4) == (
        "4 held-out tasks: with rewards of 0 and 1 a score moves in steps of 25 points, and is"
        " known to ±35 points; 40 tasks give ±15"
    )
    low, high = confidence_interval([0.0, 1.0] * 20)
    assert round(50 * (high - low)) == 15
    assert few_tasks(1).startswith("1 held-out task: ")
    assert (few_tasks(0), few_tasks(20)) == ("", "")


async def scored(store: Store, *scores: float) -> None:
    for step, score in enumerate(scores):
        await store.log("r", 10 * step, {"eval/score": score})


async def test_scores_are_compared_by_common_tasks(store: Store, tmp_path: Path) -> None:
    tasks = {"tasks": {"train": "t.py:t", "heldout": "t.py:t"}}
    config = factories.config(tmp_path, eval={"every": 10, "curve_tasks": 2}, **tasks)
    rows = [msgspec.structs.replace(played(x), index=i) for i, x in enumerate((1.0, 0.0, 0.0))]
    assert common_score(config, rows, 3) == {"eval/common": 0.5}
    assert common_score(config, rows[:2], 2) == {}
    assert common_score(factories.config(tmp_path, **tasks), rows, 3) == {}  # none in between
    await store.log("r", 10, {"eval/score": 0.5})
    await store.log("r", 20, {"eval/score": 0.9, "eval/common": 0.4})  # more tasks, easier ones
    assert await heldout_scores(store, "r") == {10: 0.5, 20: 0.4}


async def test_the_best_checkpoint_is_named_and_kept(store: Store, tmp_path: Path) -> None:
    config, folder = factories.config(tmp_path), tmp_path / "out" / "checkpoints"
    for step, score in enumerate((0.2, 0.5, 0.4), start=1):
        last = folder / f"{step:06d}"
        last.mkdir(parents=True)
        await store.commit_step(factories.commit(step - 1, checkpoint=f"checkpoints/{last.name}"))
        prune(folder, keep=1, last=last)
        await store.log("r", step, {"eval/score": score})
        await mark_best(store, config, "")
    assert {path.name for path in folder.iterdir()} == {"000002", "000003", "best"}
    assert (folder / "best").resolve().name == "000002"
    for score, best in ((0.5, "000003"), (0.4, "000002")):  # of equal ones the last
        await store.log("r", 3, {"eval/score": score})
        await mark_best(store, config, "")
        assert (folder / "best").resolve().name == best
    (folder.parent / "evaluation" / "000003").mkdir(parents=True)  # it is scored late
    (folder / "000004").mkdir()
    prune(folder, keep=1, last=folder / "000004")
    await store.log("r", 3, {"eval/score": 0.6})
    await mark_best(store, config, "")
    assert (folder / "best").resolve().name == "000003"
