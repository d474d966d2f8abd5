"""`agentrl rm`: train reward models on pairs and labels, and evaluate them."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from agentrl.base.threads import run_blocking
from agentrl.cli import numbers
from agentrl.config import RunConfig, load
from agentrl.errors import ConfigError
from agentrl.store import open_store

run_file = click.argument("run_file", type=click.Path(path_type=Path))
overrides = click.argument("overrides", nargs=-1)
plain = click.option("--json", "plain", is_flag=True, help="JSON instead of lines.")


@click.group()
def rm() -> None:
    """Reward models: train one on a data set, and evaluate it."""


@rm.command()
@run_file
@overrides
@plain
def train(run_file: Path, overrides: tuple[str, ...], plain: bool) -> None:
    """Train a reward model on the items of [data] in RUN_FILE, from its policy.model, into
    <output>/reward_model: the `model` of a [reward_models.NAME]."""
    from agentrl.algorithms.reward_models.train import train_reward_model

    config = _config(run_file, overrides)

    async def run() -> dict[str, float]:
        async with open_store(config.store) as store:
            return await train_reward_model(config, store)

    _echo(run_blocking(run()), plain=plain)
    click.echo(f"reward model: {Path(config.output, 'reward_model')}", err=plain)


@rm.command("eval")
@run_file
@overrides
@click.option("--model", type=click.Path(path_type=Path), help="Default: the run's own.")
@click.option(
    "--best-of", "sizes", callback=numbers(int),
    help="Comma-separated values of n, for best of n stored rollouts.",
)  # fmt: skip
@click.option("--run", help="The run with these rollouts; default: the run of RUN_FILE.")
@plain
def evaluate(
    run_file: Path,
    overrides: tuple[str, ...],
    model: Path | None,
    sizes: list[int],
    run: str | None,
    plain: bool,
) -> None:
    """Print the reward model's accuracy on held-out items, and the verifier's outcome of the best
    of n stored rollouts by its score."""
    from agentrl.algorithms.reward_models import train as reward_model
    from agentrl.algorithms.reward_models.trainer import preference_metrics

    config = _config(run_file, overrides)
    source = str(model or Path(config.output, "reward_model"))

    async def measure() -> dict[str, float]:
        scorer, tokenizer = reward_model.load_reward_model(config, source)
        async with open_store(config.store) as store:
            reader = reward_model.Reader(store, tokenizer, None)
            items = await reader.examples(config, config.data.heldout)
            found = preference_metrics(scorer, items)
            if sizes:
                name = run or config.name
                curve = await reward_model.best_of_curve(store, name, scorer, sizes)
                for n, (chosen, best) in curve.items():
                    found |= {f"best of {n}": chosen, f"best of {n} by the verifier": best}
        return found

    _echo(run_blocking(measure()), plain=plain)


def _config(run_file: Path, overrides: tuple[str, ...]) -> RunConfig:
    config = load(run_file, overrides)
    if config.plays_rollouts:
        raise ConfigError("data.name is missing: name the data set to learn from (`agentrl data`)")
    return config


def _echo(metrics: dict[str, float], *, plain: bool) -> None:
    if plain:
        click.echo(msgspec.json.encode(metrics).decode())
    else:
        click.echo("\n".join(f"{name:<28} {value:.4g}" for name, value in metrics.items()))
