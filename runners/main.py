"""A runner, as a process or a thread: assembles store, gateway, agent and worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.base.descendants import ending_descendants
from agentrl.base.processes import freeze_loaded, log_phase, log_to_stderr
from agentrl.base.threads import DaemonThreads
from agentrl.base.user_code import UserCodeLoop
from agentrl.config import RoleRule, RunConfig, from_store
from agentrl.config.derived import SCHEME
from agentrl.config.policies import has_no_own_policy, policy_by_role
from agentrl.config.run_file import with_env_values
from agentrl.errors import ConfigError, StoreError
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.executors import Executor
from agentrl.runners.executors.environment import environment
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.features import run_features
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.server import Gateway
from agentrl.runners.harnesses.preset import Preset, load_preset
from agentrl.runners.scoring import verifiers
from agentrl.runners.tracing.langchain_steps import instrument_frameworks
from agentrl.runners.worker import Worker
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import ENDED

log = logging.getLogger("agentrl.runner")
END_CHECK_INTERVAL = 2.0  # seconds between checks whether the run has ended


@dataclass(frozen=True, slots=True)
class PlayedEnvironment:
    """What plays the rollouts of a run in place of an agent."""

    name: str  # in messages; its faults are not the policy's
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

    Waits for the run to exist. `agent` and `verifier` default to those of the run's settings,
    whose paths are relative to `root`, by default the run's own. Raises the errors of `main`."""
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
    """Start the gateway, executor and verifier of a run. `features`: more of the gateway. Raises
    ConfigError for a run that an environment plays, without `find_environment`."""
    if find_environment is not None:
        played = find_environment(config, root)
    elif config.agent.path.startswith(f"{SCHEME}:"):
        raise ConfigError(f"agent.path = {config.agent.path!r}: this runner plays no environments")
    else:
        played = None
    preset = load_preset(config.agent.harness, root) if config.agent.harness else None
    if config.runner.framework_spans:
        instrument_frameworks()
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
        models=[config.policy.model, *(one.model for one in config.policies.values())],
        features=[*features, *run_features(store, config, role_rules(config, played, preset))],
    )
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.to_thread(gateway.start)
        stack.push_async_callback(asyncio.to_thread, gateway.close)
        url = gateway.base_url
        stack.enter_context(environment(url, config.agent.pass_env))
        given = _own_executor(config, root, url, played, preset)
        place: Any = {"root": root, "gateway": url, "runner": name}
        executor = make_executor(config, agent=agent, given=given, **place)
        scores = verifiers.load(verifier, config.verifier.rewards, root, config.verifier.range)
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
    """Return the rules of the run file, then those of its environment or harness."""
    of_environment = [] if played is None else played.role_rules
    return [*config.role_rules, *of_environment, *([] if preset is None else preset.match)]


def _own_executor(
    config: RunConfig,
    root: Path,
    gateway: str,
    played: PlayedEnvironment | None,
    preset: Preset | None,
) -> Executor | None:
    """Return what an environment or harness runs in, instead of the executor of the run file."""
    if played is not None and played.make_executor is not None:
        return played.make_executor()
    if preset is None or config.runner.executor not in ("auto", "command"):
        return None  # of a harness, the program is in the image
    from agentrl.runners.harnesses.executor import HarnessExecutor

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
        self.done.set_running_or_notify_cancel()  # prevents that a waiting caller cancels it
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
    """Raise the thresholds: agents create many short-lived objects without cycles, and the defaults
    cost a LangChain agent a tenth of its speed."""
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
