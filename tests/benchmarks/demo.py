"""Does the demo learn, and how fast? Runs the main job once per seed, exactly as `make demo` does.

python -m tests.benchmarks.demo --seeds 0 1 2 --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentrl.store import open_store
from agentrl.types import StepRow

RUN_FILE = Path(__file__).parents[2] / "examples" / "staff" / "run.toml"
PARTS = ("build", "rollouts", "update", "eval")


def run(seed: int, folder: Path, run_file: Path = RUN_FILE) -> dict[str, float]:
    """Train from nothing with one seed; seconds cover the whole command, warm start included."""
    output = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "agentrl", "train", str(run_file)]
    started = time.monotonic()
    subprocess.run(
        [*command, f"output={output}", "--seed", str(seed)], check=True, stdout=sys.stderr
    )
    seconds = time.monotonic() - started
    return summary(asyncio.run(read_steps(output)), seconds)


async def read_steps(output: Path) -> list[StepRow]:
    async with open_store(f"sqlite:///{output / 'store.db'}") as store:
        (name,) = await store.runs()
        return await store.steps(name)


def summary(steps: list[StepRow], seconds: float) -> dict[str, float]:
    first, last = steps[0].metrics, steps[-1].metrics
    total = {part: sum(row.metrics.get(f"time/{part}", 0.0) for row in steps) for part in PARTS}
    rollouts = sum(row.metrics.get("rollouts", 0.0) for row in steps)
    return {
        "before": first["eval/score"],
        "after": last["eval/score"],
        "before_sampled": first["eval/sampled"],
        "after_sampled": last["eval/sampled"],
        "seconds": seconds,
        "rollouts_per_s": rollouts / total["rollouts"],
        "logprob_difference_max": max(
            row.metrics.get("logprob_difference/max", 0) for row in steps
        ),
        **{f"seconds_{part}": value for part, value in total.items()},
        "seconds_other": seconds - sum(total.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(seed, Path(folder)) for seed in options.seeds]
    result = {"seeds": options.seeds} | {key: [row[key] for row in rows] for key in rows[0]}
    if options.json:
        print(json.dumps(result))
        return
    for key, values in result.items():
        print(f"{key:<24}", *(f"{value:>9.4g}" for value in values))


if __name__ == "__main__":
    main()
