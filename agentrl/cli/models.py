"""Commands about models: `agentrl model import`, `reward-model`, `serve` and `prompts`.

`reward-model` trains reward models on pairs and labels and evaluates them; `serve` serves a trained
model to agents; `prompts` searches for better prompts, and lists those of an agent.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import click
import msgspec
from msgspec import convert
from msgspec.structs import replace

from agentrl.cli import ResumedCommand, numbers
from agentrl.core.config import RunConfig, load
from agentrl.core.config.derived import has_no_own_policy
from agentrl.core.errors import ConfigError
from agentrl.core.processes import run_blocking
from agentrl.store import open_store
from agentrl.store.run_folder import store_with

DTYPES = ("bfloat16", "float32")


@click.group()
def model() -> None:
    """Models from other tools."""


@model.command("import")
@click.argument("source")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option(
    "--chat-template", help="File or name, in place of the model's: policy.chat_template."
)
def import_model(source: str, directory: Path, dtype: str, chat_template: str | None) -> None:
    """Convert a GGUF file to a Hugging Face folder, which can be trained. SOURCE is the file, a
    folder with it, or the name of an installed package that contains it."""
    from agentrl.models.importing import GgufFile, find, import_gguf

    file = GgufFile(find(source))
    name, licence = (file.value(f"general.{key}", "unnamed") for key in ("name", "license"))
    click.echo(
        f"{file.path}: {name}, {file.architecture}, {file.parameters / 1e6:.1f} M parameters, "
        f"licence {licence}"
    )
    settings = {"policy": {"chat_template": chat_template}} if chat_template else {}
    imported = import_gguf(file, directory, dtype=dtype, config=convert(settings, RunConfig))
    for warning in imported.warnings:
        click.echo(f"WARNING {warning}")
    click.echo(
        f"checked: all {len(file.tokens)} tokens equal the file's, and the model ends an answer "
        f"with {imported.end} (probability {imported.probability:.2f})"
    )
    click.echo(f'wrote {directory} in {dtype}: set policy.model = "{directory}"')


run_file = click.argument("run_file", type=click.Path(path_type=Path))
overrides = click.argument("overrides", nargs=-1)
as_json = click.option("--json", "as_json", is_flag=True, help="JSON instead of lines.")


@click.command("reward-model")
@run_file
@overrides
@click.option("--eval", "only_measure", is_flag=True, help="Evaluate the trained reward model.")
@click.option(
    "--best-of", "sizes", callback=numbers(int), metavar="N,N",
    help="With --eval: also the mean outcome of the rollout that the model ranks first of N.",
)  # fmt: skip
@click.option("--run", help="The run with these rollouts; default: the run of RUN_FILE.")
@as_json
def reward_model(
    run_file: Path,
    overrides: tuple[str, ...],
    only_measure: bool,
    sizes: list[int],
    run: str | None,
    as_json: bool,
) -> None:
    """Train a reward model on the items of [data] in RUN_FILE, from its policy.model, into
    <output>/reward_model: the `model` of a [reward_models.NAME]. With --eval: evaluate that model
    on held-out items."""
    if (sizes or run) and not only_measure:
        raise click.UsageError("--best-of and --run need --eval")
    config = load(run_file, overrides)
    if config.plays_rollouts:
        raise ConfigError("data.name is missing: name the data set to learn from (`agentrl data`)")
    if only_measure:
        _measure(config, sizes, run, as_json=as_json)
    else:
        _train(config, as_json=as_json)


def _train(config: RunConfig, *, as_json: bool) -> None:
    from agentrl.algorithms.reward_training import train_reward_model

    async def run() -> dict[str, float]:
        async with open_store(config.store) as store:
            return await train_reward_model(config, store)

    _echo(run_blocking(run()), as_json=as_json)
    click.echo(f"reward model: {Path(config.output, 'reward_model')}", err=as_json)


def _measure(config: RunConfig, sizes: list[int], run: str | None, *, as_json: bool) -> None:
    from agentrl.algorithms import reward_training
    from agentrl.algorithms.preferences.draft import TEST

    source = str(Path(config.output, "reward_model"))

    async def measure() -> dict[str, float]:
        scorer, tokenizer = reward_training.load_reward_model(config, source)
        async with open_store(config.store) as store:
            reader = reward_training.Reader(store, tokenizer, None)
            items = await reader.examples(config, TEST)
            metrics = reward_training.preference_metrics(scorer, items)
            if sizes:
                name = run or config.name
                curve = await reward_training.best_of_curve(store, name, scorer, sizes)
                for n, (chosen, best) in curve.items():
                    metrics |= {f"best of {n}": chosen, f"best of {n} by the verifier": best}
        return metrics

    _echo(run_blocking(measure()), as_json=as_json)


def _echo(metrics: dict[str, float], *, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(metrics).decode())
    else:
        click.echo("\n".join(f"{name:<28} {value:.4g}" for name, value in metrics.items()))


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    metavar="best|last|STEPS|PATH",
    help="The checkpoint to serve; best: with the best held-out score.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0: any free one.")
@click.option("--key-env", default="", help="Variable with callers' keys, separated by spaces.")
@click.option("--certfile", default="", help="Certificate for TLS, PEM.")
@click.option("--keyfile", default="", help="Private key of the certificate, PEM.")
@click.option("--engine", help="engine.kind, such as embedded or vllm; default: that of the run.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def serve(
    run: str,
    store: str | None,
    checkpoint: str,
    host: str,
    port: int,
    key_env: str,
    certfile: str,
    keyfile: str,
    engine: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Serve the best checkpoint of RUN on one port, until Ctrl-C: behind OpenAI's chat completions,
    completions and responses, Anthropic's messages and Google's generateContent.

    Nothing is recorded. OVERRIDES are settings such as `engine.max_context=8192`."""
    from agentrl.core.access import Access, read_key
    from agentrl.models.export import choose
    from agentrl.models.serve import Served, serve_policies

    chosen = asyncio.run(choose(store or store_with(run), run, checkpoint))
    keys = read_key(key_env, "--key-env", "the callers'").split()
    access = Access(tuple(keys), certfile, keyfile)
    settings = [*overrides, *([f"engine.kind={engine}"] if engine else [])]
    served = Served(chosen, host, port, access, tuple(settings))
    stop = asyncio.Event()

    async def until_signal() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_policies(served, started=click.echo, stop=stop)

    asyncio.run(until_signal())
    click.echo("Stopped.")


@click.command(
    cls=ResumedCommand,
    continues="the search",
    resumes=lambda options: "--find" not in options,
)
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--find", is_flag=True, help="Print the prompt texts in the run's calls, by role.")
@click.option("--fresh", is_flag=True, help="Delete the outputs of an earlier search.")
def prompts(run_file: Path, overrides: tuple[str, ...], find: bool, fresh: bool) -> None:
    """Search for better texts for the agent of RUN_FILE, or resume a stopped search."""
    from agentrl.algorithms.prompt_search import find as find_texts

    if find and fresh:
        raise click.UsageError("give --find or --fresh, not both: --find searches nothing")
    config = load(run_file, overrides)
    if find:
        click.echo(asyncio.run(find_texts(config.store, config.name)))
        return
    optimise(config, fresh=fresh)


def optimise(config: RunConfig, *, fresh: bool) -> None:
    """Search in a separate run, and write the best texts to <output>/prompts."""
    from agentrl import trainer
    from agentrl.algorithms.prompt_search import prompt_texts
    from agentrl.evaluation import evaluation_run, last_checkpoint

    config = trainer.hide_secrets(config)
    if not config.prompts.components:
        raise ConfigError("[prompts.components] is missing: name the texts to rewrite")
    if not config.tasks.train:
        raise ConfigError("tasks.train is missing: name a .jsonl file or file.py:name")
    prompt_texts(config)
    checkpoint = None
    if not has_no_own_policy(config) and Path(config.output, "checkpoints").is_dir():
        checkpoint = last_checkpoint(config)
    search = evaluation_run(config, f"{config.name}-prompts", checkpoint)
    store = search.store if trainer.has_own_store(config) else config.store
    search = replace(search, store=store)
    trainer.check(search)
    if fresh:
        trainer.clear(search)
    run_blocking(_optimise(search, Path(config.output, "prompts")))


async def _optimise(config: RunConfig, folder: Path) -> None:
    from rich.console import Console

    from agentrl import trainer
    from agentrl.algorithms.prompt_search import report, write_texts
    from agentrl.core.files import make_folder

    make_folder(Path(config.output))
    console = Console()
    async with open_store(config.store) as store:
        if state := await store.run(config.name):
            # `refuse_changes` refuses fewer steps than a resumed search has committed.
            config = replace(config, steps=state.step)
        await trainer.refuse_changes(store, config)
        config = replace(config, steps=0)
        seconds = await trainer.supervise(store, config, process="prompts", console=console)
        best = await write_texts(store, config, make_folder(folder))
        for line in await report(store, config, best):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        console.print(f"{seconds:.0f} s; the texts are in {folder}", highlight=False)
