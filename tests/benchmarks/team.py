"""Does a team of two policies learn, and what does credit of its members save?

Trains examples/team as it is, two adapters on one model, with credit in several ways:

shared    the team's outcome, compared over the rollouts of a task, for every call of both policies
per-role  the same, compared within each role (Dr. MAS)
prompt    the same, compared with the role's other answers to what it was asked (AT-GRPO)
parts     whether each call did its own part, as the verifier knows it, compared so too
c3        the outcome, each call against other samples of it, from branches that repeat what was
          before; a group is 2 rollouts and 6 branches, all of which are counted

    python -m tests.benchmarks.team --seeds 0 1 2 --json

Equal for all: the model of a seed, the tasks and their order, 64 rollouts of 8 tasks a step, the
number of steps, and the optimizer's settings. Those are the best of `GRID` for shared return, which
is what `--tune` shows: the mean success over a run of each arm, at a seed of its own, 99.

Success is that of 128 held-out questions at temperature 1, as they are sampled in training, and of
three evaluations in a row the mean. `ratio`: the training rollouts after which an arm has reached
what shared return came to in the end, over those that shared return took to get there itself.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from agentrl.core.types import StepRow
from agentrl.store import open_store
from tests.benchmarks.report import arguments

RUN_FILE = Path(__file__).parents[2] / "examples" / "team" / "run.toml"
STEPS, EVERY, TASKS, SMOOTH, TUNING = 20, 1, 128, 3, 99
Optimizer = tuple[float, int]  # learning rate, minibatches of a step
OPTIMIZER: Optimizer = (2e-3, 16)
GRID: list[Optimizer] = [(2e-3, 1), (4e-3, 1), (1e-3, 4), (2e-3, 4), (1e-3, 16), (2e-3, 16)]
OUTCOME = ["algorithm.groups=8", "algorithm.group_size=8"]
ARMS = {
    "shared": ["algorithm.preset=grpo", *OUTCOME],
    "per-role": ["algorithm.preset=dr-mas", *OUTCOME],
    "prompt": ["algorithm.preset=at-grpo", "algorithm.options.within=prompt", *OUTCOME],
    "parts": [
        *("algorithm.preset=at-grpo", "algorithm.options.within=prompt"),
        *("algorithm.options.reward=transition:part", *OUTCOME),
    ],
    "c3": [
        *("algorithm.preset=c3", "algorithm.groups=8", "algorithm.group_size=2"),
        *("algorithm.branching.kind=mc", "algorithm.branching.calls=3"),
    ],
}
Curve = list[tuple[float, float]]  # training rollouts so far, held-out success
Figures = dict[str, float | None]


def train(arm: str, seed: int, optimizer: Optimizer, steps: int, folder: Path) -> list[StepRow]:
    """One run of the example, as the command line runs it."""
    rate, minibatches = optimizer
    output = folder / f"{arm}-{seed}-{rate}-{minibatches}"
    settings = [
        f"name={arm}", f"output={output}", f"steps={steps}", f"policy.model={folder}/model-{seed}",
        f"algorithm.lr={rate}", f"algorithm.minibatches={minibatches}",
        "eval.temperature=1.0", "eval.samples=0",
        f"eval.every={EVERY}", f"eval.tasks={TASKS}", f"eval.curve_tasks={TASKS}", *ARMS[arm],
    ]  # fmt: skip
    command = [sys.executable, "-m", "agentrl", "train", str(RUN_FILE), *settings]
    subprocess.run([*command, "--seed", str(seed)], check=True, stdout=sys.stderr)
    return asyncio.run(read(output, arm))


async def read(output: Path, run: str) -> list[StepRow]:
    async with open_store(f"sqlite:///{output / 'store.db'}") as store:
        return await store.steps(run)


def curve(rows: Sequence[StepRow]) -> Curve:
    """Success after so many training rollouts; those of a step, branches included, come after the
    evaluation that has its number."""
    points, spent = [], 0.0
    for row in rows:
        if "eval/score" in row.metrics:
            points.append((spent, row.metrics["eval/score"]))
        spent += row.metrics.get("rollouts", 0.0)
    return points


def smoothed(points: Curve) -> Curve:
    """Each evaluation as the mean of the last few."""
    return [
        (spent, fmean(score for _, score in points[max(0, at + 1 - SMOOTH) : at + 1]))
        for at, (spent, _) in enumerate(points)
    ]


def reached(points: Curve, level: float) -> float | None:
    """Rollouts until the level; None where it is never reached."""
    return next((spent for spent, score in points if score >= level), None)


def compare(curves: dict[str, Curve]) -> dict[str, Figures]:
    """Of each arm: success before and after, rollouts to the level that shared return ends at, and
    their ratio to those of shared return. None: it does not get there."""
    smooth = {arm: smoothed(points) for arm, points in curves.items()}
    level = smooth["shared"][-1][1]
    base = reached(smooth["shared"], level)
    found: dict[str, Figures] = {}
    for arm, points in smooth.items():
        spent = reached(points, level)
        ratio = spent / base if spent is not None and base else None
        found[arm] = {
            "before": points[0][1], "after": points[-1][1], "rollouts": spent, "ratio": ratio
        }  # fmt: skip
    return found


def tune(folder: Path, steps: int) -> dict[str, dict[str, float]]:
    """Mean success over a run, by arm and settings of the optimizer."""
    return {
        arm: {
            f"{rate:g} in {minibatches}": fmean(
                score for _, score in curve(train(arm, TUNING, (rate, minibatches), steps, folder))
            )
            for rate, minibatches in GRID
        }
        for arm in ARMS
    }


def measure(
    seeds: Sequence[int], steps: int, folder: Path
) -> dict[str, dict[str, list[float | None]]]:
    """By arm and figure, a number for each seed."""
    found = [
        compare({arm: curve(train(arm, seed, OPTIMIZER, steps, folder)) for arm in ARMS})
        for seed in seeds
    ]
    return {arm: {key: [one[arm][key] for one in found] for key in found[0][arm]} for arm in ARMS}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tune", action="store_true", help="which of GRID suits which arm")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.tune:
            print(json.dumps(tune(Path(folder), options.steps)))
            return
        arms = measure(options.seeds, options.steps, Path(folder))
    if options.json:
        print(json.dumps({"seeds": options.seeds, "arms": arms}))
        return
    for arm, figures in arms.items():
        for key, values in figures.items():
            shown = (f"{'never' if value is None else format(value, '.4g'):>9}" for value in values)
            print(f"{arm:<10}{key:<10}", *shown)


if __name__ == "__main__":
    main()
