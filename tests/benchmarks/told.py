"""What only training knows, and what tools answered: rollouts that +told and +echo take to learn
worlds where hardly any rollout succeeds, beside GRPO and beside their controls.

    python -m tests.benchmarks.told --json --results tests/benchmarks/results/told.jsonl
        [--worlds NAME ...] [--presets NAME ...] [--seeds 1 2 3] [--tune] [--cpu]

Five worlds for +told, in which an untrained policy succeeds in at most 3 %: each also with another
task's text, a wrong one and none in place of z. Three for +echo, in half of whose tasks no rollout
can succeed, so that half of the groups are flat. The policy is a table that can follow a hint (see
`told_worlds`); everything else is the library's own step. All presets of a world have the same
learning rate: of `LRS` the one with which GRPO has the largest area under the curve on
`TUNING_SEEDS`, none of which is reported (--tune), or else `LR`. What is in the results file is not
run again, so a run may be stopped at any moment.

Held-out tasks are new paths, 200 of them; their expected success is computed after each step.
`rollouts to 80 %` is the number of rollouts at the first score from which the mean of three is at
least .8, or null; the ratio is to GRPO's, or to all rollouts of the run where GRPO does not get
there, and then an upper bound. `end` is the mean of the last three. Intervals are 95 % of a
bootstrap over seeds. --cpu compares the CPU time of updates with and without +echo, on a Llama of
0.1 M parameters.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
import torch

from agentrl.algorithms.data.state import AlgorithmState
from agentrl.algorithms.objective.ratios import ALL_OUTPUTS
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.train.prepare import Preprocessor
from agentrl.algorithms.train.step import Updater
from agentrl.core.config import AlgorithmConfig, RunConfig

from .told_worlds import ECHO_WORLDS, TOLD, TOLD_WORLDS, Player, TabularModel, World, make_tokenizer

GROUPS, SIZE, HELD_OUT, DIGITS = 8, 8, 200, 5
STEPS, ECHO_STEPS = 60, 80
SEEDS, TUNING_SEEDS = (1, 2, 3), (201, 202)
LRS = (0.3, 1.0)  # 0.1 was slower in the four worlds tried
REACHED, LAST = 0.8, 3
BASE, LESS = "grpo", "end less grpo's"
METRICS = ("told/style", "told/kl", "echo/loss", "reward/outcome/frac_zero_std")
LR = {world.name: 0.3 for world in (*TOLD_WORLDS, *ECHO_WORLDS)}


class Piece(msgspec.Struct, frozen=True):
    """What names a run."""

    world: str
    name: str  # of the preset in the tables
    preset: str
    options: dict[str, Any]
    seed: int
    steps: int
    lr: float

    @property
    def key(self) -> bytes:
        return msgspec.json.encode(self, order="deterministic")


class Result(msgspec.Struct, frozen=True):
    """What came of it: a line of the results file."""

    piece: Piece
    curve: list[tuple[int, float]]  # rollouts so far, score
    metrics: dict[str, float]  # means over the steps that have them
    cpu: float  # seconds


@dataclass
class Results:
    """Results by piece. file: where they are kept; None: nowhere."""

    file: Path | None = None
    done: dict[bytes, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.file.read_bytes().splitlines() if self.file and self.file.exists() else ():
            row = msgspec.json.decode(line, type=Result)
            self.done[row.piece.key] = row

    def of(self, piece: Piece) -> Result:
        """Run now unless it has been."""
        if piece.key not in self.done:
            row = self.done[piece.key] = run(piece)
            if self.file is not None:
                with self.file.open("ab") as lines:
                    lines.write(msgspec.json.encode(row) + b"\n")
        return self.done[piece.key]


def presets(world: World) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared in a world: a name, and preset and options."""
    if world in ECHO_WORLDS:
        return {BASE: (BASE, {}), "echo": ("grpo+echo", {})}
    options = {"told_source": world.source, "told_template": TOLD}
    told = {"told": options} | {
        f"told, {control}": {**options, "told_control": control}
        for control in ("unrelated", "wrong", "empty")
    }
    return {BASE: (BASE, {})} | {name: ("grpo+told", each) for name, each in told.items()}


def run(piece: Piece) -> Result:
    """Train from nothing."""
    torch.manual_seed(piece.seed)
    started, world = time.process_time(), _world(piece.world)
    tokenizer = make_tokenizer()
    model, rule = TabularModel(tokenizer, world.rare), world.rule(piece.seed)
    draw = random.Random(f"tasks {world.name} {piece.seed}")
    player = Player(world, model, rule, torch.Generator().manual_seed(piece.seed))
    held = [world.task(rule, draw) for _ in range(HELD_OUT)]
    algo = make(piece.preset, piece.options, supplies=ALL_OUTPUTS)
    settings = AlgorithmConfig(
        preset=piece.preset, options=piece.options, lr=piece.lr, group_size=SIZE, groups=GROUPS
    )
    updater = Updater(
        RunConfig(seed=piece.seed, algorithm=settings), algo, model,
        state=AlgorithmState(algo.remembered), preprocessor=Preprocessor(tokenizer=tokenizer),
    )  # fmt: skip
    curve = [(0, round(player.score(held), DIGITS))]
    kept: dict[str, list[float]] = {}
    for step in range(piece.steps):
        tasks = [world.task(rule, draw) for _ in range(GROUPS)]
        metrics = updater.update(step, player.groups(tasks, SIZE, step))
        for name in METRICS:
            if name in metrics:
                kept.setdefault(name, []).append(metrics[name])
        curve.append(((step + 1) * GROUPS * SIZE, round(player.score(held), DIGITS)))
    means = {name: fmean(values) for name, values in kept.items()}
    return Result(piece, curve, means, time.process_time() - started)


def _world(name: str) -> World:
    return next(world for world in (*TOLD_WORLDS, *ECHO_WORLDS) if world.name == name)


def reached(curve: Sequence[tuple[int, float]]) -> int | None:
    """Rollouts at which the mean of three scores is at least `REACHED`."""
    for n in range(len(curve) - 2):
        if fmean(score for _, score in curve[n : n + 3]) >= REACHED:
            return curve[n][0]
    return None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the means of a bootstrap."""
    draw = np.random.default_rng(0)
    means = draw.choice(np.array(values), (2000, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def summary(found: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Of a world's runs by preset: seeds are paired."""
    result: dict[str, Any] = {}
    longest = found[BASE][0].curve[-1][0]
    base = [reached(each.curve) for each in found[BASE]]
    last = [_end(each) for each in found[BASE]]
    for name, runs in found.items():
        own = [reached(each.curve) for each in runs]
        ratios = [(x if x is not None else longest) / (b if b else longest)
                  for x, b in zip(own, base, strict=True)]  # fmt: skip
        ends = [_end(each) for each in runs]
        gains = [x - y for x, y in zip(ends, last, strict=True)]
        keys = dict.fromkeys(key for each in runs for key in each.metrics)
        result[name] = {
            "start": fmean(each.curve[0][1] for each in runs),
            "rollouts to 80 %": own,
            "ratio": fmean(ratios),
            "ratio interval": interval(ratios),
            "end": fmean(ends),
            "end interval": interval(ends),
            LESS: fmean(gains),
            f"{LESS} interval": interval(gains),
            "curve": [[n, fmean(each.curve[i][1] for each in runs)]
                      for i, (n, _) in enumerate(runs[0].curve)],
            "cpu": fmean(each.cpu for each in runs),
        } | {
            key: fmean(each.metrics[key] for each in runs if key in each.metrics) for key in keys
        }  # fmt: skip
    return result


def _end(result: Result) -> float:
    return fmean(score for _, score in result.curve[-LAST:])


def tuned(world: World, steps: int, results: Results) -> float:
    """The learning rate with which GRPO has the largest area under the curve."""

    def area(lr: float) -> float:
        pieces = [Piece(world.name, BASE, BASE, {}, seed, steps, lr) for seed in TUNING_SEEDS]
        return fmean(score for piece in pieces for _, score in results.of(piece).curve)

    return max(LRS, key=area)


def measure(
    worlds: Iterable[World],
    names: Sequence[str],
    seeds: Sequence[int],
    steps: int | None,
    results: Results,
    tune: bool,
) -> dict[str, Any]:
    """Summaries by world. names: presets beside the baseline; none: all."""
    pieces: dict[str, dict[str, list[Piece]]] = {}
    for world in worlds:
        many = steps or (ECHO_STEPS if world in ECHO_WORLDS else STEPS)
        lr = tuned(world, many, results) if tune else LR[world.name]
        pieces[world.name] = {
            name: [Piece(world.name, name, *each, seed, many, lr) for seed in seeds]
            for name, each in presets(world).items()
            if name == BASE or not names or name in names
        }
    every = [piece for own in pieces.values() for each in own.values() for piece in each]
    for piece in sorted(every, key=lambda piece: seeds.index(piece.seed)):
        results.of(piece)
    return {
        world: {"lr": own[BASE][0].lr, **summary(
            {name: [results.of(piece) for piece in each] for name, each in own.items()})}
        for world, own in pieces.items()
    }  # fmt: skip


def cpu(rounds: int = 10) -> float:
    """CPU time of updates with +echo over that without, on the same batches, alternately."""
    from tests.benchmarks.told_cpu import updates

    took = dict.fromkeys(("grpo", "grpo+echo"), 0.0)
    steps = {name: updates(name) for name in took}
    for number in range(rounds + 2):
        for name, update in steps.items():
            started = time.process_time()
            update(number)
            if number >= 2:
                took[name] += time.process_time() - started
    return took["grpo+echo"] / took["grpo"]


def table(found: dict[str, Any]) -> str:
    lines = [f"{'world':<22}{'preset':<17}{'start':>6}  {'ratio':<17}  {'end less grpo':<19}"
             f"{'end':>5}  rollouts to 80 %"]  # fmt: skip
    for world, each in found.items():
        for name, x in ((name, x) for name, x in each.items() if name != "lr"):
            low, high = x["ratio interval"]
            ratio = f"{x['ratio']:.2f} ({low:.2f}, {high:.2f})"
            low, high = x[f"{LESS} interval"]
            gain = f"{x[LESS]:+.2f} ({low:+.2f}, {high:+.2f})"
            lines.append(f"{world:<22}{name:<17}{x['start']:>6.3f}  {ratio:<17}  {gain:<19}"
                         f"{x['end']:>5.2f}  {x['rollouts to 80 %']}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worlds", nargs="*", default=[])
    parser.add_argument("--presets", nargs="*", default=[], help="beside grpo; default: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, for +echo {ECHO_STEPS}")
    parser.add_argument("--results", type=Path, help="a JSON line for each run that is done")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.cpu:
        print(json.dumps({"cpu of +echo": cpu()}))
        return
    every = [*TOLD_WORLDS, *ECHO_WORLDS]
    chosen = [world for world in every if not given.worlds or world.name in given.worlds]
    results = Results(given.results)
    found = measure(chosen, given.presets, given.seeds, given.steps, results, given.tune)
    print(json.dumps(found) if given.json else table(found))


if __name__ == "__main__":
    main()
