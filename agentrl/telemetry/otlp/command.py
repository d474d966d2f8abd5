"""`agentrl export otlp`."""

from __future__ import annotations

import asyncio

import click

from agentrl.errors import ConfigError


@click.command()
@click.option("--store", required=True, help="Store URL.")
@click.option("--run", required=True, help="Name of the run.")
@click.option("--rollout", "rollouts", multiple=True, help="Only this rollout; may be repeated.")
@click.option("--to", "url", required=True, help="OTLP/HTTP endpoint, such as a Phoenix's URL.")
@click.option("--header", "headers", multiple=True, help="KEY=VALUE to send, such as an API key.")
def otlp(
    store: str, run: str, rollouts: tuple[str, ...], url: str, headers: tuple[str, ...]
) -> None:
    """Send the last attempt of each rollout of a run as a trace to Phoenix, Langfuse, Jaeger or any
    OTLP receiver.

    Sending twice changes nothing, because the ids stay the same."""
    from agentrl.telemetry.otlp.export import send

    pairs = {name: value for name, _, value in (header.partition("=") for header in headers)}
    if wrong := [header for header in headers if header.find("=") < 1]:
        raise ConfigError(f"--header {wrong[0]!r}: write it as KEY=VALUE")
    attempts, spans = asyncio.run(send(store, run, rollouts, url, pairs))
    click.echo(f"sent {attempts} attempts as {spans} spans")
