"""The content of each page: one method per page, from the address to a template and its values."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentrl.core.config import from_store
from agentrl.core.errors import AgentRLError, Forbidden, Invalid, NotFound
from agentrl.core.types import (
    Credit,
    ErrorKind,
    Image,
    Purpose,
    RolloutState,
    RunState,
    StepRow,
    Trace,
    Transition,
    numbered,
    step_number,
    stored_steps,
)
from agentrl.store.base import Store
from agentrl.store.records import CallRow, Dataset, GroupRow, RolloutRow
from agentrl.telemetry.report import policies_without_calls, untrained_sentences
from agentrl.transcript import Spelling, spelling
from agentrl.view import front, records, summaries, versions
from agentrl.view.records import LOST, Album
from agentrl.view.summaries import BY_STATE, REWARD, SCORE, condition, facts

SHOWN = [SCORE, REWARD, *summaries.TRAINING]  # curves of a comparison
GROUPS_PER_PAGE, FOUND_PER_PAGE, ITEMS_PER_PAGE = 30, 50, 10  # rows per page
LANES_PER_PAGE = 200  # calls of a table
RATING, RATE = "selfplay/elo/", "selfplay/win_rate/"  # metrics of snapshots
RECENT_STEPS = 12  # last steps for which notes are shown
CACHED_ROLLOUTS = 8  # rollouts that are cached until the store changes
Query = Mapping[str, str]
NO_QUERY: Query = MappingProxyType({})
Values = dict[str, Any]


class Page(NamedTuple):
    """A template and its values."""

    template: str
    title: str
    values: Values


class Loaded(NamedTuple):
    """The stored records of a started rollout, with the calls of one page."""

    trace: Trace
    paging: records.Paging
    outline: list[CallRow]
    credits: list[Credit]
    state: RunState

    def call(self, at: int) -> Transition:
        return self.trace.transitions[at - self.paging.first]


def _within(row: RolloutRow, first: int | None, last: int | None) -> bool:
    """Whether the number of its step is in this range."""
    number = step_number(row.step, row.purpose)
    return (first is None or first <= number) and (last is None or number <= last)


def _choice(query: Query, name: str, kind: type[StrEnum]) -> Any:
    try:
        return kind(query[name]) if query.get(name) else None
    except ValueError:
        raise Invalid(f"{name} must be one of {', '.join(kind)}, not {query[name]!r}") from None


class Pages:
    """The pages of one store. Caches the last rollouts while the store is unchanged."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._loaded: dict[tuple[str, int, int], Loaded] = {}
        self._spellings: dict[tuple[str, int, str], Spelling] = {}
        self._reasons = front.Reasons(store)
        self.album = Album(store)

    async def run(self, run: str, query: Query) -> Page:
        """The page of a run; with `live` in the query only the parts that change."""
        state, live = await self._state(run), "live" in query
        recent = await self._recent(state, RECENT_STEPS)
        at = recent[-1].at if recent else state.created
        values: Values = {"run": run, "state": state, "notes": _notes(state, recent), "live": live}
        names = await self.store.metric_names(run)
        last = {name: value for row in recent for name, value in row.metrics.items()}
        took = await _seconds(self.store, run, state.step)
        values |= {"names": names, "at": at, "last": last, "took": took}
        values["facts"] = facts(state.config, last.get(BY_STATE))
        values["condition"] = condition(state, ended="run/ended" in names, now=time.time())
        values["counts"] = await self.store.counts(run)
        values["failures"] = await self.store.failures(run)
        values["versions"] = (state.config.get("live") or {}).get("running")
        values["prompts"] = (state.config.get("prompts") or {}).get("components")
        values["pool"] = any(name.startswith(RATING) for name in names)
        values["game"] = any(name.startswith("selfplay/") for name in names)
        values["datasets"] = [] if live else await self._datasets(state)
        values |= await summaries.page(self.store, state, names, query.get("metric"))
        values["origin"] = list((await self.store.documents(run, "origin")).items())[-1:]
        values["audited"] = bool(await self.store.documents(run, "audit"))
        values["reasons"] = await self._reasons.of(state, at)
        held_out = await front.evaluations(self.store, run)
        arguments: Any = self.store, self.album, run, held_out
        values["examples"] = await front.examples(
            *arguments, game=values["game"], share=values["percent"]
        )
        values |= await self._tasks(run, held_out, [])
        values["solved"] = values["unit"] and all(row.last == 1.0 for row in values["task_rows"])
        values["task_rows"] = values["task_rows"][: front.TASKS_ON_FRONT]
        values["settings"] = front.tables(state.config)
        return Page("run.html", run, values | await self._groups(run, {}, 12))

    async def tasks(self, run: str, query: Query) -> Page:
        """Every task with its outcome in each evaluation, hardest first; or training tasks."""
        await self._state(run)
        held_out = await front.evaluations(self.store, run)
        of = query.get("of") or ("heldout" if held_out else "train")
        trained = await front.recent(self.store, run) if of == "train" else []
        values = await self._tasks(run, held_out, trained)
        if query.get("sort") == "trend":
            values["task_rows"].sort(key=lambda row: row.trend)
        values |= {"run": run, "of": of, "both": bool(held_out)}
        values["seat"] = next((group.seat for group in trained if group.seat), "")
        return Page("tasks.html", f"{run} tasks", values | {"sort": query.get("sort") or "last"})

    async def _tasks(
        self, run: str, held_out: Sequence[GroupRow], trained: Sequence[front.Listed]
    ) -> Values:
        if trained:
            steps, rows = front.training_tasks(trained)
        else:
            steps, rows = await front.held_out_tasks(self.store, run, held_out)
        outcomes = (x for group in held_out for x in group.outcomes if x is not None)
        unit = all(x.share for x in trained) and await summaries.read_shares(
            self.store, run, outcomes
        )
        return {"task_steps": steps, "task_rows": rows, "all_tasks": len(rows), "unit": unit}

    async def series(self, run: str, query: Query, names: Sequence[str]) -> Values:
        """The points of curves from the step `after` on."""
        after = records.read_number(query, "after")
        start = -1 if after is None else after - 1
        series = await self.store.series(run, names, after=start, points=summaries.CHART_POINTS)
        curves = summaries.by_number(series)
        return {name: records.finite(points) for name, points in curves.items()}

    async def step(self, run: str, step: int) -> Page:
        """The training step of this number and the evaluation after it; 0: before training."""
        values: Values = {"run": run, "step": step, "state": await self._state(run)}
        rows = numbered(await self.store.steps(run, after=step - 2, limit=2))
        values["row"] = next((row for row in rows if row.step == step), None)
        values |= await self._groups(run, {"step": str(step)}, GROUPS_PER_PAGE)
        if step and values["row"] is None and not values["groups"]:
            raise NotFound(f"run {run!r} has no step {step}")
        values["completions"] = await front.completions(self.store, run, step)
        return Page("step.html", f"{run} step {step}", values)

    async def policies(self, run: str) -> Page:
        """The served versions and, for self-play, ratings and win rates."""
        state = await self._state(run)
        recent = await self._recent(state, RECENT_STEPS)
        last = {name: value for row in recent for name, value in row.metrics.items()}
        pool = [key.removeprefix(RATING) for key in last if key.startswith(RATING)]
        taken = {
            name: int(number) for name in pool if (number := name.rpartition("@")[2]).isdigit()
        }
        pool = sorted(pool, key=lambda name: taken.get(name, 0))
        rows: list[tuple[str, dict[str, float], float | None]] = []
        for name in pool:  # a snapshot's rates are in the metrics of the step that took it
            at = await self.store.steps(run, after=taken.get(name, 0) - 2, limit=1)
            rows.append((name, at[0].metrics if at else {}, last[RATING + name]))
        rows += [("now", last, last.get("selfplay/elo"))] if pool else []
        table = [
            (name, [row.get(RATE + opponent) for opponent in pool], elo) for name, row, elo in rows
        ]
        values: Values = {"run": run, "pool": pool, "table": table, "last": last}
        values["served"] = await self.store.policies(run)
        values["running"] = state.owned_until > time.time()
        curves = await self._series(run, ["selfplay/elo"])
        values["curve"] = records.curve(curves["selfplay/elo"])
        return Page("policies.html", f"{run} policies", values)

    async def data(self, name: str, query: Query) -> Page:
        """The items of a data set's version, by default the newest."""
        versions = {dataset.version: dataset for dataset in await self.store.datasets(name)}
        version = records.read_number(query, "version") or max(versions, default=0)
        after, split = records.read_number(query, "after"), query.get("split") or None
        filters: Any = {
            "split": split,
            "after": -1 if after is None else after,
            "limit": ITEMS_PER_PAGE,
        }
        items = await self.store.items(name, version, **filters)
        sides = await self.store.sides([name for item in items for name in item.sides])
        sources = {id for item in items for id in item.source.split()}
        traces = await asyncio.gather(*map(self.store.trace, sources))
        values: Values = {"dataset": versions[version], "versions": versions, "query": query}
        calls = [call for side in sides.values() for call in side]
        pictures = await self.album.of(str(versions[version].spec.get("run") or ""), calls)
        values["rows"] = [(item, *records.item_talks(item, sides, pictures)) for item in items]
        values["rollouts"] = {trace.rollout.id: trace.rollout for trace in traces if trace}
        values["more"] = items[-1].position if len(items) == ITEMS_PER_PAGE else None
        return Page("data.html", name, values | {"run": versions[version].spec.get("run")})

    async def _datasets(self, state: RunState | None = None) -> list[Dataset]:
        """The newest version of each data set, or of the data sets that were made from a run or
        used by it."""
        try:
            datasets = {dataset.name: dataset for dataset in await self.store.datasets()}.values()
        except Forbidden:  # the key is for one run, and data sets belong to the whole store
            return []
        used_name = (state.config.get("data") or {}).get("name") if state else None
        with_runs = [
            (dataset, (dataset.spec.get("run"), dataset.spec.get("expert"))) for dataset in datasets
        ]
        return [x for x, runs in with_runs if not state or x.name == used_name or state.run in runs]

    async def versions(self, run: str) -> Page:
        """The versions of a live run as lanes, with the decisions about them."""
        return Page("versions.html", f"{run} versions", await versions.decided(self.store, run))

    async def audit(self, run: str) -> Page:
        """The attacks on the run's verifier that got a reward in the newest audit."""
        await self._state(run)
        report = (await self.store.documents(run, "audit")).get("report")
        return Page("audit.html", f"{run} audit", {"run": run, "report": report})

    async def prompts(self, run: str) -> Page:
        """The candidates of the run's searches for prompts, each below its parent."""
        return Page("prompts.html", f"{run} prompts", await versions.searched(self.store, run))

    async def prompt(self, run: str, id: str) -> Page:
        """The texts of a candidate as a diff against its parent's."""
        return Page("prompt.html", f"prompt {id}", await versions.compared(self.store, run, id))

    async def groups(self, run: str, query: Query) -> Page:
        await self._state(run)
        values = {"run": run, "query": query} | await self._groups(run, query, GROUPS_PER_PAGE)
        return Page("groups.html", f"{run} groups", values)

    async def _groups(self, run: str, query: Query, limit: int) -> Values:
        filters: Any = {"state": query.get("state") or None, "before": query.get("before") or None}
        purpose, number = _choice(query, "purpose", Purpose), records.read_number(query, "step")
        if number is None:
            rows = await self.store.groups(run, purpose=purpose, limit=limit, **filters)
        else:
            per_purpose = [
                await self.store.groups(run, purpose=kind, step=step, limit=limit, **filters)
                for kind, step in stored_steps(number).items()
                if purpose in (kind, None)
            ]
            rows = sorted(chain(*per_purpose), key=lambda row: row.id, reverse=True)[:limit]
        listed = await front.listed(self.store, run, rows)
        more = rows[-1].id if len(rows) == limit else None
        percent = await summaries.read_shares(self.store, run)
        return front.values(listed, percent=percent) | {"more": more}

    async def group(self, run: str, group: str) -> Page:
        rows = await self.store.rollouts(run, group=group)
        if not rows:
            raise NotFound(f"run {run!r} has no group {group!r}; a prune may have removed it")
        names = {row.name for rollout in rows for row in rollout.rewards if row.target is None}
        names -= {front.OUTCOME} if front.seats(rows) else set()
        values: Values = {
            "run": run,
            "group": group,
            "rows": records.nested(rows, lambda row: row.branch.rollout if row.branch else ""),
            "seats": front.seats(rows),
        }
        values["names"] = sorted(names, key=lambda name: (name != "outcome", name))
        return Page("group.html", group, values | {"first": rows[0]})

    async def find(self, run: str, query: Query) -> Page:
        await self._state(run)
        low, high = (
            records.read_number(query, "low", float),
            records.read_number(query, "high", float),
        )
        name = query.get("reward") or "outcome"
        first, last = records.read_number(query, "from"), records.read_number(query, "to")
        texts: Any = {key: query.get(key) or None for key in ("role", "policy", "text", "before")}
        rows, cursor, looked = await self.store.search(
            run,
            rewards=None if low is None and high is None else {name: (low, high)},
            state=_choice(query, "state", RolloutState),
            error=_choice(query, "error", ErrorKind),
            version=records.read_number(query, "version"),
            steps=(None if first is None else max(first - 1, 0), last),
            images=bool(query.get("images")),
            limit=FOUND_PER_PAGE,
            **texts,
        )
        rows = [row for row in rows if _within(row, first, last)]
        values = {"run": run, "rows": rows, "cursor": cursor, "looked": looked, "query": query}
        values["tasks"] = await front.tasks_of(self.store, run, rows)
        values |= {"name": name, "states": list(RolloutState), "errors": list(ErrorKind)}
        return Page("find.html", f"{run} rollouts", values)

    async def rollout(self, id: str, query: Query = NO_QUERY) -> Page:
        """The page of calls with the call `call` of the query."""
        loaded = await self.load(id, records.read_number(query, "call"))
        row, calls = loaded.trace.rollout, loaded.trace.transitions
        values = {"run": row.run, "o": row, "spans": loaded.trace.spans}
        values["roles"] = sorted({call.role for call in loaded.outline})
        values["paging"] = loaded.paging
        values["rewards"] = sorted(row.rewards, key=lambda reward: reward.target or "")
        values["calls"] = records.call_rows(
            loaded.trace,
            loaded.paging.first,
            loaded.outline,
            loaded.credits,
            self._speller(loaded),
            await self.album.of(row.run, calls),
        )
        values["siblings"] = await self.store.rollouts(row.run, group=row.group)
        return Page("rollout.html", id, values)

    async def attempts(self, id: str) -> Page:
        """All attempts of a rollout, with late results."""
        limit = records.CALLS_PER_PAGE
        values = {"id": id, "rows": await self.store.attempts(id, limit=limit)}
        return Page("attempts.html", f"{id} attempts", values)

    async def tokens(self, id: str, calls: Sequence[int]) -> dict[str, Any]:
        """Call -> the values of its tokens, see `records.token_values`."""
        values: dict[str, Any] = {}
        pages: dict[int, list[int]] = {}
        for at in calls:
            pages.setdefault(at // records.CALLS_PER_PAGE, []).append(at)
        for positions in pages.values():
            loaded = await self.load_call(id, positions[0])
            spell = self._speller(loaded)
            by_call = records.credit_by_call(loaded.outline, loaded.credits)
            k = records.baseline_count(loaded.outline, by_call)
            for at in positions:
                if not 0 <= at < loaded.paging.total:
                    raise NotFound(f"rollout {id!r} has no call {at}")
                call = loaded.call(at)
                arguments = call, by_call.get(call.id), spell(call.policy), k
                values[str(at)] = records.token_values(*arguments)
        return values

    async def numbers(self, id: str, at: int) -> Page:
        """A table of a call's tokens, for readers without JavaScript."""
        tokens, loaded = await self.tokens(id, [at]), await self.load_call(id, at)
        values = {"id": id, "at": at, "tokens": tokens[str(at)], "call": loaded.call(at)}
        return Page("numbers.html", f"{id} call {at}", values | {"run": loaded.state.run})

    async def raw(self, id: str, query: Query) -> str:
        """The uncut text of the task, the result, the rendered prompt of a call, or a message."""
        at, index = records.read_number(query, "call"), records.read_number(query, "message")
        loaded = await self.load(id, at)
        trace, what = loaded.trace, query.get("what")
        if what in ("task", "result"):
            return records.text_of(getattr(trace.rollout, str(what)))
        try:
            call = (await self.load_call(id, at)).call(at)
            if what == "prompt":
                pictures = await self.album.of(trace.rollout.run, [call])
                images = [pictures.get(digest, LOST).label for digest in call.images]
                return self._speller(loaded)(call.policy).prompt(call.prompt.tolist(), images)
            return records.text_of(call.answer if index == -1 else call.messages[index])
        except (IndexError, TypeError, NotFound):
            missing = "" if what == "prompt" else f" message {index} of"
            raise NotFound(f"rollout {id!r} has no{missing} call {at}") from None

    async def image(self, digest: str, query: Query) -> Image:
        """The file of an image of a run's calls."""
        return await self.album.file(query["run"], digest)

    async def lanes(self, id: str, query: Query = NO_QUERY) -> Page:
        """When each role made its calls; the table has a page of them."""
        at = records.read_number(query, "call")
        loaded = await self.load(id, at)
        trace, calls = loaded.trace, loaded.outline
        values: Values = {"o": trace.rollout, "run": trace.rollout.run, "calls": calls}
        values["tools"] = [span for span in trace.spans if span.kind == "tool"]
        lanes: dict[str, list[tuple[int, CallRow]]] = {}
        for n, call in enumerate(calls):
            lanes.setdefault(call.role, []).append((n, call))
        values |= {"lanes": lanes, "paging": records.Paging.of(len(calls), at, LANES_PER_PAGE)}
        return Page("lanes.html", f"{id} lanes", values)

    async def compare(self, a: str, b: str, query: Query = NO_QUERY) -> Page:
        """A diff of two rollouts by call and token: a page of their calls."""
        at = records.read_number(query, "call")
        left, right = await self.load(a, at), await self.load(b, at)
        total = max(left.paging.total, right.paging.total)
        paging = records.Paging.of(total, at)
        a_here, b_here = (  # the shorter rollout may have no call on this page
            loaded.trace
            if loaded.paging.first == paging.first
            else replace(loaded.trace, transitions=[])
            for loaded in (left, right)
        )
        spell_a, spell_b = self._speller(left), self._speller(right)
        rows = records.compared(a_here, b_here, spell_a, spell_b, paging.first)
        values: Values = {"rows": rows, "paging": paging}
        values["first"] = records.first_difference(left.outline, right.outline)
        values |= {"a": left.trace.rollout, "b": right.trace.rollout, "run": left.state.run}
        return Page("compare.html", "Compare rollouts", values)

    async def load_call(self, id: str, at: int) -> Loaded:
        """As `load`. Raises NotFound if the rollout has no call `at`."""
        loaded = await self.load(id, at)
        if not 0 <= at < loaded.paging.total:
            raise NotFound(f"rollout {id!r} has no call {at}")
        return loaded

    async def load(self, id: str, at: int | None = None) -> Loaded:
        """The stored records of a rollout, with the page of its calls that has the call `at`.
        Raises NotFound if it has not started."""
        key = (id, (at or 0) // records.CALLS_PER_PAGE, await self.store.cursor())
        if key not in self._loaded:
            outline, credits = await asyncio.gather(self.store.outline(id), self.store.credits(id))
            paging = records.Paging.of(len(outline), at)
            # Not `size`: the rollout may have made more calls since.
            limit = paging.end - paging.first
            trace = await self.store.trace(id, first=paging.first, limit=limit)
            if trace is None:
                raise NotFound(
                    f"there is no rollout {id!r} that has begun; it may be queued, or a prune may "
                    "have removed it"
                )
            while len(self._loaded) >= CACHED_ROLLOUTS:
                del self._loaded[next(iter(self._loaded))]
            state = await self._state(trace.rollout.run)
            self._loaded[key] = Loaded(trace, paging, outline, credits, state)
        return self._loaded[key]

    def _speller(self, loaded: Loaded) -> records.Spell:
        """A function from a policy of the rollout's run to its spelling, which is cached."""
        state = loaded.state

        def spell(policy: str) -> Spelling:
            key = (state.identity, state.epoch, policy)
            if key not in self._spellings:
                self._spellings[key] = spelling(state.config, policy)
            return self._spellings[key]

        return spell

    async def _state(self, run: str) -> RunState:
        if (state := await self.store.run(run)) is None:
            raise NotFound(f"there is no run {run!r} in this store")
        return state

    async def _series(
        self,
        run: str,
        names: list[str],
        points: int = summaries.CHART_POINTS,
        available: list[str] | None = None,
    ) -> Values:
        """Metric -> curve; empty, without a query, if the run does not have the metric.
        `available`: names of the run's metrics; None: read them."""
        if available is None:
            available = await self.store.metric_names(run)
        wanted = [name for name in names if name in available]
        return {name: [] for name in names} | await self.store.series(run, wanted, points=points)

    async def _recent(self, state: RunState, steps: int) -> list[StepRow]:
        return await self.store.steps(state.run, after=max(state.step - 1 - steps, -1))


async def _seconds(store: Store, run: str, steps: int) -> float:
    """The working time of a run in seconds, without pauses between its starts: exact for up to 400
    steps, else extrapolated from a sample of the steps."""
    parts = ("build", "rollouts", "update", "eval", "checkpoint")
    curves = await store.series(run, [f"time/{part}" for part in parts])
    seen = {step for points in curves.values() for step, _ in points}
    spent = sum(value for points in curves.values() for _, value in points if value == value)
    return spent * max(1.0, steps / len(seen)) if seen else 0.0


def _notes(state: RunState, recent: list[StepRow]) -> list[str]:
    """Notes on the last steps for the user: untrained calls, policies without calls."""
    notes = untrained_sentences(recent)
    try:
        return notes + list(policies_without_calls(from_store(state.config), recent).values())
    except AgentRLError as error:
        return [*notes, str(error)]
