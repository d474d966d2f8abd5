"""Commands that look at runs.

`show`, `explain`, `why`, `metrics`, `export otlp`, `view`, `compare`, and `doctor`, which checks
this machine and a run file, or an environment.
"""

from __future__ import annotations

import asyncio
import csv
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import click
import msgspec
from msgspec.structs import replace
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from agentrl import trainer
from agentrl.cli import print_result
from agentrl.cli.environments import check_environment
from agentrl.core.config import RunConfig, load
from agentrl.core.config.derived import has_no_own_policy, trained_policies
from agentrl.core.config.derived import view as policy_view
from agentrl.core.config.run_file import tasks_of
from agentrl.core.errors import AgentRLError, ConfigError, NotFound, StoreError, install_command
from agentrl.core.types import (
    Json,
    StepRow,
    missing_text,
    numbered,
    score_text,
)
from agentrl.doctor import Finding, machine, run_check, waiting
from agentrl.store import open_store
from agentrl.store.run_folder import run_and_store, store_with
from agentrl.transcript import show_rollout
from agentrl.view.summaries import Score, Summary, Verdict, matrix, summary, whole_settings


@click.command()
@click.argument("rollout")
@click.option("--store", help="Store URL; default: the store of the rollout's run.")
@click.option("--prompt", is_flag=True, help="Print what the policy read, as its template renders.")
@click.option("--call", default=0, metavar="N", help="Begin at this call; the first is 0.")
@click.option("--full", is_flag=True, help="Print all calls, and all of long messages.")
def show(rollout: str, store: str | None, prompt: bool, call: int, full: bool) -> None:
    """Print the trace of ROLLOUT: every message, tool call, reward and failure.

    A long rollout is printed in pages of calls, with the command for the next one."""
    url = store or store_with(rollout)
    asyncio.run(show_rollout(url, rollout, prompts=prompt, first=call, whole=full))


@click.command()
@click.argument("rollout")
@click.option("--tokens", is_flag=True, help="Every token instead of every call.")
@click.option("--store", help="Store URL; default: the store of the rollout's run.")
def explain(rollout: str, tokens: bool, store: str | None) -> None:
    """Print how the credit of ROLLOUT's tokens was computed, from rewards to psi."""
    from agentrl.explain import explain_rollout

    url = store or store_with(rollout)
    click.echo("\n".join(asyncio.run(explain_rollout(url, rollout, tokens=tokens))))


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
def why(run: str, store: str | None) -> None:
    """Print whether RUN learned and, if not, why: most likely reasons first, and what to change.
    RUN may be a folder that has no other run."""
    from agentrl.algorithms.run_record import PolicyRun, read
    from agentrl.algorithms.verdict import changes_text
    from agentrl.algorithms.why import opening, reasons

    name, url = (run, store) if store else run_and_store(run)

    async def read_all() -> dict[str, PolicyRun]:
        async with open_store(url, readonly=True) as opened:
            return await read(opened, name)

    records = asyncio.run(read_all())
    findings: dict[str, list[str]] = {}  # finding -> policies: equal findings are printed once
    measured: dict[str, list[str]] = {}
    for policy, record in records.items():
        ranked = reasons(record)
        lines = [opening(record, ranked)]
        for number, reason in enumerate(ranked, start=1):
            lines.append(f"{number}. {reason.text}\n   change {reason.change}")
            if reason.example:
                lines.append(f"   example: agentrl show {reason.example}")
        findings.setdefault("\n".join(lines), []).append(policy)
        tasks = f"{len(record.heldout)} held-out tasks" if record.heldout else ""
        figures = [f"{len(record.steps)} steps", tasks, changes_text(record.changes)]
        measured.setdefault("; ".join(filter(None, figures)), []).append(policy)
    for text, policies in findings.items():
        click.echo(f"{', '.join(policies)}: {text}" if len(findings) > 1 else text)
    for text, policies in measured.items():
        named = f"{', '.join(policies)}: " if len(measured) > 1 else ""
        click.echo(f"({named}{text})")


@click.command()
@click.argument("run")
@click.option("--csv", "form", flag_value="csv", help="A line per step.")
@click.option(
    "--json", "form", flag_value="json", help="The stored rows, whose steps count from 0."
)
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
def metrics(run: str, form: str | None, store: str | None) -> None:
    """Print the metrics of RUN: the first and last value of each, or all."""
    show = {"csv": as_csv, "json": as_json}.get(form or "", table)
    print_result(show(asyncio.run(read(store or store_with(run), run))))


async def read(url: str, run: str) -> list[StepRow]:
    """The steps of a run. Raises NotFound if the store does not have it."""
    async with open_store(url, readonly=True) as store:
        if await store.run(run) is None:
            raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
        return await store.steps(run)


def names(rows: list[StepRow]) -> list[str]:
    return sorted({name for row in rows for name in row.metrics})


def table(rows: list[StepRow]) -> RenderableType:
    """Every metric with its first and last value and their steps."""
    result = Table("metric", title=f"{sum(row.committed for row in rows)} steps")
    result.title_justify = "left"
    for column in ("first", "step", "last", "step"):
        result.add_column(column, justify="right")
    shown = numbered(rows)
    for name in names(rows):
        points = [(row.metrics[name], row.step) for row in shown if name in row.metrics]
        (first, began), (last, ended) = points[0], points[-1]
        result.add_row(Text(name), f"{first:.6g}", str(began), f"{last:.6g}", str(ended))
    return result


def as_csv(rows: list[StepRow]) -> str:
    """A line per step and a column per metric, from the evaluation before training, step 0; unknown
    values are empty."""
    columns, rows = names(rows), numbered(rows)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", "committed", "at", *columns])
    for row in rows:
        values = [row.metrics.get(name, math.nan) for name in columns]
        cells = ["" if math.isnan(value) else value for value in values]
        writer.writerow([row.step, int(row.committed), row.at, *cells])
    return out.getvalue()


def as_json(rows: list[StepRow]) -> str:
    """A line with a JSON object per stored row."""
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)


@click.command()
@click.option("--store", required=True, help="Store URL.")
@click.option("--run", required=True, help="Name of the run.")
@click.option("--rollout", "rollouts", multiple=True, help="Only this rollout; may be repeated.")
@click.option("--to", "url", required=True, help="OTLP/HTTP endpoint, such as a Phoenix's URL.")
@click.option("--header", "headers", multiple=True, help="KEY=VALUE to send, such as an API key.")
def otlp(
    store: str, run: str, rollouts: tuple[str, ...], url: str, headers: tuple[str, ...]
) -> None:
    """Send the last attempt of each rollout of a run as a trace to Phoenix, Langfuse, Jaeger or any
    OTLP receiver.

    Sending twice changes nothing, because the ids stay the same."""
    from agentrl.telemetry.otlp import send

    pairs = {name: value for name, _, value in (header.partition("=") for header in headers)}
    if wrong := [header for header in headers if header.find("=") < 1]:
        raise ConfigError(f"--header {wrong[0]!r}: write it as KEY=VALUE")
    attempts, spans = asyncio.run(send(store, run, rollouts, url, pairs))
    click.echo(f"sent {attempts} attempts as {spans} spans")


OUTCOMES = {"better": "better", "worse": "worse", "same": "no more than chance"}


@click.command()
@click.argument("stores", metavar="[STORE]...", nargs=-1)
@click.option("--run", metavar="NAME", help="Run to open first, or to export.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=7412, show_default=True, help="0 for any free port.")
@click.option("--open", "browse", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--export",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the run as one HTML file that needs no network, and stop.",
)
@click.option(
    "--rollouts", default="all", show_default=True, help="To export: all, failures or sample:N."
)
@click.option("--redact", default="", metavar="REGEX", help="Hide matches in the export.")
@click.option(
    "--image-mb", type=click.IntRange(0), default=100, show_default=True,
    help="To export: images up to this size in all.",
)  # fmt: skip
def view(
    stores: tuple[str, ...],
    run: str | None,
    host: str,
    port: int,
    browse: bool,
    file: Path | None,
    rollouts: str,
    redact: str,
    image_mb: int,
) -> None:
    """Show all runs in the browser, also during training.

    They are those of each STORE, a URL, file or folder; by default of every store below this folder
    and of the one whose URL is in the variable AGENTRL_STORE_URL. Stores are only read. Other
    machines need a key: that of the variable AGENTRL_VIEW_KEY, or a new one in the printed URL."""
    try:
        from agentrl.store.run_folder import find, places
        from agentrl.view import export, server
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: {install_command('view')}") from None

    if file is None and (rollouts != "all" or redact):
        raise click.UsageError("--rollouts and --redact need --export FILE")
    if file is None:
        start = f"/run/{quote(run)}" if run else "/"
        try:
            if run and not stores:
                find(run)
        except NotFound:
            raise
        except StoreError:  # several stores have this run
            start = f"/?q={quote(run or '')}"
        server.run(stores, host, port, start=start, browse=browse)
        return

    async def write(url: str, file: Path) -> str:
        async with open_store(url, readonly=True) as opened:
            names = await opened.runs()
            if run is None and len(names) != 1:
                raise ConfigError(f"choose one with --run: the store has {', '.join(names)}")
            chosen = run or names[0]
            options: Any = {"rollouts": rollouts, "redact": redact, "image_bytes": image_mb * 10**6}
            return await export.export(opened, chosen, file, **options)

    if len(stores) > 1:
        raise click.UsageError("--export writes one run: give its store, or --run alone")
    urls = [place.url for place in places(stores)]
    if run and len(urls) != 1:
        urls = [find(run)]
    if len(urls) != 1:
        raise ConfigError(f"{len(urls)} stores were found: choose a run with --run")
    click.echo(asyncio.run(write(urls[0], file)))


@click.command()
@click.argument("runs", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("--store", help="Store URL; default: those that have the runs, below this folder.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object per run.")
def compare(runs: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Compare each RUN: scores before and after training, whether that is more than chance, its
    state, and the settings that differ."""
    rows = [asyncio.run(_read(store or store_with(run), run)) for run in runs]
    settings = matrix([whole_settings(row) for row in rows])
    print_result(_lines(rows, settings) if as_json else _table(rows, settings))


async def _read(url: str, run: str) -> Summary:
    async with open_store(url, readonly=True) as store:
        if (state := await store.run(run)) is None:
            raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
        return await summary(store, state)


def _table(rows: Sequence[Summary], settings: Mapping[str, list[Json]]) -> RenderableType:
    """Name the scores once above the table if all runs have the same ones."""
    table = Table("", *(row.run for row in rows))
    for verdicts in ([row.verdict for row in rows], [row.sampled for row in rows]):
        names = list(dict.fromkeys(verdict.name for verdict in verdicts if verdict.last))
        for end in ("first", "last") if names else ():
            word = {"first": "before", "last": "after"}[end]
            several = len(names) > 1  # then each has its name with it
            scores = [_score(verdict, getattr(verdict, end), named=several) for verdict in verdicts]
            table.add_row(word if several else f"{names[0]}, {word}", *scores)
        if any(map(_measured_twice, verdicts)):
            words = [
                OUTCOMES[verdict.outcome] if _measured_twice(verdict) else "-"
                for verdict in verdicts
            ]
            table.add_row("change" if len(names) > 1 else f"{names[0]}, change", *words)
    table.add_row("state", *(f"{row.condition()}, {row.state.step} steps" for row in rows))
    for key, values in settings.items():
        table.add_row(key, *("-" if value is None else str(value) for value in values))
    return table


def _measured_twice(verdict: Verdict) -> bool:
    """Whether it was measured twice."""
    return bool(verdict.first and verdict.last and verdict.first.step != verdict.last.step)


def _score(verdict: Verdict, score: Score | None, *, named: bool) -> str:
    if score is None:
        return "-"
    prefix = f"{verdict.name} " if named else ""
    value, *ends = (
        score_text(x, verdict.percent, ".3g")
        for x in (score.value, score.low, score.high)
        if x is not None
    )
    interval = f" ({' to '.join(ends)})" if ends else ""
    return f"{prefix}{value}{interval}{missing_text(score.missing)}"


def _lines(rows: Sequence[Summary], settings: Mapping[str, list[Json]]) -> str:
    records = [
        {
            "run": row.run,
            "metric": row.verdict.metric,
            "before": row.verdict.first,
            "after": row.verdict.last,
            "outcome": row.verdict.outcome,
            "sampled_before": row.sampled.first,
            "sampled_after": row.sampled.last,
            "state": row.condition(),
            "steps": row.state.step,
            "settings": {key: values[at] for key, values in settings.items()},
        }
        for at, row in enumerate(rows)
    ]
    return "".join(msgspec.json.encode(record).decode() + "\n" for record in records)


@click.command()
@click.argument("rest", nargs=-1, metavar="[RUN_FILE] [KEY=VALUE]...")
@click.option(
    "--environment", metavar="PLUGIN:WHAT",
    help="Check this instead: ids and tasks, a rollout with a model that knows nothing, and the "
    "score of its ground truth.",
)  # fmt: skip
@click.option(
    "--tasks", type=click.IntRange(1),
    help="With --environment: number of those whose ground truth is scored; default: 3.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    rest: tuple[str, ...], environment: str | None, tasks: int | None, as_json: bool
) -> None:
    """Check this machine and, with RUN_FILE, everything that its run would rely on; or an
    environment, before a run relies on it.

    Each line is ok, warn or fail, with the fix. Exit code: 1 if a check failed."""
    if environment:
        check_environment((environment, *rest), tasks or 3, as_json=as_json)
    if tasks:
        raise click.UsageError("--tasks goes with --environment")
    run_file, overrides = (Path(rest[0]), rest[1:]) if rest else (None, ())
    findings = []
    for finding in examine(run_file, overrides):
        findings.append(finding._asdict())
        if not as_json:
            text = f"{finding.status:<5}{finding.name}: {finding.sentence}; {finding.cure}"
            click.echo(text.removesuffix("; "))
    failed = any(finding["status"] == "fail" for finding in findings)
    if as_json:
        click.echo(msgspec.json.encode({"ok": not failed, "findings": findings}))
    sys.exit(failed)


def examine(run_file: Path | None, overrides: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. A run file that cannot be loaded ends the
    checks."""
    try:
        config = load(run_file, overrides) if run_file else RunConfig()
        if run_file:
            trainer.check(config)
        for check in machine.CHECKS:
            yield from run_check(check, config)
        if run_file and find_spec("torch") and not has_no_own_policy(config):
            with TemporaryDirectory() as folder:
                yield from _examine_policy(config, folder)
    except AgentRLError as error:
        sentence, _, fix = str(error).partition("; ")
        yield Finding("settings", "fail", sentence, fix)


def _examine_policy(config: RunConfig, folder: str) -> Iterator[Finding]:
    """Check the run's policies. folder: for outputs, such as the model of `policy.build`."""
    from transformers.utils.logging import disable_progress_bar

    from agentrl.algorithms.train.load_policies import load_policies, policy_directory
    from agentrl.doctor import policy

    disable_progress_bar()
    config = config.without_warmup()  # what it makes has the same shapes
    if config.policy.build and not Path(config.model_path() or "?").is_dir():
        config = replace(config, output=f"{folder}/run")
    names = trained_policies(config)
    for name in names:
        sizes = list(
            run_check(policy.memory, config, policy_directory(policy_view(config, name))[0])
        )
        title = f"memory of {name}" if len(names) > 1 else "memory"
        yield from (finding._replace(name=title) for finding in sizes)
        if sizes[0].status == "fail":
            return
    policy_settings = replace(config.policy, model=config.model_path())
    config = replace(config, policy=policy_settings, output=f"{folder}/run")
    task = next(iter(tasks_of(config, "train") or tasks_of(config, "heldout")), {})
    with waiting("the model to be loaded"):
        models = load_policies(config)
    for model in models:
        yield from run_check(policy.tokenizer, model)
        yield from run_check(policy.context, model, config, task)
        for check in (policy.tool_calls, policy.thinking, policy.turns):
            yield from run_check(check, model.tokenizer)
        yield from run_check(policy.trie, model, config)
        yield from run_check(policy.sampler, model, config)
    if task and config.runner.processes:
        yield from run_check(policy.rollout, config, task)
