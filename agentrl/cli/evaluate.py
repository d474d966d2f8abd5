"""`agentrl eval` and `agentrl algorithms`.

The first prints the held-out score of a checkpoint, the second the presets and which of them fit a
run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from agentrl.cli import ResumedCommand, level_of, print_result, quiet, verbose
from agentrl.core.config import load, resolve


@click.command(
    "eval",
    cls=ResumedCommand,
    continues="with the games that are left",
    resumes=lambda options: bool(options & {"--crossplay", "--ablate"}),
)
@click.argument("rest", nargs=-1, metavar="RUN_FILE [CHECKPOINT]... [KEY=VALUE]...")
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
@click.option(
    "--crossplay",
    is_flag=True,
    help="Play CHECKPOINTs of self-play against each other; by default all on disk and the "
    "snapshots of the pool. Prints returns with seats swapped, and Elo ratings.",
)
@click.option(
    "--every", type=click.IntRange(1), help="With --crossplay: checkpoints every N steps."
)
@click.option(
    "--games", type=click.IntRange(1), help="With --crossplay: games per pair; default: 20."
)
@click.option(
    "--ablate",
    multiple=True,
    metavar="ROLE|all",
    help="Score the team with ROLE played by its untrained policy, or by CHECKPOINT; repeatable.",
)
@click.option("--fresh", is_flag=True, help="With --crossplay or --ablate: play all games again.")
@click.option("--json", "as_json", is_flag=True, help="With --crossplay or --ablate: print JSON.")
@quiet
@verbose
def evaluate(
    rest: tuple[str, ...],
    environment: str | None,
    model: str | None,
    model_name: str | None,
    key_env: str | None,
    tasks: str | None,
    prompts: Path | None,
    samples: int | None,
    crossplay: bool,
    every: int | None,
    games: int | None,
    ablate: tuple[str, ...],
    fresh: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:  # fmt: skip
    """Score CHECKPOINT, by default the run's last one, with the agent and verifier of RUN_FILE, or
    a model on the held-out tasks of an environment.

    Before training it scores the model that the run starts from, without its warm-up.

    If RUN_FILE trains no model, score its [upstreams]."""
    from agentrl import evaluation

    if crossplay and ablate:
        raise click.UsageError("--crossplay or --ablate, not both")
    if not crossplay and (every or games):
        raise click.UsageError("--every and --games go with --crossplay")
    if (crossplay or ablate) and (environment or tasks or samples):
        raise click.UsageError("--crossplay and --ablate play held-out tasks of a RUN_FILE once")
    if not (crossplay or ablate) and (fresh or as_json):
        raise click.UsageError("--fresh and --json go with --crossplay or --ablate")
    checkpoints = [Path(argument) for argument in rest if "=" not in argument]
    run_file = checkpoints.pop(0) if checkpoints else None
    if environment and run_file:
        raise click.UsageError(f"--environment replaces a run file: remove {run_file}")
    if run_file is None and not environment:
        raise click.UsageError("give RUN_FILE, or --environment PLUGIN:WHAT --model URL")
    if not environment and (model or model_name or key_env):
        raise click.UsageError("--model needs --environment; a RUN_FILE names its own model")
    if len(checkpoints) > 1 and not crossplay:
        raise click.UsageError(f"one checkpoint at a time, not {', '.join(map(str, checkpoints))}")
    extra = [] if samples is None else [f"eval.samples={samples}"]
    extra += [] if prompts is None else [f"prompts.directory={prompts.resolve()}"]
    overrides = [*(argument for argument in rest if "=" in argument), *extra]
    if run_file is None:
        from agentrl.evaluation import settings_of

        assert environment is not None
        data = settings_of(environment, model or "", model_name or "", key_env or "")
        config = resolve(data, source="--environment", overrides=overrides)
    else:
        config = load(run_file, overrides)
    level = level_of(quiet=quiet, verbose=verbose)
    checkpoint = checkpoints[0] if checkpoints else None
    options: Any = {"fresh": fresh, "level": level}
    if crossplay:
        from agentrl.crossplay import crossplay as play_all
        from agentrl.crossplay import matrix_json, matrix_table

        matrix = play_all(config, checkpoints, every=every or 0, games=games or 20, **options)
        print_result(matrix_json(matrix) if as_json else matrix_table(matrix))
    elif ablate:
        from agentrl.crossplay import ablate as play_without
        from agentrl.crossplay import ablation_json, ablation_table

        rows = play_without(config, () if "all" in ablate else ablate, checkpoint, **options)
        print_result(ablation_json(rows) if as_json else ablation_table(rows))
    else:
        evaluation.evaluate(config, checkpoint, tasks, level=level)


@click.command()
@click.argument("name", required=False)
@click.option("--for", "run_file", type=click.Path(path_type=Path), help="Only those for this run.")
def algorithms(name: str | None, run_file: Path | None) -> None:
    """List the presets, modifiers and recipes of `algorithm.preset`, or print the components and
    options of NAME, such as gspo, grpo+tis or mine.py:lenient.

    With --for: those that fit a run, by its settings and its rollouts in the store."""
    from agentrl.advise import advise, catalogue, record

    if name and run_file:
        raise click.UsageError("give NAME or --for, not both")
    if run_file:
        lines = asyncio.run(advise(load(run_file)))
    else:
        lines = record(name) if name else catalogue()
    click.echo("\n".join(lines))
