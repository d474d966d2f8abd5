"""`agentrl serve`: a trained model for agents."""

from __future__ import annotations

import asyncio
import signal

import click

from agentrl.run_stores import store_with


@click.command()
@click.argument("run")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    metavar="best|last|STEPS|PATH",
    help="Which one; best: by its held-out score.",
)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0: any free one.")
@click.option("--key-env", default="", help="Variable with callers' keys, separated by spaces.")
@click.option("--certfile", default="", help="Certificate for TLS, PEM.")
@click.option("--keyfile", default="", help="Its key, PEM.")
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
    from agentrl.base.access import Access, read_key
    from agentrl.model_files.chosen import choose
    from agentrl.serve.server import Served, serve_policies

    chosen = asyncio.run(choose(store or store_with(run), run, checkpoint))
    keys = read_key(key_env, "--key-env", "the callers'").split()
    access = Access(tuple(keys), certfile, keyfile)
    changed = [*overrides, *([f"engine.kind={engine}"] if engine else [])]
    served = Served(chosen, host, port, access, tuple(changed))
    stop = asyncio.Event()

    async def until_signal() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_policies(served, started=click.echo, stop=stop)

    asyncio.run(until_signal())
    click.echo("Stopped.")
