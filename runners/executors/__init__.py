"""Where an agent runs: one protocol, and the one that the run file asks for."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.types import ErrorKind, Failure, Json, Reward, Span


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of an agent's run: its result or its failure, and what it left on the way."""

    result: Any = None
    failure: Failure | None = None
    rewards: list[Reward] = []  # that an in-process agent gave itself with `agentrl.reward`
    spans: list[Span] = []
    needs_no_call: bool = False  # it says that it rightly has no answer of a model


@runtime_checkable
class Executor(Protocol):
    """Runs the agent of one attempt. Scoring it is not its business: that happens outside."""

    sealed: bool
    """What runs has the attempt's key and nothing else, and is not trusted with more."""

    limit: int | None
    """AttemptRegistry it runs at a time; None: any number."""

    async def start(self) -> None:
        """Raises ConfigError or AgentError for what the user can mend."""
        ...

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        """Ends at the attempt's deadline at the latest, or when it is cancelled. In both cases
        nothing that it started is left behind, save for threads of the runner's own process."""
        ...

    async def close(self) -> None: ...


def input_of(active: ActiveAttempt) -> Json:
    """What the agent is given."""
    return active.attempt.rollout.task["input"]


def out_of_time(active: ActiveAttempt) -> Failure:
    waiting = f", waiting for {len(active.tasks)} model calls" if active.tasks else ""
    message = f"the agent ran longer than {active.attempt.rollout.timeout:g} s{waiting}"
    return Failure(kind=ErrorKind.TIMEOUT, message=message)
