"""The first screen of a run: the improvement, its reasons, and one success and one failure as text.
Also values of other pages: groups with their tasks and, in games, the outcome of a seat; all
settings as tables, changed ones first; the output of `agentrl explain` as tables of rewards and of
the steps from them to each call's weight (unknown lines are kept as notes).
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.why import findings
from agentrl.core.config import from_store
from agentrl.core.config.validate import flatten
from agentrl.core.errors import AgentRLError
from agentrl.core.types import (
    INSTRUCTION_ROLES,
    Json,
    Purpose,
    Rollout,
    RolloutState,
    RunState,
    Scope,
    Trace,
    step_in_words,
    step_number,
    stored_steps,
)
from agentrl.store.base import Store
from agentrl.store.records import CallRow, GroupRow, RolloutRow
from agentrl.transcript import best_title
from agentrl.view import records
from agentrl.view.records import Album, Paging, Picture

READING_PATIENCE = 3.0  # seconds for which a page waits for reasons; later ones need a reload
REASONS_PAUSE = 30.0  # seconds between two readings of a running run, which slow it down
EVALUATIONS = 12  # evaluations that are read
RECENT_GROUPS = 24  # training groups that are searched for an example
MESSAGES, MAX_EXAMPLE_CHARS = 6, 480  # of an example: messages, and characters of each
TASKS_ON_FRONT = 8
GROUPS_FOUND = 16  # groups whose tasks are read for a page of search results
COMPLETIONS = 64  # rollouts of a step whose completions are listed


class ShownRollout(NamedTuple):
    """A rollout of the first screen."""

    title: str
    good: bool
    where: str
    rollout: str
    task: str
    outcome: float | None
    failure: str
    talk: list[dict[str, Any]]
    left_out: int  # messages that are not shown


class TaskRow(NamedTuple):
    """A task with its outcomes over time."""

    text: str
    outcomes: list[float | None]  # one per evaluation, oldest first
    rollout: str  # its last rollout

    @property
    def last(self) -> float | None:
        return next((outcome for outcome in reversed(self.outcomes) if outcome is not None), None)

    @property
    def trend(self) -> float:
        present = [outcome for outcome in self.outcomes if outcome is not None]
        return present[-1] - present[0] if len(present) > 1 else 0.0


class Reasons:
    """Why runs do or do not improve; read once for each step of a run, and not too often."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._readings: dict[str, tuple[float, float, asyncio.Task[list[dict[str, Any]]]]] = {}

    async def of(self, state: RunState, at: float) -> list[dict[str, Any]] | None:
        """For each policy its `name`, number of `steps`, whether it `improved`, the verdict
        (`said`), and `reasons` (text, change); None: still being read."""
        if not state.config:
            return []
        now = time.monotonic()
        of, since, reading = self._readings.get(state.identity, (math.nan, -math.inf, None))
        fresh = of == at or (state.owned_until > time.time() and now - since < REASONS_PAUSE)
        if reading is None or not fresh:
            reading = asyncio.ensure_future(self._read(state.run))
            self._readings[state.identity] = at, now, reading
        done, _ = await asyncio.wait({reading}, timeout=READING_PATIENCE)
        return reading.result() if done else None

    async def _read(self, run: str) -> list[dict[str, Any]]:
        try:
            return await findings(self._store, run)
        except (AgentRLError, ValueError, LookupError) as error:
            unread = {"name": "", "steps": 0, "improved": False, "reasons": []}
            return [unread | {"error": str(error)}]


async def evaluations(store: Store, run: str) -> list[GroupRow]:
    """The last evaluations of the held-out tasks, newest first; greedy where both exist."""
    rows = await store.groups(run, purpose=Purpose.EVAL, limit=2 * EVALUATIONS)
    rows.sort(key=lambda row: (-row.step, "/sampled" in row.id))
    by_step: dict[int, GroupRow] = {}
    for row in rows:
        if row.rollouts:
            by_step.setdefault(row.step, row)
    first = await store.groups(run, purpose=Purpose.EVAL, step=0, limit=2)
    for row in sorted(first, key=lambda row: "/sampled" in row.id):
        if row.rollouts:
            by_step.setdefault(row.step, row)
    return list(by_step.values())


async def examples(
    store: Store,
    album: Album,
    run: str,
    held_out: Sequence[GroupRow],
    *,
    game: bool,
    share: bool = False,
) -> list[ShownRollout]:
    """A success and a failure: of the last evaluation, else on the same task in an earlier
    evaluation, else of the last training steps. For a game, in which each rollout has winners and
    losers, two rollouts. share: whether outcomes are from 0 to 1, so that even the best may not be
    a success."""
    trained = await store.groups(run, purpose=Purpose.TRAIN, limit=RECENT_GROUPS)
    groups = [*held_out, *trained]
    if game and (seats := await _games(store, album, run, groups)):
        return seats
    good = next((picked for row in groups if (picked := _pick(row, good=True))), None)
    bad, same = None, ""
    if good is not None and held_out and good[0] is held_out[0]:
        at = good[0].rollouts.index(good[1])
        later = (row for row in held_out[1:] if at < row.n and _fails(row, at))
        bad = _pick(held_out[0], good=False)
        if bad is None and (row := next(later, None)) is not None:
            bad, same = (row, row.rollouts[at]), ", the same task"
    bad = bad or next((picked for row in groups if (picked := _pick(row, good=False))), None)
    shown = []
    if good is not None:
        row, id = good
        title = best_title(row.outcomes[row.rollouts.index(id)] or 0.0, share=share)
        shown.append(await _example(store, album, title, row, id, good=True))
    if bad is not None:
        shown.append(await _example(store, album, "A failure", *bad, good=False, note=same))
    return [example for example in shown if example is not None]


async def _games(
    store: Store, album: Album, run: str, groups: Sequence[GroupRow]
) -> list[ShownRollout]:
    """A game that the first seat won, and one that it lost; [] without rewards of seats."""
    row = next((row for row in groups if row.rollouts), None)
    if row is None:
        return []
    scored = [
        (reward.value, reward.target, rollout.id)
        for rollout in await store.rollouts(run, group=row.id)
        for reward in rollout.rewards
        if reward.scope is Scope.ROLE and reward.name == "outcome"
    ]
    seat = min((seat for _, seat, _ in scored if seat), default=None)
    seat_values = sorted((value, id) for value, target, id in scored if target == seat)
    if not seat_values or seat_values[0][0] >= seat_values[-1][0]:
        return []
    shown = []
    for (value, id), word in ((seat_values[-1], "won"), (seat_values[0], "lost")):
        good = value > 0
        title = f"{seat} {word}"
        shown.append(await _example(store, album, title, row, id, good=good, outcome=value))
    return [example for example in shown if example is not None]


def _fails(row: GroupRow, at: int) -> bool:
    value = row.outcomes[at]
    failed = row.states[at] is RolloutState.FAILED
    return failed or (value is not None and value <= 0)


def _pick(row: GroupRow, *, good: bool) -> tuple[GroupRow, str] | None:
    """The best rollout with an outcome above 0, or the first that failed."""
    if good:
        successes = [(row.outcomes[at] or 0.0, -at) for at in range(row.n) if not _fails(row, at)]
        successes = [(value, at) for value, at in successes if value > 0]
        return (row, row.rollouts[-max(successes)[1]]) if successes else None
    bad = next((at for at in range(row.n) if _fails(row, at)), None)
    return None if bad is None else (row, row.rollouts[bad])


async def _example(
    store: Store,
    album: Album,
    title: str,
    row: GroupRow,
    id: str,
    *,
    good: bool,
    note: str = "",
    outcome: float | None = None,
) -> ShownRollout | None:
    ends = await _ends(store, id)
    if ends is None:
        return None
    trace, between = ends
    pictures = await album.of(trace.rollout.run, trace.transitions)
    talk = [
        message
        for message in records.talk(trace.transitions, pictures)
        if (message["text"] or message["tools"]) and message["role"] not in INSTRUCTION_ROLES
    ]
    for message in talk:
        message["text"] = message["text"][:MAX_EXAMPLE_CHARS]
        message["parts"] = [
            x if isinstance(x, Picture) else x[:MAX_EXAMPLE_CHARS] for x in message["parts"]
        ]
        message["tools"] = [
            (name, words[:MAX_EXAMPLE_CHARS], cut) for name, words, cut in message["tools"]
        ]
    outcome = row.outcomes[row.rollouts.index(id)] if outcome is None else outcome
    failure = trace.rollout.failure
    kind = "held-out" if row.purpose is Purpose.EVAL else "training"
    where = step_in_words(row.step, row.purpose)
    return ShownRollout(
        title=title,
        good=good,
        where=(where if row.step < 0 else f"{kind}, {where}") + note,
        rollout=id,
        task=records.gist(trace.rollout.task),
        outcome=outcome,
        failure=f"{failure.kind.value.replace('_', ' ')}: {failure.message[:MAX_EXAMPLE_CHARS]}"
        if failure
        else "",
        talk=talk[: MESSAGES - 1] + talk[-1:] if len(talk) > MESSAGES else talk,
        left_out=max(len(talk) + between - MESSAGES, 0),
    )


async def _ends(store: Store, id: str) -> tuple[Trace, int] | None:
    """The first and the last call of a rollout, all calls if there are few, and the number of
    omitted messages."""
    trace = await store.trace(id, limit=records.CALLS_PER_PAGE)
    if trace is None or len(trace.transitions) < records.CALLS_PER_PAGE:
        return None if trace is None else (trace, 0)
    outline = await store.outline(id)
    left_out = outline[len(trace.transitions) : -1]
    last = await store.trace(id, first=len(outline) - 1, limit=1)
    if not last or len(outline) <= len(trace.transitions):
        return trace, 0
    (call,), row = last.transitions, outline[-1]
    # Only new messages are shown, not the repeated history.
    new = replace(call, messages=call.messages[records.shown_before(call, row, outline) :])
    between = sum(row.messages - row.shared + 1 for row in left_out)
    return replace(trace, transitions=[*trace.transitions, new]), between


async def held_out_tasks(
    store: Store, run: str, held_out: Sequence[GroupRow]
) -> tuple[list[int], list[TaskRow]]:
    """The steps of the evaluations, oldest first, and the tasks, hardest first. All evaluations of
    a run take the same tasks in the same order, some of them only the first ones."""
    if not held_out:
        return [], []
    order = list(reversed(held_out))
    widest = max(held_out, key=lambda row: row.n)
    rows = await store.rollouts(run, group=widest.id)
    places: dict[str, list[int]] = {}
    texts: dict[str, Json] = {}
    for at, row in enumerate(rows):
        key = records.text_of(row.task)
        places.setdefault(key, []).append(at)
        texts[key] = row.task
    task_rows = []
    for key, indices in places.items():
        outcomes = [_mean(row, indices) for row in order]
        last = next((row for row in held_out if indices[0] < row.n), widest)
        task_rows.append(TaskRow(records.gist(texts[key]), outcomes, last.rollouts[indices[0]]))
    return [row.step for row in order], sorted(task_rows, key=_hardest)


def training_tasks(groups: Sequence[Listed]) -> tuple[list[int], list[TaskRow]]:
    """The same for training groups: the numbers of recent steps, and the tasks, hardest first."""
    steps = sorted({item.row.step for item in groups})
    by_task: dict[str, dict[int, GroupRow]] = {}
    texts: dict[str, str] = {}
    for group, task, *_ in groups:
        key = records.text_of(task)
        by_task.setdefault(key, {})[group.step] = group
        texts[key] = records.gist(task)
    task_rows = []
    for key, at in by_task.items():
        outcomes = [_mean(at[step], range(at[step].n)) if step in at else None for step in steps]
        task_rows.append(TaskRow(texts[key], outcomes, at[max(at)].rollouts[0]))
    return [step_number(step) for step in steps], sorted(task_rows, key=_hardest)


def _mean(row: GroupRow, places: Sequence[int]) -> float | None:
    present = [x for at in places if at < row.n and (x := row.outcomes[at]) is not None]
    return sum(present) / len(present) if present else None


def _hardest(row: TaskRow) -> tuple[bool, float, float]:
    """The sort key of a task: its last outcome, then the mean of all; those without come last."""
    present = [outcome for outcome in row.outcomes if outcome is not None]
    return row.last is None, row.last or 0.0, sum(present) / max(len(present), 1)


async def tasks_of(store: Store, run: str, rows: Sequence[RolloutRow]) -> dict[str, str]:
    """One line per task, by rollout id, for a few groups."""
    groups = list(dict.fromkeys(row.group for row in rows))[:GROUPS_FOUND]
    read = await asyncio.gather(*(store.rollouts(run, group=group) for group in groups))
    return {rollout.id: records.gist(rollout.task) for rollouts in read for rollout in rollouts}


async def completions(store: Store, run: str, number: int) -> list[dict[str, Any]]:
    """The rollouts of the training step, else of the evaluation after it, each with its task and
    last message."""
    rows: list[Rollout] = []
    for purpose, step in stored_steps(number).items():
        rows = rows or await store.rollouts(run, purpose=purpose, step=step, limit=COMPLETIONS)
    calls = await store.calls([row.id for row in rows])
    completed = []
    for row in rows:
        row_calls = calls.get(row.id) or []
        last = {"role": "assistant"} | (row_calls[-1].answer or {}) if row_calls else None
        entry = {"o": row, "task": records.gist(row.task), "calls": len(row_calls)}
        entry["tokens"] = sum(len(call.completion) for call in row_calls)
        entry["finish"] = row_calls[-1].finish if row_calls else ""
        completed.append(entry | {"answer": last and records.message(last, -1)})
    return completed


OUTCOME = "outcome"
RECENT = 150  # training groups with listed tasks


class Listed(NamedTuple):
    """A group with its task."""

    row: GroupRow
    task: Mapping[str, Json]  # empty if the group is pruned
    seat: str = ""  # the seat of these outcomes; empty: outcomes of rollouts
    share: bool = True  # whether outcomes of seats are from 0 to 1


async def recent(store: Store, run: str) -> list[Listed]:
    """The last training groups."""
    rows = await store.groups(run, purpose=Purpose.TRAIN, limit=RECENT)
    return await listed(store, run, [row for row in rows if row.rollouts])


async def listed(store: Store, run: str, rows: Sequence[GroupRow]) -> list[Listed]:
    return list(await asyncio.gather(*(_listed(store, run, row) for row in rows)))


async def _listed(store: Store, run: str, row: GroupRow) -> Listed:
    first = await store.rollouts(run, group=row.id, limit=1) if row.rollouts else []
    if first and row.step < 0:
        return Listed(row, {"input": await _first_request(store, first[0])})
    if not first or len(_seats(first[0])) < 2:
        return Listed(row, first[0].task if first else {})
    rollouts = await store.rollouts(run, group=row.id)
    if not (seat := deciding_seat(rollouts)):
        return Listed(row, first[0].task)
    got = {rollout.id: _seats(rollout) for rollout in rollouts}
    outcomes = [got.get(id, {}).get(seat) for id in row.rollouts]
    share = all(0 <= x <= 1 for seats in got.values() for x in seats.values())
    return Listed(replace(row, outcomes=outcomes), first[0].task, seat, share)


async def _first_request(store: Store, session: Rollout) -> str:
    """The first user message: a session has no task."""
    calls = (await store.calls([session.id])).get(session.id) or []
    requests = (
        message for call in calls[:1] for message in call.messages if message.get("role") == "user"
    )
    return records.gist(next(requests, {}).get("content"))


def deciding_seat(rollouts: Sequence[Rollout]) -> str:
    """The first seat of a game in which the rollout's outcome, the mean over all seats, is the same
    for any winner; empty if the outcome is informative."""
    games = [seats for rollout in rollouts if len(seats := _seats(rollout)) > 1]
    if not any(len({*seats.values()}) > 1 for seats in games):
        return ""
    means = {round(fmean(seats.values()), 6) for seats in games}
    whole = {round(x, 6) for rollout in rollouts if (x := rollout.reward()) == x}
    return min(games[0]) if len(means) == 1 and whole <= means else ""


def seats(rollouts: Sequence[Rollout]) -> list[str]:
    """The seats of a game if their outcomes are more informative than the rollout's; else none."""
    names = {seat for rollout in rollouts for seat in _seats(rollout)}
    return sorted(names) if deciding_seat(rollouts) else []


def _seats(rollout: Rollout) -> dict[str, float]:
    """The outcome of each seat or role."""
    rows = (row for row in rollout.rewards if row.scope is Scope.ROLE and row.name == OUTCOME)
    return {row.target: row.value for row in rows if row.target}


def values(groups: Sequence[Listed], *, percent: bool) -> dict[str, Any]:
    """Values of templates that list groups. `percent`: whether the run's scores are percentages."""
    of = {group.row.id: group.seat for group in groups if group.seat}
    tasks = [records.gist(group.task) if group.task else "" for group in groups]
    percent = percent and all(group.share for group in groups)
    shown = {"groups": [group.row for group in groups], "percent": percent}
    return shown | {"group_tasks": tasks, "seats": of}


HEADING = re.compile(r"\S.*, (trained by )?step \d+, .+")
REWARD = re.compile(r"  (?P<name>.+?) = (?P<value>\S+) \((?P<source>.*)\)")
CALL = re.compile(r"call (?P<id>\S+), (?P<role>.+), (?P<tokens>\d+) tokens(?: by (?P<by>.+))?")
LINK = re.compile(r"  (?P<depth> *)(?P<text>.+): (?P<numbers>(?:[a-z]+ [-\d. e+]+(?:, )?)+)")
MISSING = re.compile(r"  (?P<depth> *)(?P<text>.+): (?P<numbers>(?:[a-z]+ (?:missing|[^,]+),? ?)+)")
WEIGHT = re.compile(
    r"  weight in the loss \(psi\): (?P<psi>.+) per token \((?P<factors>advantage .+)\)"
)
WORDS = {  # descriptions of parts of a credit
    "GroupRelative": "Compared with the group",
    "GrpoScale": "Divided by the group's spread",
    "PeerAdvantages": "Compared with rollouts that came to the same state",
    "ReturnScale": "Scaled by the spread of the returns",
    "sum": "All of these together",
}


def read(text: str, calls: Sequence[CallRow] = (), at: int | None = None) -> dict[str, Any]:
    """Values of the template: the summary (`verdict`), `rewards`, a page of `calls` with their
    steps and weight, `gates`, `notes`, `text`. at: a call on the page."""
    rewards: list[dict[str, str]] = []
    entries: list[dict[str, Any]] = []
    verdict: list[str] = []
    gates: list[str] = []
    notes: list[str] = []
    order, place = {call.id: at for at, call in enumerate(calls)}, verdict
    for line in text.splitlines():
        if call := CALL.fullmatch(line):
            entries.append(call.groupdict() | {"at": order.get(call["id"]), "steps": []})
            entries[-1] |= {"weight": None, "notes": []}
        elif line.strip() in ("rewards", "none"):
            continue
        elif HEADING.fullmatch(line):
            place = notes
        elif line == "gates and penalties":
            place = gates
        elif not entries and (row := REWARD.fullmatch(line)):
            rewards.append(row.groupdict())
        elif entries and place is not gates and line.startswith(" "):
            _of_call(entries[-1], line)
        elif line.strip():
            place.append(line.strip())
    paging = Paging.of(len(entries), at)
    entries = entries[paging.first : paging.end]
    for entry in entries:  # each step continues from the result of the previous one
        depths = [step["depth"] for step in entry["steps"]]
        entry["chain"] = len({*depths}) == len(depths)
    shown = {"verdict": verdict, "rewards": rewards, "calls": entries, "gates": gates}
    return {**shown, "notes": notes, "text": text, "paging": paging}


def _of_call(call: dict[str, Any], line: str) -> None:
    if weight := WEIGHT.fullmatch(line):
        call["weight"] = weight["psi"]
        parts = (part.rsplit(" ", 1) for part in weight["factors"].split(" x "))
        call["factors"] = [(name, value) for name, value in parts]
    elif link := LINK.fullmatch(line) or MISSING.fullmatch(line):
        numbers = dict(part.split(" ", 1) for part in link["numbers"].split(", "))
        text = link["text"].strip()
        step = {"text": text, "words": words(text), "depth": len(link["depth"]) // 2}
        call["steps"].append(step | {"numbers": numbers})
    else:
        call["notes"].append(line.strip())


def words(text: str) -> str:
    """A part of a credit in words, from its record: the name of a class and its fields."""
    factor, name = "", text
    if weighted := re.match(r"(.+?) x (?=[A-Z])", text):
        factor, name = f"{weighted[1]} × ", text[weighted.end() :]  # noqa: RUF001
    kind = re.split(r"[(\[]", name.partition(": ")[2] or name, maxsplit=1)[0]
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).capitalize()
    return factor + WORDS.get(kind, plain)


# Values that may be secrets: the agent's variables, and settings with such names.
SECRET = re.compile(r"agent\.env\.|(^|[._-])(api[_-]?key|secret|password|token)$", re.I)
TOP = "run"  # name of the table of top-level settings


class Setting(NamedTuple):
    name: str
    value: Json
    changed: bool  # whether it is not the default


def tables(config: Mapping[str, Any]) -> dict[str, list[Setting]]:
    """Table -> its settings."""
    by_table: dict[str, list[Setting]] = {}
    defaults = _defaults()
    for key, value in flatten(config).items():
        table, dot, name = key.partition(".")
        shown = "set" if value and SECRET.search(key) else value
        changed = bool(defaults) and value != defaults.get(key) and value not in ("", [], None)
        row = Setting(name if dot else table, shown, changed)
        by_table.setdefault(table if dot else TOP, []).append(row)
    return {name: sorted(rows, key=lambda row: not row.changed) for name, rows in by_table.items()}


@cache
def _defaults() -> Mapping[str, Json]:
    try:
        return flatten(msgspec.to_builtins(from_store({"name": "run"})))
    except AgentRLError:
        return {}
