"""`agentrl live` and `agentrl gateway serve`: serve, learn and promote, and steer a live run.

`status` shows versions; `promote`, `rollback` and `offer` decide by hand; `users` lists people and
deletes their data. They use only the store, so they work whichever processes of the run are alive.
`agentrl gateway serve` is the gateway in front of a deployed agent's model.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.cli import CommandGroup, level_of, print_result, quiet, verbose
from agentrl.core.access import is_loopback
from agentrl.core.config import RunConfig, load
from agentrl.core.errors import AgentRLError, ConfigError, Conflict, NotFound
from agentrl.core.types import missing_text
from agentrl.live import records, signals
from agentrl.live.records import (
    Compared,
    Event,
    EventKind,
    Lanes,
    LiveState,
    Wish,
    decide,
    live_state,
    mark_of,
    put_wish,
    unmet,
    user_of,
)
from agentrl.store import open_store
from agentrl.store.base import Store


class RunsByDefault(CommandGroup):
    """A group with the default command `start`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._named(ctx, args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, self._named(ctx, args))

    def _named(self, ctx: click.Context, args: list[str]) -> list[str]:
        complete = not args or args[0] in (*self.list_commands(ctx), *ctx.help_option_names)
        return args if complete else ["start", *args]


@click.group(cls=RunsByDefault, path="live")
def live() -> None:
    """Serve an agent's model and learn from its sessions: `agentrl live RUN_FILE`."""


@live.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--only", type=click.Choice(["gateway", "training"]), help="Run one half, on its own machine."
)
@click.option("--take-over", is_flag=True, help="Stop a live process of the run and continue here.")
@quiet
@verbose
def start(
    run_file: Path,
    overrides: tuple[str, ...],
    only: Literal["gateway", "training"] | None,
    take_over: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Serve the policy of RUN_FILE, train it on its sessions and promote better versions, until
    Ctrl-C. The same command continues the run."""
    from agentrl.live.supervisor import run_live

    config = load(run_file, [*overrides, "live.running=true"])
    check_preset(config.algorithm.preset)
    level = level_of(quiet=quiet, verbose=verbose)
    run_live(config, only, take_over=take_over, level=level)


def check_preset(preset: str) -> None:
    """Raise ConfigError for the default preset, which needs groups, before anything is served."""
    if preset.partition("+")[0] == "auto":
        raise ConfigError(
            f"algorithm.preset = {preset!r} compares rollouts of a task, and every session is "
            "the only one of its task; set it to 'reinforce+ema+tis', which learns from outcomes, "
            "or to another that needs no groups and corrects for older versions"
        )


T = TypeVar("T")
RETRIES = 5  # retries of a decision, if another process decides at the same time
EVENTS = 8  # newest events that are shown
run_file = click.argument("run_file", type=click.Path(path_type=Path))


@click.command()
@run_file
@click.option("--json", "as_json", is_flag=True, help="All documents, as JSON.")
def status(run_file: Path, as_json: bool) -> None:
    """Print the versions of the live run of RUN_FILE, how they compare, and what was decided."""
    config = load(run_file)
    state = _with_run(config, lambda store: live_state(store, config.name))
    print_result(msgspec.json.encode(state).decode() if as_json else status_of(state))


@click.command()
@run_file
@click.argument("version", type=int, required=False)
def promote(run_file: Path, version: int | None) -> None:
    """Let the candidate serve all sessions from now on, whatever the comparison shows so far. With
    VERSION: only if VERSION is the candidate."""
    _decide(run_file, lambda state: by_hand(state, "promoted", version))


@click.command()
@run_file
@click.argument("version", type=int, required=False)
def rollback(run_file: Path, version: int | None) -> None:
    """Serve the version before the last promotion again. With VERSION: only if VERSION is that
    version."""
    _decide(run_file, lambda state: by_hand(state, "rolled back", version))


@click.command()
@run_file
@click.argument("folder", type=click.Path(path_type=Path))
def offer(run_file: Path, folder: Path) -> None:
    """Offer the weights in FOLDER, a checkpoint or a snapshot, as a candidate."""
    folder = folder.resolve()
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{folder} has no weights: no config.json and no adapter_config.json")

    config = load(run_file)
    wish = Wish(path=str(folder), asked=time.time())
    _with_run(config, lambda store: put_wish(store, config.name, wish))
    click.echo(
        "offered: it becomes the candidate once the run's training half has copied and loaded it, "
        "and earlier offers are decided"
    )


def by_hand(state: LiveState, kind: EventKind, version: int | None) -> Event:
    """The event of a user's decision. Raises ConfigError if it is impossible."""
    lanes = state.lanes
    if lanes is None:
        raise ConfigError("no version is served yet: start the run with `agentrl live RUN_FILE`")
    goal = lanes.candidate if kind == "promoted" else lanes.previous
    if goal is None or version not in (None, goal):
        raise ConfigError(_impossible(state, lanes, kind, version))
    after = lanes.promoted() if kind == "promoted" else lanes.returned()
    subject = goal if kind == "promoted" else lanes.serving
    return Event(time=time.time(), kind=kind, version=subject, lanes=after, why="decided by hand")


def status_of(state: LiveState) -> RenderableType:
    """The versions and decisions of a run, for a terminal."""
    if state.lanes is None:
        return "No version is served yet."
    lines = [Text("what was decided", style="bold")]
    for event in state.events[-EVENTS:]:
        at = time.strftime("%d %b %H:%M:%S", time.localtime(event.time))
        lines.append(Text(f"{at}  version {event.version} {event.kind}: {event.why}"))
    for version, wish in unmet(state):
        lines.append(Text(f"version {version} is offered and not loaded yet: {wish.path}"))
    return Group(_lanes(state, state.lanes), *lines)


def _lanes(state: LiveState, lanes: Lanes) -> Table:
    table = Table("version", "lane", "traffic", "outcome", "sessions", "points more", "held-out")
    comparison = state.compared.get(lanes.candidate or -1)
    serving_share = 1.0 if lanes.candidate is None else 1 - lanes.share
    table.add_row(str(lanes.serving), "serving", f"{serving_share:.0%}", *_figures(comparison, 1))
    if lanes.candidate is not None:
        table.add_row(
            str(lanes.candidate), "candidate", f"{lanes.share:.0%}", *_figures(comparison, 0)
        )
    if lanes.previous is not None:
        table.add_row(str(lanes.previous), "before", "its sessions", "", "", "", "")
    return table


def _figures(comparison: Compared | None, side: int) -> tuple[str, str, str, str]:
    if comparison is None:
        return "", "", "", ""
    mean, score = comparison.means[side], comparison.held_out[side]
    difference = f"{100 * comparison.low:+.0f} to {100 * comparison.high:+.0f}" if side == 0 else ""
    return (
        "" if mean is None else f"{mean:.1%}",
        str(comparison.sessions[side]),
        difference,
        "" if score is None else f"{score:.1%}{missing_text(comparison.missing[side])}",
    )


def _impossible(state: LiveState, lanes: Lanes, kind: str, version: int | None) -> str:
    requested = f"version {version}" if version is not None else "there"
    if kind == "promoted":
        actual = "there is no candidate" if lanes.candidate is None else f"it is {lanes.candidate}"
        problem = f"{requested} is no candidate" if version is not None else actual
    else:
        actual = "none did" if lanes.previous is None else f"{lanes.previous} did"
        problem = f"only the version that served before can be rolled back to, and {actual}"
    folders = ", ".join(f"{past.version}: {past.path}" for past in state.versions.values())
    remedy = "any version can be offered again by `agentrl live offer RUN_FILE FOLDER`"
    return f"{problem}; {remedy} ({folders})"


def _decide(path: Path, event_of: Callable[[LiveState], Event]) -> None:
    config = load(path)

    async def carry_out(store: Store) -> Event:
        for _ in range(RETRIES):
            with suppress(Conflict):
                return await once(store)
        return await once(store)

    async def once(store: Store) -> Event:
        state = await live_state(store, config.name)
        event = event_of(state)
        await decide(store, config.name, state, event)
        return event

    event = _with_run(config, carry_out)
    click.echo(f"version {event.version} {event.kind}; version {event.serving} serves")


overrides = click.argument("overrides", nargs=-1)


@click.command()
@run_file
@overrides
@click.option("--user", help="Only this one, as the agent's header names it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each user.")
@click.option(
    "--export", is_flag=True,
    help="All that is stored of --user: a JSON line for each session, and one of data sets.",
)  # fmt: skip
@click.option(
    "--forget", is_flag=True,
    help="Delete the sessions of --user, and what was mined from them into data sets.",
)  # fmt: skip
def users(
    run_file: Path,
    overrides: tuple[str, ...],
    user: str | None,
    as_json: bool,
    export: bool,
    forget: bool,
) -> None:
    """List users by their hashes: sessions that count, sessions held back and why, and outliers.
    --forget deletes a user's sessions, ends those in progress, and prints which versions have
    learned from them; it works while the run continues."""
    if (export or forget) and user is None:
        raise click.UsageError(f"{'--export' if export else '--forget'} needs --user")
    if export and forget:
        raise click.UsageError("--export or --forget, not both: export first")

    config = load(run_file, overrides)

    async def exported(store: Store) -> None:
        async for row in records.export(store, config, str(user)):
            click.echo(msgspec.json.encode(row))

    async def forgotten(store: Store) -> None:
        await _forget(store, config, str(user))

    async def listed(store: Store) -> None:
        only = (
            None if user is None else records.user_id(await records.secret_of(store, config), user)
        )
        live, held = config.live, defaultdict[str, Counter[str]](Counter)
        ledger = signals.Ledger(live.people.per_user, live.signals.weight)
        async for row in records.all_sessions(store, config.name):
            if (mark := mark_of(row)) and (name := user_of(row)):
                held[name][mark.held if not signals.is_counted(mark) else ""] += 1
                ledger.learn(row.id, name, mark)
        rows = _rows(ledger, held, only)
        if as_json:
            click.echo(msgspec.json.Encoder().encode_lines(rows), nl=False)
        else:
            _print(rows)

    _with_run(config, exported if export else forgotten if forget else listed)


async def _forget(store: Store, config: RunConfig, user: str) -> None:
    rows = await records.sessions_of_user(store, config, user)
    learned = await records.learned_from(store, config.name, rows)
    gone = await records.forget_user(store, config, user, click.echo)
    click.echo(f"{gone.rollouts} sessions and their replays are deleted")
    for name, n in gone.items.items():
        click.echo(f"{n} items of data set {name} are deleted, which has a new digest")
    if learned:
        click.echo(
            f"versions {', '.join(map(str, learned))} have learned from them, or may continue "
            "from a version that has; weights cannot be taken apart"
        )
    if gone.left:
        raise AgentRLError(
            f"{len(gone.left)} sessions are being trained on: rerun the command after the step"
        )


def _rows(
    ledger: signals.Ledger, held: Mapping[str, Counter[str]], only: str | None
) -> list[dict[str, Any]]:
    """Users, those with the most sessions first. held: user -> sessions by the reason why they do
    not count; empty: they count."""
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
            "outlier": [outlier[name] for outlier in outliers if name in outlier],
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
        why += [f"outlier: {outlier}" for outlier in row["outlier"]]
        numbers = [str(row[name]) for name in ("sessions", "counted", "today", "votes")]
        means = ["" if isnan(x) else f"{x:.2f}" for x in (row["mean_vote"], row["mean_outcome"])]
        table.add_row(row["user"], *numbers, *means, "; ".join(why))
    Console().print(table)


def _with_run(config: RunConfig, act: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
    """Call `act` with the store of a run that was started; return its result."""

    async def opened() -> T:
        async with open_store(config.store, create=False) as store:
            if await store.run(config.name) is None:
                raise NotFound(f"{config.store} has no run {config.name!r}: start it first")
            return await act(store)

    return asyncio.run(opened())


USED_TABLES = {"name", "root", "output", "store", "runner"}
USED_TABLES |= {"upstreams", "roles", "role_rules", "sessions"}


@click.group()
def gateway() -> None:
    """Serve the model API of a deployed agent."""


@gateway.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
def serve(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Forward an agent's calls to [upstreams] of RUN_FILE and record its sessions, until SIGTERM.

    Users' feedback is posted to /v1/feedback; `agentrl data mine` makes data sets of both."""
    from agentrl.runners.sessions import serve as serve_sessions
    from agentrl.trainer import hide_secrets

    config = load(run_file, overrides)
    check(config)
    stop = asyncio.Event()

    async def until_signal() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_sessions(hide_secrets(config), started=click.echo, stop=stop)

    asyncio.run(until_signal())


def check(config: RunConfig) -> None:
    """Raises ConfigError for settings without effect, for missing or ambiguous upstreams, and for a
    public address without a key."""
    defaults, host = RunConfig(), config.runner.host
    unread = [t for t in RunConfig.__struct_fields__ if getattr(config, t) != getattr(defaults, t)]
    if ignored := [f"[{table}]" for table in unread if table not in USED_TABLES]:
        raise ConfigError(f"{ignored[0]} has no effect on `agentrl gateway serve`; remove it")
    if replace(config.runner, host=defaults.runner.host, port=0) != defaults.runner:
        raise ConfigError("[runner]: `agentrl gateway serve` reads only host and port")
    if not config.upstreams or (len(config.upstreams) > 1 and not config.roles):
        raise ConfigError("set [upstreams.NAME], which answers; with several, set [roles] too")
    if not (is_loopback(host) or config.sessions.key_env):
        raise ConfigError(f"runner.host = {host!r}: anybody could call; set sessions.key_env")
