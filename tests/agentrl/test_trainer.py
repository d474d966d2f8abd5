"""The front: what it makes of its children's ends."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl import trainer
from agentrl.core import processes
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.store import open_store
from tests import factories


class Mortal:
    """A runner that lives as long as the clock says, and is done after so many lives."""

    name, log = "runner-0", Path("runner-0.log")

    def __init__(self, life: float, lives: int) -> None:
        self.life, self.lives, self.now, self.started = life, lives, 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # of the thread that counts kills, if an earlier test has started it

    async def start(self) -> None:
        self.started += 1
        if self.started > self.lives:
            raise KeyboardInterrupt

    async def wait(self) -> int:
        self.now += self.life
        return 1


@pytest.mark.parametrize(
    ("life", "rollouts", "ends", "started"),
    [
        (1.0, 0, TrainingError, processes.MAX_CONSECUTIVE_CRASHES),
        (processes.STEADY_UPTIME + 1.0, 0, KeyboardInterrupt, 101),
        (1.0, 1, KeyboardInterrupt, 101),  # an agent that kills its runner, one task after another
    ],
)
async def test_a_runner_is_given_up_only_when_it_dies_young(
    monkeypatch: pytest.MonkeyPatch,
    life: float,
    rollouts: int,
    ends: type[BaseException],
    started: int,
) -> None:
    """rollouts: that end in each of its lives."""

    child: Any = Mortal(life, lives=100)
    monkeypatch.setattr(processes, "time", child)
    monkeypatch.setattr(processes, "RESTART_PAUSE", 0.0)

    async def ended() -> int:
        return rollouts * int(child.started)

    with pytest.raises(ends):
        await processes.keep_alive(child, ended)
    assert child.started == started


@pytest.mark.parametrize(
    "store", ["postgresql://me:hush@host/db", "http://hush@host:7411"], ids=["password", "key"]
)
async def test_no_secret_is_in_files_arguments_or_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """Whoever starts the processes of a run: training, an evaluation, a search."""
    for name in (*processes.SECRETS, "TOKEN"):
        monkeypatch.setenv(name, "{}")
    arguments = list[str]()

    class Child(processes.Child):
        async def start(self) -> None:
            arguments.extend(self.arguments)
            if self.name == "runner-0":
                raise ConfigError("enough")

        async def wait(self) -> int:
            return await asyncio.Future[int]()

    monkeypatch.setattr(trainer, "Child", Child)
    made = {"output": str(tmp_path), "store": store, "agent": {"env": {"TOKEN": "hush"}}}
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as opened:
        with pytest.raises(ConfigError, match="enough"):
            await trainer.supervise(opened, resolve(made, source="test"))
        state = await opened.run("run")
    assert state is not None
    assert "--store" in arguments
    assert "hush" not in " ".join(arguments) + (tmp_path / "run.json").read_text()
    assert "hush" not in repr(state.config)
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o600
    assert "hush" in " ".join(os.environ[name] for name in processes.SECRETS)


def test_fresh_deletes_what_the_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    config = resolve({"output": str(tmp_path)}, source="test")
    written = ["pool/policy@000000", "servers/1/vllm", "checkpoints/000001", "logs", "dumps/solver"]
    for name in [*written, "notes"]:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "store.db").touch()
    trainer.clear(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "run.lock"]


def test_what_is_cheap_to_check_is_checked_before_tasks_are_made(tmp_path: Path) -> None:
    (tmp_path / "dear.py").write_text("raise SystemError('made')")
    made = {"root": str(tmp_path), "steps": 1, "tasks": {"train": "dear.py:tasks"}}
    made |= {"policy": {"model": "m"}, "agent": {"path": "absent.py:agent"}}
    with pytest.raises(ConfigError, match=r"agent.path = 'absent.py:agent': there is no file"):
        trainer.check(resolve(made, source="test"))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"preset": "grpoo"}, r"no preset 'grpoo'; did you mean 'grpo'\?"),
        ({"preset": "grpo+tiss"}, r"no modifier \+tiss for 'grpo'; did you mean 'tis'\?"),
        ({"options": {"clip_hihg": 1.0}}, r"options\.clip_hihg: no option of 'auto'; did you mean"),
    ],
)
def test_an_unknown_preset_or_option_is_refused_before_tasks_are_made(
    tmp_path: Path, algorithm: dict[str, Any], message: str
) -> None:
    (tmp_path / "dear.py").write_text("raise SystemError('made')")
    made = {"root": str(tmp_path), "steps": 1, "tasks": {"train": "dear.py:tasks"}}
    made |= {"policy": {"model": "m"}, "output": str(tmp_path / "out"), "algorithm": algorithm}
    with pytest.raises(ConfigError, match=message):
        trainer.check(resolve(made, source="test"))
    tasks = (pytest.fail("made") for _ in range(1))
    settings = {key: made[key] for key in ("steps", "algorithm", "output")}
    with pytest.raises(ConfigError, match=message):
        trainer.Trainer(None, tasks, "v.py:v", "m", **settings).fit()
    with pytest.raises(ConfigError, match=message):
        asyncio.run(trainer.Trainer(None, tasks, "v.py:v", "m", **settings).fit_async())
    assert not (tmp_path / "out").exists()


def test_presets_from_outside_are_left_to_the_algorithm_process(tmp_path: Path) -> None:
    algorithm = {"preset": "mine.py:lenient", "options": {"anything": 1}}
    made = {"policy": {"model": "m"}, "tasks": {"train": "none.jsonl"}, "algorithm": algorithm}
    with pytest.raises(ConfigError, match="cannot read the task file"):
        trainer.check(resolve(made | {"root": str(tmp_path)}, source="test"))


def test_a_run_that_was_stopped_says_the_step_that_it_continues_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"output": str(tmp_path), "steps": 9, "tasks": {"train": "t.jsonl"}}
    config = resolve(made, source="test")

    steps = 0

    async def launch(config: Any, **_: Any) -> None:
        async with open_store(config.store) as store:
            epoch = (await store.open_run(config.name, {})).epoch
            for step in range(steps):
                row = factories.commit(step, epoch=epoch, run=config.name, checkpoint="c")
                await store.commit_step(row)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "launch", launch)
    monkeypatch.setattr(trainer, "check", lambda config: None)
    with pytest.raises(KeyboardInterrupt, match="from the first step: there is no checkpoint yet"):
        trainer.run_training(config)
    steps = 3
    with pytest.raises(KeyboardInterrupt, match="after step 3 of 9"):
        trainer.run_training(config)


async def test_runners_begin_when_an_audit_has_had_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.audit.subjects.LIMIT", 0.05)
    began = list[bool]()

    async def play() -> None:
        began.append(audit.done())

    audit = asyncio.create_task(asyncio.sleep(60))
    await trainer._after(audit, play())
    audit.cancel()
    audit = asyncio.create_task(asyncio.sleep(0))
    await trainer._after(audit, play())
    assert began == [False, True]
