"""What a model learns from recorded traces: the commands of examples/traces, from the recording to
the last step of reinforcement learning, and TRL's SFT on the same traces.

`recorded` is the share of the traces of the expert that its reviewer calls correct; `imitated` and
`trained` are greedy scores of live held-out tasks before and after the steps of reinforcement
learning. CPU seconds are those of all processes of `agentrl train`: to the end of the imitation,
and whole. TRL imitates all calls of the traces that are not of held-out tasks, good and bad, with
one adapter of the same rank, learning rate, batch and number of conversations. Merged into the
model, it answers the same agent from the same engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.core.config import load
from agentrl.evaluation import evaluate
from agentrl.recorded.training import split_of, traces
from agentrl.store import open_store
from tests.benchmarks.demo import read_steps
from tests.benchmarks.real_model import cpu_seconds

ROOT = Path(__file__).parents[2]
EXAMPLE, MODEL = ROOT / "examples/traces", ROOT / "examples/smollm/model"
OWN_FILES = ("agent.py", "orders.py", "verifier.py")
TRACES, SMALL_TRACES = 500, 60
GREEDY = ("eval.every=0", "eval.samples=0")  # before and after, as the figures are
SMALL = ("warmup.steps=2", "steps=1", "algorithm.groups=1", "algorithm.group_size=2",
         "sampling.max_tokens=8", "eval.tasks=2")  # fmt: skip
Figures = dict[str, Any]


def figures(options: argparse.Namespace, folder: Path) -> Figures:
    """The figures of each seed, as a list by name."""
    rows = []
    for seed in options.seed:
        rows.append(row := learned(seed, folder / str(seed), options))
        print(json.dumps(row), file=sys.stderr, flush=True)
    return {key: [row[key] for row in rows] for key in rows[0]}


def learned(seed: int, folder: Path, options: argparse.Namespace) -> Figures:
    """Record, import, write the run and train it, with one seed."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = recorded_success(seed, folder, SMALL_TRACES if options.small else TRACES)
    agentrl(folder, "init", "shop", "--from-traces", "traces.db", "--model", str(options.model))
    for name in OWN_FILES:
        (folder / "shop" / name).write_bytes((EXAMPLE / name).read_bytes())
    small = SMALL if options.small else ()
    settings = [*GREEDY, *small, *options.set, f"seed={seed}"]
    figures = trained(folder, settings)
    figures = {
        "seed": seed,
        "recorded": recorded,
        **figures,
        "imitated_over_recorded": figures["imitated"] / recorded,
        "gain": figures["trained"] - figures["imitated"],
    }
    if options.trl:
        steps = sum(figures["imitation_steps"].values())
        figures |= trl(options.trl, seed, folder, settings, steps)
    return figures


def recorded_success(seed: int, folder: Path, count: int) -> float:
    """Record and import the traces; returns the share that the reviewer calls correct."""
    if not (folder / "recorded.jsonl").exists():
        record = [sys.executable, str(EXAMPLE / "record.py"), "recorded.jsonl"]
        do([*record, "--seed", str(seed), "--count", str(count)], folder)
    lines = (folder / "recorded.jsonl").read_text().splitlines()
    scores = [row["score"] for row in map(json.loads, lines) if row.get("key") == "correct"]
    agentrl(folder, "traces", "import", "recorded.jsonl", "traces.db")
    return float(sum(scores) / len(scores))


def do(command: list[str], folder: Path) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=folder)


def agentrl(folder: Path, *arguments: str) -> None:
    do([sys.executable, "-m", "agentrl", *arguments], folder)


def trained(folder: Path, settings: list[str]) -> Figures:
    """`agentrl train`, with what its processes cost."""
    output, started = folder / "run", time.monotonic()
    command = [sys.executable, "-m", "agentrl", "train", "shop/run.toml", f"output={output}"]
    imitated, steps, cpu = 0.0, list[int](), 0.0
    with subprocess.Popen(
        [*command, *settings], stdout=subprocess.PIPE, text=True, cwd=folder
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            cpu = max(cpu, cpu_seconds(run.pid))
            if ended := re.match(r"imitated for (\d+) steps", line):
                imitated, steps = cpu, [*steps, int(ended[1])]
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {run.returncode}")
    rows = asyncio.run(read_steps(output))
    return {
        "imitated": rows[0].metrics["eval/score"],
        "trained": rows[-1].metrics["eval/score"],
        "imitation_cpu_seconds": imitated,
        "imitation_steps": dict(zip(load(folder / "shop/run.toml").policies, steps, strict=True)),
        "cpu_seconds": cpu,
        "seconds": time.monotonic() - started,
        "peak_mb": max(
            value
            for row in rows
            for name, value in row.metrics.items()
            if name.endswith("memory/process_peak_mb")  # each policy has its own
        ),
    }


def trl(python: str, seed: int, folder: Path, settings: list[str], steps: int) -> Figures:
    """TRL's SFT of all calls for so many steps, scored by the same agent."""
    config = load(folder / "shop/run.toml", settings)
    task_settings = {
        "model": config.model_path(), "steps": steps, "seed": seed, "out": str(folder / "trl"),
        "rows": asyncio.run(every_call(f"sqlite:///{folder}/traces.db")),
        "batch": config.warmup.batch, "lr": config.warmup.lr, "dtype": config.policy.dtype,
        "rank": config.policy.lora.rank, "alpha": config.policy.lora.alpha,
        "threads": config.learner.threads or None,
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(task_settings))
    script = Path(__file__).with_name("trl_traces.py")
    done = subprocess.run(
        [python, str(script), str(folder / "trl.json")],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    merged = [f"policy.model={task_settings['out']}", f"output={folder / 'trl-run'}"]
    scored = evaluate(load(folder / "shop/run.toml", [*settings, *merged]), None, None)
    return {"trl": scored.after, **{f"trl_{key}": value for key, value in figures.items()}}


async def every_call(url: str) -> list[Figures]:
    """The calls of the traces that are not of held-out tasks, as TRL has prompts and completions:
    good ones and bad ones."""
    async with open_store(url, readonly=True) as store:
        held = {*(await split_of(store)).heldout}
        return [
            {"prompt": call.messages, "completion": [call.answer]}
            async for trace in traces(store)
            if trace.rollout.group not in held
            for call in trace.transitions
        ]
