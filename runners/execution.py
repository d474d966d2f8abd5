"""Runs one attempt from claim to outcome: the executor runs the agent, then the verifier scores its
result here, out of the agent's reach.

A failed attempt has an error kind and no reward, unless the run file sets one for agents that raise
(`agent.error_reward`) or that exceed their time, calls or tokens (`agent.on_truncation`). A failure
of the model server never counts as the agent's: if a model call failed and no retry of it
succeeded, the attempt fails regardless of the agent's result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.core import processes, user_code
from agentrl.core.config import AgentConfig
from agentrl.core.errors import ConfigError, Invalid
from agentrl.core.otlp import DIFF
from agentrl.core.types import Attempt, ErrorKind, Failure, Json, Outcome, Reward, Span, Trace
from agentrl.runners.executors import ExecutionResult, Executor, out_of_time
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.scoring import (
    Verifier,
    VerifierError,
    failure_of,
    resolve_targets,
    stored_result,
)
from agentrl.runners.tracing import core as tracing
from agentrl.runners.workspace.sources import AttemptWorkspace, WorkspaceError, WorkspaceSource
from agentrl.store.base import Store
from agentrl.store.rows import storable_text

log = logging.getLogger("agentrl.runner")
MAX_LOST = 2  # retries after a lost sandbox; a third loss is attributed to the task
# Characters of a failure's message before a hint, so that both fit on one line.
MAX_CAUSE_CHARS = 200
MAX_DIFF_CHARS = 20_000  # stored characters of an agent's changes to its workspace


class AgentRun(msgspec.Struct):
    """An agent's unscored run, stored: if the runner dies, it is scored without a second run."""

    result: Json
    failure: Failure | None  # exceeded time, calls or tokens; scored nevertheless
    rewards: list[Reward]  # recorded by the agent, for spans of its calls
    calls: int  # stored calls
    files: bytes | None  # changes to the workspace, packed


@dataclass(slots=True)
class AttemptRunner:
    """Runs attempts of one agent and scores them."""

    store: Store
    gateway: Gateway
    executor: Executor
    verifier: Verifier
    agent: AgentConfig = field(default_factory=AgentConfig)  # limits, retries, rewards of failures
    workspaces: WorkspaceSource | None = None
    environment: str = ""  # environment that plays in place of an agent

    def __post_init__(self) -> None:
        if self.verifier.wants_workspace and self.workspaces is None:
            raise ConfigError("the verifier takes a workspace; set workspace.source")

    async def run(self, active: ActiveAttempt, slots: asyncio.Semaphore) -> Outcome:
        """Return the attempt's outcome. Cancellation stops the agent. Either way the workspace is
        removed, unless the run file keeps it. slots: of attempts that run at once."""
        outcome, opened = None, list[AttemptWorkspace]()
        active.extend(math.inf)
        try:
            async with slots:
                outcome = await self._run_and_score(active, opened)
        finally:
            for workspace in opened:
                assert self.workspaces is not None
                name = f"{active.attempt.rollout.id}-{active.attempt.fence}"
                failed = outcome is not None and outcome.failure is not None
                await self.workspaces.remove(workspace, failed=failed, name=name)
        return outcome

    async def _run_and_score(
        self, active: ActiveAttempt, opened: list[AttemptWorkspace]
    ) -> Outcome:
        attempt, ran = active.attempt, ExecutionResult()
        earlier_run = None if attempt.ran is None else msgspec.convert(attempt.ran, AgentRun)
        try:
            if self.workspaces is not None:
                workspace = await self.workspaces.prepare(
                    attempt.rollout.task, earlier_run.files if earlier_run else None
                )
                opened.append(workspace)
                active.place = workspace.place
            if earlier_run is not None:
                self.gateway.unregister(active)
                active.stored = earlier_run.calls
                fields = {
                    "result": earlier_run.result,
                    "failure": earlier_run.failure,
                    "rewards": earlier_run.rewards,
                }
                ran = ExecutionResult(**fields, kept=True)
            else:
                active.extend(attempt.rollout.timeout)
                ran = await self.run_agent(active)
                for workspace in opened:
                    ran = replace(ran, spans=await _with_diff(ran.spans, workspace))
                if self._is_scored(active, ran):  # a verifier may end the process
                    ran = await self._keep_run(active, ran, *opened)
            return await self._score(active, ran, *opened)
        except WorkspaceError as error:
            return self._failed(active, ran, Failure(kind=ErrorKind.WORKSPACE, message=str(error)))

    async def _keep_run(
        self, active: ActiveAttempt, ran: ExecutionResult, workspace: AttemptWorkspace | None = None
    ) -> ExecutionResult:
        """Store an unscored result, so that the next attempt need not run the agent again. The
        returned result has no spans, because they are stored."""
        try:
            files = None if workspace is None else await processes.call(workspace.packed)
            unscored = AgentRun(ran.result, ran.failure, ran.rewards, active.stored, files)
            stored, fence = msgspec.to_builtins(unscored), active.attempt.fence
            outcome = Outcome(attempt=active.id, fence=fence, spans=ran.spans, ran=stored)
            await self.store.finish([outcome])
        except (Invalid, WorkspaceError) as error:
            log.warning("attempt %s would be run again: %s", active.id, error)
            return ran
        return replace(ran, spans=[], kept=True)

    async def run_agent(self, active: ActiveAttempt) -> ExecutionResult:
        """Run the agent and return its result or failure; later model calls are refused."""
        active.max_calls, active.max_tokens = self.agent.max_calls, self.agent.max_tokens
        active.environment = self.environment
        try:
            ran = await self._within_limits(active)
            result, failure = stored_result(ran.result, ran.failure)
            ran = replace(ran, result=result, failure=failure)
        except Exception as error:  # a bug of an executor costs one attempt, not the runner
            log.exception("the executor failed in attempt %s", active.id)
            ran = ExecutionResult(failure=failure_of(ErrorKind.LOST_RUNNER, error))
        finally:
            over = self.gateway.unregister(active)
        await asyncio.wrap_future(over)
        if active.lost:  # what the agent made of the refused call says nothing about the agent
            message = f"attempt {active.id} lost its lease"
            return replace(ran, failure=Failure(kind=ErrorKind.LOST_RUNNER, message=message))
        if active.failures:
            message = next(iter(active.failures.values()))
            return replace(ran, failure=Failure(kind=ErrorKind.MODEL, message=message))
        if ran.failure and ran.failure.kind is ErrorKind.AGENT and active.timed_out:
            ran = replace(ran, failure=out_of_time(active))  # the agent re-raised our time-out
        if active.stored or ran.needs_no_call or self.agent.calls_optional:
            return ran
        if ran.failure is None:
            return replace(ran, failure=self._no_call(active, ran))
        had_input = "input" in active.attempt.rollout.task and not active.calls
        if had_input and ran.failure.kind in (ErrorKind.AGENT, ErrorKind.TIMEOUT):
            cause, hint = ran.failure.message, self._called_instead(ran) or self._made_no_call("")
            cause = cause if len(cause) <= MAX_CAUSE_CHARS else f"{cause[:MAX_CAUSE_CHARS]} ..."
            return replace(ran, failure=replace(ran.failure, message=f"{cause}; {hint}"))
        return ran

    async def _within_limits(self, active: ActiveAttempt) -> ExecutionResult:
        """Run the agent; stop it when it exceeds its calls or tokens."""
        loop, spent = asyncio.get_running_loop(), list[str]()

        def end(why: str) -> None:
            spent.append(why)
            loop.call_soon_threadsafe(running.cancel)

        running = asyncio.create_task(self._run_agent(active))
        active.on_spent = end
        try:
            return await running
        except asyncio.CancelledError:
            if not spent or not running.cancelled() or _is_cancelled():
                running.cancel()
                await asyncio.wait([running])
                raise
        return ExecutionResult(failure=Failure(kind=ErrorKind.LIMIT, message=spent[0]))

    async def _run_agent(self, active: ActiveAttempt) -> ExecutionResult:
        rollout = active.attempt.rollout
        if "input" in rollout.task:
            return await user_code.awaited(self.executor.run(active))
        message = f"the task of rollout {rollout.id} has no 'input' for the agent"
        return ExecutionResult(failure=Failure(kind=ErrorKind.AGENT, message=message))

    def _is_scored(self, active: ActiveAttempt, ran: ExecutionResult) -> bool:
        """Whether the verifier scores this result."""
        return ran.failure is None or (
            self.agent.on_truncation == "score" and self._is_partial(active, ran.failure)
        )

    def _is_partial(self, active: ActiveAttempt, failure: Failure) -> bool:
        """Whether the agent hit a limit after some calls, in the rollout's last attempt."""
        cut = failure.kind in (ErrorKind.TIMEOUT, ErrorKind.LIMIT) and bool(active.stored)
        return cut and not self._is_retried(active, failure)

    async def _score(
        self, active: ActiveAttempt, ran: ExecutionResult, workspace: AttemptWorkspace | None = None
    ) -> Outcome:
        if (failure := ran.failure) is None:
            return await self._verified(active, ran, workspace)
        if not self._is_scored(active, ran):
            outcome = self._failed(active, ran, failure)
            zero = self.agent.on_truncation == "zero" and self._is_partial(active, failure)
            row = Reward(value=0.0, source="runner")
            return replace(outcome, rewards=[row]) if zero else outcome
        scored = await self._verified(active, ran, workspace)
        if scored.failure is not None:
            message = f"{failure.message}; scoring failed too: {scored.failure.message}"
            failure = replace(failure, message=message, traceback=scored.failure.traceback)
        return replace(scored, failure=failure, retry=False)

    async def _verified(
        self, active: ActiveAttempt, ran: ExecutionResult, workspace: AttemptWorkspace | None
    ) -> Outcome:
        rollout = active.attempt.rollout
        trace = await self.store.trace(rollout.id) if self.verifier.wants_trace else None
        trace = trace and replace(trace, spans=[*trace.spans, *ran.spans])
        active.extend(2 * rollout.timeout)  # also for a second verifier
        try:
            rewards = [
                *ran.rewards,
                *await self._verify(active.attempt, ran.result, trace, workspace),
            ]
        except WorkspaceError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's verifier is a boundary
            return self._failed(active, ran, failure_of(ErrorKind.VERIFIER, error))
        if trace is None and any(row.target for row in rewards):
            trace = await self.store.trace(rollout.id)
        try:
            spans = [*(trace.spans if trace else ()), *ran.spans]
            rewards = resolve_targets(rewards, trace, spans)
        except VerifierError as error:
            return self._failed(active, ran, failure_of(ErrorKind.VERIFIER, error))
        return _outcome(active, ran, rewards=rewards)

    async def _verify(
        self, attempt: Attempt, result: Any, trace: Trace | None, workspace: AttemptWorkspace | None
    ) -> list[Reward]:
        """Run the verifier in a separate trace, in which model clients can reach the frozen
        endpoints."""
        rollout, until = attempt.rollout, time.monotonic() + attempt.rollout.timeout
        late = VerifierError(f"the verifier ran longer than {rollout.timeout:g} s")
        arguments = {"task": rollout.task, "result": result, "trace": trace, "workspace": workspace}
        try:
            with self.gateway.scoring(attempt) as trace_id, tracing.install().attempt(trace_id):
                async with asyncio.timeout(rollout.timeout) as limit:
                    rewards = await self.verifier.rewards(arguments)
                # The agent blocked the event loop, which could not stop it.
                if time.monotonic() > until:
                    raise late
                return [*rewards, *await self.verifier.audited(arguments, rollout.timeout)]
        except TimeoutError:
            if not limit.expired():
                raise
            raise late from None

    def _failed(self, active: ActiveAttempt, ran: ExecutionResult, failure: Failure) -> Outcome:
        """Build a failed outcome, with `agent.error_reward` as its reward if the agent raised after
        a model call: before one, the policy did not fail."""
        retry, rewards = self._is_retried(active, failure), []
        if failure.kind is ErrorKind.VERIFIER and not ran.kept:
            retry = False  # a retry would run the agent again, with another answer
        called = active.calls or active.stored or self.agent.calls_optional
        raised = failure.kind is ErrorKind.AGENT and called and not retry
        if raised and self.agent.error_reward is not None:
            rewards = [Reward(value=self.agent.error_reward, source="runner")]
        return _outcome(active, ran, rewards=rewards, failure=failure, retry=retry)

    def _is_retried(self, active: ActiveAttempt, failure: Failure) -> bool:
        attempt = active.attempt
        if (
            active.lost
        ):  # if a clock set back lets the lease hold again, the rollout is played again
            return True
        if failure.kind is ErrorKind.LOST_RUNNER:
            retried = attempt.fence <= MAX_LOST
        else:
            retried = failure.kind is ErrorKind.MODEL or failure.kind.value in self.agent.retry
        return retried and attempt.fence < attempt.rollout.max_attempts

    def _no_call(self, active: ActiveAttempt, ran: ExecutionResult) -> Failure:
        """Build the failure of an attempt without calls of the run's models, hence untrainable."""
        hint = "; set agent.calls_optional = true if that is intended"
        if active.calls:
            why = f": the last one was refused, {active.refused}" if active.refused else ""
            message = f"none of the agent's {active.calls} model calls succeeded{why}"
            return Failure(kind=ErrorKind.NO_CALL, message=message + hint)
        if self.gateway.attempts.unowned:
            message = (
                "the agent made no model call that belongs to this rollout, and the gateway refused"
                " some that belong to none, such as those of a server that one rollout started for"
                " all: let it forward the traceparent header of the request that it serves"
            )
            return Failure(kind=ErrorKind.NO_CALL, message=message + hint)
        message = self._called_instead(ran) or self._made_no_call("")
        return Failure(kind=ErrorKind.NO_CALL, message=message + hint)

    def _called_instead(self, ran: ExecutionResult) -> str:
        """Say which models an agent without a call through the gateway called; "": none."""
        urls = {str(span.attributes.get("url.full", "")) for span in ran.spans}
        called = {url for url in urls if url and not url.startswith(self.gateway.base_url)}
        return self._made_no_call(f", but called {', '.join(sorted(called)[:3])}") if called else ""

    def _made_no_call(self, instead: str) -> str:
        return (
            f"the agent made no model call through the gateway at {self.gateway.base_url}{instead};"
            " let its client read its base URL from OPENAI_BASE_URL, and create it in the agent's"
            " own module or in a function that builds the agent"
        )


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


async def _with_diff(spans: list[Span], workspace: AttemptWorkspace) -> list[Span]:
    """Add the diff of the workspace to the first of an agent's spans."""
    with contextlib.suppress(OSError):  # agents can create unreadable special files
        diff = storable_text((await processes.call(workspace.diff))[:MAX_DIFF_CHARS])
        spans = [replace(s, attributes={**s.attributes, DIFF: diff}) for s in spans[:1]] + spans[1:]
    return spans


def _outcome(active: ActiveAttempt, ran: ExecutionResult, **ended: Any) -> Outcome:
    id, fence = active.id, active.attempt.fence
    return Outcome(attempt=id, fence=fence, result=ran.result, spans=ran.spans, **ended)
