"""Where an agent runs: one protocol, and the one that the run file asks for."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.types import ErrorKind, Failure, Json, Reward, Span


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result or failure of an agent's run, with the rewards and spans that it recorded."""

    result: Any = None
    failure: Failure | None = None
    rewards: list[Reward] = []  # of an in-process agent that calls `agentrl.reward`
    spans: list[Span] = []
    needs_no_call: bool = False  # it succeeded without a model call, as it should


@runtime_checkable
class Executor(Protocol):
    """Runs the agent of one attempt. It does not score it."""

    sealed: bool
    """The agent reaches the gateway with its attempt's own key only."""

    limit: int | None
    """Attempts that it runs at a time; None: any number."""

    async def start(self) -> None:
        """Raises ConfigError or AgentError for what the user can correct."""

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        """Ends at the attempt's deadline at the latest, or when it is cancelled. In both cases
        nothing that it started is left, except threads of the runner's own process."""

    async def close(self) -> None: ...


def input_of(active: ActiveAttempt) -> Json:
    """What the agent is given."""
    return active.attempt.rollout.task["input"]


def out_of_time(active: ActiveAttempt) -> Failure:
    waiting = f", waiting for {len(active.tasks)} model calls" if active.tasks else ""
    message = f"the agent ran longer than {active.attempt.rollout.timeout:g} s{waiting}"
    return Failure(kind=ErrorKind.TIMEOUT, message=message)
