"""One attempt from claim to outcome: run the agent in its trace, then score what it returned.

A failed attempt has a kind and no reward. What the model's side broke is never the agent's fault,
even when the agent swallowed the error: an unrecovered model failure outweighs any result.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.runners import tracing
from agentrl.runners.agents import Agent
from agentrl.runners.attribution import Live
from agentrl.runners.gateway import Gateway
from agentrl.runners.rewards import settle, unsettled
from agentrl.runners.verifiers import Verifier, VerifierError
from agentrl.store.base import Store
from agentrl.types import ErrorKind, Failure, Json, NewRollout, Outcome, Reward, Span, Trace

log = logging.getLogger("agentrl.runner")
LONGEST_TRACEBACK = 20_000  # characters, from the end


@dataclass(slots=True)
class Executor:
    """Runs attempts of one agent in this process."""

    store: Store
    gateway: Gateway
    agent: Agent
    verifier: Verifier
    error_reward: float | None = None  # outcome when the agent itself raises
    _tracing: tracing.Tracing = field(default_factory=tracing.install)
    _warned: bool = False

    async def run(self, live: Live) -> Outcome:
        """How the attempt ended. Cancelling it stops the agent and raises CancelledError."""
        rollout = live.attempt.rollout
        result, failure = None, None
        try:
            with self._tracing.attempt(live.id) as finished:
                result, failure = await self._run_agent(live)
        finally:
            self.gateway.unregister(live)
        spans, given = tracing.records(finished, live.id), finished.rewards
        if live.failures:
            failure = Failure(kind=ErrorKind.MODEL, message=next(iter(live.failures.values())))
            return self._outcome(live, spans, failure=failure, retry=True)
        if failure and failure.kind is ErrorKind.AGENT and self.error_reward is not None:
            reward = Reward(value=self.error_reward, source="runner")
            return self._outcome(live, spans, rewards=[reward], failure=failure)
        if failure:
            return self._outcome(live, spans, failure=failure)
        self._warn_if_silent(live)
        whole = await self.store.trace(rollout.id) if self.verifier.wants_trace else None
        whole = whole and replace(whole, spans=[*whole.spans, *spans])
        live.extend(rollout.timeout)
        try:
            given += await self._verify(rollout, result, whole)
        except Exception as error:  # noqa: BLE001 - the user's verifier is a boundary
            failure = _failure(ErrorKind.VERIFIER, error)
            return self._outcome(live, spans, result=_json(result), failure=failure)
        if whole is None and unsettled(given):
            whole = await self.store.trace(rollout.id)
        try:
            rewards = settle(given, whole, spans)
        except VerifierError as error:
            failure = _failure(ErrorKind.VERIFIER, error)
            return self._outcome(live, spans, result=_json(result), failure=failure)
        return self._outcome(live, spans, result=_json(result), rewards=rewards)

    async def _run_agent(self, live: Live) -> tuple[Any, Failure | None]:
        """Result or failure, at the deadline at the latest: an agent that does not heed its
        cancellation is left behind."""
        rollout = live.attempt.rollout
        if "input" not in rollout.task:
            message = f"the task of rollout {rollout.id} has no 'input' to give to the agent"
            return None, Failure(kind=ErrorKind.AGENT, message=message)
        task = asyncio.create_task(self._guarded(rollout.task["input"]))
        try:
            await asyncio.wait({task}, timeout=live.left)
        finally:
            waiting = f", waiting for {len(live.tasks)} model calls" if live.tasks else ""
            task.cancel()  # nothing happens if it is done
        if task.done():
            return task.result()
        message = f"the agent ran longer than {rollout.timeout:g} s{waiting}"
        return None, Failure(kind=ErrorKind.TIMEOUT, message=message)

    async def _guarded(self, value: Json) -> tuple[Any, Failure | None]:
        try:
            return await self.agent(value), None
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
            return None, _failure(ErrorKind.AGENT, error)  # the user's agent is a boundary

    async def _verify(self, rollout: NewRollout, result: Any, trace: Trace | None) -> list[Reward]:
        try:
            async with asyncio.timeout(rollout.timeout) as limit:
                return await self.verifier(task=rollout.task, result=result, trace=trace)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the verifier ran longer than {rollout.timeout:g} s"
            raise VerifierError(message) from None

    def _outcome(
        self,
        live: Live,
        spans: list[Span],
        *,
        result: Json = None,
        rewards: list[Reward] | None = None,
        failure: Failure | None = None,
        retry: bool = False,
    ) -> Outcome:
        return Outcome(
            attempt=live.id,
            fence=live.attempt.fence,
            result=result,
            rewards=rewards or [],
            spans=spans,
            failure=failure,
            retry=retry,
        )

    def _warn_if_silent(self, live: Live) -> None:
        if live.calls == 0 and not self._warned:
            self._warned = True
            log.warning(
                "rollout %s ended without a model call through the gateway at %s; if the agent"
                " has a model, it must use OPENAI_BASE_URL from the environment",
                live.attempt.rollout.id,
                self.gateway.base_url,
            )


def _failure(kind: ErrorKind, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(kind=kind, message=message, traceback=text[-LONGEST_TRACEBACK:])


def _json(result: Any) -> Json:
    """`result` as JSON can say it; what JSON cannot say becomes its text."""
    if result is None or isinstance(result, bool | int | float) or type(result) is str:
        return result
    try:
        return msgspec.json.decode(msgspec.json.encode(result, enc_hook=_plain))
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) else str(value)
