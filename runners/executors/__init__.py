"""The executor protocol: where and how an agent runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from agentrl.core.types import ErrorKind, Failure, Json, Reward, Span

if TYPE_CHECKING:  # a process of the pool runs agents and has no gateway
    from agentrl.runners.gateway.attribution import ActiveAttempt

MAX_RESULT_BYTES = 16 * 2**20  # bytes


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result or failure of an agent's run, with its rewards and spans."""

    result: Any = None
    failure: Failure | None = None
    rewards: list[Reward] = []  # from `agentrl.reward` in a Python agent
    spans: list[Span] = []
    needs_no_call: bool = False  # success without a model call is correct here
    # Whether the result is stored, so that another attempt can score it without running the agent.
    kept: bool = False


@runtime_checkable
class Executor(Protocol):
    """Runs agents, one attempt per call; scoring happens elsewhere.

    `runner.executor` names a class or function that gives one for (config, root, gateway, runner):
    the run file, its folder, the gateway's base URL for agents on this machine, and this runner's
    name."""

    sealed: bool
    """The gateway accepts the agent with its attempt's own key only."""

    limit: int | None
    """Maximum of concurrent attempts; None: no limit."""

    async def start(self) -> None:
        """Raise ConfigError or AgentError for problems that the user can correct."""

    async def run(self, active: ActiveAttempt) -> ExecutionResult:
        """Run one attempt until its deadline, in `active.left` seconds (see `out_of_time`), or
        cancellation. No process of the attempt survives, except threads of the runner's process. A
        failed agent is reported as `failure` in the result; an exception is a fault of the
        executor, and counts as `lost_runner`."""

    async def close(self) -> None: ...


def input_of(active: ActiveAttempt) -> Json:
    """The input of the attempt's task."""
    return active.attempt.rollout.task["input"]


def out_of_time(active: ActiveAttempt) -> Failure:
    """The failure of an attempt that has not ended at its deadline. Time that an environment spends
    without waiting for a model is not the policy's fault, so limits of agents do not apply to
    it."""
    seconds = f"{active.attempt.rollout.timeout:g} s"
    if active.environment and not active.waiting:
        message = f"{active.environment}: the rollout ran longer than {seconds}, and its time ended"
        message += f" in the environment's own code, after {active.stored} model calls"
        return Failure(kind=ErrorKind.VERIFIER, message=message)
    calls = "1 model call" if active.waiting == 1 else f"{active.waiting} model calls"
    waiting = f", waiting for {calls}" if active.waiting else ""
    message = f"the agent ran longer than {seconds}{waiting}"
    return Failure(kind=ErrorKind.TIMEOUT, message=message)


def ended_its_process(active: ActiveAttempt, how: str) -> Failure:
    """The failure of an attempt whose process `how`."""
    if active.environment:
        message = f"{active.environment}: its process {how}"
        return Failure(kind=ErrorKind.VERIFIER, message=message)
    return Failure(kind=ErrorKind.AGENT, message=f"the agent's process {how}")


def too_large(where: str) -> str:
    return f"the agent wrote more than {MAX_RESULT_BYTES} bytes to {where}"
