"""Does the demo learn, and how fast? Runs the main job once per seed, exactly as `make demo` does.

python -m tests.benchmarks.demo --seeds 0 1 2 --json
python -m tests.benchmarks.demo --starter    # what `agentrl init` writes
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agentrl.core.types import StepRow
from agentrl.store import open_store
from tests.benchmarks.report import arguments, report

RUN_FILE = Path(__file__).parents[2] / "examples" / "staff" / "run.toml"
PARTS = ("build", "rollouts", "update", "eval")


def run(seed: int, folder: Path, run_file: Path = RUN_FILE, *overrides: str) -> dict[str, float]:
    """Train from nothing with one seed; seconds cover the whole command, warm start included."""
    output = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "agentrl", "train", str(run_file)]
    started, before = time.monotonic(), os.times()
    subprocess.run(
        [*command, f"output={output}", "--seed", str(seed), *overrides],
        check=True,
        stdout=sys.stderr,
    )
    seconds, now = time.monotonic() - started, os.times()
    used = sum(now[2:4]) - sum(before[2:4])  # of ended children, and of theirs
    return summary(asyncio.run(read_steps(output)), seconds) | {"cpu_seconds": used}


def starter(folder: Path) -> Path:
    """The run file that `agentrl init` writes."""
    command = [sys.executable, "-m", "agentrl", "init", str(folder / "mine")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "mine" / "run.toml"


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
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--starter", action="store_true", help="only what `agentrl init` writes")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {"starter_": starter(Path(folder))} | ({} if options.starter else {"": RUN_FILE})
        for prefix, run_file in jobs.items():
            for seed in options.seeds:
                for key, value in run(seed, Path(folder, prefix), run_file).items():
                    found.setdefault(f"{prefix}{key}", []).append(value)
    result = {"seeds": options.seeds} | found
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
