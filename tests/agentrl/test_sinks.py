"""Metrics sinks: each real backend in its own process, none of them online, and whatever fails."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from agentrl.config import MetricsConfig, RunConfig, resolve
from agentrl.config import sinks as sink_settings
from agentrl.errors import ConfigError, SinkError
from agentrl.processes import Child
from agentrl.store import open_store
from agentrl.telemetry.sinks import exporter, follow
from agentrl.telemetry.sinks.base import Mark, load_mark, mark_file, plain, save_mark, settings
from agentrl.types import StepCommit, StepRow

NAN = float("nan")
OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}


def config(folder: Path, *names: str, steps: int = 3) -> RunConfig:
    return RunConfig(
        name="r",
        output=str(folder),
        store=f"sqlite:///{folder / 'store.db'}",
        steps=steps,
        metrics=MetricsConfig(sinks=list(names), project="p"),
    )


def row(step: int, *, committed: bool = True, **metrics: float) -> StepRow:
    return StepRow(run="r", step=step, metrics=metrics, committed=committed, at=100.0 + step)


async def train(run: RunConfig, first: int, last: int, evaluation: float | None = None) -> None:
    """Commit steps [first, last), and log an evaluation after them."""
    async with open_store(run.store) as store:
        state = await store.open_run("r", {})
        for step in range(first, last):
            commit = StepCommit(
                run="r",
                epoch=state.epoch,
                step=step,
                groups=[],
                versions={},
                checkpoint="",
                metrics={
                    "calls": 8.0,
                    "calls/refused": 2.0,
                    "reward/mean": step / 10,
                    "reward/role:tact/std": 1.0,
                    "lost": NAN,
                },
            )
            await store.commit_step(commit)
        if evaluation is not None:
            await store.log("r", last, {"eval/score": evaluation})


# -- the mark --------------------------------------------------------------------------------------


def test_what_is_due() -> None:
    rows = [row(0, a=1), row(1, a=2, b=NAN), row(2, committed=False, eval=5)]
    assert [r.step for r in Mark(id="x").due(rows, steps=9)] == [0, 1]  # 2 may still change
    assert [r.step for r in Mark(id="x", next=1).due(rows, steps=2)] == [1, 2]
    (second, _) = Mark(id="x", next=1).due(rows, steps=2)
    assert second.metrics == {"a": 2}


def test_an_evaluation_after_the_last_step_is_due_once() -> None:
    """A run that is made longer trains from the step whose evaluation the sink has."""
    mark = Mark(id="x", next=2).after(row(2, committed=False, eval=5))
    assert (mark.next, mark.names) == (2, ("eval",))
    assert not list(mark.due([row(2, committed=False, eval=5)], steps=2))
    (rest,) = mark.due([row(2, eval=5, reward=1)], steps=4)
    assert rest.metrics == {"reward": 1}
    assert mark.after(rest) == Mark(id="x", next=3)


def test_a_mark_keeps_its_id(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "x.json"
    mark = load_mark(file)
    assert load_mark(file) == mark
    save_mark(file, mark.after(row(0, a=1)))
    assert load_mark(file) == Mark(id=mark.id, next=1)


def test_a_damaged_mark_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b"")
    with pytest.raises(SinkError, match=r"x\.json is damaged .*delete it"):
        load_mark(file)


def test_backends_are_not_told_of_the_agents_variables(tmp_path: Path) -> None:
    run = msgspec.convert({"agent": {"env": {"KEY": "secret"}}, "steps": 7}, RunConfig)
    shown = settings(run)
    assert shown["steps"] == 7
    assert shown["algorithm.lr"] == run.algorithm.lr
    assert "secret" not in str(shown)


def test_plain_names() -> None:
    assert plain("reward/role:tact/the critic!") == "reward/role:tact/the critic_"


# -- following the store ---------------------------------------------------------------------------


class Memory:
    """A backend that fails at the steps it is told to fail at."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.rows, self.opened, self.closed = set(bad), list[StepRow](), 0, 0

    def __call__(self, name: str, run: RunConfig, mark: Mark) -> Memory:
        self.opened += 1
        return self

    def write(self, step: StepRow) -> None:
        if step.step in self.bad:
            raise OSError("the network is down\nand more")
        self.rows.append(step)

    def close(self) -> None:
        self.closed += 1


async def drain(run: RunConfig) -> None:
    stop = asyncio.Event()
    stop.set()
    async with open_store(run.store) as store:
        await follow.follow(store, run, "memory", stop)


async def test_a_failure_loses_nothing_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, run = Memory(1), config(tmp_path)
    monkeypatch.setattr(follow, "open_sink", memory)
    await train(run, 0, 3)
    with pytest.raises(SinkError, match=r"metrics sink memory: the network is down\. Training"):
        await drain(run)
    assert [r.step for r in memory.rows] == [0]
    memory.bad.clear()
    await drain(run)
    await drain(run)
    assert [r.step for r in memory.rows] == [0, 1, 2]
    assert (memory.opened, memory.closed) == (2, 2)  # the third time had nothing to write


async def test_steps_are_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, run, stop = Memory(), config(tmp_path), asyncio.Event()
    monkeypatch.setattr(follow, "open_sink", memory)
    monkeypatch.setattr(follow, "PAUSE", 0.0)
    await train(run, 0, 1)
    wrote = asyncio.Event()
    monkeypatch.setattr(memory, "write", lambda step: (memory.rows.append(step), wrote.set()))
    async with open_store(run.store) as store:
        following = asyncio.create_task(follow.follow(store, run, "memory", stop))
        for number in range(1, 4):
            await wrote.wait()
            wrote.clear()
            await train(run, number, number + (number < 3), 0.5 if number == 3 else None)
        stop.set()
        await following
    assert [r.step for r in memory.rows] == [0, 1, 2, 3]
    assert memory.rows[3].metrics == {"eval/score": 0.5}


async def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, run = Memory(), config(tmp_path)
    monkeypatch.setattr(follow, "open_sink", memory)
    await train(run, 0, 1)
    load_mark(mark_file(run, "memory"))

    def full(file: Path, mark: Mark) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(follow, "save_mark", full)
        with pytest.raises(SinkError, match=r"memory: .*No space left on device\. Training goes"):
            await drain(run)
    await drain(run)
    assert [r.step for r in memory.rows] == [0, 0]  # what was not remembered is given again


STUCK = """
import sys, time
from agentrl.telemetry.sinks import follow
class Stuck:
    def write(self, row): print("writing", flush=True); time.sleep(600)
    def close(self): ...
follow.open_sink = lambda *_: Stuck()
follow.DRAIN = follow.SLACK = 0.5
import msgspec
from agentrl.config import RunConfig
follow.main(msgspec.json.decode(sys.argv[1], type=RunConfig), "memory")
"""


async def test_a_sink_that_a_killed_front_left_behind_ends_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory = config(tmp_path), Memory()
    monkeypatch.setattr(follow, "open_sink", memory)
    await train(run, 0, 1)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    left = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, msgspec.json.encode(run).decode(), **pipes
    )
    assert left.stdout is not None
    assert left.stdin is not None
    assert await left.stdout.readline() == b"writing\n"
    lock = mark_file(run, "memory").with_suffix(".lock")
    waiting = asyncio.create_task(asyncio.to_thread(follow._locked, lock))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    left.stdin.close()  # as when the front is killed
    assert await left.wait() == 1
    (await waiting).close()


async def test_the_stores_failure_is_not_the_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "open_sink", Memory())
    store: Any = Broken()
    with pytest.raises(ZeroDivisionError):
        await follow.follow(store, config(tmp_path), "memory", asyncio.Event())


class Broken:
    async def cursor(self) -> int:
        return 0

    async def steps(self, run: str, *, after: int) -> list[StepRow]:
        return []

    async def wait(self, cursor: int) -> int:
        raise ZeroDivisionError


# -- the real ones ---------------------------------------------------------------------------------

# What a backend shows of run "r": {metric: [[step, value], ...]}, in order of step.
READ = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(output + "/tensorboard").Reload()
for tag in events.Tags()["scalars"]:
    for event in events.Scalars(tag):
        show(tag, event.step, event.value)
""",
    "mlflow": """
import os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient
client = MlflowClient(f"file://{output}/mlruns")
(run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
assert run.info.run_name == "r" and run.data.params["algorithm.preset"] == "grpo"
for name in run.data.metrics:
    for metric in client.get_metric_history(run.info.run_id, name):
        show(name.replace(".", "/"), metric.step, metric.value)
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("p")
for row in SQLiteStorage.get_logs("p", run):
    for name in row.keys() - {"step", "timestamp"}:
        show(name, row["step"], row[name])
""",
    "wandb": """
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
def records(data):  # a LevelDB log: blocks of 32 KiB, fragments with a header of 7 bytes
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:
            at += left
            continue
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""
last = -1
for file in sorted(Path(output, "wandb").glob("offline-run-*/*.wandb")):
    for record in records(file.read_bytes()):
        items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        row = {name: json.loads(value) for name, value in items.items()}
        if not row or row["_step"] <= last:  # as the server does with a resumed run
            continue
        last = row["_step"]
        for name in row:
            if name != "step" and not name.startswith("_"):
                show(name, row["step"], row[name])
""",
}
HEAD = """
import json, sys
output, found = sys.argv[1], {}
def show(name, step, value):
    found.setdefault(name, []).append([step, round(value, 6)])
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | OFFLINE | {"HOME": str(folder), "TRACKIO_DIR": f"{folder}/trackio"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def export(run: RunConfig, name: str) -> None:
    """One life of the sink's process: its standard input is at its end from the beginning."""
    folder = Path(run.output)
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    done = python(folder, "-m", "agentrl", "sink", "start", name, str(folder / "run.json"))
    assert done.returncode == 0, done.stderr


def shown(run: RunConfig, name: str) -> dict[str, list[list[float]]]:
    script = HEAD + READ[name] + "\nprint('found:' + json.dumps(found))"
    done = python(Path(run.output), "-c", script, run.output)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[float]]] = json.loads(done.stdout.rpartition("found:")[2])
    return {key: sorted(values) for key, values in found.items()}


@pytest.mark.parametrize("name", sorted(READ))
async def test_a_backend_has_every_step_once(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name)
    run = config(tmp_path, name, steps=2)
    await train(run, 0, 1)
    export(run, name)
    before = load_mark(mark_file(run, name))
    await train(run, 1, 2, evaluation=0.5)
    export(run, name)
    if name in ("tensorboard", "wandb"):  # the others show a step twice that was given twice
        save_mark(mark_file(run, name), before)  # as if killed before it could write its mark
        export(run, name)
    longer = msgspec.structs.replace(run, steps=3)
    await train(longer, 2, 3, evaluation=0.75)
    export(longer, name)
    assert shown(run, name) == {
        "calls": [[0, 8.0], [1, 8.0], [2, 8.0]],
        "calls/refused": [[0, 2.0], [1, 2.0], [2, 2.0]],
        "reward/mean": [[0, 0.0], [1, 0.1], [2, 0.2]],
        "reward/role:tact/std": [[0, 1.0], [1, 1.0], [2, 1.0]],
        "eval/score": [[2, 0.5], [3, 0.75]],
    }


# -- in the run file -------------------------------------------------------------------------------


def test_sinks_are_checked_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"run.toml: metrics.sinks: 'wandbb'; did you mean 'wan"):
        resolve({"metrics": {"sinks": ["wandbb"]}}, source="run.toml")
    with pytest.raises(ConfigError, match="'wandb' twice"):
        resolve({"metrics": {"sinks": ["wandb", "wandb"]}}, source="run.toml")
    monkeypatch.setattr(sink_settings, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'trackio' is not installed.*agentrl\[trackio\]"):
        resolve({"metrics": {"sinks": ["trackio"]}}, source="run.toml")


def test_a_folder_that_a_backend_made_is_not_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb_like").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert sink_settings.missing(["wandb_like", "json"]) == ["wandb_like"]


# -- the front's side ------------------------------------------------------------------------------


class Scripted:
    """A child whose lives end with these codes; the last life waits for its input's end."""

    def __init__(self, log: Path, *codes: int) -> None:
        self.log, self.codes, self.lives, self.ended = log, list(codes), 0, asyncio.Event()
        self.process: Any = None

    async def start(self) -> None:
        self.process = type("Process", (), {"returncode": None})()
        self.lives += 1

    async def wait(self) -> int:
        if len(self.codes) == 1:
            await self.ended.wait()
        self.process.returncode = self.codes.pop(0)
        return int(self.process.returncode)

    async def stop(self, grace: float) -> None:
        self.process.returncode = self.codes.pop(0)

    def last_error(self) -> str:
        return "metrics sink x: no network."


def test_a_sinks_failure_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter, "PAUSE", 0.0)

    async def scenario() -> None:
        child: Any = Scripted(tmp_path / "log", 2, 2, 0)
        sink = exporter.Exporter("x", child, Console(width=200))
        child.ended.set()
        await sink.keep()
        assert child.lives == 3

    asyncio.run(scenario())
    assert capsys.readouterr().out.count("metrics sink x: no network.") == 1


def test_a_sink_that_failed_has_a_last_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        child: Any = Scripted(tmp_path / "log", 2, -9)
        sink = exporter.Exporter("x", child, Console(width=200))
        await child.start()
        await child.wait()
        await sink.stop()
        assert child.lives == 2

    asyncio.run(scenario())
    assert "it ended with code -9 before it had everything" in capsys.readouterr().out


async def test_a_child_with_a_pipe_ends_with_its_input(tmp_path: Path) -> None:
    program = "import sys; sys.stdin.read(); print('drained')"
    child = Child("x", [], tmp_path / "log", piped=True)
    with (tmp_path / "log").open("ab") as log:
        child.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=log
        )
    await child.stop()
    assert child.process.returncode == 0
    assert child.log.read_text() == "drained\n"
