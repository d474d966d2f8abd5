"""A run that is interrupted and started again has bitwise the losses and weights of one that was
not."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.algorithms.train import saving
from agentrl.cli.main import export
from agentrl.core.config.schema import CheckpointConfig
from agentrl.core.errors import NotFound, PolicyError
from agentrl.core.types import RunState
from agentrl.store import open_store
from tests import warm
from tests.system.steady import (
    KINDS,
    POINTS,
    STEPS,
    Interrupted,
    Silent,
    break_off,
    config,
    finish,
    interrupt,
    run,
    strike_at,
)

SHOWN = ("loss", "grad_norm", "lr", "old/kl", "policy/entropy", "logprob_difference/mean")


def outcome(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics of every step, and all tensors of the last checkpoint."""

    async def read() -> tuple[list[dict[str, float]], str]:
        async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
            rows = [row for row in await store.steps("steady") if row.committed]
            state = await store.run("steady")
        assert state is not None
        assert state.checkpoint is not None
        return [shown(row.metrics) for row in rows], str(folder / "out" / state.checkpoint)

    losses, checkpoint = asyncio.run(read())
    tensors = {
        f"{file.relative_to(checkpoint)}/{name}": tensor
        for file in Path(checkpoint).rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    return losses, tensors


def shown(metrics: dict[str, float]) -> dict[str, float]:
    """Those of `SHOWN`, of whichever policies learned in the step."""
    found = {
        name: value
        for name, value in metrics.items()
        if name in SHOWN or name.removeprefix("planner/").removeprefix("solver/") in SHOWN
    }
    assert len(found) >= len(SHOWN)
    return found


def assert_same(folder: Path, other: Path) -> None:
    (losses, tensors), (expected, weights) = outcome(folder), outcome(other)
    assert len(losses) == STEPS
    assert losses == expected
    assert tensors.keys() == weights.keys()
    assert not [name for name, tensor in tensors.items() if not torch.equal(tensor, weights[name])]


def die() -> None:
    Silent.gone.set()


Whole = Callable[..., Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Whole:
    """The folder of a run that nothing interrupted, trained once for all tests."""

    @cache
    def trained(kind: str = "alone", dtype: str = "float32") -> Path:
        folder = tmp_path_factory.mktemp(kind)
        finish(KINDS[kind](folder, tiny_model_dir, dtype))
        return folder

    return trained


@pytest.mark.parametrize(
    ("kind", "dtype"), [("alone", "float32"), ("alone", "bfloat16"), ("team", "float32")]
)
def test_interrupted_at_every_step_a_run_ends_bitwise_the_same(
    whole: Whole, tmp_path: Path, tiny_model_dir: Path, kind: str, dtype: str
) -> None:
    settings = KINDS[kind](tmp_path, tiny_model_dir, dtype)
    break_off(settings, *POINTS)  # each start gets one step further than its last commit
    finish(settings)
    assert_same(tmp_path, whole(kind, dtype))


def test_every_policy_of_a_team_has_its_weights(whole: Whole) -> None:
    _, tensors = outcome(whole("team"))
    assert {name.partition("/")[0] for name in tensors} == {"planner", "solver"}


def refuse() -> None:
    raise PolicyError("the engine takes no weights")


# When it is paused, with a commit on its way, as it gets new weights, in the rollouts of a step.
@pytest.mark.parametrize(
    ("where", "how"),
    [("update", refuse), ("checkpoint", die), ("publish", refuse), ("commit", die)],
)
def test_an_engine_that_dies_in_a_step_leaves_it_whole_or_undone(
    whole: Whole, tmp_path: Path, tiny_model_dir: Path, where: str, how: Callable[[], None]
) -> None:
    settings = config(tmp_path, tiny_model_dir)
    with pytest.raises(PolicyError, match="the engine"):
        asyncio.run(run(settings, strike_at(where, 3, how)))
    check_store(tmp_path, {2, 3} if where == "checkpoint" else {2} if where == "update" else {3})
    finish(settings)
    assert_same(tmp_path, whole())


def check_store(folder: Path, steps: set[int]) -> None:
    """It is sound, and its steps are those that were committed, each with all that belongs to
    it."""
    with closing(sqlite3.connect(folder / "out" / "store.db")) as database:
        assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
        assert database.execute("pragma foreign_key_check").fetchall() == []
        trained = database.execute(
            "select trained_step, count(*) from groups where trained_step is not null group by 1"
        ).fetchall()
    rows, state = asyncio.run(kept(folder))
    assert state is not None
    assert state.step in steps
    assert rows == list(range(state.step))
    assert trained == [(step, 2) for step in rows]
    assert state.checkpoint is not None
    assert (folder / "out" / state.checkpoint / "state.json").is_file()


async def kept(folder: Path) -> tuple[list[int], RunState | None]:
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
        rows = await store.steps("steady")
        return [row.step for row in rows if row.committed], await store.run("steady")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_exported_as_what_transformers_loads_with_the_last_weights(
    whole: Whole, tmp_path: Path, dtype: str
) -> None:
    folder, target = whole("alone", dtype), tmp_path / "exported"
    url = f"sqlite:///{folder / 'out' / 'store.db'}"
    arguments = ["model", "--run", "steady", "--store", url, "--to", str(target)]
    result = CliRunner().invoke(export, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    _, tensors = outcome(folder)
    names = {name: name.removeprefix("model.safetensors/") for name in tensors if "model.s" in name}
    assert names
    assert all(torch.equal(model.state_dict()[own], tensors[n]) for n, own in names.items())
    assert not (target / "optimizer.safetensors").exists()
    unknown = CliRunner().invoke(export, ["model", "--run", "x", "--store", url, "--to", "y"])
    assert isinstance(unknown.exception, NotFound)
    assert CliRunner().invoke(export, ["model", "--to", "y"]).exit_code == 2


@pytest.mark.parametrize("kind", ["alone", "team"])
def test_killed_in_an_update_and_before_a_commit_a_run_ends_bitwise_the_same(
    whole: Whole, tmp_path: Path, tiny_model_dir: Path, kind: str
) -> None:
    command = ["-m", "tests.system.steady", kind, str(tmp_path), str(tiny_model_dir)]
    for where in ("optimizer:6", "checkpoint:2"):
        killed = warm.run(*command, where)
        assert killed.returncode == -signal.SIGKILL
    finish(KINDS[kind](tmp_path, tiny_model_dir))
    assert_same(tmp_path, whole(kind))


SMALL = [("update", 3), ("optimizer", 11), ("commit", 4), ("update", 2), ("publish", 3)]
LARGE = [("update", 4), ("optimizer", 3), ("commit", 2), ("update", 3)]


@pytest.mark.parametrize(("every", "starts"), [(3, SMALL), (1, LARGE)])
def test_steps_after_the_last_checkpoint_are_trained_again_once(
    whole: Whole,
    tmp_path: Path,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    starts: list[tuple[str, int]],
) -> None:
    """With bitwise the same result; a large one becomes whole while the next step is trained."""
    monkeypatch.setattr(saving, "LARGE", 0 if starts is LARGE else 2**40)
    settings = replace(config(tmp_path, tiny_model_dir), checkpoint=CheckpointConfig(every=every))
    for point, number in starts:
        with pytest.raises(Interrupted):
            asyncio.run(run(settings, strike_at(point, number, interrupt)))
    finish(settings)
    assert_same(tmp_path, whole())
    check_trained_once(tmp_path, every)


def check_trained_once(folder: Path, every: int) -> None:
    """And that no start has lost more than `every` steps."""
    with closing(sqlite3.connect(folder / "out" / "store.db")) as connection:
        found = connection.execute("select trained_step, state from groups order by 1").fetchall()
        query = "select max(value) from metrics where name = 'steps/rolled_back'"
        ((lost,),) = connection.execute(query).fetchall()
    assert found == [(step, "trained") for step in range(STEPS) for _ in range(2)]
    assert 0 < lost <= every
