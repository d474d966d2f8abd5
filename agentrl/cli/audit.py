"""`agentrl audit` and `agentrl rescore`: attacks on a verifier, and another verifier's scores."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from agentrl.cli import ResumedCommand, print_result
from agentrl.core.config import load, resolve


@click.command()
@click.argument("rest", nargs=-1, metavar="[RUN_FILE] [KEY=VALUE]...")
@click.option("--environment", metavar="PLUGIN:WHAT", help="In place of RUN_FILE.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True)
@click.option("--check", is_flag=True, help="Exit code 1 unless no hole was found.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def audit(
    rest: tuple[str, ...], environment: str | None, seconds: float, check: bool, as_json: bool
) -> None:
    """Attack the verifier of RUN_FILE, or an environment, as a policy would: without a model, in
    the run's sandbox, and without calls to judges or other machines.

    Prints each attack that gets a reward, the share of tasks, an example and what to change; and
    whether right answers are rejected. Every new run begins with ten seconds of this
    (audit.before)."""
    from agentrl.audit.scoring import end_process, isolate
    from agentrl.audit.subjects import audit_run

    overrides = [word for word in rest if "=" in word]
    files = [Path(word) for word in rest if "=" not in word]
    if bool(environment) == bool(files) or len(files) > 1:
        raise click.UsageError("give one RUN_FILE, or --environment PLUGIN:WHAT")
    if environment:
        config = resolve(_environment(environment), source="--environment", overrides=overrides)
    else:
        config = load(files[0], overrides)
    isolate()
    stdout = os.dup(1)
    os.dup2(2, 1)  # output of verifiers is not part of the report
    report = asyncio.run(_audited(audit_run, config, seconds, store=bool(files)))
    sys.stdout.flush()
    os.dup2(stdout, 1)
    text = msgspec.json.encode(report).decode() if as_json else "\n".join(report.lines())
    click.echo(text)
    sys.stdout.flush()
    failed = check and report.verdict != "no hole found"
    end_process(int(failed))  # a verifier may have left hanging threads


async def _audited(audit_run: Any, config: Any, seconds: float, *, store: bool) -> Any:
    """With the run's stored rollouts, if there are any; the report is stored with them."""
    from agentrl.audit.subjects import keep
    from agentrl.store import open_store
    from agentrl.trainer import has_own_store

    if not store or (has_own_store(config) and not _has_store(config)):
        return await audit_run(config, seconds)
    async with open_store(config.store, create=False) as opened:
        report = await audit_run(config, seconds, store=opened)
        if await opened.run(config.name):
            await keep(report, opened, config.name)
    return report


def _has_store(config: Any) -> bool:
    return Path(config.output, "store.db").exists()


def _environment(name: str) -> dict[str, Any]:
    script = {"upstreams": {"script": {"text": ""}}, "roles": {"*": "script"}}
    return {"name": "audit", "environment": name, "steps": 1, **script}


@click.command(cls=ResumedCommand, continues="with the rollouts that are left")
@click.argument("run")
@click.option("--verifier", metavar="FILE.PY:NAME", help="Scores rollouts by task and result.")
@click.option("--judge", metavar="NAME", help="Score with one of the run's [judges] instead.")
@click.option("--name", help="Name of the new reward; default: that of the function or judge.")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rescore(
    run: str,
    verifier: str | None,
    judge: str | None,
    name: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Score the stored rollouts of RUN again, without playing.

    The new reward is stored as an additional one; nothing that was trained changes. Prints how the
    rewards differ, in which groups the order changed, and the credit of their rollouts before and
    after: the reward minus the group's mean."""
    from agentrl import rescore as rescoring
    from agentrl.store import open_store
    from agentrl.store.run_folder import store_with

    if bool(verifier) == bool(judge):
        raise click.UsageError("give --verifier or --judge")
    url = store or store_with(run)

    async def work() -> rescoring.Rescored:
        async with open_store(url, create=False) as opened:
            options: Any = {"verifier": verifier or "", "judge": judge or "", "name": name or ""}
            return await rescoring.rescore(opened, run, **options)

    rescored = asyncio.run(work())
    for part in [rescoring.as_json(rescored)] if as_json else rescored.tables():
        print_result(part)
