"""Scores of whole trainings on three seeds, from the command line as users train: `scores.jsonl`.

python -m tests.golden.scores --write demo  # three minutes on two quiet cores
make smollm-model && python -m tests.golden.scores --write smollm  # half an hour
python -m tests.golden.scores --check demo  # trains again and compares

Sampled tokens differ between processors, and by the order in which rollouts end; so scores are
compared by their means over the seeds, with a margin, and only what no token decides is equal.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.golden import files
from tests.golden.access import ROOT

RUN_FILES = {"demo": "examples/staff/run.toml", "smollm": "examples/smollm/run.toml"}
SEEDS = (0, 1, 2)
MARGIN = {"demo": 0.06, "smollm": 0.08}  # of the mean of the scores after training
SCORES = ("eval/score", "eval/sampled", "reward/mean")
SUMS = ("rollouts/failed", "update/bad")
MORE = {
    "rollouts/failed": 16,
    "update/bad": 0,
}  # than before; a busy machine lets rollouts time out


def agentrl(*words: str) -> str:
    command = [sys.executable, "-m", "agentrl", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def train(name: str, seed: int, folder: Path, more: Sequence[str] = ()) -> files.Case:
    """One training, and what its metrics say."""
    output = folder / f"{name}-{seed}"
    words = [f"output={output}", "--seed", str(seed), "--quiet", *more]
    agentrl("train", RUN_FILES[name], *words)
    store = f"sqlite:///{output / 'store.db'}"
    run = Path(RUN_FILES[name]).parent.name
    lines = agentrl("metrics", run, "--json", "--store", store).splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    return summary(steps)


def summary(steps: list[dict[str, Any]]) -> files.Case:
    """Curves by name, with four digits, and sums over the steps."""
    curves = {
        name: [round(step[name], 4) for step in steps if step.get(name) is not None]
        for name in SCORES
    }
    sums = {name: sum(step.get(name) or 0.0 for step in steps) for name in SUMS}
    return {"steps": sum("reward/mean" in step for step in steps), "curves": curves, "sums": sums}


def compared(name: str, golden: list[files.Case], found: list[files.Case]) -> list[str]:
    """What is not as it was, as lines of text."""
    lines = []
    if (before := [one["steps"] for one in golden]) != (now := [one["steps"] for one in found]):
        lines.append(f"steps: {before} became {now}")
    for key, more in MORE.items():
        before, now = (sum(one["sums"][key] for one in some) for some in (golden, found))
        if now > before + more:
            lines.append(f"{key}: {before:g} became {now:g}")
    for score in ("eval/score", "eval/sampled"):
        for end, at, margin in (("before", 0, 0.02), ("after", -1, MARGIN[name])):
            curves = [[case["curves"][score] for case in some] for some in (golden, found)]
            ends = [[curve[at] for curve in some if curve] for some in curves]
            before, now = (fmean(some) if some else math.nan for some in ends)
            if math.isnan(before) != math.isnan(now) or before - now > margin:
                lines.append(f"{score} {end} training: {before:.4f} became {now:.4f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", choices=RUN_FILES)
    group.add_argument("--check", choices=RUN_FILES)
    parser.add_argument("overrides", nargs="*", help="settings of the run file")
    options = parser.parse_args()
    name = options.write or options.check
    with tempfile.TemporaryDirectory() as folder:
        found = [train(name, seed, Path(folder), options.overrides) for seed in SEEDS]
    known = files.read("scores") if (files.HERE / "scores.jsonl").exists() else {}
    own = [f"{name}, seed {seed}" for seed in SEEDS]
    if options.write:
        cases = known | dict(zip(own, found, strict=True))
        files.write("scores", sorted(cases.items()))
        return
    if lines := compared(name, [known[case] for case in own], found):
        raise SystemExit("\n".join(lines))
    print(f"{name}: as recorded")


if __name__ == "__main__":
    main()
