"""`agentrl rescore`: stored rollouts scored by another verifier or a judge, without running agents.

The scores are stored as an additional reward under a separate name, so nothing that was trained
changes. Rollouts that already have this reward are left out, so a repeated command continues.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import msgspec
from msgspec.structs import replace
from rich.table import Table

from agentrl.algorithms.judges import JudgeClient, record_of
from agentrl.core.config import RunConfig, derived, from_store
from agentrl.core.errors import AgentRLError, ConfigError, NotFound
from agentrl.core.types import (
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Scope,
    StepReward,
    one_line,
)
from agentrl.core.user_code import text_of
from agentrl.runners import scoring
from agentrl.runners.scoring import Verifier
from agentrl.store.base import Store

PAGE = 500  # rollouts per read, scoring and write
AT_ONCE = 32  # calls of a verifier
SHOWN = 10  # reordered groups in the table
MIN_CHANGE = 1e-9


@dataclass(slots=True)
class Rescored:
    """The scores of another verifier. pairs: by group, (rollout, old reward, new reward)."""

    run: str
    name: str
    scored: int = 0  # rollouts scored by this command
    known: int = 0  # rollouts scored by earlier ones
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by message
    pairs: dict[str, list[tuple[str, float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @property
    def changed(self) -> list[tuple[str, float, float]]:
        rows = (row for group in self.pairs.values() for row in group)
        return [row for row in rows if abs(row[2] - row[1]) > MIN_CHANGE]

    @property
    def reordered(self) -> list[str]:
        """Groups in which the order of two rollouts changes, or a tie begins or ends."""
        return [group for group, rows in self.pairs.items() if _is_reordered(rows)]

    def summary(self) -> dict[str, Any]:
        """As JSON: counts, means, and groups whose order changed with the credit of each rollout:
        its reward minus the mean of its group, before and after."""
        rows = [row for group in self.pairs.values() for row in group]
        return {
            "run": self.run, "name": self.name, "scored": self.scored, "known": self.known,
            "failed": dict(self.failed), "rollouts": len(rows), "changed": len(self.changed),
            "mean_before": fmean(row[1] for row in rows) if rows else None,
            "mean_after": fmean(row[2] for row in rows) if rows else None,
            "higher": sum(row[2] > row[1] for row in self.changed),
            "lower": sum(row[2] < row[1] for row in self.changed),
            "groups": len(self.pairs),
            "reordered": {group: list(credit(self.pairs[group])) for group in self.reordered},
        }  # fmt: skip

    def tables(self) -> Iterator[Table | str]:
        found = self.summary()
        yield (
            f"{self.scored} rollouts of {self.run} were scored as {self.name!r}, {self.known} had"
            f" been before; of {found['rollouts']} with both rewards {found['higher']} are higher,"
            f" {found['lower']} lower"
        )
        for message, count in self.failed.items():
            yield f"{count} could not be scored: {message}"
        if found["rollouts"]:
            yield f"mean {found['mean_before']:.4g} before, {found['mean_after']:.4g} after"
        yield f"the order of rollouts changed in {len(self.reordered)} of {found['groups']} groups"
        if self.reordered:
            table = Table("group", "rollout", "reward", "new", "credit", "new credit")
            for group in self.reordered[:SHOWN]:
                for row in credit(self.pairs[group]):
                    numbers = [f"{row[key]:.3g}" for key in ("before", "after", "credit", "new")]
                    table.add_row(group, row["rollout"].rpartition("/")[2], *numbers)
            yield table


def credit(rows: Sequence[tuple[str, float, float]]) -> Iterator[dict[str, Any]]:
    """Rewards and credit of a group's rollouts: the reward minus the group's mean."""
    before, after = fmean(row[1] for row in rows), fmean(row[2] for row in rows)
    for id, old, new in rows:
        yield {"rollout": id, "before": old, "after": new, "credit": old - before,
               "new": new - after}  # fmt: skip


def _is_reordered(rows: Sequence[tuple[str, float, float]]) -> bool:
    return any(
        _sign(a[1] - b[1]) != _sign(a[2] - b[2]) for a, b in combinations(rows, 2)
    )  # fmt: skip


def _sign(value: float) -> int:
    return 0 if abs(value) <= MIN_CHANGE else (1 if value > 0 else -1)


async def rescore(
    store: Store,
    run: str,
    *,
    verifier: str = "",
    judge: str = "",
    name: str = "",
) -> Rescored:
    """Score the training rollouts of a run again. verifier: "file.py:name", relative to the working
    directory; judge: the name of one of the run's [judges]; name: of the new reward.

    Raises NotFound for an unknown run, ConfigError for a name that the run's rewards have, and for
    a verifier that needs workspaces."""
    state = await store.run(run)
    if state is None:
        raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
    config = from_store(state.config)
    name = name or judge or verifier.rpartition(":")[2]
    source = f"rescore:{verifier or judge}"
    found = Rescored(run, name)
    scores = scoring.load(verifier, {}, Path.cwd()) if verifier else None
    if scores is not None and scores.wants_workspace:
        raise ConfigError(f"{verifier} takes a workspace, but workspaces are not stored")
    async for page in _pages(store, run):
        _check_name(page, name, source)
        new = [row for row in page if not _has(row, name, source)]
        if scores is not None:
            given = await _verified(scores, store, new, found, config.agent.timeout)
        else:
            given = await _judged(store, config, judge, new)
        rows = [
            StepReward(rollout=id, reward=Reward(value=value, name=name, source=source))
            for id, value in given.items()
        ]
        if rows:
            await store.add_rewards(rows)
        found.scored += len(rows)
        found.known += len(page) - len(new)
        for row in page:
            after = given.get(row.id, row.reward(name))
            before = row.reward(derived.trained_reward(config))
            if math.isfinite(before) and math.isfinite(after):
                found.pairs[row.group].append((row.id, before, after))
    return found


async def _pages(store: Store, run: str) -> AsyncIterator[list[Rollout]]:
    """Rollouts in pages of whole groups, because judges compare within groups."""
    after, rows = None, list[Rollout]()
    while page := await store.rollouts(run, purpose=Purpose.TRAIN, after=after, limit=PAGE):
        after, rows = page[-1].id, [*rows, *page]
        last = [row for row in rows if row.group == page[-1].group]  # may continue on the next page
        yield [row for row in rows[: -len(last)] if row.state is RolloutState.SUCCEEDED]
        rows = last
    yield [row for row in rows if row.state is RolloutState.SUCCEEDED]


def _check_name(rows: Sequence[Rollout], name: str, source: str) -> None:
    """Raises ConfigError if rewards of this name have another source: they would be mixed."""
    for row in rows:
        for reward in row.rewards:
            if reward.name == name and reward.source != source:
                raise ConfigError(
                    f"rollouts have a reward {name!r} already, by {reward.source!r}; choose another"
                    " with --name"
                )


def _has(row: Rollout, name: str, source: str) -> bool:
    return any(reward.name == name and reward.source == source for reward in row.rewards)


async def _verified(
    scores: Verifier, store: Store, rows: Sequence[Rollout], found: Rescored, limit: float
) -> Mapping[str, float]:
    """The outcomes of a verifier; its exceptions are counted. limit: seconds per call."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(row: Rollout) -> tuple[str, float] | None:
        async with slots:
            trace = await store.trace(row.id) if scores.wants_trace else None
            try:
                async with asyncio.timeout(limit):
                    given = await scores(task=row.task, result=row.result, trace=trace)
            except TimeoutError:
                found.failed[f"the verifier ran longer than {limit:g} s"] += 1
                return None
            except Exception as error:  # noqa: BLE001 - the user's verifier is a boundary
                found.failed[one_line(text_of(error))] += 1
                return None
        own = [x.value for x in given if x.name == "outcome" and x.scope is Scope.ROLLOUT]
        if not own:
            found.failed["the verifier returned no outcome of the rollout"] += 1
            return None
        return row.id, own[0]

    return dict(filter(None, await asyncio.gather(*map(one, rows))))


async def _judged(
    store: Store, config: RunConfig, judge: str, rows: Sequence[Rollout]
) -> Mapping[str, float]:
    """The rewards of a judge; the store keeps its answers."""
    if judge not in config.judges:
        raise ConfigError(
            f"the run has no judge {judge!r}; its judges: {', '.join(config.judges) or 'none'}"
        )
    groups, given = defaultdict[str, list[Rollout]](list), dict[str, float]()
    for row in rows:
        trace = await store.trace(row.id)
        groups[row.group].append(replace(row, transitions=trace.transitions if trace else []))
    async with aiohttp.ClientSession() as session:
        client = JudgeClient(
            judge, config.judges[judge], config, store, session, skips_refused=True
        )
        for members in groups.values():
            scores = await client.score([record_of(row) for row in members])
            both = zip(members, scores, strict=True)
            given |= {row.id: score for row, score in both if score is not None}
        if rows and not given and client.refused is not None:
            raise AgentRLError(str(client.refused))
    return given


def as_json(found: Rescored) -> str:
    return msgspec.json.encode(found.summary()).decode()
