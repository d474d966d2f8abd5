"""What the rollouts of an evaluation come to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import nan
from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithms.sampling.evaluate import (
    evaluate_functions,
    has_stalled,
    heldout_scores,
    score_metrics,
)
from agentrl.algorithms.train.checkpoint import mark_best, prune
from agentrl.config import RunConfig, resolve
from agentrl.errors import ConfigError
from agentrl.store import Store, open_store
from agentrl.types import Purpose, Reward, Rollout, Scope, StepCommit
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


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(f"sqlite:///{tmp_path / 'out' / 'store.db'}", create=True) as store:
        await store.open_run("r", {})
        yield store


def run_config(folder: Path, **tables: Any) -> RunConfig:
    settings = {"name": "r", "root": str(folder), "output": str(folder / "out"), **tables}
    return resolve(settings, source="test")


async def scored(store: Store, *scores: float) -> None:
    for step, score in enumerate(scores):
        await store.log("r", 10 * step, {"eval/score": score})


async def test_training_ends_when_held_out_scores_stopped_rising(
    store: Store, tmp_path: Path
) -> None:
    tasks = {"tasks": {"train": "t.py:t", "heldout": "t.py:t"}}
    config = run_config(tmp_path, eval={"every": 10, "patience": 2}, **tasks)
    await scored(store, 0.9, 0.3, 0.5, 0.4)  # of the untrained policy, after 10, 20 and 30 steps
    assert await heldout_scores(store, "r") == {20: 0.5, 30: 0.4, 10: 0.3}
    assert not await has_stalled(store, config)
    await store.log("r", 40, {"eval/score": 0.5})  # as good is no better
    assert await has_stalled(store, config)
    assert not await has_stalled(store, run_config(tmp_path))
    with pytest.raises(ConfigError, match=r"eval.patience counts held-out scores: set eval.every"):
        run_config(tmp_path, eval={"patience": 2}, **tasks)


async def test_the_best_checkpoint_is_named_and_kept(store: Store, tmp_path: Path) -> None:
    config, folder = run_config(tmp_path), tmp_path / "out" / "checkpoints"
    for step, score in enumerate((0.2, 0.5, 0.5), start=1):
        last = folder / f"{step:06d}"
        last.mkdir(parents=True)
        await store.commit_step(
            StepCommit(
                run="r", epoch=1, step=step - 1, groups=[], versions={}, metrics={},
                checkpoint=f"checkpoints/{last.name}",
            )
        )  # fmt: skip
        prune(folder, keep=1, last=last)
        await store.log("r", step, {"eval/score": score})
        await mark_best(store, config, step)
    assert {path.name for path in folder.iterdir()} == {"000002", "000003", "best"}
    assert (folder / "best").resolve().name == "000002"


async def test_functions_of_the_run_file_measure_checkpoints(store: Store, tmp_path: Path) -> None:
    (tmp_path / "own_measure.py").write_text(
        "def size(path): return len(path.name)\n"
        "def pair(path): return {'a': 1, 'b': 2.5}\n"
        "def wrong(path): 1 / 0\n"
    )
    names = ["own_measure.py:size", "own_measure.py:pair"]
    config = run_config(tmp_path, eval={"functions": names}, policy={"model": "some/base"})
    await evaluate_functions(store, config, 1, 0)
    (row,) = await store.steps("r")
    named = {"size": 4.0, "pair/a": 1.0, "pair/b": 2.5}
    assert row.metrics == {f"eval/function/{name}": x for name, x in named.items()}
    config = run_config(tmp_path, eval={"functions": ["own_measure.py:wrong"]})
    with pytest.raises(ConfigError, match=r"own_measure.py:wrong' raised ZeroDivisionError"):
        await evaluate_functions(store, config, 1, 0)
    upstream = {"u": {"base_url": "http://u/v1"}}
    with pytest.raises(ConfigError, match=r"eval.functions are given a checkpoint"):
        run_config(tmp_path, eval={"functions": names}, upstreams=upstream)
