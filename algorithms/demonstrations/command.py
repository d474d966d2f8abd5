"""`agentrl demonstrate`: a stronger model makes the demonstrations of `[warmup]`.

Its rollouts are those of a run without a policy, in a folder beside the user's, with the unmodified
agent, runner and gateway: an upstream answers all roles. The run's name has a hash of all that the
rollouts depend on, so the same command finds those that have ended, and plays the rest.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from agentrl.base.files import make_folder
from agentrl.base.loading import load_tasks
from agentrl.base.processes import die_with_parent, log_to_stderr
from agentrl.base.row_files import write_rows
from agentrl.base.threads import run_blocking
from agentrl.cli import ResumedCommand, config_file, level_of, quiet, verbose
from agentrl.config import PolicyConfig, RunConfig, load
from agentrl.config.learning import TeamConfig
from agentrl.config.schema import EvalConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.store import open_store
from agentrl.types import ANY_ROLE, Purpose

if TYPE_CHECKING:
    from agentrl.algorithms.demonstrations.demonstrator import Demonstrator

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
@click.option("--count", type=click.IntRange(1), help="Most tasks; default: all.")
@click.option("--samples", type=click.IntRange(1), default=1, help="Rollouts per task.")
@click.option("--least", default=1.0, show_default=True, help="Smallest reward to keep.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="file.jsonl"
)
@click.option("--fresh", is_flag=True, help="Play all rollouts again.")
@quiet
@verbose
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
    quiet: bool,
    verbose: bool,
) -> None:
    """Let a model on a server, or a function, play the tasks of RUN_FILE with its agent, and write
    the conversations of good rollouts to OUT, for [warmup] data.

    The function returns text, or a message with tool_calls."""
    from agentrl import trainer
    from agentrl.algorithms.demonstrations.demonstrator import Demonstrator

    if bool(script) == bool(url) or bool(url) != bool(model):
        raise click.UsageError("give --url and --model of a server, or --script of a function")
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: [warmup] reads .jsonl; name such a file")
    config = trainer.hide_secrets(load(run_file, overrides))
    who = Demonstrator(url, model, key_env, script)
    own = run_of(config, who, tasks, count or 0, samples)
    if fresh:
        trainer.clear(own)
    level = level_of(quiet=quiet, verbose=verbose)
    found = run_blocking(play_and_keep(own, who, least, level))
    write_rows(found, out)
    click.echo(f"{out}: imitate them with [warmup] data = {str(out.resolve())!r}")


def run_of(
    config: RunConfig, demonstrator: Demonstrator, tasks: str, count: int, samples: int
) -> RunConfig:
    """The run that plays the tasks. tasks: train, heldout, or those of a file; count: the most, 0:
    all. Raises ConfigError for settings with which no rollouts are played."""
    from agentrl import trainer
    from agentrl.algorithms.demonstrations.demonstrator import NAME, content_digest
    from agentrl.evaluation.checkpoint.runs import evaluation_run

    if not config.plays_rollouts:
        raise ConfigError("this run learns from a data set and plays no rollouts of an agent")
    if NAME in config.upstreams:
        raise ConfigError(f"[upstreams.{NAME}] has the name of what answers here; rename it")
    file = getattr(config.tasks, tasks) if tasks in ("train", "heldout") else tasks
    if not file:
        raise ConfigError(f"tasks.{tasks} is missing: name a .jsonl file or file.py:name")
    own = config.without_warmup().for_evaluation()
    roles = {role: who for role, who in config.roles.items() if who in config.upstreams}
    own = replace(
        own,
        policy=PolicyConfig(unsupported_roles=config.policy.unsupported_roles),
        policies={},
        team=TeamConfig(),
        roles={ANY_ROLE: NAME} | roles,
        tasks=replace(config.tasks, heldout=file),
        eval=EvalConfig(tasks=count, samples=samples),
    )
    played = load_tasks(
        file, Path(config.root), key=f"tasks.{tasks}", columns=config.tasks.columns
    )[: count or None]
    settings = {k: v for k, v in msgspec.to_builtins(own).items() if k not in UNPLAYED}
    root = Path(config.root)
    files = [content_digest(name, root) for name in (config.agent.path, config.verifier.path)]
    about = [demonstrator.identity(root), files, played, settings]
    digest = sha256(msgspec.json.encode(about, order="sorted")).hexdigest()[:8]
    own = evaluation_run(own, f"{config.name}-demonstrations-{digest}", None)
    return replace(own, store=own.store if trainer.has_own_store(config) else config.store)


async def play_and_keep(
    config: RunConfig, demonstrator: Demonstrator, least: float, level: int
) -> list[dict[str, Any]]:
    """Play the rollouts of `run_of`; returns the conversations of those with a reward of at least
    `least`. Raises AgentRLError if there are none."""
    from rich.console import Console

    from agentrl import trainer
    from agentrl.algorithms.demonstrations.demonstrator import NAME, kept_conversations
    from agentrl.evaluation.checkpoint.runs import check_any_succeeded

    console = Console(stderr=True)
    async with demonstrator.answering(Path(config.root)) as upstream:
        config = replace(config, upstreams=config.upstreams | {NAME: upstream})
        trainer.check(config)
        make_folder(Path(config.output))
        async with open_store(config.store) as store:
            await trainer.supervise(
                store, config, verb="demonstrate", alone=True, console=console, level=level
            )
            rows = await store.rollouts(config.name, purpose=Purpose.EVAL)
            check_any_succeeded(rows, config.name, " with --fresh")
            kept, sentence = await kept_conversations(store, rows, least)
    if not kept:
        raise AgentRLError(f"{sentence}; lower --least, or take a stronger model")
    console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    return kept


@click.command("demonstrate")
@config_file
def play_demonstrations(config: RunConfig) -> None:
    die_with_parent()
    log_to_stderr()
    from agentrl.algorithms.demonstrations.demonstrator import run

    run(config)
