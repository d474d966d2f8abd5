"""The runs that a coding agent may look at: those below a folder, or of one store."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from agentrl.config import RunConfig, differences, from_store
from agentrl.errors import AgentRLError, ConfigError, NotFound, StoreError
from agentrl.run_owner import Owner
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import RunState

SHOWN = ("eval/score", "eval/sampled", "reward/mean")  # of a run in the list
COMPARED = (*SHOWN, "policy/entropy", "completion/length_mean", "rollouts/failed")


@dataclass(frozen=True, slots=True)
class Runs:
    folder: Path  # in which run files and `runs/` are
    store: str | None = None  # the only store; None: all below runs/

    def stores(self) -> list[str]:
        if self.store:
            return [self.store]
        depths = ("store.db", "*/store.db", "*/*/store.db")
        files = sorted(file for depth in depths for file in (self.folder / "runs").glob(depth))
        shared = os.environ.get("AGENTRL_STORE_URL")  # as `agentrl view` reads it
        return [f"sqlite:///{file}" for file in files] + ([shared] if shared else [])

    def address(self, url: str) -> str:
        """The address of a store to show: relative to the folder, if it is in there."""
        return url.replace(f"sqlite:///{self.folder}/", "")

    @asynccontextmanager
    async def opened(self, run: str) -> AsyncIterator[tuple[Store, RunState]]:
        """The store with this run, and the run. Raises NotFound."""
        async with open_store(await self._store_of(run), readonly=True) as store:
            state = await store.run(run)
            assert state is not None
            yield store, state

    async def _store_of(self, run: str) -> str:
        names, own = list[str](), f"/{run}/store.db"
        for url in sorted(self.stores(), key=lambda url: not url.endswith(own)):
            with contextlib.suppress(StoreError):  # another store, which list_runs names
                async with open_store(url, readonly=True) as store:
                    there = await store.runs()
                    if run in there:
                        return url
                    names += there
        known = ", ".join(sorted(names)[:20]) or "none"
        raise NotFound(f"there is no run {run!r} here; list_runs has them: {known}")

    async def listed(self) -> str:
        """A JSON object per run, the newest first; a store that cannot be read is one, too."""
        rows: list[tuple[float, dict[str, Any]]] = []
        for url in self.stores():
            try:
                async with open_store(url, readonly=True) as store:
                    for name in await store.runs():
                        if state := await store.run(name):
                            row = await summary(store, state)
                            rows.append((state.created, row | {"store": self.address(url)}))
            except AgentRLError as error:
                rows.append((math.inf, {"store": self.address(url), "error": str(error)}))
        rows.sort(key=lambda row: -row[0])
        return "\n".join(json.dumps(row) for _, row in rows) or (
            "There is no run below runs/ yet. check_run_file checks a run file, and `agentrl init "
            "FOLDER` writes one to begin with."
        )

    async def compared(self, names: list[str]) -> str:
        """The settings in which runs differ from the first, and first and last metrics of each."""
        if len(names) < 2:
            raise ConfigError("name two runs or more; list_runs has them")
        found: list[tuple[str, RunConfig, dict[str, Any]]] = []
        for name in names:
            async with self.opened(name) as (store, state):
                found.append((name, from_store(state.config), await ends(store, name, COMPARED)))
        _, first, _ = found[0]
        return "\n".join(
            json.dumps({"run": name, "settings": changes(first, config), **metrics})
            for name, config, metrics in found
        )

    async def metrics(self, run: str, names: list[str], last: int) -> str:
        """The names of all metrics, or JSON arrays of (step, value) of those named."""
        async with self.opened(run) as (store, _):
            every = await store.metric_names(run)
            if not names:
                return "\n".join(every) or f"run {run!r} has reported no step yet"
            if unknown := [name for name in names if name not in every]:
                raise NotFound(
                    f"run {run!r} has no metric {unknown[0]!r}; without names this lists them"
                )
            curves = await store.series(run, names)
        return "\n".join(
            json.dumps({"metric": name, "steps": [[s, tidy(v)] for s, v in curve[-last:]]})
            for name, curve in curves.items()
        )


async def summary(store: Store, state: RunState) -> dict[str, Any]:
    """What a list shows of a run."""
    counts = await store.counts(state.run)
    row: dict[str, Any] = {
        "run": state.run,
        "state": activity(state),
        "steps": state.step,
        "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(state.created)),
        "rollouts": {"completed": counts.succeeded, "failed": counts.failed},
    }
    try:
        config = from_store(state.config)
        row |= {"of": config.steps, "preset": config.algorithm.preset, "model": model_of(config)}
    except ConfigError as error:
        row["settings"] = str(error)
    return row | await ends(store, state.run, SHOWN)


async def ends(store: Store, run: str, names: tuple[str, ...]) -> dict[str, Any]:
    """First and last known value of metrics, as [step, value]."""
    curves = await store.series(run, names)
    known = {
        name: [[step, tidy(value)] for step, value in curve if not math.isnan(value)]
        for name, curve in curves.items()
    }
    return {name: {"first": p[0], "last": p[-1]} for name, p in known.items() if p}


def activity(state: RunState) -> str:
    """Whether a run is live: running, stopped, or unknown on another machine."""
    owner = owner_of(state)
    lives = owner.lives() if owner and state.owned_until else False
    if lives is None:
        return f"running on {owner.host}" if state.owned_until > time.time() else "stopped"  # type: ignore[union-attr]
    return "running" if lives else "stopped"


def owner_of(state: RunState) -> Owner | None:
    return msgspec.json.decode(state.owner, type=Owner) if state.owner else None


def model_of(config: RunConfig) -> str:
    return Path(config.policy.model or config.policy.build or "").name or "none of its own"


def changes(first: RunConfig, other: RunConfig) -> list[str]:
    return [one for one in differences(first, other) if not one.startswith("name:")]


def tidy(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def printed_by(command: click.Command, *words: str) -> str:
    """What a reading command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            command.main(list(words), prog_name=f"agentrl {command.name}", standalone_mode=False)
        except click.ClickException as error:
            raise ConfigError(error.format_message()) from None
    return out.getvalue()
