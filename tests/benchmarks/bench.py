"""A bench file: the tasks and presets that are compared, and the runs that this takes.

Every run is a piece: a task, a preset, a learning rate and a seed. All presets of a task have the
same learning rate: of `lrs` the one with which the baseline has the highest mean score over the
evaluations (the area under the curve) of `tuning_seeds`, none of which is reported.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec

from agentrl.core.config import RunConfig, load
from agentrl.core.config.base import Count, Natural, Positive, Section
from agentrl.core.config.validate import check_keys, format_validation_error
from agentrl.core.errors import ConfigError, nearest

Some = msgspec.Meta(min_length=1)
Pair = tuple[str, str]  # task, preset


class BenchTask(Section, frozen=True):
    """A run file with settings, and scores by which others are normalised to [0, 1]."""

    run: str  # run file, relative to the bench file
    settings: tuple[str, ...] = ()  # as on the command line of `agentrl train`
    best: float = 1.0  # the score of the best policy
    random: float = 0.0  # the score of a policy that does anything possible
    measure: str = ""  # "file.py:name": checkpoint folder -> score; default: the held-out outcome
    presets: tuple[str, ...] = ()  # that make sense here; none: all
    rollouts: Natural = 0  # of each run; 0: as the bench says
    seeds: tuple[Natural, ...] = ()  # none: as the bench says
    lrs: tuple[Positive, ...] = ()  # none: as the bench says


class BenchPreset(Section, frozen=True):
    """An algorithm by its settings."""

    settings: tuple[str, ...]
    seeds: tuple[Natural, ...] = ()  # none: as the task says
    cost: Positive = 1.0  # rollouts played for each of groups x group_size: branches and replays


class Bench(Section, frozen=True):
    """What is compared, at equal numbers of rollouts."""

    baseline: str  # the preset that others are measured by
    rollouts: Count  # of each run, branches and replays included
    seeds: Annotated[tuple[Natural, ...], Some]
    tuning_seeds: Annotated[tuple[Natural, ...], Some]
    lrs: Annotated[tuple[Positive, ...], Some]
    tasks: dict[str, BenchTask]
    presets: dict[str, BenchPreset]
    evaluations: Count = 8  # evenly spaced, after the one before training
    heldout: Count = 64  # rollouts of an evaluation

    def presets_of(self, task: str) -> tuple[str, ...]:
        return self.tasks[task].presets or tuple(self.presets)

    def seeds_of(self, pair: Pair) -> tuple[int, ...]:
        """Those of the preset, else of the task, else of the bench."""
        return self.presets[pair[1]].seeds or self.tasks[pair[0]].seeds or self.seeds

    def lrs_of(self, task: str) -> tuple[float, ...]:
        return self.tasks[task].lrs or self.lrs

    def baseline_of(self, task: str) -> str:
        """The bench's baseline, or the first preset of a task that does not have it."""
        presets = self.presets_of(task)
        return self.baseline if self.baseline in presets else presets[0]

    def pairs(self) -> list[Pair]:
        return [(task, preset) for task in self.tasks for preset in self.presets_of(task)]


class Result(msgspec.Struct, frozen=True):
    """What came of a piece: a line of the results file."""

    digest: str
    task: str
    preset: str
    lr: float
    seed: int
    curve: list[tuple[float, float]]  # training rollouts so far, score
    seconds: float
    failed: float  # rollouts without an outcome, those of evaluations too
    version: str  # of this library


@dataclass(frozen=True)
class Piece:
    """One run of a bench."""

    name: tuple[str, str, float, int]  # task, preset, learning rate, seed
    file: Path
    settings: tuple[str, ...]
    measure: str
    digest: str  # of its settings and the files that they name, but not of this library

    @cached_property
    def config(self) -> RunConfig:
        """Loaded where the piece is run: what is done is known by the digest alone."""
        return load(self.file, self.settings)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The pieces of a bench file, which work in folders of `work`. `done`: results by digest."""

    bench: Bench
    file: Path
    work: Path
    done: dict[str, Result]
    _loaded: dict[tuple[str, ...], RunConfig] = field(default_factory=dict, repr=False)

    def piece(self, pair: Pair, lr: float, seed: int) -> Piece:
        bench, task, preset = self.bench, self.bench.tasks[pair[0]], self.bench.presets[pair[1]]
        path = self.file.parent / task.run
        settings, text = [*task.settings, *preset.settings], path.read_text()
        config = self._load(path, text, settings)
        settings += [f"algorithm.lr={lr}", f"seed={seed}"]
        size = config.algorithm.groups * config.algorithm.group_size * preset.cost
        steps = max(1, math.floor((task.rollouts or bench.rollouts) / size))
        settings += [
            f"steps={steps}", f"eval.every={math.ceil(steps / bench.evaluations)}",
            f"eval.tasks={bench.heldout}", f"eval.curve_tasks={bench.heldout}",
            "eval.samples=0", f"keep_checkpoints={steps if task.measure else 1}",
        ]  # fmt: skip
        build, agent, verifier = config.policy.build, config.agent.path, config.verifier
        files = [build, agent, config.tasks.train, config.tasks.heldout, verifier.path]
        files += [*verifier.rewards.values(), task.measure]
        digest = _digest(config, files, text, *settings)
        settings += [f"name=bench-{digest}", f"output={self.work / digest}"]
        if build:  # one model for all presets
            model = self.work / "models" / _digest(config, [build], build, str(seed))
            settings.append(f"policy.model={model}")
        return Piece((*pair, lr, seed), path, tuple(settings), task.measure, digest)

    def _load(self, path: Path, text: str, settings: list[str]) -> RunConfig:
        """Once for all learning rates and seeds. text: of the file at this moment."""
        name = (str(path), text, *settings)
        if name not in self._loaded:
            self._loaded[name] = load(path, settings)
        return self._loaded[name]

    def tuning(self, tasks: Iterable[str]) -> Iterator[Piece]:
        """The runs that choose the learning rates of these tasks; none for a single rate."""
        for task in tasks:
            grid, baseline = self.bench.lrs_of(task), (task, self.bench.baseline_of(task))
            for seed in self.bench.tuning_seeds if len(grid) > 1 else ():
                yield from (self.piece(baseline, lr, seed) for lr in grid)

    def learning_rate(self, task: str) -> float | None:
        """The chosen one; None until every run that chooses it is done."""
        grid = self.bench.lrs_of(task)
        areas = dict.fromkeys(grid, 0.0)
        for one in self.tuning([task]):
            if one.digest not in self.done:
                return None
            areas[one.name[2]] += fmean(score for _, score in self.done[one.digest].curve)
        return max(grid, key=areas.__getitem__)

    def reported(self, pairs: Iterable[Pair], seeds: Iterable[int]) -> Iterator[Piece]:
        """The runs of all pairs whose learning rate is chosen, one seed after the other."""
        chosen = [(pair, lr) for pair in pairs if (lr := self.learning_rate(pair[0])) is not None]
        for seed in seeds:
            for pair, lr in chosen:
                if seed in self.bench.seeds_of(pair):
                    yield self.piece(pair, lr, seed)


def read_bench(file: Path) -> Bench:
    """Raises ConfigError for what is no bench file, and for seeds or presets that cannot be."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        bench = msgspec.convert(check_keys(Bench, data, source=str(file)), Bench)
    except (OSError, ValueError) as error:  # of TOML, of UTF-8 and of values, too
        raise ConfigError(f"{file}: {format_validation_error(str(error))}") from None
    for name in [bench.baseline, *(name for task in bench.tasks.values() for name in task.presets)]:
        if name not in bench.presets:
            raise ConfigError(f"{file}: preset {name!r}; {nearest(name, bench.presets)}")
    reported = {seed for pair in bench.pairs() for seed in bench.seeds_of(pair)}
    if both := reported & set(bench.tuning_seeds):
        raise ConfigError(f"{file}: seeds {sorted(both)} are tuned on, so they cannot be reported")
    return bench


def _digest(config: RunConfig, named: Iterable[str], *more: str) -> str:
    """Of texts, and of the files that settings name as file.py:name."""
    found = sha256("\0".join(more).encode())
    for file in sorted({config.path(name.rpartition(":")[0]) for name in named if ".py:" in name}):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
