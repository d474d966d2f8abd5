"""`agentrl data` and `agentrl demonstrate`: pairs, labels and demonstrations in a store.

`agentrl demonstrate` lets a stronger model create demonstrations for `[warmup]`. Its rollouts
belong to a separate run without a policy, with the unmodified agent, runner and gateway: an
upstream answers all roles. The run's name contains a hash of everything that the rollouts depend
on, so the same command reuses finished rollouts and plays the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import wraps
from hashlib import sha256
from pathlib import Path
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from agentrl.algorithms.preferences.draft import Draft
from agentrl.algorithms.preferences.formats import add_row, export_rows
from agentrl.algorithms.preferences.mining import MineSpec, mine
from agentrl.cli import ResumedCommand
from agentrl.core.config import PolicyConfig, RunConfig, load
from agentrl.core.config.learning import TeamConfig
from agentrl.core.config.schema import EvalConfig
from agentrl.core.data_files import read_rows, write_rows
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.files import make_folder
from agentrl.core.images import described
from agentrl.core.loading import load_tasks
from agentrl.core.processes import run_blocking
from agentrl.core.types import ANY_ROLE, POLICY, Purpose
from agentrl.store import Store, open_store
from agentrl.store.records import Dataset, Item, Side

if TYPE_CHECKING:
    from agentrl.algorithms.demonstrator import Demonstrator


ITEMS_PER_READ = 256  # items per read
EXAMPLES = 3  # items that are shown
PAIRS = ("extremes", "all", "best-of", "expert", "branch", "turn", "correction", "reasked")
HOWS = (*PAIRS, "label", "mc", "demonstration")
ONLY_FOR = {"least": PAIRS, "per_group": PAIRS, "threshold": ("label", "demonstration")}
Command = Callable[..., Any]


@click.group()
def data() -> None:
    """Create, inspect and export data sets of a store."""


def _with(
    *options: Command, create: bool = False
) -> Callable[[Callable[..., Awaitable[None]]], Command]:
    """A decorator for a command with these options; its function gets the open store as first
    argument. create: whether a missing store is created."""

    def declare(work: Callable[..., Awaitable[None]]) -> Command:
        @wraps(work)
        def command(url: str, **arguments: Any) -> None:
            async def run() -> None:
                async with open_store(url, create=create) as store:
                    await work(store, **arguments)

            asyncio.run(run())

        result: Command = command
        for option in reversed((STORE, *options)):
            result = option(result)
        return result

    return declare


STORE = click.option("--store", "url", required=True, help="URL or file of the store.")
MAKING = (
    click.option(
        "--test", type=click.FloatRange(0, 1), default=0.1, show_default=True,
        help="Fraction of prompts whose items are held out.",
    ),
    click.option(
        "--conflicts", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
        help="What to do with pairs that contradict each other.",
    ),
)  # fmt: skip


@data.command("mine")
@_with(
    click.option(
        "--how", type=click.Choice(HOWS), default=HOWS[0], show_default=True,
        help="Pairs of rollouts or of their calls; label, mc: labels by reward or by call; or"
        " demonstrations.",
    ),
    click.option("--run", required=True, help="The run with the rollouts or sessions."),
    click.option("--reward", default="outcome", show_default=True),
    click.option(
        "--steps", type=(click.IntRange(1), click.IntRange(1)),
        help="First and last step of the rollouts, from 1.",
    ),
    click.option("--policy", default=POLICY, help="Policy or upstream of the calls."),
    click.option("--since", type=click.DateTime(), help="Earliest time of a call."),
    click.option("--least-version", default=0, help="Oldest policy version of a call."),
    click.option("--inexact", is_flag=True, help="Include calls without token ids."),
    click.option("--least", default=0.0, help="Of pairs: the smallest difference of rewards."),
    click.option("--per-group", default=0, help="Of pairs: at most this many of a group; 0: all."),
    click.option("--expert", default="", help="With --how expert: the run with better rollouts."),
    click.option("--threshold", default=0.5, help="Of labels: smallest reward of a good rollout."),
    click.option("--freeze", is_flag=True, help="Copy the calls, so a prune may remove them."),
    click.argument("name"), *MAKING,
)  # fmt: skip
async def mine_command(store: Store, freeze: bool, **options: Any) -> None:
    """Create data set NAME with pairs, labels or demonstrations of a run's rollouts or sessions."""
    if bool(options["expert"]) != (options["how"] == "expert"):
        raise click.UsageError("--how expert needs --expert RUN, which no other --how takes")
    context = click.get_current_context()
    for name, hows in ONLY_FOR.items():
        on_command_line = (
            context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        )
        if on_command_line and options["how"] not in hows:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} has no effect with --how {options['how']}")
    dataset = await _mine(store, **options)
    if freeze:
        await _freeze(store, dataset)


async def _mine(store: Store, name: str, test: float, conflicts: Any, **options: Any) -> Dataset:
    since: datetime | None = options.pop("since")
    spec = msgspec.convert(options | {"since": since.timestamp() if since else 0.0}, MineSpec)
    if spec.run not in (runs := await store.runs()):
        raise ConfigError(f"--run {spec.run}: the store has {', '.join(runs) or 'no run'}")
    draft = await _draft(store, name, test, conflicts, msgspec.to_builtins(spec))
    await mine(store, draft, spec)
    return await _commit(draft)


@data.command("import")
@_with(click.argument("name"), click.argument("source"), *MAKING, create=True)
async def import_command(store: Store, name: str, source: str, test: float, conflicts: Any) -> None:
    """Create data set NAME from SOURCE: file.jsonl, file.parquet or hf:OWNER/NAME[@REV][:SPLIT].

    Also creates a missing store, so a run on a data set may begin with this command."""
    draft = await _draft(store, name, test, conflicts, {"source": source})
    for place, row in read_rows(source):
        add_row(draft, place, row)
        await draft.flush()
    await _commit(draft)


@data.command()
@_with(click.argument("name", required=False))
async def show(store: Store, name: str | None) -> None:
    """List the data sets of a store, or describe NAME: kinds, margins, lengths, examples."""
    if name is None:
        for dataset in await store.datasets():
            state = dataset.digest or "unfinished"
            click.echo(f"{dataset.name} version {dataset.version}: {dataset.items} items, {state}")
        return
    dataset, items = await _items(store, name)
    click.echo(f"{name} version {dataset.version}, digest {dataset.digest}")
    spec = (f"{key} {value}" for key, value in dataset.spec.items() if value not in (None, "", 0))
    click.echo(f"made with {', '.join(spec)}")
    for (kind, split), n in sorted(Counter((i.kind, i.split) for i in items).items()):
        click.echo(f"{n:8} {kind} ({split})")
    margins = [item.margin for item in items if item.margin is not None]
    if len(margins) > 1:
        low, middle, high = quantiles(margins, n=4)
        click.echo(f"margins: quartiles {low:g}, {middle:g}, {high:g}")
    if pairs := [item for item in items[:ITEMS_PER_READ] if item.rejected]:
        fraction = await _longer(store, pairs)
        click.echo(f"the better completion is the longer one in {fraction:.0%} of pairs")
    for row in await export_rows(store, items[:EXAMPLES], described):
        shown = {key: value for key, value in row.items() if not key.endswith("_ids")}
        click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())


@data.command("export")
@_with(click.argument("name"), click.argument("path", type=click.Path(path_type=Path)))
async def export_command(store: Store, name: str, path: Path) -> None:
    """Write NAME to PATH (.jsonl or .parquet) with TRL's columns and exact tokens."""
    _, items = await _items(store, name)
    rows = await export_rows(store, items)
    write_rows(rows, path)
    click.echo(f"{len(items)} items in {path}")


async def _freeze(store: Store, dataset: Dataset) -> None:
    """Copy the calls of all items."""
    items = await store.items(dataset.name, dataset.version)
    for first in range(0, len(items), ITEMS_PER_READ):
        digests = [side for item in items[first : first + ITEMS_PER_READ] for side in item.sides]
        sides = await store.sides(digests)
        copies = [Side(digest=digest, own=calls) for digest, calls in sides.items() if calls]
        await store.add_items(dataset.name, dataset.version, [], copies)


async def _draft(store: Store, name: str, test: float, conflicts: Any, spec: Any) -> Draft:
    spec |= {"test": test, "conflicts": conflicts}
    return Draft(store, name, await store.draft_dataset(name, spec), test, conflicts)


async def _commit(draft: Draft) -> Dataset:
    """Commit and return a version; print its size and the numbers of omitted items."""
    if not draft.items:
        counted = ", ".join(f"{n} {reason}" for reason, n in draft.counts.items() if n)
        raise ConfigError(f"{draft.name}: found nothing to learn from ({counted or 'no rows'})")
    dataset = await draft.commit()
    click.echo(
        f"{dataset.name} version {dataset.version}: {dataset.items} items, digest {dataset.digest}"
    )
    for reason, n in draft.counts.most_common():
        if n:
            click.echo(f"{n:8} {reason}")
    return dataset


async def _items(store: Store, name: str) -> tuple[Dataset, list[Item]]:
    """The newest version of a data set, and its items."""
    if not (versions := await store.datasets(name)):
        raise ConfigError(f"{name}: the store has no such data set")
    return versions[-1], await store.items(name, versions[-1].version)


async def _longer(store: Store, pairs: list[Item]) -> float:
    """The fraction of pairs whose better completion is the longer one."""
    sides = await store.sides([side for item in pairs for side in item.sides])
    sizes = {
        digest: sum(len(call.completion) or len(str(call.answer)) for call in calls)
        for digest, calls in sides.items()
    }
    return fmean(sizes[item.chosen] > sizes[item.sides[-1]] for item in pairs)


UNPLAYED = {"name", "root", "output", "store", "runner", "engine", "learner", "keep_checkpoints"}
UNPLAYED |= {"steps", "algorithm", "critic", "reference", "teacher"}


@click.command(cls=ResumedCommand, continues="with the rollouts that are left")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--url", default="", help="Server of OpenAI's API, up to /v1.")
@click.option("--model", default="", help="Name of the model on the server.")
@click.option("--key-env", default="", help="Environment variable with the server's API key.")
@click.option("--script", default="", help="file.py:name of a function of messages and tools.")
@click.option(
    "--tasks", default="train", show_default=True, help="train, heldout, or another task file."
)
@click.option("--count", type=click.IntRange(1), help="At most this many tasks; default: all.")
@click.option("--samples", type=click.IntRange(1), default=1, help="Rollouts per task.")
@click.option("--least", default=1.0, show_default=True, help="Smallest reward to keep.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="file.jsonl"
)
@click.option("--fresh", is_flag=True, help="Play all rollouts again.")
def demonstrate(
    run_file: Path,
    overrides: tuple[str, ...],
    url: str,
    model: str,
    key_env: str,
    script: str,
    tasks: str,
    count: int | None,
    samples: int,
    least: float,
    out: Path,
    fresh: bool,
) -> None:
    """Let a model on a server, or a function, play the tasks of RUN_FILE with its agent, and write
    the conversations of good rollouts to OUT, for [warmup] data.

    The function returns text, or a message with tool_calls."""
    from agentrl import trainer
    from agentrl.algorithms.demonstrator import Demonstrator

    if bool(script) == bool(url) or bool(url) != bool(model):
        raise click.UsageError("give --url and --model of a server, or --script of a function")
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: [warmup] reads .jsonl; name such a file")
    config = trainer.hide_secrets(load(run_file, overrides))
    demonstrator = Demonstrator(url, model, key_env, script)
    run = run_of(config, demonstrator, tasks, count or 0, samples)
    if fresh:
        trainer.clear(run)
    conversations = run_blocking(play_and_keep(run, demonstrator, least))
    write_rows(conversations, out)
    click.echo(f"{out}: imitate them with [warmup] data = {str(out.resolve())!r}")


def run_of(
    config: RunConfig, demonstrator: Demonstrator, tasks: str, count: int, samples: int
) -> RunConfig:
    """The run that plays the tasks. tasks: train, heldout or a file; count: at most this many, 0:
    all. Raises ConfigError for settings of a run without rollouts."""
    from agentrl import trainer
    from agentrl.algorithms.demonstrator import NAME, content_digest
    from agentrl.evaluation import evaluation_run

    if not config.plays_rollouts:
        raise ConfigError("this run learns from a data set and plays no rollouts of an agent")
    if NAME in config.upstreams:
        raise ConfigError(f"[upstreams.{NAME}] has the name of the demonstrator; rename it")
    file = getattr(config.tasks, tasks) if tasks in ("train", "heldout") else tasks
    if not file:
        raise ConfigError(f"tasks.{tasks} is missing: name a .jsonl file or file.py:name")
    run = config.without_warmup().for_evaluation()
    roles = {role: player for role, player in config.roles.items() if player in config.upstreams}
    run = replace(
        run,
        policy=PolicyConfig(unsupported_roles=config.policy.unsupported_roles),
        policies={},
        team=TeamConfig(),
        roles={ANY_ROLE: NAME} | roles,
        tasks=replace(config.tasks, heldout=file),
        eval=EvalConfig(tasks=count, samples=samples),
    )
    task_list = load_tasks(
        file, Path(config.root), key=f"tasks.{tasks}", columns=config.tasks.columns
    )[: count or None]
    settings = {k: v for k, v in msgspec.to_builtins(run).items() if k not in UNPLAYED}
    root = Path(config.root)
    files = [content_digest(name, root) for name in (config.agent.path, config.verifier.path)]
    identity = [demonstrator.identity(root), files, task_list, settings]
    digest = sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:8]
    run = evaluation_run(run, f"{config.name}-demonstrations-{digest}", None)
    return replace(run, store=run.store if trainer.has_own_store(config) else config.store)


async def play_and_keep(
    config: RunConfig, demonstrator: Demonstrator, least: float
) -> list[dict[str, Any]]:
    """Play the rollouts of `run_of`; returns the conversations of those with a reward of at least
    `least`. Raises AgentRLError if there are none."""
    from rich.console import Console

    from agentrl import trainer
    from agentrl.algorithms.demonstrator import NAME, kept_conversations
    from agentrl.evaluation import check_any_succeeded

    console = Console(stderr=True)
    async with demonstrator.answering(Path(config.root)) as upstream:
        config = replace(config, upstreams=config.upstreams | {NAME: upstream})
        trainer.check(config)
        make_folder(Path(config.output))
        async with open_store(config.store) as store:
            await trainer.supervise(
                store, config, process="demonstrations", alone=True, console=console
            )
            rows = await store.rollouts(config.name, purpose=Purpose.EVAL)
            check_any_succeeded(rows, config.name, " with --fresh")
            kept, sentence = await kept_conversations(store, rows, least)
    if not kept:
        raise AgentRLError(f"{sentence}; lower --least, or take a stronger model")
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    return kept
