"""Metrics sinks: each real backend in its own process, none of them online, and whatever fails."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from agentrl.core import loading
from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.infrastructure import MetricsConfig
from agentrl.core.errors import ConfigError
from agentrl.core.loading import is_installed
from agentrl.core.processes import Child
from agentrl.core.types import StepRow
from agentrl.store import open_store
from agentrl.telemetry import sinks
from agentrl.telemetry import sinks as sink_module
from agentrl.telemetry.sinks import (
    SinkError,
    SinkPosition,
    load_position,
    plain_name,
    position_file,
    public_settings,
    save_position,
)
from tests import factories

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
            commit = factories.commit(
                step,
                epoch=state.epoch,
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


# -- the position ----------------------------------------------------------------------------------


def test_what_is_unwritten() -> None:
    rows = [row(0, a=1), row(1, a=2, b=NAN), row(2, committed=False, eval=5)]
    assert [r.step for r in SinkPosition(id="x").unwritten(rows, steps=9)] == [
        0,
        1,
    ]  # 2 may still change
    assert [r.step for r in SinkPosition(id="x", next=1).unwritten(rows, steps=2)] == [1, 2]
    (second, _) = SinkPosition(id="x", next=1).unwritten(rows, steps=2)
    assert second.metrics == {"a": 2}


def test_an_evaluation_after_the_last_step_is_written_once() -> None:
    """A run that is made longer trains from the step whose evaluation the sink has."""
    position = SinkPosition(id="x", next=2).after(row(2, committed=False, eval=5))
    assert (position.next, position.names) == (2, ("eval",))
    assert not list(position.unwritten([row(2, committed=False, eval=5)], steps=2))
    (rest,) = position.unwritten([row(2, eval=5, reward=1)], steps=4)
    assert rest.metrics == {"reward": 1}
    assert position.after(rest) == SinkPosition(id="x", next=3)


def test_a_mark_keeps_its_id(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "x.json"
    position = load_position(file)
    assert load_position(file) == position
    save_position(file, position.after(row(0, a=1)))
    assert load_position(file) == SinkPosition(id=position.id, next=1)


def test_a_damaged_mark_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b"")
    with pytest.raises(SinkError, match=r"x\.json is damaged .*delete it"):
        load_position(file)


def test_backends_are_not_told_of_the_agents_variables(tmp_path: Path) -> None:
    run = msgspec.convert({"agent": {"env": {"KEY": "secret"}}, "steps": 7}, RunConfig)
    shown = public_settings(run)
    assert shown["steps"] == 7
    assert shown["algorithm.lr"] == run.algorithm.lr
    assert "secret" not in str(shown)


def test_plain_names() -> None:
    assert plain_name("reward/role:tact/the critic!") == "reward/role:tact/the critic_"


# -- following the store ---------------------------------------------------------------------------


class MemorySink:
    """A backend that fails at the steps it is told to fail at."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.rows, self.opened, self.closed = set(bad), list[StepRow](), 0, 0

    def __call__(self, name: str, run: RunConfig, position: SinkPosition) -> MemorySink:
        self.opened += 1
        return self

    def write(self, step: StepRow) -> None:
        if step.step in self.bad:
            raise OSError("the network is down\nand more")
        self.rows.append(step)

    def close(self) -> None:
        self.closed += 1


async def drain(run: RunConfig) -> None:
    run_ended = threading.Event()
    run_ended.set()
    async with open_store(run.store) as store:
        await sink_module.write_steps(store, run, "memory", run_ended)


async def test_a_failure_loses_nothing_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, run = MemorySink(1), config(tmp_path)
    monkeypatch.setattr(sinks, "open_sink", memory)
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
    memory, run, run_ended = MemorySink(), config(tmp_path), threading.Event()
    monkeypatch.setattr(sinks, "open_sink", memory)
    monkeypatch.setattr(sink_module, "STORE_POLL", 0.01)
    await train(run, 0, 1)
    wrote = asyncio.Event()
    monkeypatch.setattr(memory, "write", lambda step: (memory.rows.append(step), wrote.set()))
    async with open_store(run.store) as store:
        following = asyncio.create_task(sink_module.write_steps(store, run, "memory", run_ended))
        for number in range(1, 4):
            await wrote.wait()
            wrote.clear()
            await train(run, number, number + (number < 3), 0.5 if number == 3 else None)
        run_ended.set()
        await following
    assert [r.step for r in memory.rows] == [0, 1, 2, 3]
    assert memory.rows[3].metrics == {"eval/score": 0.5}


async def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, run = MemorySink(), config(tmp_path)
    monkeypatch.setattr(sinks, "open_sink", memory)
    await train(run, 0, 1)
    load_position(position_file(run, "memory"))

    def full(file: Path, position: SinkPosition) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sink_module, "save_position", full)
        with pytest.raises(
            SinkError, match=r"memory: .*No space left on device\. Training continues"
        ):
            await drain(run)
    await drain(run)
    assert [r.step for r in memory.rows] == [0, 0]  # what was not remembered is given again


STUCK = """
import sys, time
from agentrl.telemetry import sinks
class Stuck:
    def write(self, row): print("writing", flush=True); time.sleep(600)
    def close(self): ...
sinks.open_sink = lambda *_: Stuck()
sinks.DRAIN_TIMEOUT = sinks.EXIT_GRACE = 0.5
import msgspec
from agentrl.core.config import RunConfig
sinks.main(msgspec.json.decode(sys.argv[1], type=RunConfig))
"""


async def test_a_sink_that_a_killed_front_left_behind_ends_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory = config(tmp_path, "memory"), MemorySink()
    monkeypatch.setattr(sinks, "open_sink", memory)
    await train(run, 0, 1)
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    left = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, msgspec.json.encode(run).decode(), **pipes
    )
    assert left.stdout is not None
    assert left.stdin is not None
    assert await left.stdout.readline() == b"writing\n"
    lock = position_file(run, "memory").with_suffix(".lock")
    waiting = asyncio.create_task(asyncio.to_thread(sink_module._locked, lock))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    left.stdin.close()  # as when the launcher is killed
    assert await left.wait() == 1
    (await waiting).close()


async def test_the_stores_failure_is_not_the_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "open_sink", MemorySink())
    store: Any = Broken()
    with pytest.raises(ZeroDivisionError):
        await sink_module.write_steps(store, config(tmp_path), "memory", threading.Event())


class Broken:
    async def steps(self, run: str, *, after: int) -> list[StepRow]:
        raise ZeroDivisionError


# -- sinks from outside the library ----------------------------------------------------------------

CSV = (Path(__file__).parents[4] / "examples" / "plugins" / "sink.py").read_text()
BROKEN = """
import time

class Hangs:
    def __init__(self, config, position): time.sleep(600)
    def write(self, row): ...
    def close(self): ...

class Fails(Hangs):
    def __init__(self, config, position): raise SystemExit("no licence")

def nothing(config, position): ...
def three(config, position, more): ...
class Mute:
    def __init__(self, config, position): ...
"""
LOUD = """
import csv_sink, sys

class Csv(csv_sink.Csv):
    def write(self, row):
        super().write(row)
        print("wrote", row.step, file=sys.stderr, flush=True)
"""
MAIN = """
import sys, msgspec
from agentrl.core.config import RunConfig
from agentrl.telemetry import sinks
sinks.DRAIN_TIMEOUT = 3.0
sinks.main(msgspec.json.decode(sys.argv[1], type=RunConfig))
"""


def test_a_sink_that_fails_or_hangs_delays_no_other(tmp_path: Path) -> None:
    for name, text in (("csv_sink", CSV), ("loud", LOUD), ("broken", BROKEN)):
        (tmp_path / f"{name}.py").write_text(text)
    names = ["broken.py:Hangs", "broken.py:Fails", "broken.py:nothing", "loud.py:Csv"]
    run = msgspec.structs.replace(config(tmp_path, *names), root=str(tmp_path))
    asyncio.run(train(run, 0, 3))
    expected = {
        "metrics sink broken.py:Fails: no licence. Training continues",
        "returned NoneType, which is no Sink: it has no write, close",
        "wrote 2",
    }
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, msgspec.json.encode(run).decode()],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    while expected:
        line = child.stderr.readline()
        assert line, f"it ended without {expected}"
        expected -= {text for text in expected if text in line}
    _, errors = child.communicate()  # ends its input
    assert "metrics sink broken.py:Hangs: it did not end within" in errors
    assert "Csv" not in errors
    assert child.returncode == 1
    assert (tmp_path / "reward.csv").read_text() == "1 0.0\n2 0.1\n3 0.2\n"
    assert load_position(position_file(run, "loud.py:Csv")).next == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken.py:Fail", r"it has no 'Fail'; did you mean 'Fails'"),
        ("broken.py:three", r"three \(.*broken\.py:\d+\) must take \(config, position\)"),
        ("broken.py:Mute", r"Mute \(.*broken\.py:\d+\) is no Sink: it has no write, close"),
        ("missing.py:Csv", r"there is no file .*missing\.py"),
    ],
)
def test_what_is_no_sink_is_refused_before_a_run(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    run = msgspec.structs.replace(config(tmp_path, name), root=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"metrics\.sinks.*{message}"):
        sinks.check_sinks(run)


def test_a_package_may_register_sinks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "csv_sink.py").write_text(CSV)
    found = tmp_path / "csv_sink-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: csv-sink\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text("[agentrl.sinks]\ncsv = csv_sink:Csv\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = resolve({"metrics": {"sinks": ["csv"]}, "output": str(tmp_path)}, source="run.toml")
    sinks.check_sinks(run)
    sink = sinks.open_sink("csv", run, SinkPosition(id="x"))
    sink.close()
    assert type(sink).__name__ == "Csv"


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
assert run.info.run_name == "r" and run.data.params["algorithm.preset"] == "auto"
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


# A process that has imported a backend and forks for each program: importing it takes seconds.
FORK = """
import importlib, os, runpy, sys, traceback
import agentrl.cli.main
importlib.import_module(sys.argv[1])
for line in sys.stdin:
    program, *sys.argv[1:] = line.split()
    child = os.fork()
    if not child:
        code = 1
        try:
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            if program == "agentrl":
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print("\\nended:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs programs one after another; each begins with the backend imported and nothing else."""

    def __init__(self, folder: Path, backend: str) -> None:
        own = {"HOME": str(folder), "TRACKIO_DIR": f"{folder}/trackio"}
        environment = os.environ | OFFLINE | own
        environment.pop("MLFLOW_TRACKING_URI", None)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORK, backend],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *program: str) -> str:
        """What it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*program, file=self._process.stdin, flush=True)
        printed = ""
        for line in self._process.stdout:
            if line.startswith("ended:"):
                assert line == "ended: 0\n", printed
                return printed
            printed += line
        raise AssertionError(f"its process ended: {printed}")

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def forks(tmp_path: Path, name: str) -> Iterator[Forks]:
    pytest.importorskip(name)
    forks = Forks(tmp_path, name)
    yield forks
    forks.close()


def export(run: RunConfig, forks: Forks) -> None:
    """One life of the sink's process: its standard input is at its end from the beginning."""
    file = Path(run.output) / "run.json"
    file.write_bytes(msgspec.json.encode(run))
    forks.run("agentrl", "process", "sinks", str(file))


def shown(run: RunConfig, name: str, forks: Forks) -> dict[str, list[list[float]]]:
    program = Path(run.output) / "read.py"
    program.write_text(HEAD + READ[name] + "\nprint('found:' + json.dumps(found))")
    printed = forks.run(str(program), run.output)
    found: dict[str, list[list[float]]] = json.loads(printed.rpartition("found:")[2])
    return {key: sorted(values) for key, values in found.items()}


def test_tensorboard_reads_files_in_the_order_in_which_they_were_opened(tmp_path: Path) -> None:
    run = config(tmp_path, "tensorboard")
    for _ in range(3):
        sinks.open_sink("tensorboard", run, SinkPosition(id="x")).close()
    files = [file.name for file in Path(run.output, "tensorboard").iterdir()]
    assert len({name.split(".")[3] for name in files}) == 3  # seconds: pids are in no order


@pytest.mark.parametrize("name", sorted(READ))
async def test_a_backend_has_every_step_once(tmp_path: Path, name: str, forks: Forks) -> None:
    run = config(tmp_path, name, steps=2)
    await train(run, 0, 1, evaluation=0.25)
    export(run, forks)
    before = load_position(position_file(run, name))
    await train(run, 1, 2, evaluation=0.5)
    export(run, forks)
    if name in ("tensorboard", "wandb"):  # the others show a step twice that was given twice
        save_position(
            position_file(run, name), before
        )  # as if killed before it could write its position
        export(run, forks)
    longer = msgspec.structs.replace(run, steps=3)
    await train(longer, 2, 3, evaluation=0.75)
    export(longer, forks)
    # TensorBoard cannot drop it without the training step before it, which has the same number.
    twice = 2 if name == "tensorboard" else 1
    assert shown(run, name, forks) == {
        "calls": [[1, 8.0], [2, 8.0], [3, 8.0]],
        "calls/refused": [[1, 2.0], [2, 2.0], [3, 2.0]],
        "reward/mean": [[1, 0.0], [2, 0.1], [3, 0.2]],
        "reward/role:tact/std": [[1, 1.0], [2, 1.0], [3, 1.0]],
        "eval/score": [[1, 0.25]] * twice + [[2, 0.5], [3, 0.75]],
    }


# -- in the run file -------------------------------------------------------------------------------


def test_sinks_are_checked_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"run.toml: metrics.sinks: 'wandbb'; did you mean 'wan"):
        resolve({"metrics": {"sinks": ["wandbb"]}}, source="run.toml")
    with pytest.raises(ConfigError, match="'wandb' twice"):
        resolve({"metrics": {"sinks": ["wandb", "wandb"]}}, source="run.toml")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'trackio' is not installed.*\[trackio\]"):
        resolve({"metrics": {"sinks": ["trackio"]}}, source="run.toml")


def test_a_folder_that_a_backend_made_is_not_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb_like").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert [is_installed(name) for name in ("wandb_like", "json")] == [False, True]


# -- the launcher's side ------------------------------------------------------------------------


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


def test_a_sinks_failure_is_said_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, run = MemorySink(0), config(tmp_path, "memory")
    asyncio.run(train(run, 0, 1))
    tries = [{0}, {0}, set[int]()]

    def open_sink(*_: object) -> MemorySink:
        memory.bad = tries.pop(0)
        return memory

    monkeypatch.setattr(sinks, "open_sink", open_sink)
    monkeypatch.setattr(sink_module, "FIRST_RETRY_PAUSE", 0.0)
    monkeypatch.setattr(sink_module, "STORE_POLL", 0.01)
    thread = sink_module.SinkThread(run, "memory")
    thread.start()
    while tries:
        thread.join(0.01)
    thread.run_ended.set()
    thread.join()
    assert (thread.error, [row.step for row in memory.rows]) == ("", [0])
    assert caplog.text.count("metrics sink memory: the network is down.") == 1


async def test_a_process_that_dies_is_reported_once_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sink_module, "FIRST_RETRY_PAUSE", 0.0)
    child: Any = Scripted(tmp_path / "log", -11, -11, 0)
    child.ended.set()
    await sink_module.SinksProcess(child, Console(width=200)).keep()
    assert child.lives == 3
    assert capsys.readouterr().out.count("metrics sinks: their process ended with code -11") == 1


def test_a_process_that_died_has_a_last_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        child: Any = Scripted(tmp_path / "log", -11, -9)
        sinks = sink_module.SinksProcess(child, Console(width=200))
        await child.start()
        await child.wait()
        await sinks.stop()
        assert child.lives == 2

    asyncio.run(scenario())
    assert "ended with code -9 before they had all steps" in capsys.readouterr().out


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
