"""The front of a run: it starts the processes, watches them and reports. It never loads torch.

    front ── starts ──► algorithm process (loop, learner, policy server)
          └─ starts ──► runner processes  (worker, gateway, the agents)

Owns the child processes and nothing else: all state is in the store, so killing the front and
giving the same command again continues the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from agentrl import folder_lock
from agentrl.algorithms.learners.verl import settings as verl_settings
from agentrl.algorithms.plugins import engine_factory, learner_factory
from agentrl.config import RunConfig, agent_env, differences, resolve
from agentrl.config import policies as team
from agentrl.config.infrastructure import EXECUTORS
from agentrl.errors import AgentRLError, ConfigError, StoreError, TrainingError
from agentrl.loading import check_tasks, load_tasks
from agentrl.plugins import load_plugin
from agentrl.processes import PHASE, USER_ERROR, Child
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.store.urls import split_secret
from agentrl.telemetry import console as view
from agentrl.telemetry import report
from agentrl.telemetry.log_follower import LogFollower
from agentrl.telemetry.sinks.base import check_sinks
from agentrl.telemetry.sinks.process import SinksProcess, sinks_process
from agentrl.types import Json

WRITTEN = (
    *("store.db*", "run.json", "logs", "checkpoints", "dumps", "curve.png"),
    *("policy", "policy.tmp-*", "train.jsonl", "heldout.jsonl"),
    *("metrics", "tensorboard", "wandb", "mlruns", "vllm", "servers", "pool"),
    *("plan.json", "players"),
)  # by a run, in its output folder
T = TypeVar("T")
RESTARTS = 20  # of one runner in a row; more means that it cannot work
STEADY = 300.0  # seconds alive after which a runner's earlier deaths do not count
PAUSE = 1.0  # seconds before a runner is started again


@dataclass(frozen=True, slots=True)
class Result:
    """What a run achieved. Scores are mean held-out rewards; None where not evaluated."""

    before: float | None
    after: float | None
    before_sampled: float | None
    after_sampled: float | None
    seconds: float
    checkpoint: str | None
    store: str


def run_training(config: RunConfig, *, fresh: bool = False, level: int = PHASE) -> Result:
    """Train to the end with runner processes, show it, print the report. level: the lowest, of
    `logging`, of what is shown while it works."""
    config = conceal(config)
    check(config)
    if fresh:
        clear(config)
    return blocking(front(config, runners=config.runner.processes, level=level))


class Trainer:
    """Train an agent from Python, in a script or a notebook.

    `agent` is a callable, a LangChain runnable or a function without arguments that builds one
    (called once `OPENAI_BASE_URL` points at the gateway), and runs in this process; `tasks` and
    `heldout` are lists of `{"input": ..., ...}`; `verifier` takes task and result and returns a
    number or named numbers; `policy` is a Hugging Face directory or name, to be left out where
    each of several policies has one of its own. `settings` are those of a run file, tables as
    dicts: `Trainer(..., steps=50, algorithm={"lr": 1e-5}, policies={"solver": {...}})`.

    `agent`, `tasks`, `heldout` and `verifier` may also be "file.py:name" as in a run file.
    """

    def __init__(
        self,
        agent: Any,
        tasks: Iterable[dict[str, Json]] | str,
        verifier: Callable[..., Any] | str,
        policy: str | Path = "",
        heldout: Iterable[dict[str, Json]] | str = "",
        **settings: Any,
    ) -> None:
        self.agent, self.tasks, self.verifier = agent, tasks, verifier
        self.policy, self.heldout, self.settings = policy, heldout, settings

    def fit(self, *, fresh: bool = False) -> Result:
        """Train to the end, or continue where an earlier call of this name was stopped."""
        config = conceal(self._config())
        if fresh:
            clear(config)
        output = folder_at(Path(config.output))
        names = {
            "train": _task_file(self.tasks, output / "train.jsonl"),
            "heldout": _task_file(self.heldout, output / "heldout.jsonl"),
        }
        config = msgspec.structs.replace(
            config, tasks=msgspec.structs.replace(config.tasks, **names)
        )
        if isinstance(self.agent, str) and isinstance(self.verifier, str):
            return run_training(config)
        check(config)
        return blocking(front(config, runners=0, local=(self.agent, self.verifier)))

    def _config(self) -> RunConfig:
        data = {"policy": {}, "agent": {}, "verifier": {}} | self.settings
        data["policy"] = {"model": str(self.policy)} | data["policy"]
        for key, value in (("agent", self.agent), ("verifier", self.verifier)):
            if isinstance(value, str):
                data[key] = {"path": value} | data[key]
        return resolve(data, source="Trainer")


def check(config: RunConfig) -> None:
    """Refuse, before anything starts, what can be seen to be wrong from here: the tasks, which may
    take long to make, last."""
    root = Path(config.root)
    if config.steps and not config.tasks.train:
        raise ConfigError("tasks.train is missing: name a .jsonl file or file.py:name")
    if not config.steps and not config.tasks.heldout:
        raise ConfigError("tasks.heldout is missing: there is nothing to evaluate on")
    for key, value in (
        ("agent.path", config.agent.path),
        ("verifier.path", config.verifier.path),
        *((f"verifier.rewards.{name}", path) for name, path in config.verifier.rewards.items()),
        ("runner.executor", config.runner.executor),
    ):
        file = value.rpartition(":")[0]
        if file.endswith(".py") and not (root / file).is_file():
            raise ConfigError(f"{key} = {value!r}: there is no file {root / file}")
    if ":" not in config.runner.executor:
        load_plugin("executors", config.runner.executor, EXECUTORS, root, key="runner.executor")
    own = config.policies and all(member.model for member in config.policies.values())
    if team.remote(config) and config.steps:
        raise ConfigError(
            "policy.model is missing: there is nothing to train. `agentrl eval` scores what "
            "[upstreams] answer; to train, give a Hugging Face directory or name"
        )
    if not (config.policy.model or config.policy.build or own or team.remote(config)):
        raise ConfigError("policy.model is missing: a Hugging Face directory or name")
    engine_factory(config)
    learner_factory(config)
    if config.learner.kind == "verl":
        verl_settings.check(config)
    check_sinks(config)
    for key, value in (
        ("tasks.train", config.tasks.train),
        ("tasks.heldout", config.tasks.heldout),
    ):
        if value:
            load_tasks(value, root, key=key)


def conceal(config: RunConfig) -> RunConfig:
    """Take password or key out of the store's URL, and the values out of `agent.env`: what is
    printed, stored, written to files or given as arguments is read by others. Every process finds
    them in its environment."""
    store, secrets = split_secret(config.store)
    os.environ.update(secrets)
    return agent_env.hide(msgspec.structs.replace(config, store=store))


def clear(config: RunConfig) -> None:
    """Delete what an earlier run of this name wrote, and nothing else in its folder.

    Raises ConfigError while that run is live. What cannot be seen from here, such as a process of
    an earlier version, is fenced: at its next commit it learns that it is not the owner."""
    output = Path(config.output)
    if not has_own_store(config):
        raise ConfigError(
            f"--fresh: the store {config.store} is not in {output}, so it may hold other runs;"
            " choose another name, or delete it yourself"
        )
    if not output.is_dir():
        return
    with folder_lock.alone(output):
        with contextlib.suppress(StoreError):  # there is none, or none that could be trained on
            blocking(_fence(config))
        for pattern in WRITTEN:
            for path in output.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


async def _fence(config: RunConfig) -> None:
    async with open_store(config.store, create=False) as store:
        await store.open_run(config.name, msgspec.to_builtins(config))


def has_own_store(config: RunConfig) -> bool:
    """Whether the store is the one in the output folder, which no other run has."""
    return config.store == f"sqlite:///{Path(config.output) / 'store.db'}"


def folder_at(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output: cannot make the folder {path} ({error.strerror}); choose another with output="
        ) from None
    return path


async def front(
    config: RunConfig,
    *,
    runners: int,
    local: tuple[Any, Any] | None = None,
    level: int = PHASE,
) -> Result:
    """Train to the end and report. local: agent and verifier of this process, in place of runner
    processes. level: as of `run_training`."""
    folder_at(Path(config.output))  # before the store, which is most often in it
    async with open_store(config.store) as store:
        await refuse_changes(store, config)
        seconds = await attend(store, config, runners=runners, local=local, level=level)
        return await _finish(store, config, seconds)


async def attend(
    store: Store,
    config: RunConfig,
    *,
    runners: int,
    local: tuple[Any, Any] | None = None,
    play: Path | None = None,
    console: Console | None = None,
    level: int = PHASE,
) -> float:
    """Start the processes of a run, show it, and stop them when the algorithm is done; the seconds
    it took. play: a plan of games to play instead of training.

    Raises what ended a process that should have gone on."""
    config, output = agent_env.hide(config), Path(config.output)
    logs = folder_at(output / "logs")
    # Runners read the settings from the store; and an algorithm left over is fenced from here.
    await store.open_run(config.name, msgspec.to_builtins(config))
    run_file = output / "run.json"
    run_file.touch(mode=0o600)
    run_file.chmod(0o600)  # also one of an earlier start
    run_file.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    order = ["start", str(run_file)] if play is None else ["play", str(run_file), str(play)]
    algorithm = Child("algorithm", ["algorithm", *order], logs / "algorithm.log")
    arguments = ["runner", "start", "--store", config.store, "--run", config.name]
    workers = [Child(f"runner-{i}", arguments, logs / f"runner-{i}.log") for i in range(runners)]
    console = console or Console()
    if not runners and not local:
        console.print(_to_join(config), soft_wrap=True, highlight=False)
    sinks = sinks_process(config, run_file, console)
    logged = [algorithm, *workers, *([sinks.child] if sinks else [])]
    log_lines = LogFollower(console, level, [child.log for child in logged])
    started = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(folder_lock.shared(output))
        if sinks:  # last: they wait for the last evaluation
            stack.push_async_callback(_stop_sinks, sinks, log_lines)
        stack.push_async_callback(algorithm.stop)  # after the runners: they still need a model
        stack.push_async_callback(_stop_runners, workers, config.runner.drain)
        watchers = [asyncio.create_task(_algorithm(algorithm))]
        watchers += [asyncio.create_task(_keep_alive(child)) for child in workers]
        if local:
            watchers.append(asyncio.create_task(_local_runner(config, *local)))
        quiet = level > PHASE
        following = [asyncio.create_task(view.show_progress(store, config, console, quiet=quiet))]
        following += [asyncio.create_task(log_lines.follow())]
        following += [asyncio.create_task(sinks.keep())] if sinks else []
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*watchers, *following):
                task.cancel()
            await asyncio.gather(*watchers, *following, return_exceptions=True)
        for task in done:
            task.result()
    return time.monotonic() - started


def _to_join(config: RunConfig) -> str:
    key = " --key KEY" if config.store.startswith("http") else ""
    return (
        "No runners are started here (runner.processes = 0). On every machine that is to run agents"
        f": agentrl runner start --store {config.store}{key} --run {config.name} --root FOLDER"
    )


async def _finish(store: Store, config: RunConfig, seconds: float) -> Result:
    state = await store.run(config.name)
    last = state.checkpoint if state else None
    steps = await store.steps(config.name)
    before, after = steps[0].metrics, steps[-1].metrics
    result = Result(
        before=before.get("eval/score"),
        after=after.get("eval/score"),
        before_sampled=before.get("eval/sampled"),
        after_sampled=after.get("eval/sampled"),
        seconds=seconds,
        checkpoint=str(config.checkpoint(last)) if last else None,
        store=config.store,
    )
    await report.print_report(store, config, steps, result.checkpoint, seconds)
    return result


async def _algorithm(child: Child) -> None:
    await child.start()
    code = await child.wait()
    if code == USER_ERROR:
        raise AgentRLError(child.last_error() or f"see {child.log}")
    if code:
        raise TrainingError(
            f"the algorithm process ended with {_ending(code)}; nothing is lost: the same command"
            f" continues after the last committed step (its output: {child.log})"
        )


async def _keep_alive(child: Child) -> None:
    """Start a runner again whenever it dies: its rollouts come back when their leases expire."""
    deaths = 0
    while deaths < RESTARTS:
        await child.start()
        started = time.monotonic()
        code = await child.wait()
        if code == USER_ERROR:
            raise AgentRLError(child.last_error() or f"see {child.log}")
        deaths = 1 if time.monotonic() - started > STEADY else deaths + 1
        await asyncio.sleep(PAUSE)
    raise TrainingError(
        f"{child.name} died {RESTARTS} times in a row; read {child.log}, mend the cause, repeat"
    )


async def _stop_runners(children: list[Child], drain: float) -> None:
    """All at once; each has its `drain` seconds, and a few to give back what is left."""
    await asyncio.gather(*(child.stop(drain + 10.0) for child in children))


async def _stop_sinks(sinks: SinksProcess, log_lines: LogFollower) -> None:
    await sinks.stop()
    log_lines.look()


async def _local_runner(config: RunConfig, agent: Any, verifier: Any) -> None:
    """A runner in this process, for agents that are objects of it; ends only by failing."""
    from agentrl.runners.main import RunnerThread

    root = Path(config.root)
    runner = RunnerThread(config.store, config.name, agent=agent, verifier=verifier, root=root)
    runner.start()
    try:
        await asyncio.wrap_future(runner.done)
    finally:
        await asyncio.to_thread(runner.stop)


async def refuse_changes(store: Store, config: RunConfig) -> None:
    """A run is one experiment: continuing it with other settings would be neither of the two."""
    state = await store.run(config.name)
    if state is None or not await store.rollouts(config.name, limit=1):
        return  # nothing has come of it yet
    if config.steps < state.step:
        raise ConfigError(
            f"steps = {config.steps}: run {config.name!r} has {state.step} steps already; give at"
            " least as many, choose another name, or give --fresh"
        )
    try:
        before = msgspec.convert(state.config, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"run {config.name!r} in {config.output} was started by another version of agentrl"
            f" ({error}); choose another name, or give --fresh"
        ) from None
    changed = differences(before, config)
    if changed:
        raise ConfigError(
            f"run {config.name!r} in {config.output} was started with other settings"
            f" ({'; '.join(changed)}); restore them, choose another name, or give --fresh"
        )


def _task_file(tasks: Iterable[dict[str, Json]] | str, file: Path) -> str:
    """Name of a task file for the other processes, written from the list if it is one."""
    if isinstance(tasks, str):
        return tasks
    items = list(tasks)
    check_tasks(items, [f"task {index}" for index in range(len(items))], key=file.stem)
    file.write_bytes(b"".join(msgspec.json.encode(item) + b"\n" for item in items))
    return str(file)


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end from a script, or from a notebook whose own event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="agentrl-front") as executor:
        loop = asyncio.new_event_loop()
        task = loop.create_task(work)
        running = executor.submit(_run, loop, task)
        try:
            return running.result()
        except KeyboardInterrupt:  # a notebook's "interrupt": end the children, then the cell
            loop.call_soon_threadsafe(task.cancel)
            raise


def _run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    try:
        return loop.run_until_complete(task)
    finally:
        loop.close()
