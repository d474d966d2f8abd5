"""Warnings about a run, printed on the console when their cause first shows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from agentrl.config import RunConfig
from agentrl.config.policies import policy_by_role
from agentrl.failures import brief
from agentrl.store.base import Store
from agentrl.telemetry.report import policies_without_calls, untrained_calls
from agentrl.types import ErrorKind, FailureCount, Purpose, StepRow

UNSEEN_TOOLS = (
    "tools are not seen: {:.0f} model calls sent tools, and no prompt has the name of one. The chat"
    " template of the policy's server renders none; choose a model or template that does"
)
UNTRAINED = (
    "{} model calls are not trained: their upstream gave no token ids. Serve the policy with ids,"
    ' or set algorithm.inexact = "retokenize".'
)
DISCARDED = (
    "{} groups were discarded: they have token ids that the policy does not have, or rewards or"
    " log-probs that cannot be. Which, and why, is in {}."
)
TAKEN_BACK = (
    "{:.0f} steps were taken back, and are trained again from step {}: their checkpoint was"
    " damaged, or --from said so"
)


@dataclass(slots=True)
class RunWarnings:
    """Prints each warning of a run once. Failures of an earlier start are not repeated unless the
    same kind fails again."""

    config: RunConfig
    console: Console
    earlier_failures: dict[ErrorKind, int] | None = None  # attempts by kind, before this start
    roles_checked: bool = False
    discarded: int = 0  # groups, as of the last warning
    printed: set[Hashable] = field(default_factory=set)

    async def print_new(self, store: Store, rows: Sequence[StepRow]) -> None:
        """Print the warnings of these steps that were not printed before."""
        committed = [row for row in rows if row.committed]
        for policy, sentence in policies_without_calls(self.config, committed).items():
            self._print_once(("policy", policy), sentence)
        for row in rows:
            if not row.committed and (steps := row.metrics.get("steps/taken_back")):
                self._print_once(("taken back", row.step), TAKEN_BACK.format(steps, row.step + 1))
        if committed and not self.roles_checked:
            self.roles_checked = True
            self._print_once("roles", await roles_without_calls(store, self.config))
        discarded = sum(int(row.metrics.get("groups/unreadable", 0)) for row in committed)
        if discarded > self.discarded:
            self.discarded = discarded
            log = Path(self.config.output, "logs", "algorithm.log")
            self._print_once(("discarded", discarded), DISCARDED.format(discarded, log))
        without_ids, _ = untrained_calls(committed)
        if without_ids > 0:
            self._print_once("untrained", UNTRAINED.format(without_ids))
        failures = await store.failures(self.config.name)
        if self.earlier_failures is None:
            self.earlier_failures = {row.kind: row.attempts for row in failures}
        for failed in failures:
            if failed.attempts > self.earlier_failures.get(failed.kind, 0):
                self._print_once(("failure", failed.kind), failure_sentence(self.config, failed))
        unseen = sum(row.metrics.get("calls/tools_unseen", 0.0) for row in committed)
        if unseen:
            self._print_once("tools", UNSEEN_TOOLS.format(unseen))

    def _print_once(self, key: Hashable, sentence: str) -> None:
        if sentence and key not in self.printed:
            self.printed.add(key)
            self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)


async def roles_without_calls(store: Store, config: RunConfig) -> str:
    """A sentence that names the roles of the run file in which no call of the first trained step
    was made; empty if there are none. `policies_without_calls` reports policies without a call."""
    named = policy_by_role(config)
    if not named:
        return ""
    seen: set[str] = set()
    for row in await store.rollouts(config.name, purpose=Purpose.TRAIN, trained=0):
        trace = await store.trace(row.id)
        seen.update(call.role for call in (trace.transitions if trace else ()))
        if seen >= named.keys():
            return ""
    playing = {named[role] for role in seen & named.keys()}
    silent = [
        repr(role)
        for role, player in named.items()
        if role not in seen and (player in playing or player not in config.policies)
    ]
    if not silent:
        return ""
    spoke = ", ".join(map(repr, sorted(seen))) or "none"
    return (
        f"no call was made in the first step in the role {', '.join(silent)}, which the run file "
        f"names; the roles that spoke are {spoke}. Roles are graph nodes, agent names, model names "
        "or what `with agentrl.role(...)` says"
    )


def failure_sentence(config: RunConfig, failed: FailureCount) -> str:
    """The kind of failure, how often it happened, an example, and the command that shows it."""
    times = f"{failed.attempts} attempts" if failed.attempts > 1 else "an attempt"
    # `agentrl show` finds this store by itself, from the working directory.
    default = f"sqlite:///{Path('runs', config.name, 'store.db').resolve()}"
    where = "" if config.store == default else f" --store {config.store}"
    return (
        f"{failed.kind}: {times} failed so far: {brief(failed.message)}\n"
        f"  see it: agentrl show {failed.rollout}{where}"
    )
