"""`agentrl prompts`: search for better texts, and list those of an agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
from msgspec.structs import replace

from agentrl.algorithms.prompts.texts import prompt_texts
from agentrl.base.processes import die_with_parent, log_to_stderr
from agentrl.base.threads import run_blocking
from agentrl.cli import ResumedCommand, config_file
from agentrl.config import RunConfig, load
from agentrl.config.policies import has_no_own_policy
from agentrl.errors import ConfigError
from agentrl.run_stores import store_with


@click.command(cls=ResumedCommand, continues="the search")
@click.argument("run_file")
@click.argument("overrides", nargs=-1)
@click.option("--fresh", is_flag=True, help="Delete the outputs of an earlier search.")
@click.option("--quiet", "-q", is_flag=True, help="Show only warnings and the result.")
@click.option("--store", help="With find: store URL; default: the store in runs/RUN.")
def prompts(
    run_file: str, overrides: tuple[str, ...], fresh: bool, quiet: bool, store: str | None
) -> None:
    """Search for better texts for the agent of RUN_FILE, or resume a stopped search.

    `agentrl prompts find RUN` prints the prompt texts in the calls of a run, by role."""
    from agentrl.algorithms.prompts.find import find
    from agentrl.telemetry.console import console_level

    if run_file == "find" and not Path("find").is_file():
        if len(overrides) != 1:
            raise click.UsageError("give one run: agentrl prompts find RUN")
        url = store or store_with(overrides[0])
        click.echo(asyncio.run(find(url, overrides[0])))
        return
    config = load(Path(run_file), overrides)
    optimise(config, fresh=fresh, level=console_level(quiet=quiet, verbose=False))


def optimise(config: RunConfig, *, fresh: bool, level: int) -> None:
    """Search in a separate run, and write the best texts to <output>/prompts."""
    from agentrl import trainer
    from agentrl.evaluation.checkpoint.runs import evaluation_run, last_checkpoint

    config = trainer.hide_secrets(config)
    if not config.prompts.components:
        raise ConfigError("[prompts.components] is missing: name the texts to rewrite")
    if not config.tasks.train:
        raise ConfigError("tasks.train is missing: name a .jsonl file or file.py:name")
    prompt_texts(config)
    checkpoint = None
    if not has_no_own_policy(config) and Path(config.output, "checkpoints").is_dir():
        checkpoint = last_checkpoint(config)
    own = evaluation_run(config, f"{config.name}-prompts", checkpoint)
    store = own.store if trainer.has_own_store(config) else config.store
    own = replace(own, store=store)
    trainer.check(own)
    if fresh:
        trainer.clear(own)
    run_blocking(_optimise(own, Path(config.output, "prompts"), level))


async def _optimise(config: RunConfig, folder: Path, level: int) -> None:
    from rich.console import Console

    from agentrl import trainer
    from agentrl.algorithms.prompts.result import report, write_texts
    from agentrl.base.files import make_folder
    from agentrl.store import open_store

    make_folder(Path(config.output))
    console = Console()
    async with open_store(config.store) as store:
        if state := await store.run(config.name):
            # `refuse_changes` refuses fewer steps than a resumed search has committed.
            config = replace(config, steps=state.step)
        await trainer.refuse_changes(store, config)
        config = replace(config, steps=0)
        seconds = await trainer.supervise(
            store, config, verb="prompts", console=console, level=level
        )
        best = await write_texts(store, config, make_folder(folder))
        for line in await report(store, config, best):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"{seconds:.0f} s; the texts are in {folder}", highlight=False)


@click.command("prompts")
@config_file
def search_process(config: RunConfig) -> None:
    die_with_parent()
    log_to_stderr()
    from agentrl.algorithms.prompts.stored import search_upstreams

    own = not has_no_own_policy(config)
    asyncio.run(_search_with_policies(config) if own else search_upstreams(config))


async def _search_with_policies(config: RunConfig) -> None:
    """With the run's policies, which do not learn."""
    from agentrl.algorithms.prompts.stored import search_and_score
    from agentrl.algorithms.train.stages import served

    async with served(config, 0) as (store, state):
        await search_and_score(store, config, state)
