"""The entry point of the command line. Every user error is one sentence and exit code 2.

`agentrl train --dry-run` prints the settings of a run, and its memory and time.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import click
from msgspec.structs import replace

from agentrl import __version__
from agentrl.cli import (
    CommandGroup,
    ResumedCommand,
    config_file,
    how_to_continue,
    level_of,
    log_level,
    quiet,
    verbose,
)
from agentrl.cli.store import store as store_group
from agentrl.core.config import RunConfig, load, to_toml
from agentrl.core.config.infrastructure import VerlLearnerConfig
from agentrl.core.errors import AgentRLError, user_message
from agentrl.core.processes import ERROR_MARK, PARENT, USER_ERROR, die_with_parent, seal
from agentrl.store.urls import split_secret

# Functions that `agentrl process NAME` runs, with settings that the parent process has written.
PROCESSES = {
    "algorithm": "agentrl.algorithm_process:run_algorithm",
    "audit": "agentrl.audit.subjects:main",
    "demonstrations": "agentrl.algorithms.demonstrator:main",
    "heldout": "agentrl.live.promotion:play",
    "live-gateway": "agentrl.live.gateway:main",
    "plan": "agentrl.crossplay:main",
    "prompts": "agentrl.algorithms.prompts:main",
    "sinks": "agentrl.telemetry.sinks:main",
    "watch": "agentrl.live.supervisor:main",
}
OUTLIVE_PARENT = {"live-gateway", "sinks"}  # these processes end by themselves, after their work


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Reinforcement learning for the agents people already have."""


cli.add_command(store_group)


@cli.command(cls=ResumedCommand, continues="after the last checkpoint")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@quiet
@verbose
@log_level
@click.option("--seed", type=int, help="Seed of model building, task order and sampling.")
@click.option("--steps", type=int, help="Training steps.")
@click.option("--fresh", is_flag=True, help="Delete the outputs of an earlier run of this name.")
@click.option("--take-over", is_flag=True, help="Stop a live process of the run and continue here.")
@click.option(
    "--from",
    "start",
    metavar="STEPS|PATH",
    help="Resume from this checkpoint of the run; the steps after it are trained again.",
)
@click.option("--dry-run", is_flag=True, help="Check and print all settings and the run's needs.")
def train(
    run_file: Path,
    overrides: tuple[str, ...],
    seed: int | None,
    steps: int | None,
    fresh: bool,
    take_over: bool,
    start: str | None,
    dry_run: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train the agent of RUN_FILE, or resume a stopped run.

    OVERRIDES are settings such as `algorithm.lr=1e-4`."""
    level = level_of(quiet=quiet, verbose=verbose)
    settings = {"seed": seed, "steps": steps}
    extra = [f"{key}={value}" for key, value in settings.items() if value is not None]
    if fresh and start:
        raise click.UsageError("--fresh deletes every checkpoint: remove it or --from")
    if fresh and take_over:
        raise click.UsageError("--fresh deletes what a live run writes: stop it, drop --take-over")
    config = load(run_file, [*overrides, *extra])
    if dry_run:
        show_settings(config)
        return
    from agentrl import trainer
    from agentrl.cli.init import check_name
    from agentrl.doctor.machine import check_at_start

    for warning in check_at_start(config):
        click.echo(f"WARNING {warning}")
    check_name(config)
    if start:
        trainer.check(config)
        trainer.go_back(config, start, take_over=take_over)
    trainer.run_training(config, fresh=fresh, take_over=take_over, level=level)


@cli.group(cls=CommandGroup, path="export")
def export() -> None:
    """Export traces and models to other tools."""


@cli.group()
def runner() -> None:
    """Processes that run agents."""


@runner.command("start")
@click.option("--store", required=True, help="Store URL.")
@click.option("--run", "run", required=True, help="Name of the run.")
@click.option(
    "--key",
    help="API key of a store over HTTP, with scope runner. Prefer the variable AGENTRL_STORE_KEY: "
    "every user of a machine can read its command lines.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of the agent's files here; default: the path on the machine that trains.",
)
@log_level
def start_runner(store: str, run: str, key: str | None, root: Path | None) -> None:
    """Run rollouts until the run ends or SIGTERM, on a machine that reaches store and policy."""
    standalone = PARENT not in os.environ  # otherwise the launcher decides when to stop
    die_with_parent()
    if key is not None:
        os.environ["AGENTRL_STORE_KEY"] = key
    from agentrl.environments.runner import played_environment
    from agentrl.runners.main import main as run_forever

    sys.exit(
        run_forever(
            store, run, find_environment=played_environment, root=root, until_ended=standalone
        )
    )


@cli.command(hidden=True)
@click.argument("name", type=click.Choice(list(PROCESSES)))
@config_file
def process(name: str, config: RunConfig) -> None:
    """A process of a run, which another command starts."""
    if name not in OUTLIVE_PARENT:
        die_with_parent()
    resolve_name(PROCESSES[name])(config)


def main() -> None:
    """Entry point of `agentrl`. Agents, which run as the same user, cannot read its memory."""
    seal()
    try:
        cli(standalone_mode=False)
    except (AgentRLError, ModuleNotFoundError) as error:
        click.echo(f"{ERROR_MARK}{user_message(error)}", err=True)
        sys.exit(USER_ERROR)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort) as stop:
        click.echo(f"\nStopped.{how_to_continue(cli, sys.argv[1:], str(stop))}", err=True)
        sys.exit(130)


def show_settings(config: RunConfig) -> None:
    """Print a run file with every setting and, as comments, a forecast of the run. Raises
    ConfigError for settings that contradict each other."""
    lines: list[str] = []
    if find_spec("torch") and find_spec("transformers"):  # the extra `train`
        from agentrl.algorithms.proof import forecast
        from agentrl.algorithms.train.stages import group_requirements, load_algorithms

        group_requirements(config, load_algorithms(config))
        lines += forecast(config)
    text = "".join(f"# {line}\n" for line in lines)
    text += to_toml(replace(config, store=split_secret(config.store)[0]))
    if isinstance(config.learner, VerlLearnerConfig):
        from agentrl.algorithms.learners.verl.settings import describe_settings

        text += describe_settings(config)
    click.echo(text, nl=False)
