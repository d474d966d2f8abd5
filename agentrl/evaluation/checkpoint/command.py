"""`agentrl eval`: the held-out score of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from agentrl.cli import level_of, log_level, quiet, verbose
from agentrl.config import load


@click.command("eval")
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("rest", nargs=-1, metavar="[CHECKPOINT] [KEY=VALUE]...")
@click.option("--tasks", help="Task file; default: the run file's held-out tasks.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of <component>.txt: prompts.directory; default: what `agentrl prompts` found.",
)
@click.option("--samples", type=click.IntRange(1), help="Rollouts per task: eval.samples, pass@k.")
@quiet
@verbose
@log_level
def evaluate(
    run_file: Path,
    rest: tuple[str, ...],
    tasks: str | None,
    prompts: Path | None,
    samples: int | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Score CHECKPOINT, by default the run's last one, with the agent and verifier of RUN_FILE.

    Before training it scores the model that the run starts from, without its warm-up.

    For a RUN_FILE without a model of its own, score its [upstreams]."""
    from agentrl.evaluation.checkpoint import score

    checkpoints = [Path(argument) for argument in rest if "=" not in argument]
    if len(checkpoints) > 1:
        raise click.UsageError(f"one checkpoint at a time, not {', '.join(map(str, checkpoints))}")
    extra = [] if samples is None else [f"eval.samples={samples}"]
    extra += [] if prompts is None else [f"prompts.directory={prompts.resolve()}"]
    config = load(run_file, [*(argument for argument in rest if "=" in argument), *extra])
    level = level_of(quiet=quiet, verbose=verbose)
    checkpoint = checkpoints[0] if checkpoints else None
    score.evaluate(config, checkpoint, tasks, level=level)
