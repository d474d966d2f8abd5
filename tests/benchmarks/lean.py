"""How much memory, CPU and start-up this build takes beside another one, in one run.

python -m tests.benchmarks.lean --baseline PATH --json [--only SECTION ...] [--seeds 0 1 2]

PATH is a checkout of another build, with its environment in PATH/.venv (without one: this Python,
which knows the plug-ins of this build alone). Both run by turns, so that what else this machine
does meets both. `help` and `import` are CPU seconds;
`start` is of the demo, until its first rollout has begun: seconds, and CPU seconds of all
processes; `speed` is of SmolLM2-135M with an adapter alone: CPU seconds of an update, and tokens
per CPU second that the engine decodes of 1 and 64 rows (`cpu_speed`); `prices` and `calculator`
train it: CPU seconds of a step (median), peak memory of the process that trains, and held-out
scores. Every figure is a list of [here, baseline].
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.real_model import cpu_seconds, differences

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "smollm" / "model"
RECIPES = {
    "prices": "examples/smollm/run.toml",
    "calculator": "examples/smollm/calculator/run.toml",
}
SPEEDS = {  # figures of `cpu_speed`, by their names here
    "update_cpu": "update_lora_step_cpu_s",
    "decode_1": "decode_1_lora",
    "decode_64": "decode_64_lora",
}
SECTIONS = ("help", "import", "start", "speed", *RECIPES)
STARTS, REPEATS = 3, 5
START_TIMEOUT = 600.0  # seconds until the first rollout
LOOK = 0.05  # seconds between two looks at a store
Figures = dict[str, float]


@contextmanager
def started(tree: Path, *words: str, **given: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python of a tree, which is interrupted at the end if it still runs."""
    own, env = tree / ".venv" / "bin" / "python", os.environ | {"PYTHONPATH": str(tree)}
    python = str(own) if own.exists() else sys.executable
    process = subprocess.Popen([python, *words], cwd=tree, env=env, text=True, **given)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait()


def cpu_of(tree: Path, *words: str) -> float:
    """CPU seconds of a command, the least of some."""
    spent = []
    for _ in range(REPEATS):
        before = os.times()
        with started(tree, *words, stdout=subprocess.DEVNULL) as process:
            if process.wait():
                raise SystemExit(f"{tree}: {' '.join(words)}: exit code {process.returncode}")
        after = os.times()
        spent.append(sum(after[2:4]) - sum(before[2:4]))
    return min(spent)


def start(tree: Path, folder: Path) -> Figures:
    """The demo until its first rollout has begun."""
    words = ("-m", "agentrl", "train", "examples/staff/run.toml", f"output={folder}")
    began = time.monotonic()
    with started(tree, *words, stdout=subprocess.DEVNULL) as process:
        while not has_begun(folder / "store.db"):
            if process.poll() is not None or time.monotonic() - began > START_TIMEOUT:
                raise SystemExit(f"{tree}: the demo began no rollout")
            time.sleep(LOOK)
        return {"start_seconds": time.monotonic() - began, "start_cpu": cpu_seconds(process.pid)}


def has_begun(store: Path) -> bool:
    """Whether a store has an attempt at a rollout."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        return bool(db.execute("select 1 from attempts limit 1").fetchone())
    return False


def speed(tree: Path, _: Path) -> Figures:
    """An update and decoding of the model with an adapter, without a run."""
    words = ("-m", "tests.benchmarks.cpu_speed", "--model", str(MODEL), "--json", "--only", "lora")
    with started(tree, *words, stdout=subprocess.PIPE) as process:
        found = json.loads(process.communicate()[0].splitlines()[-1])
    return {name: found[key] for name, key in SPEEDS.items()}


def recipe(tree: Path, name: str, seed: int, folder: Path) -> Figures:
    """A training run of SmolLM2, by the tree's command line."""
    words = ("-m", "agentrl", "train", RECIPES[name], f"output={folder}", f"seed={seed}")
    cpu = list[float]()
    with started(tree, *words, f"policy.model={MODEL}", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{tree.name}: {line}", end="", file=sys.stderr)
            if line.startswith("step "):
                cpu.append(cpu_seconds(process.pid))
        if process.wait():
            raise SystemExit(f"{tree}: {name}, seed {seed}: exit code {process.returncode}")
    return {f"{name}_cpu_per_step": median(differences(cpu))} | figures(tree, name, folder)


def figures(tree: Path, name: str, folder: Path) -> Figures:
    """What a finished run has stored, as its own build reads it."""
    with closing(sqlite3.connect(folder / "store.db")) as db:
        (run,) = db.execute("select id from runs").fetchone()
    words = ("-m", "agentrl", "metrics", run, "--json", "--store", f"sqlite:///{folder}/store.db")
    with started(tree, *words, stdout=subprocess.PIPE) as process:
        lines = process.communicate()[0].splitlines()
    return {f"{name}_{key}": x for key, x in summary([json.loads(line) for line in lines]).items()}


def summary(rows: Sequence[dict[str, Any]]) -> Figures:
    """Peak memory and held-out scores of the rows of `agentrl metrics --json`."""
    metrics = [row["metrics"] for row in rows]
    scored = [row for row in metrics if "eval/score" in row]
    return {
        "peak_mb": max(row.get("memory/process_peak_mb", 0.0) for row in metrics),
        "greedy_after": scored[-1]["eval/score"],
        "sampled_after": scored[-1].get("eval/sampled", 0.0),
    }


def measures(options: argparse.Namespace) -> Iterator[Callable[[Path, Path], Figures]]:
    """What is measured of each tree, in its own folder."""
    for section in options.only:
        if section == "help":
            yield lambda tree, _: {"help_cpu": cpu_of(tree, "-m", "agentrl", "--help")}
        elif section == "import":
            yield lambda tree, _: {"import_cpu": imported(tree)}
        elif section == "start":
            yield from [start] * STARTS
        elif section == "speed":
            yield speed
        else:
            for seed in options.seeds:
                yield lambda tree, folder, n=section, s=seed: recipe(tree, n, s, folder)


def imported(tree: Path) -> float:
    """CPU seconds of `import agentrl`, without those of Python."""
    return cpu_of(tree, "-c", "import agentrl") - cpu_of(tree, "-c", "pass")


def paired(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Each figure of both trees; the first of them is another one each time."""
    found: dict[str, Any] = {"trees": [str(ROOT), str(options.baseline)]}
    for number, measure in enumerate(measures(options)):
        pair: list[Figures] = [{}, {}]
        for at in (0, 1) if number % 2 else (1, 0):
            tree = (ROOT, options.baseline)[at]
            pair[at] = measure(tree, folder / f"{number}-{at}")
        for key in pair[0]:
            found.setdefault(key, []).append([pair[0][key], pair[1].get(key)])
    return found | ratios(found)


def ratios(found: dict[str, Any]) -> Figures:
    """Medians of here over the baseline's, of what should be small."""
    return {
        f"{key}_ratio": median(here / there for here, there in pairs)
        for key, pairs in found.items()
        if key.endswith(("_cpu", "_seconds", "_per_step", "_mb")) and all(all(x) for x in pairs)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--baseline", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    if {*options.only} & {"speed", *RECIPES} and not MODEL.is_dir():
        raise SystemExit(f"{MODEL} is missing: make smollm-model")
    with tempfile.TemporaryDirectory() as folder:
        found = paired(options, Path(folder))
    if options.json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        print(f"{key:<26} {value}")


if __name__ == "__main__":
    main()
