"""Does self-play approach an equilibrium? Kuhn poker, whole runs as users start them.

python -m tests.benchmarks.selfplay --seeds 0 1 2 --json
python -m tests.benchmarks.selfplay --seeds 0 --set steps=20 selfplay.opponents=pfsp

Exploitability is exact: every probability is read from the model (examples/kuhn/exploitability.py).
`against_first` is what the last checkpoint wins in a game from the policy that the run began with,
`against_pool` from its snapshots, on average over seats and snapshots, in antes: exact as well.

With snapshots as opponents, seed 0, two busy cores: pfsp 0.444 to 0.109, uniform 0.444 to 0.130;
against_first 0.216 and 0.214, against_pool 0.096 and 0.095; 369 and 498 s.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from agentrl.core.types import StepRow
from agentrl.store import open_store
from tests.benchmarks.report import arguments, report

EXAMPLE = Path(__file__).parents[2] / "examples" / "kuhn"
TARGET = 0.6  # share of its exploitability that a policy loses


def run(seed: int, folder: Path, settings: Sequence[str] = ()) -> dict[str, float]:
    """Train from nothing with one seed; seconds cover the whole command, warm start included."""
    output = folder / f"seed-{seed}"
    command = [sys.executable, "-m", "agentrl", "train", str(EXAMPLE / "run.toml")]
    started = time.monotonic()
    subprocess.run(
        [*command, f"output={output}", *settings, "--seed", str(seed)],
        check=True,
        stdout=sys.stderr,
    )
    seconds = time.monotonic() - started
    checkpoints = sorted((output / "checkpoints").glob("0*"), key=lambda path: path.name)
    before, after = rated(output / "policy", checkpoints[-1])
    result = summary(before, after, asyncio.run(read_steps(output)), seconds)
    if pool := sorted((output / "pool").glob("*@*")):
        met = [rated(snapshot, checkpoints[-1])[-1]["against_first"] for snapshot in pool]
        result["against_pool"] = fmean(met)
    return result


def rated(*checkpoints: Path) -> list[dict[str, float]]:
    """In a process of its own: modules of all examples have the same names."""
    command = [sys.executable, str(EXAMPLE / "exploitability.py"), *map(str, checkpoints)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in said.splitlines()]


async def read_steps(output: Path) -> list[StepRow]:
    async with open_store(f"sqlite:///{output / 'store.db'}") as store:
        (name,) = await store.runs()
        return await store.steps(name)


def summary(
    before: dict[str, float], after: dict[str, float], steps: list[StepRow], seconds: float
) -> dict[str, float]:
    games = sum(row.metrics.get("rollouts", 0.0) for row in steps)
    waited = sum(row.metrics.get("time/rollouts", 0.0) for row in steps)
    return {
        "before": before["exploitability"],
        "after": after["exploitability"],
        "fall": 1 - after["exploitability"] / before["exploitability"],
        "illegal_max": after["illegal_max"],
        "against_first": after["against_first"],
        "games": games,
        "games_per_s": games / waited,
        "seconds": seconds,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="settings of the run file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(seed, Path(folder), options.set) for seed in options.seeds]
    result = {"seeds": options.seeds} | {key: [row[key] for row in rows] for key in rows[0]}
    result["target_met"] = [row["fall"] >= TARGET and row["seconds"] <= 600 for row in rows]
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
