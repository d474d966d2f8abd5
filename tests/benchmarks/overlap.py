"""What sampling while learning is worth: the time of a step, and what it costs in reward.

python -m tests.benchmarks.overlap --virtual --json     # simulated clock, real weights
python -m tests.benchmarks.overlap --json               # wall clock: runs of `agentrl train`

Ratios are of seconds: of a step in sync over one in flight, with max_staleness 1 and 4; of the time
until the mean reward is 0.8, at least, as runs in sync may end before that; and, of long answers
without tools, drained over in flight: of 64 to 512 tokens with mean 180, and, as `..._median64`, of
1 to 512 with median 64, whose longest are further from the rest. reward_gaps: mean reward in flight
(4) - in sync in the last steps, by preset; reward_gap: the largest, without its sign.
max_lag: of trained tokens, by max_staleness, of groups that are trained in the order asked; the
modes above train them as they end. logprob_error: the largest difference between a recorded
log-prob and that of the version it names, of calls that crossed an update. pause_p99: seconds of
wall clock for which a change of weights keeps the engine from computing. On the wall
clock all ratios are of `examples/staff` with tools of 3 s (sigma 1.2), the modes by turns.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import repeat
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from tests.benchmarks import demo
from tests.benchmarks.report import arguments, report
from tests.benchmarks.virtual_run import STAFF, Costs, Mode, VirtualRun, make_policy

PRESETS = ("grpo+tis", "scalerl", "dppo-tv")
SYNC, DRAINED1, FLIGHT1, FLIGHT4 = Mode(), Mode(1.0), Mode(1.0, True), Mode(4.0, True)
LONG = {
    "": Costs(tool=None, length=(180.0, 0.9, 64, 512)),
    "_median64": Costs(tool=None, length=(96.0, 0.9, 1, 512)),
}
AGENT = Path(__file__).with_name("slow_agent.py")


def virtual(seeds: list[int], steps: int, folder: Path, presets: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, list[VirtualRun]] = {}
    long = {(name, mode): list[float]() for name in LONG for mode in (DRAINED1, FLIGHT1)}
    lags = dict.fromkeys((0.0, 0.5, 1.0, 4.0), 0)
    gaps: dict[str, list[float]] = {preset: [] for preset in presets}
    for seed in seeds:
        policy = make_policy(folder, seed)
        for name, mode in (("sync", SYNC), ("flight1", FLIGHT1), ("flight4", FLIGHT4)):
            run = VirtualRun(policy, mode, seed=seed, steps=steps).run()
            found.setdefault(name, []).append(run)
        for ahead in lags:
            mode, few = Mode(ahead, ahead > 0, asked=True), min(steps, 8)
            run = VirtualRun(policy, mode, seed=seed, steps=few).run()
            lags[ahead] = max(lags[ahead], run.max_lag)
        for (name, mode), times in long.items():
            few, costs = min(steps, 8), LONG[name]
            run = VirtualRun(policy, mode, seed=seed, steps=few, costs=costs, lr=1e-9)
            times.append(run.run().per_step)
        for preset in presets:
            pair = [found["sync"][-1], found["flight4"][-1]]
            if preset != PRESETS[0]:
                options = {"seed": seed, "steps": steps, "preset": preset}
                pair = [VirtualRun(policy, mode, **options).run() for mode in (SYNC, FLIGHT4)]
            rewards = [run.last_reward() for run in pair]
            gaps[preset].append(rewards[1] - rewards[0])
    seconds = {name: fmean(run.per_step for run in runs) for name, runs in found.items()}
    # A run in sync that never gets there took at least its whole time.
    ends = {"sync": [run.committed[-1] for run in found["sync"]]}
    reached = {
        name: fmean(
            min(run.seconds_to(0.8), end)
            for run, end in zip(runs, ends.get(name, repeat(inf)), strict=False)
        )
        for name, runs in found.items()
    }
    pauses = [
        pause for name in ("flight1", "flight4") for run in found[name] for pause in run.pauses
    ]
    return {
        "sync_over_flight1": seconds["sync"] / seconds["flight1"],
        "sync_over_flight4": seconds["sync"] / seconds["flight4"],
        "reward08_sync_over_flight4": reached["sync"] / reached["flight4"],
        **{
            f"drained_over_flight1_long{name}": fmean(long[name, DRAINED1])
            / fmean(long[name, FLIGHT1])
            for name in LONG
        },
        "reward_gap": max(abs(fmean(values)) for values in gaps.values()),
        "reward_gaps": {preset: fmean(values) for preset, values in gaps.items()},
        "max_lag": {f"{ahead:g}": lag for ahead, lag in lags.items()},
        "logprob_error": max(logprob_error(run) for run in found["flight4"]),
        "pause_p99": float(np.quantile(pauses, 0.99)),
    }


@torch.no_grad()
def logprob_error(run: VirtualRun) -> float:
    """Over the calls of a run that crossed an update."""
    worst = 0.0
    for request, update in (call for call in run.calls if len(call[1].spans) > 1):
        tokens = torch.tensor([[*request.prompt.tolist(), *update.tokens]])
        starts = [start for start, _ in update.spans]
        for (start, version), end in zip(update.spans, [*starts[1:], None], strict=True):
            run.served.load_state_dict(run.weights[version])
            logprobs = run.served(input_ids=tokens).logits[0].log_softmax(-1)
            rows = logprobs[len(request.prompt) - 1 : -1]
            named = rows.gather(1, torch.tensor(update.tokens)[:, None])[start:end, 0]
            gap = (named - torch.tensor(update.logprobs)[start:end]).abs().max()
            worst = max(worst, float(gap))
    return worst


def wall_clock(seeds: list[int], steps: int, folder: Path) -> dict[str, Any]:
    modes = {
        "sync": [],
        "drained1": ["algorithm.max_staleness=1", "algorithm.async_sampling=drained"],
        "flight1": ["algorithm.max_staleness=1", "algorithm.async_sampling=in_flight"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for seed in seeds:
        policy = make_policy(folder, seed)
        for name, settings in modes.items():
            output = folder / f"{name}-{seed}"
            command = [sys.executable, "-m", "agentrl", "train", str(STAFF / "run.toml")]
            command += ["algorithm.preset=grpo+tis", f"steps={steps}", f"seed={seed}", *settings]
            command += ["eval.every=0", "eval.tasks=1", "eval.samples=0", f"output={output}"]
            command += [f"policy.model={policy}", f"agent.path={AGENT}:agent"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            at = [row.at for row in demo.asyncio.run(demo.read_steps(output)) if row.committed]
            seconds[name].append((at[-1] - at[0]) / (len(at) - 1))
    means = {name: fmean(times) for name, times in seconds.items()}
    return {
        "sync_over_flight1": means["sync"] / means["flight1"],
        "drained_over_flight1": means["drained1"] / means["flight1"],
    } | {f"{name}_seconds": values for name, values in seconds.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--virtual", action="store_true", help="simulated clock")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="default: 25, on the wall clock 8")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), help="of reward_gap")
    parser.add_argument("--policies", type=Path, help="folder in which to keep the first weights")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.policies or Path(temporary)
        folder.mkdir(exist_ok=True)
        if options.virtual:
            presets = tuple(options.presets)
            result = virtual(options.seeds, options.steps or 25, folder, presets)
        else:
            result = wall_clock(options.seeds, options.steps or 8, folder)
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
