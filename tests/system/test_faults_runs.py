"""What is done to a run's files while it lives, and between two of its starts."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from agentrl import trainer
from agentrl.algorithms.model import digests
from agentrl.algorithms.train import loop as empty_steps_module
from agentrl.core import files
from agentrl.core.config import RunConfig
from agentrl.core.errors import ConfigError, DamagedError, Fenced, TrainingError, Unavailable
from agentrl.core.types import EMPTY
from agentrl.store import open_store
from agentrl.store.sqlite import StoreFile
from agentrl.trainer import clear
from tests.algorithms.train.test_checkpoint import flip
from tests.system.steady import (
    STEPS,
    Interrupted,
    config,
    failing_config,
    finish,
    interrupt,
    run,
    strike_at,
)
from tests.system.test_kill import wait_for_progress
from tests.system.test_resume import assert_same, check_store, kept


def start(
    settings: RunConfig, act: Callable[[], None], at: str = "commit", number: int = 2
) -> None:
    """A life of a run, in which `act` happens as it passes a point."""
    asyncio.run(run(settings, strike_at(at, number, act)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    finish(config(folder, tiny_model_dir))
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Interrupted):
        start(config(folder, tiny_model_dir), interrupt, number=4)
    return folder


@pytest.fixture
def broken(interrupted: Path, tmp_path: Path, tiny_model_dir: Path) -> RunConfig:
    """A copy of a run that was interrupted after four steps."""
    return config(shutil.copytree(interrupted, tmp_path / "broken"), tiny_model_dir)


def folder_of(settings: RunConfig) -> Path:
    return Path(settings.root)


def checkpoint(settings: RunConfig, steps: int) -> Path:
    (found,) = Path(settings.output, "checkpoints").glob(f"{steps:06d}*")
    return found


# -- two owners ------------------------------------------------------------------------------------


def test_a_live_run_is_not_cleared_and_goes_on(whole: Path, tmp_path: Path, tiny_model_dir) -> None:
    settings = config(tmp_path, tiny_model_dir)

    def attack() -> None:
        with pytest.raises(ConfigError, match=r"--fresh: .* is live \(process \d+\).*stop it"):
            clear(settings)

    start(settings, attack)
    assert_same(tmp_path, whole)
    clear(settings)
    assert sorted(path.name for path in Path(settings.output).iterdir()) == [files.FILE]


def test_who_cannot_be_seen_is_fenced_before_its_files_go(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, tiny_model_dir)
    monkeypatch.setattr(StoreFile, "check", lambda self: None)  # as an earlier version
    fence, files_were_there = trainer._fence, []

    async def noted(config: RunConfig) -> None:
        await fence(config)
        files_were_there.append(Path(settings.output, "store.db").exists())

    def attack() -> None:
        monkeypatch.setattr(trainer, "_fence", noted)
        (Path(settings.output) / files.FILE).unlink()
        clear(settings)

    with pytest.raises((Fenced, TrainingError)) as caught:
        start(settings, attack)
    # A reader may notice that the file is gone before the commit is refused.
    assert isinstance(caught.value.__context__ or caught.value, Fenced | Unavailable)
    assert files_were_there == [True]
    assert not Path(settings.output, "checkpoints").exists()


@pytest.mark.parametrize("at", ["update", "optimizer", "commit"])
def test_a_folder_deleted_under_a_live_run_ends_it_and_spares_the_next_one(
    tmp_path: Path, tiny_model_dir: Path, at: str
) -> None:
    settings = config(tmp_path, tiny_model_dir)
    foreign = Path(settings.output, "checkpoints", "000003", "of the next run")

    def attack() -> None:
        shutil.rmtree(settings.output)
        foreign.parent.mkdir(parents=True)
        foreign.touch()
        sqlite3.connect(Path(settings.output, "store.db")).close()

    with pytest.raises(TrainingError, match="was deleted, moved or replaced during its run"):
        start(settings, attack, at)
    assert list(foreign.parent.parent.rglob("*")) == [foreign.parent, foreign]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rm_rf_under_the_command_line_ends_it_with_a_sentence(run_folder: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "train", "run.toml", "steps=500"]
    command += ["algorithm.groups=1", "algorithm.group_size=2", "eval.tasks=0"]
    with (run_folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=run_folder, stdout=said, stderr=said)
    try:
        wait_for_progress(process, run_folder / "out" / "store.db", 500)
        fresh = subprocess.run(
            [*command, "--fresh"], cwd=run_folder, capture_output=True, text=True, check=False
        )
        assert fresh.returncode == 2
        assert "is live (process" in fresh.stderr
        while (run_folder / "out").exists() and process.poll() is None:  # it writes meanwhile
            shutil.rmtree(run_folder / "out", ignore_errors=True)
        assert process.wait(timeout=120) == 2
    finally:
        if process.poll() is None:
            process.kill()
    told = (run_folder / "said").read_text()
    assert "was deleted, moved or replaced" in told
    assert "Traceback" not in told


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [lambda path: flip(path / "model.safetensors"), shutil.rmtree])
def test_a_damaged_last_checkpoint_is_passed_over_and_the_run_ends_the_same(
    whole: Path, broken: RunConfig, how: Callable[[Path], None]
) -> None:
    how(checkpoint(broken, 4))
    finish(broken)
    check_store(folder_of(broken), {STEPS})
    assert_same(folder_of(broken), whole)


def test_a_damaged_checkpoint_before_empty_steps_is_passed_over(
    broken: RunConfig, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty steps write no checkpoint, so the last one is older than the last step, and the steps
    that are rolled back are the empty ones and one that was trained."""
    monkeypatch.setattr(empty_steps_module, "MAX_EMPTY_STEPS", 2)
    failing_config(folder_of(broken), tiny_model_dir)
    with pytest.raises(TrainingError, match="in 2 steps in a row"):
        finish(broken)
    assert empty_steps(broken) == [False] * 4 + [True] * 2
    twin = config(shutil.copytree(folder_of(broken), tmp_path / "twin"), tiny_model_dir)
    flip(checkpoint(broken, 4) / "model.safetensors")
    with pytest.raises(TrainingError, match="in 2 steps in a row"):  # the same two
        finish(broken)
    assert empty_steps(broken) == [False] * 4 + [True] * 2
    for settings in (broken, twin):
        config(folder_of(settings), tiny_model_dir)  # whose tasks do not fail
        finish(replace(settings, steps=STEPS + 1))
        assert empty_steps(settings) == [False] * 4 + [True] * 2 + [False]
    assert weights_of(broken).keys() == weights_of(twin).keys()
    for name, tensor in weights_of(broken).items():
        assert torch.equal(tensor, weights_of(twin)[name]), name


def empty_steps(settings: RunConfig) -> list[bool]:
    """Of each committed step, whether it was one without a usable rollout."""

    async def read() -> list[bool]:
        async with open_store(settings.store) as store:
            rows = await store.steps(settings.name)
            return [EMPTY in row.metrics for row in rows if row.committed]

    return asyncio.run(read())


def weights_of(settings: RunConfig) -> dict[str, Tensor]:
    return load_file(checkpoint(settings, STEPS + 1) / "model.safetensors")


def go_back(settings: RunConfig, start: str) -> None:
    from agentrl import trainer

    trainer.go_back(settings, start)


def test_where_no_checkpoint_is_whole_the_run_ends_with_what_to_do(
    whole: Path, broken: RunConfig, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(broken, 3), tmp_path / "000003")
    for steps in (3, 4):
        flip(checkpoint(broken, steps) / "optimizer.safetensors")
    with pytest.raises(DamagedError, match=r"000004: optimizer.*No earlier one is whole.*--from"):
        finish(broken)
    with pytest.raises(DamagedError, match="000003: optimizer"):
        go_back(broken, "3")
    with pytest.raises(ConfigError, match="no checkpoint after 2 steps"):
        go_back(broken, "2")
    check_store(folder_of(broken), {4})
    go_back(broken, str(tmp_path / "000003"))
    assert asyncio.run(kept(folder_of(broken)))[0] == [0, 1, 2]
    with pytest.raises(ConfigError, match="has 3 steps, but the checkpoint is from step 4"):
        go_back(broken, str(checkpoint(broken, 4)))
    finish(broken)
    check_store(folder_of(broken), {STEPS})
    assert_same(folder_of(broken), whole)


@pytest.mark.slow
def test_from_the_start_all_steps_are_trained_again(whole: Path, broken: RunConfig) -> None:
    go_back(broken, "0")
    assert asyncio.run(kept(folder_of(broken)))[0] == []
    finish(broken)
    assert_same(folder_of(broken), whole)


def test_a_checkpoint_of_another_run_is_not_gone_on_from(whole: Path, broken: RunConfig) -> None:
    other = next((whole / "out" / "checkpoints").iterdir())
    with pytest.raises(ConfigError, match="another run"):
        go_back(broken, str(other))
    check_store(folder_of(broken), {4})


# -- another place ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["this one", "an earlier one"])
def test_a_moved_folder_goes_on_and_ends_the_same(
    whole: Path, broken: RunConfig, tmp_path: Path, tiny_model_dir: Path, version: str
) -> None:
    if version == "an earlier one":
        as_written_earlier(broken)
    folder_of(broken).rename(tmp_path / "moved")
    finish(config(tmp_path / "moved", tiny_model_dir))
    assert_same(tmp_path / "moved", whole)
    assert not folder_of(broken).exists()


def as_written_earlier(settings: RunConfig) -> None:
    """Absolute paths, and no digests."""
    with closing(sqlite3.connect(Path(settings.output, "store.db"))) as database, database:
        absolute = str(checkpoint(settings, 4))
        database.execute("update runs set checkpoint = ?", (absolute,))
    for path in Path(settings.output, "checkpoints").glob("*"):
        (path / digests.FILE).unlink()
        state = path / "state.json"
        state.write_text(state.read_text().replace('"run": ', '"unknown": ', 1))
