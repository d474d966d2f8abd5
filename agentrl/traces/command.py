"""`agentrl show`: the trace of a rollout."""

from __future__ import annotations

import asyncio

import click

from agentrl.run_stores import store_with
from agentrl.traces.show import show_rollout


@click.command()
@click.argument("rollout")
@click.option("--store", help="Store URL; default: the store of the rollout's run.")
@click.option("--prompt", is_flag=True, help="Print what the policy read, as its template renders.")
def show(rollout: str, store: str | None, prompt: bool) -> None:
    """Print the trace of ROLLOUT: every message, tool call, reward and failure."""
    asyncio.run(show_rollout(store or store_with(rollout), rollout, prompts=prompt))
