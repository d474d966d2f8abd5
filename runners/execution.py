"""One attempt from claim to outcome: the executor runs the agent, then its result is scored here,
out of the agent's reach.

A failed attempt has a kind and no reward. A failure of the model server is never counted as the
agent's, even when the agent ignored the error: a model call that failed and was not repeated with
success fails the attempt, whatever its result.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from agentrl.config import RetriesConfig
from agentrl.runners.executors import ExecutionResult, Executor
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.gateway.replay import recording
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.scoring.results import as_json, failure_of
from agentrl.runners.scoring.rewards import resolve_targets
from agentrl.runners.scoring.verifiers import Verifier, VerifierError
from agentrl.runners.tracing import core as tracing
from agentrl.store.base import Store
from agentrl.types import Attempt, ErrorKind, Failure, Outcome, Reward, Scope, Trace

log = logging.getLogger("agentrl.runner")


@dataclass(slots=True)
class AttemptRunner:
    """Runs and scores the attempts of one agent."""

    store: Store
    gateway: Gateway
    executor: Executor
    verifier: Verifier
    error_reward: float | None = None  # outcome when the agent itself raises
    retries: RetriesConfig = field(default_factory=RetriesConfig)
    calls_optional: bool = False  # whether an agent may succeed without a model call

    async def run(self, active: ActiveAttempt) -> Outcome:
        """How the attempt ended. Cancelling it stops the agent and raises CancelledError."""
        try:
            ran = await self._run_agent(active)
        except Exception as error:  # a bug of an executor costs one attempt, not the runner
            log.exception("the executor failed in attempt %s", active.id)
            ran = ExecutionResult(failure=failure_of(ErrorKind.LOST_RUNNER, error))
        finally:
            over = self.gateway.unregister(active)
        await asyncio.wrap_future(over)
        if active.failures:
            message = next(iter(active.failures.values()))
            return self._failed(active, ran, Failure(kind=ErrorKind.MODEL, message=message))
        if ran.failure:
            return self._failed(active, ran, ran.failure)
        if not (active.stored or ran.needs_no_call or self.calls_optional):
            return self._failed(active, ran, self._no_call(active, ran))
        return await self._score(active, ran)

    async def _run_agent(self, active: ActiveAttempt) -> ExecutionResult:
        rollout = active.attempt.rollout
        if "input" in rollout.task:
            if rollout.branch is not None:
                active.recording = await recording(self.store, rollout.branch)
            return await self.executor.run(active)
        message = f"the task of rollout {rollout.id} has no 'input' to give to the agent"
        return ExecutionResult(failure=Failure(kind=ErrorKind.AGENT, message=message))

    async def _score(self, active: ActiveAttempt, ran: ExecutionResult) -> Outcome:
        rollout = active.attempt.rollout
        trace = await self.store.trace(rollout.id) if self.verifier.wants_trace else None
        trace = trace and replace(trace, spans=[*trace.spans, *ran.spans])
        active.extend(rollout.timeout)
        try:
            rewards = [*ran.rewards, *await self._verify(active.attempt, ran.result, trace)]
        except Exception as error:  # noqa: BLE001 - the user's verifier is a boundary
            return self._failed(active, ran, failure_of(ErrorKind.VERIFIER, error))
        if trace is None and any(row.scope is not Scope.ROLLOUT for row in rewards):
            trace = await self.store.trace(rollout.id)
        try:
            rewards = resolve_targets(rewards, trace, ran.spans)
        except VerifierError as error:
            return self._failed(active, ran, failure_of(ErrorKind.VERIFIER, error))
        return _outcome(active, ran, rewards=rewards)

    async def _verify(self, attempt: Attempt, result: Any, trace: Trace | None) -> list[Reward]:
        """Run the verifier in a trace of its own, in which its model clients reach the run's frozen
        endpoints."""
        rollout = attempt.rollout
        try:
            with self.gateway.scoring(attempt) as own, tracing.install().attempt(own):
                async with asyncio.timeout(rollout.timeout) as limit:
                    return await self.verifier(task=rollout.task, result=result, trace=trace)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the verifier ran longer than {rollout.timeout:g} s"
            raise VerifierError(message) from None

    def _failed(self, active: ActiveAttempt, ran: ExecutionResult, failure: Failure) -> Outcome:
        """A failed attempt. It has no reward, except `agent.error_reward` if the agent failed."""
        attempt, limit = active.attempt, getattr(self.retries, failure.kind.value)
        left = attempt.fence < attempt.rollout.max_attempts
        retry, rewards = left and (limit is None or attempt.fence <= limit), []
        if failure.kind is ErrorKind.AGENT and self.error_reward is not None and not retry:
            rewards = [Reward(value=self.error_reward, source="runner")]
        return _outcome(active, ran, rewards=rewards, failure=failure, retry=retry)

    def _no_call(self, active: ActiveAttempt, ran: ExecutionResult) -> Failure:
        """The failure of an attempt in which no model of the run was called: there is nothing to
        learn from."""
        gateway = self.gateway.base_url
        hint = "; set agent.calls_optional = true if that is how it should be"
        if active.calls:
            why = f": the last one was refused, {active.refused}" if active.refused else ""
            message = f"none of the agent's {active.calls} model calls has an answer to record{why}"
            return Failure(kind=ErrorKind.NO_CALL, message=message + hint)
        urls = {str(span.attributes.get("url.full", gateway)) for span in ran.spans}
        called = {url for url in urls if not url.startswith(gateway)}
        instead = f", but called {', '.join(sorted(called)[:3])}" if called else ""
        message = (
            f"the agent made no model call through the gateway at {gateway}{instead}; let its"
            " client take its address from OPENAI_BASE_URL, and make it in the agent's own module"
            " or in a function that builds the agent"
        )
        return Failure(kind=ErrorKind.NO_CALL, message=message + hint)


def _outcome(active: ActiveAttempt, ran: ExecutionResult, **ended: Any) -> Outcome:
    fence, result = active.attempt.fence, as_json(ran.result)
    return Outcome(attempt=active.id, fence=fence, result=result, spans=ran.spans, **ended)
