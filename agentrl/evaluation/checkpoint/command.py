"""`agentrl eval`: the held-out score of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from agentrl.cli import level_of, log_level, quiet, verbose
from agentrl.config import load, resolve


@click.command("eval")
@click.argument("rest", nargs=-1, metavar="RUN_FILE [CHECKPOINT] [KEY=VALUE]...")
@click.option("--environment", metavar="PLUGIN:WHAT", help="Needs no RUN_FILE, but --model.")
@click.option(
    "--model",
    metavar="URL|NAME",
    help="With --environment: a server's URL ending in /v1, or a model as policy.model.",
)
@click.option("--model-name", help="Model at the URL; default: the only one that it serves.")
@click.option("--key-env", help="Variable with the API key of the URL.")
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
    rest: tuple[str, ...],
    environment: str | None,
    model: str | None,
    model_name: str | None,
    key_env: str | None,
    tasks: str | None,
    prompts: Path | None,
    samples: int | None,
    quiet: bool,
    verbose: bool,
) -> None:
    """Score CHECKPOINT, by default the run's last one, with the agent and verifier of RUN_FILE, or
    a model on the held-out tasks of an environment.

    Before training it scores the model that the run starts from, without its warm-up.

    For a RUN_FILE without a model of its own, score its [upstreams]."""
    from agentrl.evaluation.checkpoint import score

    checkpoints = [Path(argument) for argument in rest if "=" not in argument]
    run_file = checkpoints.pop(0) if checkpoints else None
    if environment and run_file:
        raise click.UsageError(f"--environment stands for a run file: remove {run_file}")
    if run_file is None and not environment:
        raise click.UsageError("give RUN_FILE, or --environment PLUGIN:WHAT --model URL")
    if not environment and (model or model_name or key_env):
        raise click.UsageError("--model goes with --environment; a RUN_FILE names its own")
    if len(checkpoints) > 1:
        raise click.UsageError(f"one checkpoint at a time, not {', '.join(map(str, checkpoints))}")
    extra = [] if samples is None else [f"eval.samples={samples}"]
    extra += [] if prompts is None else [f"prompts.directory={prompts.resolve()}"]
    overrides = [*(argument for argument in rest if "=" in argument), *extra]
    if run_file is None:
        from agentrl.evaluation.checkpoint.served import settings_of

        assert environment is not None
        data = settings_of(environment, model or "", model_name or "", key_env or "")
        config = resolve(data, source="--environment", overrides=overrides)
    else:
        config = load(run_file, overrides)
    level = level_of(quiet=quiet, verbose=verbose)
    checkpoint = checkpoints[0] if checkpoints else None
    score.evaluate(config, checkpoint, tasks, level=level)
