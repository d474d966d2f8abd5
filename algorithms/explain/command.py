"""`agentrl explain`: how the credit of a rollout's tokens was computed."""

from __future__ import annotations

import asyncio

import click

from agentrl.run_stores import store_with


@click.command()
@click.argument("rollout")
@click.option("--tokens", is_flag=True, help="Every token instead of every call.")
@click.option("--store", help="Store URL; default: the store of the rollout's run.")
def explain(rollout: str, tokens: bool, store: str | None) -> None:
    """Print how the credit of ROLLOUT's tokens was computed, from rewards to psi."""
    from agentrl.algorithms.explain.rollouts import explain_rollout

    url = store or store_with(rollout)
    click.echo("\n".join(asyncio.run(explain_rollout(url, rollout, tokens=tokens))))
