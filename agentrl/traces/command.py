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
@click.option("--call", default=0, metavar="N", help="Begin at this call; the first is 0.")
@click.option("--full", is_flag=True, help="Print all calls, and all of long messages.")
def show(rollout: str, store: str | None, prompt: bool, call: int, full: bool) -> None:
    """Print the trace of ROLLOUT: every message, tool call, reward and failure.

    Of a long rollout a page of calls is printed, and how to go on."""
    url = store or store_with(rollout)
    asyncio.run(show_rollout(url, rollout, prompts=prompt, first=call, whole=full))
