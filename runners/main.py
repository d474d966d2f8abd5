"""The runner, a process or a thread: its worker, its gateway's features, and its start.

A worker claims rollouts, runs an attempt of each and stores its outcome. It owns one task for each
attempt in progress; at most `concurrency` of them run an agent. With `prepare` it claims more
attempts early; with `score` an attempt frees its slot before it is scored. Invariant: an attempt
ends in exactly one way: its outcome is stored; the worker, when it is stopped, returns it to the
queue because it did not end within `drain`; or its lease expires. An attempt that has lost its
lease is stopped and its outcome discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentrl.core.config import RoleRule, RunConfig, RunnerConfig, from_store
from agentrl.core.config.derived import SCHEME, has_no_own_policy, policy_by_role
from agentrl.core.config.run_file import with_env_values
from agentrl.core.errors import ConfigError, Invalid, StoreError
from agentrl.core.processes import (
    DaemonThreads,
    ending_descendants,
    freeze_loaded,
    log_phase,
    log_to_stderr,
)
from agentrl.core.types import ENDED, Attempt, ErrorKind, Failure, Outcome
from agentrl.core.user_code import UserCodeLoop
from agentrl.runners import scoring
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors import Executor
from agentrl.runners.executors.command import environment
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.gateway.attribution import ActiveAttempt
from agentrl.runners.gateway.features import CandidatePrompts, Feature, Replays
from agentrl.runners.gateway.images import StoredImages
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.gateway.templates import ChatTemplates, RoleRules
from agentrl.runners.harness import Preset, load_preset
from agentrl.store import open_store
from agentrl.store.base import Store


def run_features(store: Store, config: RunConfig, rules: Sequence[RoleRule] = ()) -> list[Feature]:
    """Return the features in order: roles first, because the changes of other features depend on a
    call's role."""
    adapts = config.policy.unsupported_roles == "adapt"
    return [
        RoleRules(rules),
        CandidatePrompts(),
        Replays(store),
        *([ChatTemplates()] if adapts else []),
        StoredImages(store, config),
    ]


log = logging.getLogger("agentrl.runner")
CLAIM_TIMEOUT = 1.0  # seconds that one `claim` waits at the store, which may delay a stop
# Seconds after its deadline from which the lease of a hung attempt is no longer renewed.
LEASE_GRACE = 5.0


class Worker:
    """Runs attempts of one run in this process."""

    def __init__(
        self,
        run: str,
        execution: AttemptRunner,
        config: RunnerConfig,
        *,
        name: str,
        on_blocked: Callable[[str], None] | None = None,
    ) -> None:
        """Calls `on_blocked(rollout)` on the gateway's thread when an async agent blocks the event
        loop past its time-out."""
        self.run_name, self.config, self.name = run, config, name
        self.on_blocked = on_blocked
        self._execution = execution
        self._store, self._gateway = execution.store, execution.gateway
        limit = execution.executor.limit
        slots = config.concurrency if limit is None else min(limit, config.concurrency)
        self._claim_id = uuid.uuid4().hex
        self._running: dict[str, tuple[asyncio.Task[None], ActiveAttempt]] = {}
        self._being_stored: dict[str, asyncio.Task[None]] = {}  # ended, outcome not yet stored
        self._outcomes: list[Outcome] = []
        self._finishing = asyncio.Lock()
        self._failed: BaseException | None = None
        self._stopped = False
        self._changed = asyncio.Event()  # a slot is free, or it is time to stop
        self._n_slots, self._slots = slots, asyncio.Semaphore(slots)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, wait up to `drain` seconds for running attempts, then return
        the unfinished ones to the queue.

        Raises StoreError if the store fails permanently."""
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda _: self._changed.set())
        home = asyncio.get_running_loop()
        leases = self._gateway.spawn(self._keep_leases(home))
        leases.add_done_callback(lambda ended: home.call_soon_threadsafe(self._note_failure, ended))
        try:
            while not stop.is_set() and self._failed is None:
                await self._claim_and_start(stop)
            running = [task for task, _ in self._running.values()]
            if running and self._failed is None:
                await asyncio.wait(running, timeout=self.config.drain)
        finally:
            self._stopped = True
            stopping.cancel()
            try:
                await self._abandon()
            finally:
                leases.cancel()
        if self._failed:
            raise self._failed

    async def _claim_and_start(self, stop: asyncio.Event) -> None:
        self._changed.clear()
        free = self._n_slots - len(self._running)
        if free <= 0:
            await self._changed.wait()
            return
        if not self._gateway.router.ready:
            # The trainer is starting: attempts would time out without a policy server.
            cursor = await self._store.cursor()
            if not await self._store.policies(self.run_name):
                await self._store.wait(cursor, timeout=CLAIM_TIMEOUT)
                return
        attempts = await self._claim(free)
        if stop.is_set():
            await self._give_back(attempts)
            return
        for attempt in attempts:
            active = self._gateway.register(attempt, sealed=self._execution.executor.sealed)
            task = asyncio.create_task(self._attempt(active), name=f"attempt-{active.id}")
            self._running[active.id] = task, active
            task.add_done_callback(self._note_failure)

    async def _claim(self, n: int) -> list[Attempt]:
        """Claim rollouts, with the same id until a claim returns some: over HTTP a request may be
        late, and under another id its rollouts would have no runner."""
        name, lease, run = self.name, self.config.lease, self.run_name
        claim, began = self._claim_id, time.monotonic()
        attempts = await self._store.claim(
            n, runner=name, lease=lease, run=run, claim_id=claim, timeout=CLAIM_TIMEOUT
        )
        # Returned early: the run has ended.
        if attempts or time.monotonic() - began < CLAIM_TIMEOUT:
            self._claim_id = uuid.uuid4().hex
        return attempts

    async def _attempt(self, active: ActiveAttempt) -> None:
        try:
            outcome = await self._execution.run(active, self._slots)
        finally:
            task, _ = self._running.pop(active.id)
            self._changed.set()
        self._being_stored[active.id] = task  # without a slot, but with a renewed lease
        try:
            await self._end(outcome)
        finally:
            del self._being_stored[active.id]

    async def _end(self, outcome: Outcome) -> None:
        """Store an outcome, in one batch with others that arrive during the previous write."""
        self._outcomes.append(outcome)
        async with self._finishing:
            if self._outcomes:  # otherwise another task has stored this outcome
                outcomes, self._outcomes = self._outcomes, []
                await self._finish(outcomes)

    async def _finish(self, outcomes: Sequence[Outcome]) -> None:
        """Store outcomes; an invalid one fails only its own attempt."""
        try:
            await self._store.finish(outcomes)
        except Invalid as error:
            if len(outcomes) == 1:
                refused = outcomes[0]
                log.warning(
                    "the outcome of attempt %s cannot be stored: %s", refused.attempt, error
                )
                failure = refused.failure or Failure(kind=ErrorKind.AGENT, message=str(error))
                empty = replace(refused, result=None, rewards=[], spans=[], failure=failure)
                await self._store.finish([empty])
                return
            for outcome in outcomes:
                await self._finish([outcome])

    def _note_failure(self, ended: asyncio.Task[None] | Future[None]) -> None:
        """Stop the worker after an unexpected error of an attempt or the heartbeat."""
        failed: BaseException | None = None
        if not ended.cancelled():
            failed = ended.exception()
        elif isinstance(ended, Future) and not self._stopped:
            failed = RuntimeError("the gateway has ended, and the heartbeat with it")
        if failed is not None:
            self._failed = self._failed or failed
            self._changed.set()

    async def _abandon(self) -> None:
        """Stop the running attempts, then return them to the queue: two attempts of a rollout must
        not run at once. Waits `LEASE_GRACE` seconds for agents that ignore cancellation."""
        unfinished = list(self._running.values())
        for task, _ in unfinished:
            task.cancel()
        tasks = {*(task for task, _ in unfinished), *self._being_stored.values()}
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=LEASE_GRACE)
        finally:
            await self._give_back([active.attempt for _, active in unfinished])

    async def _give_back(self, attempts: Sequence[Attempt]) -> None:
        """Return attempts to the queue before their leases expire."""
        failure = Failure(kind=ErrorKind.LOST_RUNNER, message=f"runner {self.name} was stopped")
        outcomes = [
            Outcome(attempt=attempt.id, fence=attempt.fence, failure=failure, retry=True)
            for attempt in attempts
        ]
        if outcomes:
            await self._store.finish(outcomes)

    async def _keep_leases(self, home: asyncio.AbstractEventLoop) -> None:
        """Renew the leases of all attempts, on the gateway's event loop: an agent that blocks the
        worker's loop keeps its lease until its time-out."""
        while True:
            await asyncio.sleep(self.config.lease / 3)
            running = list(self._running.values())
            blocked = [
                active for _, active in running if active.left < -LEASE_GRACE - self.config.lease
            ]
            if blocked and self.on_blocked is not None:
                self.on_blocked(blocked[0].attempt.rollout.id)
            held = [active.id for _, active in running if active.left > -LEASE_GRACE]
            held += list(self._being_stored)
            if not held:
                continue
            try:
                live = await self._store.heartbeat(held, lease=self.config.lease)
            except StoreError as error:  # if it persists, `claim` raises it
                log.warning("heartbeat failed: %s", error)
                continue
            lost = set(held).difference(live)
            if lost:
                with contextlib.suppress(RuntimeError):  # the worker's loop is closed
                    home.call_soon_threadsafe(self._stop_lost, sorted(lost))

    def _stop_lost(self, attempts: Sequence[str]) -> None:
        for attempt in attempts:
            if attempt in self._running:
                task, _ = self._running[attempt]
                log.warning("attempt %s lost its lease and is stopped", attempt)
                task.cancel()


END_CHECK_INTERVAL = 2.0  # seconds between checks whether the run has ended


@dataclass(frozen=True, slots=True)
class PlayedEnvironment:
    """An environment that plays the rollouts of a run in place of an agent."""

    name: str  # for messages, which blame the environment and not the policy
    role_rules: Sequence[RoleRule] = ()
    make_executor: Callable[[], Executor] | None = None  # default: the executor of the run file


FindEnvironment = Callable[[RunConfig, Path], PlayedEnvironment | None]
"""Returns the environment that a run names, if it does. Raises ConfigError."""


def main(
    store_url: str,
    run: str,
    *,
    find_environment: FindEnvironment | None = None,
    root: Path | None = None,
    name: str | None = None,
    until_ended: bool = False,
) -> int:
    """Run rollouts of `run` until SIGTERM or SIGINT, after which those in progress have
    `runner.drain` seconds, or with `until_ended` until the run has ended; return the exit code.

    Raises AgentRLError for errors that the user can correct: an agent or verifier that cannot be
    loaded, a port in use, a store that cannot be opened."""
    log_to_stderr()

    async def until_signal() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await start_runner(
            store_url,
            run,
            find_environment=find_environment,
            root=root,
            name=name,
            stop=stop,
            until_ended=until_ended,
            ready=_tune_gc,
            on_blocked=_end_process,
        )

    with ending_descendants() as ended, asyncio.Runner(loop_factory=UserCodeLoop) as runner:
        runner.run(until_signal())
    if ended:
        log.warning("ended %d programs that agents had left running", len(ended))
    return 0


async def start_runner(
    store_url: str,
    run: str,
    *,
    find_environment: FindEnvironment | None = None,
    root: Path | None = None,
    name: str | None = None,
    stop: asyncio.Event,
    until_ended: bool = False,
    agent: object = None,
    verifier: Callable[..., Any] | str | None = None,
    ready: Callable[[], None] | None = None,
    on_blocked: Callable[[str], None] | None = None,
) -> None:
    """Run rollouts of `run` until `stop` is set, or with `until_ended` until training has finished.
    Calls `ready` when agent and verifier are loaded.

    Waits for the run to exist. `agent` and `verifier` default to those of the run's settings.
    `root`: base of their paths, by default the run's. Raises the errors of `main`."""
    async with open_store(store_url) as store:
        config = await _config(store, run, stop)
        if config is None:
            return
        watch = _stop_at_end(store, run, config.steps, stop) if until_ended else None
        ending = asyncio.create_task(watch) if watch else None
        root, name = root or Path(config.root), name or f"{socket.gethostname()}-{os.getpid()}"
        verifier = config.verifier.path if verifier is None else verifier
        started = attempt_runner(
            store, run, config, root, name, agent, verifier, find_environment=find_environment
        )
        try:
            async with started as execution:
                if ready is not None:
                    ready()
                worker = Worker(run, execution, config.runner, name=name, on_blocked=on_blocked)
                await worker.run(stop)
        finally:
            if ending is not None:
                ending.cancel()


@contextlib.asynccontextmanager
async def attempt_runner(
    store: Store,
    run: str,
    config: RunConfig,
    root: Path,
    name: str,
    agent: object,
    verifier: Callable[..., Any] | str,
    features: Sequence[Feature] = (),
    *,
    find_environment: FindEnvironment | None = None,
) -> AsyncIterator[AttemptRunner]:
    """Start the gateway, executor and verifier of a run. `features`: additional features of the
    gateway. Raises ConfigError for a run that an environment plays, without `find_environment`."""
    if find_environment is not None:
        played = find_environment(config, root)
    elif config.agent.path.startswith(f"{SCHEME}:"):
        raise ConfigError(f"agent.path = {config.agent.path!r}: this runner plays no environments")
    else:
        played = None
    preset = load_preset(config.agent.harness, root) if config.agent.harness else None
    gateway = Gateway(
        store,
        run,
        host=config.runner.host,
        port=config.runner.port,
        upstreams=config.upstreams,
        roles=policy_by_role(config),
        policies=config.policies,
        remote=has_no_own_policy(config),
        key=config.engine.access.key,
        models=[config.policy.model, *(policy.model for policy in config.policies.values())],
        features=[*features, *run_features(store, config, role_rules(config, played, preset))],
    )
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.to_thread(gateway.start)
        stack.push_async_callback(asyncio.to_thread, gateway.close)
        url = gateway.base_url
        stack.enter_context(environment(url, config.agent.pass_env))
        own_executor = _own_executor(config, root, url, played, preset)
        place: Any = {"root": root, "gateway": url, "runner": name}
        executor = make_executor(config, agent=agent, given=own_executor, **place)
        settings = config.verifier
        scores = scoring.load(verifier, settings.rewards, root, settings.range, settings.audit)
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        workspaces = None
        if config.workspace.source:
            from agentrl.runners.workspace.folders import Workspaces

            workspaces = Workspaces(config, root=root, gateway=url)
            stack.push_async_callback(workspaces.close)
        stack.push_async_callback(executor.close)
        await executor.start()
        if workspaces is not None:
            await workspaces.start()
        plays = played.name if played and not agent else ""
        yield AttemptRunner(store, gateway, executor, scores, config.agent, workspaces, plays)


def role_rules(
    config: RunConfig, played: PlayedEnvironment | None, preset: Preset | None
) -> list[RoleRule]:
    """Return the role rules of the run file, then those of its environment or harness."""
    of_environment = [] if played is None else played.role_rules
    return [*config.role_rules, *of_environment, *([] if preset is None else preset.match)]


def _own_executor(
    config: RunConfig,
    root: Path,
    gateway: str,
    played: PlayedEnvironment | None,
    preset: Preset | None,
) -> Executor | None:
    """Return the executor of an environment or harness, which replaces the run file's."""
    if played is not None and played.make_executor is not None:
        return played.make_executor()
    if preset is None or config.runner.executor not in ("auto", "command"):
        return None  # the harness is installed in the image
    from agentrl.runners.harness import HarnessExecutor

    return HarnessExecutor(config, preset, root=root, gateway=gateway)


async def _stop_at_end(store: Store, run: str, steps: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(StoreError):  # the worker has the same error and handles it
            rows = await store.steps(run, after=steps - 1)
            if any(ENDED in row.metrics for row in rows):
                log_phase(log, f"run {run} has ended after {steps} steps; this runner ends too")
                stop.set()
        await asyncio.sleep(END_CHECK_INTERVAL)


class RunnerThread:
    """A runner in a thread, for an agent that is an object of this process.

    `agent` and `verifier` are objects or "file.py:name". Pass an agent that creates its client
    itself as a function without parameters, which is called once `OPENAI_BASE_URL` points at the
    gateway; `stop` restores the environment."""

    def __init__(
        self,
        store_url: str,
        run: str,
        *,
        agent: object,
        verifier: Callable[..., Any] | str,
        find_environment: FindEnvironment | None = None,
        root: Path | None = None,
    ) -> None:
        self.done: Future[None] = Future()  # raises the error that ended the runner
        self.done.set_running_or_notify_cancel()  # so that a waiting caller cannot cancel it
        self._loop = UserCodeLoop()
        self._stop = asyncio.Event()
        self._runner = partial(
            start_runner,
            store_url,
            run,
            find_environment=find_environment,
            root=root,
            stop=self._stop,
            agent=agent,
            verifier=verifier,
        )
        self._thread = threading.Thread(target=self._work, name="agentrl-runner", daemon=True)

    def start(self) -> None:
        """Start the thread, which waits for the run to exist."""
        self._thread.start()

    def stop(self) -> None:
        """Return unfinished rollouts to the queue and end the thread; `done` has earlier errors."""
        with contextlib.suppress(RuntimeError):  # its loop is already closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._runner())
        except BaseException as error:  # noqa: BLE001 - raised by `done`
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


async def _config(store: Store, run: str, stop: asyncio.Event) -> RunConfig | None:
    """Wait for the run and return its settings; None if `stop` is set before."""
    cursor = await store.cursor()
    while not stop.is_set():
        state = await store.run(run)
        if state is not None:
            return with_env_values(from_store(state.config))
        cursor = await store.wait(cursor, timeout=1.0)
    return None


def _tune_gc() -> None:
    """Raise the thresholds of garbage collection: agents create many short-lived objects without
    cycles, and the defaults cost a LangChain agent a tenth of its speed."""
    freeze_loaded()
    gc.set_threshold(20_000, 20, 50)


def _end_process(rollout: str) -> None:
    """End this process; its parent restarts it, and the rollouts are retried when their leases
    expire."""
    log.error(
        "the agent has blocked its event loop past the time-out of rollout %s; ending this process:"
        " make the agent await instead, or make it a plain function, which runs in a thread",
        rollout,
    )
    os._exit(1)
