"""The content of each page: one method per page, from the address to a template and its values."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from agentrl.base.parts import installed_plugins
from agentrl.config import differences, from_store
from agentrl.errors import AgentRLError, Forbidden, Invalid, NotFound
from agentrl.store.base import Store
from agentrl.store.records import Dataset
from agentrl.telemetry.report import policies_without_calls, untrained_sentences
from agentrl.telemetry.spelling import Spelling, spelling
from agentrl.types import Credit, ErrorKind, Json, Purpose, RolloutState, RunState, StepRow, Trace
from agentrl.view import records

SHOWN = ["reward/mean", "eval/score", "policy/entropy", "sampler/kl", "grad_norm"]
SHOWN += ["reward/outcome/frac_zero_std", "completion/length_mean", "time/rollouts"]
RUNS_PER_PAGE, GROUPS_PER_PAGE, FOUND_PER_PAGE, ITEMS_PER_PAGE = 50, 30, 50, 10  # rows per page
POINTS_PER_CURVE = 400  # per curve
ELO, WIN_RATE = "selfplay/elo/", "selfplay/win_rate/"  # metrics of snapshots
RECENT_STEPS = 12  # last steps for which notes are shown
CACHED_ROLLOUTS = 8  # rollouts that are cached until the store changes
Query = Mapping[str, str]
Values = dict[str, Any]


class Page(NamedTuple):
    """A template and its values."""

    template: str
    title: str
    values: Values


class PartPage(Protocol):
    """The pages of a part below one address. Their templates are in the folder of its module."""

    def link(self, config: Mapping[str, Json]) -> str:
        """The text of the link on the page of a run with these settings; empty: no link."""

    async def ids(self, run: str) -> list[str]:
        """What follows the address, for each page of a run."""

    async def page(self, id: str, query: Query) -> Page: ...


class Loaded(NamedTuple):
    """The stored records of a started rollout."""

    trace: Trace
    credits: list[Credit]
    state: RunState


def _read(query: Query, name: str, kind: type[int] | type[float] = int) -> Any:
    """A number from a form; None for an empty field."""
    try:
        return kind(query[name]) if query.get(name) else None
    except ValueError:
        what = "whole number" if kind is int else "number"
        raise Invalid(f"{name} must be a {what}, not {query[name]!r}") from None


def _choice(query: Query, name: str, kind: type[StrEnum]) -> Any:
    try:
        return kind(query[name]) if query.get(name) else None
    except ValueError:
        raise Invalid(f"{name} must be one of {', '.join(kind)}, not {query[name]!r}") from None


class Pages:
    """The pages of one store. Caches the last rollouts while the store is unchanged."""

    def __init__(self, store: Store) -> None:
        self.store = store
        points = installed_plugins("pages")
        self.parts: dict[str, PartPage] = {point.name: point.load()(store) for point in points}
        self._kept: dict[tuple[str, int], Loaded] = {}
        self._spellings: dict[tuple[str, int, str], Spelling] = {}

    async def runs(self, query: Query) -> Page:
        names, start = (await self.store.runs())[::-1], _read(query, "from") or 0
        rows = await asyncio.gather(*map(self._run_row, names[start : start + RUNS_PER_PAGE]))
        more = start + RUNS_PER_PAGE if len(names) > start + RUNS_PER_PAGE else None
        values = {"rows": rows, "all": len(names), "more": more, "datasets": await self._datasets()}
        return Page("runs.html", "Runs", values)

    async def _run_row(self, run: str) -> Values:
        state = await self._state(run)
        last = await self._recent(state, 1)
        found = await self._series(run, ["eval/score", "reward/mean"], points=60)
        metric = "eval/score" if found["eval/score"] else "reward/mean"
        row = {"run": run, "state": state, "counts": await self.store.counts(run), "metric": metric}
        row["ended"] = bool(last and last[-1].metrics.get("run/ended"))
        row["at"] = last[-1].at if last else state.created
        return row | {"curve": records.curve(found[metric], 140, 28)}

    async def compare_runs(self, runs: Sequence[str]) -> Page:
        if not 2 <= len(runs) <= 4:
            raise Invalid("choose two to four runs to compare")
        states = await asyncio.gather(*map(self._state, runs))
        found = [await self._series(run, SHOWN) for run in runs]
        names = [name for name in SHOWN if any(one[name] for one in found)]
        rows = []
        for state in states[1:]:
            try:
                lines = differences(from_store(states[0].config), from_store(state.config))
            except AgentRLError as error:
                lines = [str(error)]
            rows.append((state.run, lines))
        series = {name: [records.finite(one[name]) for one in found] for name in names}
        values = {"runs": list(runs), "names": names, "series": series, "differences": rows}
        return Page("compare_runs.html", "Compare runs", values)

    async def run(self, run: str, query: Query) -> Page:
        """The page of a run; with `live` in the query only the parts that change."""
        state, live = await self._state(run), "live" in query
        recent = await self._recent(state, RECENT_STEPS)
        values: Values = {"run": run, "state": state, "notes": _notes(state, recent)}
        values["counts"] = await self.store.counts(run)
        values["failures"] = await self.store.failures(run)
        values["names"] = [] if live else await self.store.metric_names(run)
        values["links"] = [(name, part.link(state.config)) for name, part in self.parts.items()]
        values["pool"] = any(name.startswith(ELO) for name in values["names"])
        values["datasets"] = [] if live else await self._datasets(state)
        values["at"] = recent[-1].at if recent else state.created
        values["last"] = {name: value for row in recent for name, value in row.metrics.items()}
        own = [name for name in values["names"] if name.startswith("eval/function/")]
        wanted = [*SHOWN[:2], *own, *SHOWN[2:]]
        wanted += {query["metric"]} - set(wanted) if "metric" in query else ()
        found = {} if live else await self._series(run, wanted, known=values["names"])
        values["shown"] = [name for name in wanted if found.get(name)]
        values["series"] = {name: records.finite(points) for name, points in found.items()}
        values["curves"] = {name: records.curve(points) for name, points in found.items()}
        return Page("run.html", run, values | await self._groups(run, {}, 12))

    async def series(self, run: str, query: Query, names: Sequence[str]) -> Values:
        """The points of curves after the step `after`."""
        after = _read(query, "after")
        start = -1 if after is None else after
        found = await self.store.series(run, names, after=start, points=POINTS_PER_CURVE)
        return {name: records.finite(points) for name, points in found.items()}

    async def step(self, run: str, step: int) -> Page:
        values: Values = {"run": run, "step": step, "state": await self._state(run)}
        rows = await self.store.steps(run, after=step - 1, limit=1)
        values["row"] = rows[0] if rows and rows[0].step == step else None
        values |= await self._groups(run, {"step": str(step)}, GROUPS_PER_PAGE)
        if values["row"] is None and not values["groups"]:
            raise NotFound(f"run {run!r} has no step {step}")
        return Page("step.html", f"{run} step {step}", values)

    async def policies(self, run: str) -> Page:
        """The served versions and, for self-play, ratings and win rates."""
        recent = await self._recent(await self._state(run), RECENT_STEPS)
        last = {name: value for row in recent for name, value in row.metrics.items()}
        pool = [key.removeprefix(ELO) for key in last if key.startswith(ELO)]
        taken = {
            name: int(number) for name in pool if (number := name.rpartition("@")[2]).isdigit()
        }
        pool = sorted(pool, key=lambda name: taken.get(name, 0))
        rows: list[tuple[str, dict[str, float], float | None]] = []
        for name in pool:  # a snapshot's rates are in the metrics of the step that took it
            at = await self.store.steps(run, after=taken.get(name, 0) - 2, limit=1)
            rows.append((name, at[0].metrics if at else {}, last[ELO + name]))
        rows += [("now", last, last.get("selfplay/elo"))] if pool else []
        table = [(name, [row.get(WIN_RATE + one) for one in pool], elo) for name, row, elo in rows]
        values = {"run": run, "pool": pool, "table": table, "last": last}
        values["served"] = await self.store.policies(run)
        found = await self._series(run, ["selfplay/elo"])
        values["curve"] = records.curve(found["selfplay/elo"])
        return Page("policies.html", f"{run} policies", values)

    async def data(self, name: str, query: Query) -> Page:
        """The items of a data set's version, by default the newest."""
        versions = {one.version: one for one in await self.store.datasets(name)}
        version = _read(query, "version") or max(versions, default=0)
        after, split = _read(query, "after"), query.get("split") or None
        given: Any = {
            "split": split,
            "after": -1 if after is None else after,
            "limit": ITEMS_PER_PAGE,
        }
        items = await self.store.items(name, version, **given)
        sides = await self.store.sides([name for item in items for name in item.sides])
        sources = {id for item in items for id in item.source.split()}
        traces = await asyncio.gather(*map(self.store.trace, sources))
        values: Values = {"dataset": versions[version], "versions": versions, "query": query}
        values["rows"] = [(item, *records.item_talks(item, sides)) for item in items]
        values["rollouts"] = {trace.rollout.id: trace.rollout for trace in traces if trace}
        values["more"] = items[-1].position if len(items) == ITEMS_PER_PAGE else None
        return Page("data.html", name, values | {"run": versions[version].spec.get("run")})

    async def _datasets(self, state: RunState | None = None) -> list[Dataset]:
        """The newest version of each data set, or of those made from a run or learned by it."""
        try:
            found = {one.name: one for one in await self.store.datasets()}.values()
        except Forbidden:  # the key is for one run, and data sets belong to the whole store
            return []
        own = (state.config.get("data") or {}).get("name") if state else None
        made = [(one, (one.spec.get("run"), one.spec.get("expert"))) for one in found]
        return [x for x, runs in made if not state or x.name == own or state.run in runs]

    async def of_part(self, address: str, id: str, query: Query) -> Page:
        return await self.parts[address].page(id, query)

    async def groups(self, run: str, query: Query) -> Page:
        await self._state(run)
        values = {"run": run, "query": query} | await self._groups(run, query, GROUPS_PER_PAGE)
        return Page("groups.html", f"{run} groups", values)

    async def _groups(self, run: str, query: Query, limit: int) -> Values:
        given: Any = {"state": query.get("state") or None, "before": query.get("before") or None}
        purpose, step = _choice(query, "purpose", Purpose), _read(query, "step")
        rows = await self.store.groups(run, purpose=purpose, step=step, limit=limit, **given)
        return {"groups": rows, "more": rows[-1].id if len(rows) == limit else None}

    async def group(self, run: str, group: str) -> Page:
        rows = await self.store.rollouts(run, group=group)
        if not rows:
            raise NotFound(f"run {run!r} has no group {group!r}; a prune may have removed it")
        names = {row.name for one in rows for row in one.rewards if row.target is None}
        values: Values = {
            "run": run,
            "group": group,
            "rows": records.nested(rows, lambda row: row.branch.rollout if row.branch else ""),
        }
        values["names"] = sorted(names, key=lambda name: (name != "outcome", name))
        return Page("group.html", group, values | {"first": rows[0]})

    async def find(self, run: str, query: Query) -> Page:
        await self._state(run)
        low, high = _read(query, "low", float), _read(query, "high", float)
        name, steps = query.get("reward") or "outcome", (_read(query, "from"), _read(query, "to"))
        texts: Any = {key: query.get(key) or None for key in ("role", "policy", "text", "before")}
        rows, cursor, looked = await self.store.search(
            run,
            rewards=None if low is None and high is None else {name: (low, high)},
            state=_choice(query, "state", RolloutState),
            error=_choice(query, "error", ErrorKind),
            version=_read(query, "version"),
            steps=None if steps == (None, None) else steps,
            limit=FOUND_PER_PAGE,
            **texts,
        )
        values = {"run": run, "rows": rows, "cursor": cursor, "looked": looked, "query": query}
        values |= {"name": name, "states": list(RolloutState), "errors": list(ErrorKind)}
        return Page("find.html", f"{run} rollouts", values)

    async def rollout(self, id: str) -> Page:
        loaded = await self.load(id)
        row, calls = loaded.trace.rollout, loaded.trace.transitions
        values = {"run": row.run, "o": row, "spans": loaded.trace.spans, "parts": self.parts}
        values["roles"] = sorted({call.role for call in calls})
        values["rewards"] = sorted(row.rewards, key=lambda one: one.target or "")
        values["calls"] = records.call_rows(loaded.trace, loaded.credits, self._speller(loaded))
        values["siblings"] = await self.store.rollouts(row.run, group=row.group)
        return Page("rollout.html", id, values)

    async def attempts(self, id: str) -> Page:
        """All attempts of a rollout, with late results."""
        values = {"id": id, "rows": await self.store.attempts(id)}
        return Page("attempts.html", f"{id} attempts", values)

    async def tokens(self, id: str, calls: Sequence[int]) -> dict[str, Any]:
        """Call -> the values of its tokens, see `records.token_values`."""
        loaded = await self.load(id)
        trace, spell = loaded.trace, self._speller(loaded)
        by_call, found = records.credit_by_call(trace, loaded.credits), {}
        k = records.baseline_count(trace, by_call)
        for at in calls:
            if not 0 <= at < len(trace.transitions):
                raise NotFound(f"rollout {id!r} has no call {at}")
            call = trace.transitions[at]
            found[str(at)] = records.token_values(call, by_call.get(call.id), spell(call.policy), k)
        return found

    async def numbers(self, id: str, at: int) -> Page:
        """A table of a call's tokens, for readers without JavaScript."""
        tokens, trace = await self.tokens(id, [at]), (await self.load(id)).trace
        values = {"id": id, "at": at, "tokens": tokens[str(at)], "call": trace.transitions[at]}
        return Page("numbers.html", f"{id} call {at}", values | {"run": trace.rollout.run})

    async def raw(self, id: str, query: Query) -> str:
        """The uncut text of the task, the result, the rendered prompt of a call, or a message."""
        loaded = await self.load(id)
        trace, what = loaded.trace, query.get("what")
        if what in ("task", "result"):
            return records.text_of(getattr(trace.rollout, str(what)))
        at, index = _read(query, "call"), _read(query, "message")
        try:
            call = trace.transitions[at]
            if what == "prompt":
                return self._speller(loaded)(call.policy).text(call.prompt.tolist())
            return records.text_of(call.answer if index == -1 else call.messages[index])
        except (IndexError, TypeError):
            missing = "" if what == "prompt" else f" message {index} of"
            raise NotFound(f"rollout {id!r} has no{missing} call {at}") from None

    async def lanes(self, id: str) -> Page:
        trace = (await self.load(id)).trace
        values = {"o": trace.rollout, "run": trace.rollout.run, "calls": trace.transitions}
        values["tools"] = [span for span in trace.spans if span.kind == "tool"]
        return Page("lanes.html", f"{id} lanes", values)

    async def compare(self, a: str, b: str) -> Page:
        """A diff of two rollouts by call and token."""
        left, right = await self.load(a), await self.load(b)
        rows = records.compared(left.trace, right.trace, self._speller(left), self._speller(right))
        values = {"a": left.trace.rollout, "b": right.trace.rollout, "rows": rows}
        return Page("compare.html", "Compare rollouts", values | {"run": left.state.run})

    async def load(self, id: str) -> Loaded:
        """The stored records of a rollout. Raises NotFound if it has not started."""
        key = (id, await self.store.cursor())
        if key not in self._kept:
            trace, credits = await asyncio.gather(self.store.trace(id), self.store.credits(id))
            if trace is None:
                raise NotFound(
                    f"there is no rollout {id!r} that has begun; it may be queued, or a prune may "
                    "have removed it"
                )
            while len(self._kept) >= CACHED_ROLLOUTS:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = Loaded(trace, credits, await self._state(trace.rollout.run))
        return self._kept[key]

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
        points: int = POINTS_PER_CURVE,
        known: list[str] | None = None,
    ) -> Values:
        """Metric -> curve; empty, without a query, if the run does not have the metric. `known`:
        the names of the run's metrics; None: read them."""
        if known is None:
            known = await self.store.metric_names(run)
        wanted = [name for name in names if name in known]
        return {name: [] for name in names} | await self.store.series(run, wanted, points=points)

    async def _recent(self, state: RunState, steps: int) -> list[StepRow]:
        return await self.store.steps(state.run, after=max(state.step - 1 - steps, -1))


def _notes(state: RunState, recent: list[StepRow]) -> list[str]:
    """Notes on the last steps for the user: untrained calls, policies without calls."""
    found = untrained_sentences(recent)
    try:
        return found + list(policies_without_calls(from_store(state.config), recent).values())
    except AgentRLError as error:
        return [*found, str(error)]
