"""Summaries of runs: score before -> after with its interval, state, settings, and curves.

Curves have titles in words and axes that fit; empty ones are left out.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from agentrl.algorithms.verdict import HELD_OUT, Change, held_out_changes, paired
from agentrl.algorithms.verdict import SAMPLED as SAMPLED_HELD_OUT
from agentrl.core.config import from_store
from agentrl.core.config.derived import UNBOUNDED
from agentrl.core.config.validate import flatten
from agentrl.core.errors import AgentRLError
from agentrl.core.types import (
    MISSING,
    ROUNDING,
    Json,
    RunState,
    are_shares,
    decisive,
    metric_step,
)
from agentrl.store.base import Store
from agentrl.view import records

SCORE, REWARD, FUNCTIONS = "eval/score", "reward/mean", "eval/function/"
SAMPLED = "eval/sampled"
POINTS, EVERY = 60, 10**6  # points of a curve in a list; all points
PLAIN_NAMES = {"model", "policy", "checkpoint", "best", "final"}  # uninformative names of folders
BY_STATE = "credit/by_state"  # how far the preset `auto` trusts values of states
# Settings that do not distinguish runs: locations and monitoring.
PLACES = {
    "name", "root", "output", "store", "file", "seed", "keep_checkpoints", "metrics", "runner",
}  # fmt: skip
LESS_IS_BETTER = ("exploitability", "loss", "regret", "illegal", "error", "perplexity", "cost")
Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Score:
    """A score at a step, with its interval if it has one."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None
    missing: float = 0.0  # rollouts without a score, which are left out


@dataclass(frozen=True, slots=True)
class Verdict:
    """The change of a run's most informative metric. None: there is none."""

    metric: str
    first: Score | None = None
    last: Score | None = None
    percent: bool = False  # whether it is between 0 and 1
    less: bool = False  # whether less is better
    change: Change | None = None  # change of a held-out score compared with chance

    @property
    def name(self) -> str:
        names = {SCORE: "held-out", SAMPLED: "sampled held-out", REWARD: "training reward"}
        return names.get(self.metric, self.metric.removeprefix(FUNCTIONS))

    @property
    def gain(self) -> float:
        """The gain: above 0 for an improvement; 0 if unknown."""
        if self.first is None or self.last is None:
            return 0.0
        return (self.first.value - self.last.value) * (1 if self.less else -1)

    @property
    def outcome(self) -> str:
        """Whether the score became better or worse by more than chance, else same: for held-out
        scores by the rule of `agentrl why`, for other metrics if their intervals do not overlap."""
        if self.change is not None and math.isfinite(self.change.noise):
            return "better" if self.change.risen else "worse" if self.change.fallen else "same"
        if self.first is None or self.last is None or self.first.step == self.last.step:
            return "same"
        below, above = (self.first, self.last) if self.gain > 0 else (self.last, self.first)
        if self.less:
            below, above = above, below
        bounded = below.high is not None and above.low is not None  # a single task has no interval
        apart = (below.high or 0.0) < (above.low or 0.0) if bounded else not self.percent
        word = "better" if self.gain > 0 else "worse"
        return word if apart and abs(self.gain) > ROUNDING and self.metric != REWARD else "same"


def by_number(series: Mapping[str, Points]) -> dict[str, Points]:
    """Curves with the numbers of steps that people see, from stored ones."""
    return {
        name: [(metric_step(name, step), y) for step, y in points]
        for name, points in series.items()
    }


def in_unit(curves: Iterable[Points]) -> bool:
    """Whether all values lie in 0 to 1, so that they can be shown as percentages."""
    values = [y for points in curves for _, y in points if math.isfinite(y)]
    return bool(values) and all(-ROUNDING <= y <= 1 + ROUNDING for y in values)


def shares(curves: Mapping[str, Points]) -> bool:
    """Whether the run's scores are shown as percentages, as on its console."""
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for name in decisive(curves):
        for step, y in curves[name]:
            rows[step][name] = y
    return are_shares(rows.values())


async def read_shares(store: Store, run: str, outcomes: Iterable[float] = ()) -> bool:
    """Whether the scores of a run are shown as percentages. outcomes: shown beside them."""
    names = decisive(await store.metric_names(run))
    return shares(await store.series(run, names, points=POINTS)) and are_shares((), outcomes)


def verdict(curves: Mapping[str, Points]) -> Verdict:
    """The verdict on held-out scores if there are two, else on the user's evaluation functions,
    else on the reward."""
    functions = sorted(
        (name for name in curves if name.startswith(FUNCTIONS)),
        key=lambda name: "exploitability" not in name,
    )
    wanted = [SCORE, *functions, REWARD]
    points = {name: _finite(curves.get(name, ())) for name in wanted}
    chosen = next((name for name in wanted if len(points[name]) > 1), None)
    chosen = chosen or next((name for name in wanted if points[name]), SCORE)
    return verdict_on(chosen, curves)


def verdict_on(metric: str, curves: Mapping[str, Points]) -> Verdict:
    """The verdict on one metric."""
    points = _finite(curves.get(metric, ()))
    if not points:
        return Verdict(metric)
    bounds = (curves.get(f"{metric}_{end}", ()) for end in ("low", "high"))
    low, high = map(dict, bounds)
    missing = dict(curves.get(f"{metric}_missing", ()))
    first, last = (
        Score(step, value, low.get(step), high.get(step), missing.get(step, 0.0))
        for step, value in (points[0], points[-1])
    )
    if metric == REWARD and len(points) >= 10:  # single steps are noisy
        fifth = len(points) // 5
        ends = points[:fifth], points[-fifth:]
        first, last = (Score(end[-1][0], sum(y for _, y in end) / fifth) for end in ends)
    first, last = (replace(score, step=metric_step(metric, score.step)) for score in (first, last))
    percent = metric in (SCORE, SAMPLED, REWARD) and shares(curves)
    less = any(word in metric for word in LESS_IS_BETTER)
    return Verdict(metric, first, last, percent, less)


async def with_changes(store: Store, run: str, *verdicts: Verdict) -> list[Verdict]:
    """Add the paired change of held-out scores to verdicts: each task is compared with itself."""
    keys = {SCORE: HELD_OUT, SAMPLED: SAMPLED_HELD_OUT}
    if not any(verdict.metric in keys and verdict.last for verdict in verdicts):
        return [*verdicts]
    names = [f"{key}{end}" for key in keys for end in ("", "_low", "_high")]
    curves = await store.series(run, [*names, "eval/common"], points=EVERY)
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for name, points in curves.items():
        for step, y in points:
            rows[step][name] = y
    by_step = [rows[step] for step in sorted(rows)]
    steps = {
        name: [step for step in sorted(rows) if key in rows[step]] for key, name in keys.items()
    }
    changes = await paired(store, run, held_out_changes(by_step), steps)
    return [
        replace(verdict, change=changes.get(keys.get(verdict.metric, ""))) for verdict in verdicts
    ]


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(step, y) for step, y in points if math.isfinite(y)]


def condition(state: RunState, *, ended: bool, now: float) -> str:
    """running, finished, stopped (neither of them), or empty: without settings."""
    if state.owned_until > now:
        return "running"
    return "finished" if ended else "stopped" if state.config else "empty"


@dataclass(frozen=True, slots=True)
class Summary:
    """A line of the list of runs."""

    run: str
    state: RunState
    verdict: Verdict
    sampled: Verdict  # on scores at temperature 1, if there are any
    curve: Points
    percent: bool  # whether its scores are percentages
    ended: bool
    at: float  # time of the last step, in unix seconds
    facts: Mapping[str, str]
    settings: Mapping[str, Json] = field(default_factory=dict)

    def condition(self, now: float | None = None) -> str:
        return condition(self.state, ended=self.ended, now=now or time.time())


async def summary(store: Store, state: RunState) -> Summary:
    available = await store.metric_names(state.run)
    functions = [name for name in available if name.startswith(FUNCTIONS)]
    names = [SCORE, *decisive(available), *functions, *MISSING, "run/ended"]
    curves: dict[str, Points] = dict(await store.series(state.run, names, points=POINTS))
    named = verdict(curves), verdict_on(SAMPLED, curves)
    main_verdict, sampled = await with_changes(store, state.run, *named)
    rows = await store.steps(state.run, after=max(state.step - 2, -1))
    return Summary(
        run=state.run,
        state=state,
        verdict=main_verdict,
        sampled=sampled,
        curve=curves.get(main_verdict.metric, ()),
        percent=shares(curves),
        ended=bool(curves["run/ended"]),
        at=rows[-1].at if rows else state.created,
        facts=facts(state.config),
        settings=flatten(state.config),
    )


def whole_settings(row: Summary) -> Mapping[str, Json]:
    """The settings with the defaults of this version, if it can read them."""
    try:
        whole: dict[str, Json] = flatten(msgspec.to_builtins(from_store(row.state.config)))
    except AgentRLError:
        return row.settings
    return whole


def facts(config: Mapping[str, Any], by_state: float | None = None) -> dict[str, str]:
    """The main settings of a run: model, preset and learning rate. Works for stored settings of any
    version."""

    def read(*path: str) -> Any:
        value: Any = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value or ""

    model = _called(str(read("policy", "model") or read("policy", "build")), str(read("root")))
    lr, steps, heldout = read("algorithm", "lr"), read("steps"), read("tasks", "heldout")
    policies = ", ".join(read("policies") or ())
    texts = {
        "model": model or ", ".join(read("upstreams") or ()),
        "preset": preset_in_words(str(read("algorithm", "preset")), by_state),
        "learning rate": f"{lr:.3g}" if isinstance(lr, float | int) else "",
        "policies": policies,
        "tasks": f"{read('tasks', 'train')}" + (f", held-out {heldout}" if heldout else ""),
        "planned steps": str(steps) if steps != UNBOUNDED else "",
    }
    if not steps:  # without training, as with `agentrl eval`
        texts |= {"preset": "", "learning rate": "", "planned steps": ""}
    return {key: text for key, text in texts.items() if text}


def _called(model: str, root: str) -> str:
    """A short name of a model: its hub name, or that of its folder (or the parent, if the folder is
    called `model`)."""
    folder = Path(root, model)
    if not (model.startswith((".", "/")) or (model and folder.is_dir())):
        return model
    folder = Path(os.path.normpath(folder))
    if folder.parent.name == "checkpoints":
        return f"{folder.parts[-3]}, {folder.name}"
    return "/".join(folder.parts[-2:]) if folder.name in PLAIN_NAMES else folder.name


def preset_in_words(preset: str, by_state: float | None = None) -> str:
    """The preset; for `auto` with the measured share of credit by state."""
    auto, plus, options = preset.partition("+")
    if auto != "auto":
        return preset
    share = "" if by_state is None else f", {by_state:.0%} by state"
    return f"auto: grpo{plus}{options}{share}"


def differing(rows: Sequence[Summary]) -> list[dict[str, Json]]:
    """The distinguishing settings of each run among those of the same agent: values that most of
    the others do not have."""
    kin: dict[Any, list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        settings = row.settings
        kin[
            tuple(str(settings.get(key)) for key in ("root", "agent.path", "agent.command"))
        ].append(at)
    distinct: list[dict[str, Json]] = [{} for _ in rows]
    for alike in kin.values():
        for key in sorted({key for at in alike for key in rows[at].settings} - PLACES):
            if key.partition(".")[0] in PLACES or len(alike) < 2:
                continue
            values = [repr(rows[at].settings.get(key)) for at in alike]
            (usual, n), *others = Counter(values).most_common()
            tied = bool(others) and others[0][1] == n
            for at, value in zip(alike, values, strict=True):
                if others and (value != usual or tied):
                    distinct[at][key] = rows[at].settings.get(key)
    return distinct


def matrix(rows: Sequence[Mapping[str, Json]]) -> dict[str, list[Json]]:
    """Setting -> its value in each run, for settings that differ."""
    keys = sorted({key for row in rows for key in row})
    return {
        key: [row.get(key) for row in rows]
        for key in keys
        if key.partition(".")[0] not in PLACES and len({repr(row.get(key)) for row in rows}) > 1
    }


CHART_POINTS = 400  # per curve


# Metric -> its name in words, in the order of the page.
TRAINING = {
    "policy/entropy": "Entropy, in nats per token",
    "grad_norm": "Gradient norm",
    "completion/length_mean": "Tokens per call",
    "reward/outcome/frac_zero_std": "Groups of equal outcomes",
    "sampler/kl": "Trainer against sampler, KL",
    "time/rollouts": "Seconds of rollouts per step",
}
ELO, WIN_RATE = "selfplay/elo", "selfplay/win_rate"
GAMES = {ELO: "Elo", WIN_RATE: "Win rate against snapshots"}
OF_A_ROLE = re.compile(r"role/(.+)/reward")
REWARDS = re.compile(r"reward/([^/]+)(?:/(.+))?/mean")
TINY = 1e-6  # a curve of smaller absolute values shows only rounding


@dataclass(frozen=True, slots=True)
class Chart:
    name: str  # name of the first metric, as the key of the chart
    title: str
    lines: tuple[tuple[str, str], ...]  # (label, metric)

    @property
    def metrics(self) -> list[str]:
        return [metric for _, metric in self.lines]


def single(metric: str, title: str = "") -> Chart:
    return Chart(metric, title or metric, ((title or metric, metric),))


def main(names: Sequence[str]) -> Chart | None:
    """Held-out score and training reward on one pair of axes."""
    lines = ((("held-out"), SCORE), ("training reward", REWARD))
    present = tuple((label, metric) for label, metric in lines if metric in names)
    return Chart(REWARD, "Held-out and training", present) if present else None


def games(names: Sequence[str]) -> list[Chart]:
    """Charts of the user's evaluation functions, such as exploitability, and of self-play."""
    function_names = sorted(
        (name for name in names if name.startswith(FUNCTIONS)),
        key=lambda name: "exploitability" not in name,
    )
    seats = tuple((n.rpartition("/")[2], n) for n in names if n.startswith("selfplay/seat/"))
    charts = [single(name, title) for name, title in GAMES.items() if name in names]
    charts += [Chart(seats[0][1], "Score by seat", seats)] if seats else []
    functions = [single(name, name.removeprefix(FUNCTIONS)) for name in function_names]
    exploited = [chart for chart in functions if "exploitability" in chart.name]
    return exploited + charts + functions[len(exploited) :]


def rewards(names: Sequence[str]) -> list[Chart]:
    """One chart of the roles of a team, and one for each reward, with a line for each role."""
    roles = tuple((m[1], m[0]) for name in names if (m := OF_A_ROLE.fullmatch(name)))
    charts = [Chart(roles[0][1], "Reward by role", roles)] if len(roles) > 1 else []
    by_reward: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        match = REWARDS.fullmatch(name)
        if match and not (roles and match[1] == "role:outcome"):  # rewards of roles
            by_reward.setdefault(match[1], []).append((match[2] or "all", name))
    for reward, lines in sorted(by_reward.items()):
        by_role = [line for line in lines if line[0] != "all"] or lines
        title = f"Reward {reward}" + (", by role" if len(by_role) > 1 else "")
        charts.append(Chart(by_role[0][1], title, tuple(by_role)))
    return charts


def training(names: Sequence[str], policies: Sequence[str]) -> list[Chart]:
    charts = []
    for metric, title in TRAINING.items():
        lines = [(title, metric)] if metric in names else []
        lines += [
            (name, policy_metric)
            for name in policies
            if (policy_metric := f"{name}/{metric}") in names
        ]
        if lines:
            charts.append(Chart(lines[0][1], title, tuple(lines)))
    return charts


def drawn(
    chart: Chart, series: Mapping[str, Points], *, percent: bool = True
) -> dict[str, Any] | None:
    """The values for drawing a chart; None without a value. `series`: as of `by_number`; `percent`:
    whether the scores of the run are percentages."""
    lines: list[tuple[str, str, Points]] = []
    for label, metric in chart.lines:
        points = series.get(metric) or []
        same = next((at for at, line in enumerate(lines) if line[2] == points), None)
        if same is not None:  # one line for roles with the same rewards
            lines[same] = f"{lines[same][0]}, {label}", *lines[same][1:]
        elif any(math.isfinite(y) for _, y in points):
            lines.append((label, metric, points))
    if not lines:
        return None
    unit = in_unit(points for *_, points in lines) and _is_share(chart)
    unit = unit and (percent or not {SCORE, REWARD} & {*chart.metrics})
    flat = [y for *_, points in lines for _, y in points if math.isfinite(y)]
    bounds = (0.0, 1.0) if unit else (min(flat), max(flat))
    steps = [step for *_, points in lines for step, _ in points]
    span = min(steps), max(steps)
    return {
        "name": chart.name,
        "title": chart.title,
        "unit": unit,
        "lines": [[label, metric] for label, metric, _ in lines],
        "paths": [records.curve(points, span=span, bounds=bounds) for *_, points in lines],
        "quiet": _says_nothing([points for *_, points in lines]),
        "low": min(flat),
        "high": max(flat),
    }


def _is_share(chart: Chart) -> bool:
    """Whether its values are scores, rewards or shares, for which 0 and 1 are the natural ends."""
    shares = (SCORE, "reward/", "role/", WIN_RATE, "selfplay/seat/")
    return any(
        word in f"/{metric}" for metric in chart.metrics for word in map("/{}".format, shares)
    )


def _says_nothing(lines: Sequence[Points]) -> bool:
    """Whether no line moves, or only by rounding."""
    for points in lines:
        values = [y for _, y in points if math.isfinite(y)]
        largest = max(map(abs, values), default=0.0)
        if largest >= TINY and max(values) - min(values) > 1e-3 * largest:
            return False
    return any(len(points) > 1 for points in lines)


async def page(
    store: Store, state: RunState, names: Sequence[str], wanted: str | None
) -> dict[str, Any]:
    """The verdict and the charts of a run's page, with their points. `names`: the run's metrics;
    `wanted`: a metric that the user chose."""
    policies: Any = state.config.get("policies") or {}
    top, chosen = main(names), [single(wanted)] if wanted in names and wanted else []
    played, paid, trained = games(names), rewards(names), training(names, list(policies))
    charts = [*([top] if top else []), *chosen, *played, *paid, *trained]
    metrics = {metric for chart in charts for metric in chart.metrics}
    metrics |= {*decisive(names), *MISSING}
    series = await store.series(state.run, sorted(metrics), points=CHART_POINTS)
    percent = shares(series)
    curves = by_number(series)
    first = drawn(top, curves, percent=percent) if top else None
    if top and first and first["quiet"] and played:  # a zero-sum game
        first, played = None, [*played, top]
    values: dict[str, Any] = {"quiet": []}
    for name, group in {"played": played, "paid": paid, "trained": [*chosen, *trained]}.items():
        plots = [plot for chart in group if (plot := drawn(chart, curves, percent=percent))]
        values[name] = [plot for plot in plots if not plot["quiet"] or plot["name"] == wanted]
        values["quiet"] += [plot for plot in plots if plot not in values[name]]
    if first is None and values["played"]:
        first = values["played"].pop(0)
    (main_verdict,) = await with_changes(store, state.run, verdict(series))
    values |= {"main": first, "verdict": main_verdict, "percent": percent}
    return values | {"series": {name: records.finite(points) for name, points in curves.items()}}
