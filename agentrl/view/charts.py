"""Which curves the page of a run has, in words, with axes that fit and without empty ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.scores import MISSING, decisive
from agentrl.store.base import Store
from agentrl.types import RunState
from agentrl.view import records
from agentrl.view.summaries import (
    FUNCTIONS,
    REWARD,
    SCORE,
    Points,
    in_unit,
    offset,
    shares,
    verdict,
    with_changes,
)

POINTS = 400  # per curve

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
TINY = 1e-6  # a curve below it everywhere is rounding


@dataclass(frozen=True, slots=True)
class Chart:
    name: str  # of its first metric, by which the page finds it
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
    known = tuple((label, metric) for label, metric in lines if metric in names)
    return Chart(REWARD, "Held-out and training", known) if known else None


def games(names: Sequence[str]) -> list[Chart]:
    """Of the user's own functions, such as exploitability, and of self-play."""
    own = sorted(
        (name for name in names if name.startswith(FUNCTIONS)),
        key=lambda name: "exploitability" not in name,
    )
    seats = tuple((n.rpartition("/")[2], n) for n in names if n.startswith("selfplay/seat/"))
    found = [single(name, title) for name, title in GAMES.items() if name in names]
    found += [Chart(seats[0][1], "Score by seat", seats)] if seats else []
    functions = [single(name, name.removeprefix(FUNCTIONS)) for name in own]
    exploited = [one for one in functions if "exploitability" in one.name]
    return exploited + found + functions[len(exploited) :]


def rewards(names: Sequence[str]) -> list[Chart]:
    """One chart of the roles of a team, and one for each reward, with a line for each role."""
    roles = tuple((m[1], m[0]) for name in names if (m := OF_A_ROLE.fullmatch(name)))
    found = [Chart(roles[0][1], "Reward by role", roles)] if len(roles) > 1 else []
    by_reward: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        match = REWARDS.fullmatch(name)
        if match and not (roles and match[1] == "role:outcome"):  # the rewards of the roles
            by_reward.setdefault(match[1], []).append((match[2] or "all", name))
    for reward, lines in sorted(by_reward.items()):
        by_role = [line for line in lines if line[0] != "all"] or lines
        title = f"Reward {reward}" + (", by role" if len(by_role) > 1 else "")
        found.append(Chart(by_role[0][1], title, tuple(by_role)))
    return found


def training(names: Sequence[str], policies: Sequence[str]) -> list[Chart]:
    found = []
    for metric, title in TRAINING.items():
        lines = [(title, metric)] if metric in names else []
        lines += [(name, own) for name in policies if (own := f"{name}/{metric}") in names]
        if lines:
            found.append(Chart(lines[0][1], title, tuple(lines)))
    return found


def drawn(
    chart: Chart, series: Mapping[str, Points], *, percent: bool = True
) -> dict[str, Any] | None:
    """What the template and the script need to draw a chart; None without a value. `percent`:
    whether the scores of the run are percentages."""
    lines = [
        (label, metric, [(step + offset(metric), y) for step, y in series.get(metric) or []])
        for label, metric in chart.lines
    ]
    known: list[tuple[str, str, Points]] = []
    for label, metric, points in lines:
        same = next((at for at, one in enumerate(known) if one[2] == points), None)
        if same is not None:  # roles that share a reward have one line
            known[same] = f"{known[same][0]}, {label}", *known[same][1:]
        elif any(math.isfinite(y) for _, y in points):
            known.append((label, metric, points))
    if not known:
        return None
    unit = in_unit(points for *_, points in known) and _is_share(chart)
    unit = unit and (percent or not {SCORE, REWARD} & {*chart.metrics})
    flat = [y for *_, points in known for _, y in points if math.isfinite(y)]
    bounds = (0.0, 1.0) if unit else (min(flat), max(flat))
    steps = [step for *_, points in known for step, _ in points]
    span = min(steps), max(steps)
    return {
        "name": chart.name,
        "title": chart.title,
        "unit": unit,
        "lines": [[label, metric] for label, metric, _ in known],
        "offsets": [offset(metric) for _, metric, _ in known],
        "paths": [records.curve(points, span=span, bounds=bounds) for *_, points in known],
        "quiet": _says_nothing([points for *_, points in known]),
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
        known = [y for _, y in points if math.isfinite(y)]
        most = max(map(abs, known), default=0.0)
        if most >= TINY and max(known) - min(known) > 1e-3 * most:
            return False
    return any(len(points) > 1 for points in lines)


async def page(
    store: Store, state: RunState, names: Sequence[str], wanted: str | None
) -> dict[str, Any]:
    """The verdict and the charts of a run's page, with their points. `names`: of the metrics that
    it has; `wanted`: one that the reader chose."""
    policies: Any = state.config.get("policies") or {}
    top, chosen = main(names), [single(wanted)] if wanted in names and wanted else []
    played, paid, trained = games(names), rewards(names), training(names, list(policies))
    every = [*([top] if top else []), *chosen, *played, *paid, *trained]
    asked = {metric for chart in every for metric in chart.metrics}
    asked |= {*decisive(names), *MISSING}
    found = await store.series(state.run, sorted(asked), points=POINTS)
    percent = shares(found)
    first = drawn(top, found, percent=percent) if top else None
    if top and first and first["quiet"] and played:  # a game: one seat's win is another's loss
        first, played = None, [*played, top]
    values: dict[str, Any] = {"quiet": []}
    for name, group in {"played": played, "paid": paid, "trained": [*chosen, *trained]}.items():
        made = [one for chart in group if (one := drawn(chart, found, percent=percent))]
        values[name] = [one for one in made if not one["quiet"] or one["name"] == wanted]
        values["quiet"] += [one for one in made if one not in values[name]]
    if first is None and values["played"]:
        first = values["played"].pop(0)
    (said,) = await with_changes(store, state.run, verdict(found))
    values |= {"main": first, "verdict": said, "percent": percent}
    return values | {"series": {name: records.finite(one) for name, one in found.items()}}
