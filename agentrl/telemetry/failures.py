"""What goes wrong in a run, said on the console when it first happens: a line for each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from agentrl.config import RunConfig
from agentrl.errors import brief
from agentrl.store.base import Store
from agentrl.types import ErrorKind, FailureCount, StepRow

TOOLS = (
    "tools are not seen: {:.0f} model calls sent tools, and no prompt has the name of one. The chat"
    " template of the policy's server renders none; choose a model or template that does"
)


@dataclass(slots=True)
class FirstFailures:
    """Says the first failure of each kind. Those of an earlier start are not said again, unless
    the kind fails once more."""

    config: RunConfig
    known: dict[ErrorKind, int] | None = None  # attempts by kind, before this start
    said: set[ErrorKind] = field(default_factory=set)
    said_tools: bool = False

    async def say(self, store: Store, console: Console, steps: Sequence[StepRow] = ()) -> None:
        found = await store.failures(self.config.name)
        if self.known is None:
            self.known = {row.kind: row.attempts for row in found}
        for row in found:
            if row.kind not in self.said and row.attempts > self.known.get(row.kind, 0):
                self.said.add(row.kind)
                console.print(
                    sentence(self.config, row), markup=False, highlight=False, soft_wrap=True
                )
        unseen = sum(row.metrics.get("calls/tools_unseen", 0.0) for row in steps)
        if unseen and not self.said_tools:
            self.said_tools = True
            console.print(TOOLS.format(unseen), markup=False, highlight=False, soft_wrap=True)


def sentence(config: RunConfig, failed: FailureCount) -> str:
    """Kind, how many, what it was, and how to see the whole."""
    times = f"{failed.attempts} attempts" if failed.attempts > 1 else "an attempt"
    where = "" if _is_default(config) else f" --store {config.store}"
    return (
        f"{failed.kind}: {times} failed so far: {brief(failed.message)}\n"
        f"  see it: agentrl show {failed.rollout}{where}"
    )


def _is_default(config: RunConfig) -> bool:
    """Whether `agentrl show` finds the store by itself, from the working directory."""
    return config.store == f"sqlite:///{Path('runs', config.name, 'store.db').resolve()}"
