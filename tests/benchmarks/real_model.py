"""Does a real pretrained model learn, how fast, and what does it take? Both agents of
examples/smollm, TRL beside the first, and the model's other benchmarks.

make smollm-model && python -m tests.benchmarks.real_model --json [--trl PYTHON] [--seeds 0 1 2]

A run is the command line of the example: `seconds` are of the whole command, evaluations included.
`cpu_per_step` is the median of the CPU seconds of all its processes between two steps; other
programs change it little. `checkpoint_share` of the steps' time is waited for checkpoints. TRL
trains the same model and adapter on the same tasks, prompts, reward, groups, tokens and seeds with
the same learning rate; `trl_cpu_per_step` is the same of its process. Peak memory is of the process
that trains. What a section cannot measure is in `absent`, with why.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from agentrl.core.config import RunConfig, load
from agentrl.core.types import StepRow
from tests.benchmarks.demo import read_steps
from tests.benchmarks.report import arguments, report
from tests.examples.parts import modules

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm"
AGENTS = {"prices": EXAMPLE / "run.toml", "calculator": EXAMPLE / "calculator" / "run.toml"}
OTHERS = {"speed": "cpu_speed", "estimate": "estimate"}  # other benchmarks of the same model
SECTIONS = (*AGENTS, "trl", *OTHERS, "formats")
TARGETS = {"sampled_after": 0.8, "tool_greedy_after": 0.9, "seconds": 300, "cpu_over_trl": 1 / 6}
Figures = dict[str, Any]


def train(run_file: Path, output: Path, overrides: Iterable[str]) -> Figures:
    """Train with the command line, and measure it."""
    command = [sys.executable, "-m", "agentrl", "train", str(run_file), f"output={output}"]
    started, cpu = time.monotonic(), []
    with subprocess.Popen([*command, *overrides], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", file=sys.stderr)
            if line.startswith("step "):
                cpu.append(cpu_seconds(run.pid))
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {run.returncode}")
    steps = asyncio.run(read_steps(output))
    first, last = steps[0].metrics, steps[-1].metrics
    return {
        "greedy_before": first["eval/score"],
        "sampled_before": first["eval/sampled"],
        "greedy_after": last["eval/score"],
        "sampled_after": last["eval/sampled"],
        "seconds": time.monotonic() - started,
        "cpu_per_step": median(differences(cpu)),
        "peak_mb": max(row.metrics.get("memory/process_peak_mb", 0.0) for row in steps),
        "logprob_difference_max": max(
            row.metrics.get("logprob_difference/max", 0.0) for row in steps
        ),
        "checkpoint_share": checkpoint_share(steps),
    }


def checkpoint_share(steps: Sequence[StepRow]) -> float:
    parts = ("checkpoint", "rollouts", "update", "eval", "build")
    spent = [sum(row.metrics.get(f"time/{part}", 0.0) for row in steps) for part in parts]
    return spent[0] / sum(spent)


def cpu_seconds(root: int) -> float:
    """CPU seconds of a process and of what it has started, the ended ones included."""
    process = psutil.Process(root)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def differences(values: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]


def trl(python: str, config: RunConfig, seed: int, folder: Path, *, evaluate: bool) -> Figures:
    """The same training by TRL, in a Python that has it."""
    with modules("smollm", "agent", "tasks") as own:
        agent, tasks = own["agent"], own["tasks"]
    given = {
        "model": config.model_path(), "steps": config.steps, "seed": seed,
        "prompt": agent.PROMPT,
        "train": tasks.train, "heldout": tasks.heldout if evaluate else [],
        "verifier": str(EXAMPLE / "verifier.py"), "max_tokens": config.sampling.max_tokens,
        "groups": config.algorithm.groups, "group_size": config.algorithm.group_size,
        "lr": config.algorithm.lr, "rank": config.policy.lora.rank,
        "alpha": config.policy.lora.alpha, "dtype": config.policy.dtype,
        "threads": config.learner.threads or psutil.cpu_count(logical=False),
    }  # fmt: skip
    settings = folder / "settings.json"
    settings.write_text(json.dumps(given))
    script = Path(__file__).with_name("trl_real_model.py")
    done = subprocess.run(
        [python, str(script), str(settings)], stdout=subprocess.PIPE, text=True, check=True
    )
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return {f"trl_{key}": value for key, value in found.items() if key != "trl"}


def beside(module: str, model: str) -> Figures:
    """The figures of another benchmark of the same model. Raises LookupError if there is none."""
    if find_spec(f"tests.benchmarks.{module}") is None:
        raise LookupError(f"there is no tests/benchmarks/{module}.py")
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--model", model, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def tool_roundtrip() -> dict[str, float]:
    """By chat template, the share of conversations with tools that come back the same. Raises
    ImportError without the part that has the templates."""
    from agentrl.algorithms.model.templates import templates
    from tests.algorithms.model.roundtrip import tool_roundtrip

    return {name: tool_roundtrip(name) for name in templates()}


def measure(options: argparse.Namespace, folder: Path) -> Figures:
    found: Figures = {"seeds": options.seeds, "absent": {}}
    for section in options.only:
        try:
            found |= measured(section, options, folder)
        except (LookupError, ImportError, subprocess.CalledProcessError) as error:
            found["absent"][section] = str(error)
    if "cpu_per_step" in found and "trl_cpu_per_step" in found:
        ours, theirs = median(found["cpu_per_step"]), median(found["trl_cpu_per_step"])
        found["cpu_over_trl"] = ours / theirs
    return found


def measured(section: str, options: argparse.Namespace, folder: Path) -> Figures:
    if section in OTHERS:
        return beside(OTHERS[section], str(options.model))
    if section == "formats":
        return {"tool_roundtrip": tool_roundtrip()}
    own, rows = [f"policy.model={options.model.resolve()}", *options.set], []
    for seed in options.seeds:
        if section in AGENTS:
            output = folder / f"{section}-{seed}"
            rows.append(train(AGENTS[section], output, [*own, f"seed={seed}"]))
        elif not options.trl:
            raise LookupError("give --trl PYTHON, one that has TRL")
        else:
            config = load(AGENTS["prices"], own)
            rows.append(trl(options.trl, config, seed, folder, evaluate=options.trl_evaluate))
    prefix = "tool_" if section == "calculator" else ""
    return {prefix + key: [row[key] for row in rows] for key in rows[0]}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--trl", metavar="PYTHON", help="a Python with TRL")
    parser.add_argument("--trl-evaluate", action="store_true", help="held-out scores of TRL too")
    parser.add_argument("--set", nargs="+", default=[], help="settings of the runs")
    options = parser.parse_args()
    if not options.model.is_dir():
        raise SystemExit(f"{options.model} is missing: make smollm-model")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    report(found, as_json=options.json, targets=TARGETS)


if __name__ == "__main__":
    main()
