"""`agentrl live forget`, `export` and `users`."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from agentrl.config import RunConfig, load
from agentrl.errors import AgentRLError, NotFound
from agentrl.live.labels import weighing
from agentrl.live.records import people
from agentrl.live.records.marks import mark_of, user_of
from agentrl.store import open_store
from agentrl.store.base import Store

T = TypeVar("T")
run_file = click.argument("run_file", type=click.Path(path_type=Path))
overrides = click.argument("overrides", nargs=-1)
of_user = click.option("--user", required=True, help="The user, as the agent's header names it.")


@click.command()
@run_file
@overrides
@of_user
def forget(run_file: Path, overrides: tuple[str, ...], user: str) -> None:
    """Delete a user's sessions, with what was mined from them into data sets.

    Says which versions have learned from them. Sessions in progress are ended. The run may go
    on meanwhile."""

    async def deleted(store: Store, config: RunConfig) -> None:
        rows = await people.sessions_of_user(store, config, user)
        learned = await people.learned_from(store, config.name, rows)
        gone = await people.forget_user(store, config, user, click.echo)
        click.echo(f"{gone.rollouts} sessions and their replays are deleted")
        for name, n in gone.items.items():
            click.echo(f"{n} items of data set {name} are deleted, which has a new digest")
        if learned:
            click.echo(
                f"versions {', '.join(map(str, learned))} have learned from them, or may go on from"
                " a version that has; weights cannot be taken apart"
            )
        if gone.left:
            raise AgentRLError(
                f"{len(gone.left)} sessions are being trained on: repeat the command after the step"
            )

    _with(run_file, overrides, deleted)


@click.command()
@run_file
@overrides
@of_user
def export(run_file: Path, overrides: tuple[str, ...], user: str) -> None:
    """Print all that is known of a user: a JSON line for each session, and one of data sets."""

    async def shown(store: Store, config: RunConfig) -> None:
        async for row in people.export(store, config, user):
            click.echo(msgspec.json.encode(row))

    _with(run_file, overrides, shown)


@click.command()
@run_file
@overrides
@click.option("--user", help="Only this one, as the agent's header names it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each user.")
def users(run_file: Path, overrides: tuple[str, ...], user: str | None, as_json: bool) -> None:
    """List users, by their hash: sessions that count, those held back and why, and outliers."""

    async def listed(store: Store, config: RunConfig) -> None:
        only = None if user is None else people.user_id(await people.secret_of(store, config), user)
        live, held = config.live, defaultdict[str, Counter[str]](Counter)
        ledger = weighing.Ledger(live.people.per_user, live.signals.weight)
        async for row in people.all_sessions(store, config.name):
            if (mark := mark_of(row)) and (name := user_of(row)):
                held[name][mark.held if not weighing.is_counted(mark) else ""] += 1
                ledger.learn(row.id, name, mark)
        rows = _rows(ledger, held, only)
        if as_json:
            click.echo(msgspec.json.Encoder().encode_lines(rows), nl=False)
        else:
            _print(rows)

    _with(run_file, overrides, listed)


def _rows(
    ledger: weighing.Ledger, held: Mapping[str, Counter[str]], only: str | None
) -> list[dict[str, Any]]:
    """Users with most sessions first. held: sessions by user and why they do not count; empty: they
    do."""
    today, outliers = ledger.days.get(datetime.now(UTC).date().isoformat()), ledger.outliers()
    counted = today.counted if today else {}
    users = sorted(held.items(), key=lambda item: -item[1].total())
    return [
        {
            "user": name, "sessions": why.total(), "counted": why[""],
            "today": len(counted.get(name, ())), "votes": ledger.users[name].mean("vote").of,
            "mean_vote": ledger.users[name].mean("vote").value,
            "mean_outcome": ledger.users[name].mean("outcome").value,
            "held": {reason: n for reason, n in why.items() if reason},
            "outlier": [found[name] for found in outliers if name in found],
        }
        for name, why in users
        if only in (None, name)
    ]  # fmt: skip


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("user", "sessions", "counted", "today", "votes", "mean vote", "mean outcome", "why")
    table = Table(*names, box=None)
    table.columns[0].no_wrap = True
    for row in rows:
        why = [f"{n} not counted: {why}" for why, n in row["held"].items()]
        why += [f"outlier: {found}" for found in row["outlier"]]
        numbers = [str(row[name]) for name in ("sessions", "counted", "today", "votes")]
        means = ["" if isnan(x) else f"{x:.2f}" for x in (row["mean_vote"], row["mean_outcome"])]
        table.add_row(row["user"], *numbers, *means, "; ".join(why))
    Console().print(table)


def _with(
    run_file: Path,
    overrides: tuple[str, ...],
    use: Callable[[Store, RunConfig], Awaitable[T]],
) -> T:
    config = load(run_file, overrides)

    async def opened() -> T:
        async with open_store(config.store, create=False) as store:
            if await store.run(config.name) is None:
                raise NotFound(f"the store {config.store} has no run {config.name!r}")
            return await use(store, config)

    return asyncio.run(opened())
