"""The launcher of a run: it starts the processes, watches them and reports. It never loads torch.

    launcher ── starts ──► algorithm process (loop, learner, policy server)
             └─ starts ──► runner processes  (worker, gateway, the agents)

Owns: only these processes. All state is in the store, so the same command resumes a run after its
launcher was killed.

`agentrl train --from` resumes a run from one of its earlier checkpoints on disk: the store rolls
back the steps after it, so their groups are trained again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console

from agentrl import measured
from agentrl.algorithms.learners.verl.settings import check as check_verl
from agentrl.algorithms.model import digests
from agentrl.algorithms.plugins import engine_factory, learner_factory
from agentrl.algorithms.preferences.draft import pin_dataset
from agentrl.core import files, processes
from agentrl.core.config import RunConfig, derived, differences, from_store, resolve, store_in
from agentrl.core.config.agents import SessionsConfig
from agentrl.core.config.derived import check_presets
from agentrl.core.config.infrastructure import (
    EXECUTORS,
    ExternalEngineConfig,
    ExternalLearnerConfig,
)
from agentrl.core.config.live import LiveConfig
from agentrl.core.config.run_file import tasks_of, trainer_arguments, without_env_values
from agentrl.core.errors import AgentRLError, ConfigError, StoreError, TrainingError
from agentrl.core.files import atomic_directory, make_folder
from agentrl.core.loading import task_file
from agentrl.core.plugins import load_plugin
from agentrl.core.processes import PHASE, USER_ERROR, Child, exit_text, keep_alive, run_blocking
from agentrl.core.types import Json, RunState, TrainingResult
from agentrl.store import open_store, run_folder
from agentrl.store.base import Store
from agentrl.store.urls import split_secret
from agentrl.telemetry.console import LogFollower, show_progress
from agentrl.telemetry.report import print_report
from agentrl.telemetry.sinks import check_sinks, followed, sinks_process

# File in the output folder for demonstrations given as objects.
DEMONSTRATIONS = "demonstrations.jsonl"
# Files of a run in its output folder, which `--fresh` deletes.
RUN_OUTPUTS = (
    *("store.db*", "run.json", "logs", "checkpoints", "plan.json", "dumps"),
    *("train.jsonl", "heldout.jsonl", measured.FILE, DEMONSTRATIONS),
    *(
        "policy",
        "policy.tmp-*",
        "warmup",
        "warmup-*",
        "warmup.tmp-*",
        "players",
        "pool",
        "vllm",
        "servers",
    ),
    *("versions", "heldout", "watch.json"),  # files of `agentrl live`
    *("metrics", "tensorboard", "wandb", "mlruns", "curve.png"),
)


def run_training(
    config: RunConfig, *, fresh: bool = False, take_over: bool = False, level: int = PHASE
) -> TrainingResult:
    """Train with runner processes, show the progress and print the report. take_over: from a live
    process of this run, which stops; level: the lowest level of `logging` that is shown."""
    config = hide_secrets(config)
    check(config)
    if fresh:
        clear(config)
    run_blocking(run_folder.check_free(config, take_over=take_over))
    try:
        return run_blocking(launch(config, level=level))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_resume_point(config)) from None


def _resume_point(config: RunConfig) -> str:
    """Where a stopped run continues; empty if that is unknown."""

    async def read() -> RunState | None:
        async with open_store(config.store, readonly=True) as store:
            return await store.run(config.name)

    with contextlib.suppress(AgentRLError):
        state = run_blocking(read())
        if state and state.checkpoint:
            return f"after step {state.step} of {config.steps}"
        return "from the first step: there is no checkpoint yet"
    return ""


class Trainer:
    """Train an agent from Python, in a script or a notebook.

    `agent` is a callable, a LangChain runnable or a function without arguments that builds one
    (called once `OPENAI_BASE_URL` points at the gateway), and runs in this process; `tasks` and
    `heldout` are lists of `{"input": ..., ...}`; `verifier` takes task and result and returns a
    number or named numbers. Each may also be "file.py:name", as in a run file, and is left out if
    an environment has it: `Trainer(environment="PLUGIN:WHAT", policy=...)`. `policy` is a Hugging
    Face directory or name, and may be left out if each of several policies has its own model.
    `callbacks` have `on_step` or `on_evaluation`. Conversations to imitate first may be a list,
    too: `warmup={"data": [{"messages": [...], "tools": [...]}, ...]}`.

    Every setting of a run file can be given, tables as dicts or by names with dots:
    `Trainer(..., algorithm={"lr": 1e-5}, **{"eval.every": 5})`. For `agent`, `tasks`, `verifier`
    and `policy`, a dict is the whole table, and any other value its first setting:
    `policy={"model": ..., "lora": {"rank": 16}}`, `agent={"path": make_agent, "max_calls": 20}`.

    If a single model is trained on this machine, settings that are not given are measured, as by
    `agentrl init --model`: dtype, adapter with learning rate, threads, context, length of
    completions, time-out and tasks per step."""

    def __init__(
        self,
        agent: Any = None,
        tasks: Iterable[dict[str, Json]] | dict[str, Any] | str = "",
        verifier: Callable[..., Any] | dict[str, Any] | str = "",
        policy: str | Path | dict[str, Any] = "",
        heldout: Iterable[dict[str, Json]] | str = "",
        callbacks: Sequence[Any] = (),
        **settings: Any,
    ) -> None:
        self.callbacks = callbacks
        parameters = {"agent": agent, "tasks": tasks, "verifier": verifier, "policy": policy}
        self.arguments = trainer_arguments(parameters, heldout, settings)
        self._stopped = ""  # step from which a stopped run continues

    def fit(self, *, fresh: bool = False, take_over: bool = False) -> TrainingResult:
        """Train to the end, or resume a stopped run of this name. fresh: start over;
        take_over: continue a run that is live in another process, which stops."""
        try:
            return run_blocking(self.fit_async(fresh=fresh, take_over=take_over))
        except KeyboardInterrupt:  # without the event loop's tracebacks
            where = self._stopped or "after the last checkpoint"
            raise KeyboardInterrupt(f"stopped; fit(), without fresh, continues {where}") from None

    async def fit_async(self, *, fresh: bool = False, take_over: bool = False) -> TrainingResult:
        """`fit` for an event loop. If it is cancelled, it stops its processes."""
        tables, agent, verifier, train, heldout, demonstrations = self.arguments
        if demonstrations is not None:  # the checks need the file's name; it is written after them
            tables = {**tables, "warmup": tables["warmup"] | {"data": DEMONSTRATIONS}}

        def resolved() -> RunConfig:
            config = hide_secrets(resolve(tables, source="Trainer"))
            if agent is not None:  # replaces the environment's agent
                config = replace(config, agent=replace(config.agent, path=""))
            return config

        check_presets(config := resolved())  # before the tasks are loaded, which may take long
        if fresh:
            clear(config)
        await run_folder.check_free(config, take_over=take_over)  # before its files are replaced
        output = make_folder(Path(config.output))
        for key, objects in (("train", train), ("heldout", heldout)):
            if objects is not None:
                file = task_file(objects, output / f"{key}.jsonl", config.tasks.columns)
                tables = {**tables, "tasks": tables.get("tasks", {}) | {key: file}}
        if demonstrations is not None:
            file = task_file(demonstrations, output / DEMONSTRATIONS, needs="messages")
            tables = {**tables, "warmup": tables["warmup"] | {"data": file}}
        check(config := resolved())
        measurements = await measured.complete(
            tables, output, Console(), plays_rollouts=config.plays_rollouts
        )
        for key, value in measurements.items():
            tables = trainer_arguments({}, "", {**tables, key: value}).tables
        local = None
        if agent is not None or verifier is not None:
            local = agent, verifier or config.verifier.path
        config = resolved()
        try:
            return await launch(config, local=local, callbacks=self.callbacks)
        except asyncio.CancelledError:
            self._stopped = await asyncio.to_thread(_resume_point, config)
            raise


def check(config: RunConfig) -> None:
    """Raises ConfigError for mistakes that the launcher can find before anything starts. Checks the
    tasks last, because they may take long to load."""
    from agentrl.algorithms.model.templates import check as check_templates
    from agentrl.environments.hosted import check as check_environment

    root = Path(config.root)
    check_presets(config)
    check_environment(config)
    check_templates(config)
    _check_tables(config)
    check_sinks(config)
    check_verl(config)
    if config.steps and config.plays_rollouts and not config.tasks.train:
        raise ConfigError("tasks.train is missing: name a .jsonl file or file.py:name")
    if not config.steps and not config.tasks.heldout:
        raise ConfigError("tasks.heldout is missing: there is nothing to evaluate on")
    for key, value in (
        ("agent.path", config.agent.path),
        ("verifier.path", config.verifier.path),
        ("verifier.audit", config.verifier.audit),
        *((f"verifier.rewards.{name}", path) for name, path in config.verifier.rewards.items()),
        ("runner.executor", config.runner.executor),
    ):
        file = value.rpartition(":")[0]
        if file.endswith(".py") and not (root / file).is_file():
            raise ConfigError(f"{key} = {value!r}: there is no file {root / file}")
    if ":" not in config.runner.executor:
        load_plugin("executors", config.runner.executor, EXECUTORS, root, key="runner.executor")
    upstreams_only = derived.has_no_own_policy(config)
    if upstreams_only and config.steps:
        raise ConfigError(
            "policy.model is missing: there is nothing to train. `agentrl eval` scores what "
            "[upstreams] answer; to train, give a Hugging Face directory or name"
        )
    own_models = config.policies and all(member.model for member in config.policies.values())
    if not (config.policy.model or config.policy.build or own_models or upstreams_only):
        raise ConfigError("policy.model is missing: a Hugging Face directory or name")
    if isinstance(config.engine, ExternalEngineConfig):  # the library's own would load torch
        engine_factory(config)
    if isinstance(config.learner, ExternalLearnerConfig):
        learner_factory(config.learner.kind, Path(config.root))
    tasks_of(config, "train")
    tasks_of(config, "heldout")


def _check_tables(config: RunConfig) -> None:
    """Raises ConfigError for tables that only other commands read."""
    if config.live.running:
        return
    if config.live != LiveConfig():
        raise ConfigError("[live] is read by `agentrl live` alone; remove it, or use that command")
    if config.sessions != SessionsConfig():
        raise ConfigError(
            "[sessions] is read by `agentrl gateway serve` and `agentrl live` alone; remove it"
        )


def hide_secrets(config: RunConfig) -> RunConfig:
    """The settings without the values of `agent.env` and the password or key in the store's URL.
    These move to the environment of the run's processes, because others can read output, store,
    files and command lines."""
    store, secrets = split_secret(config.store)
    os.environ.update(secrets)
    return without_env_values(replace(config, store=store))


def clear(config: RunConfig) -> None:
    """Delete the outputs of an earlier run of this name, and nothing else in its folder.

    Raises ConfigError while that run is live. A process that holds neither the ownership nor the
    lock is fenced."""
    output = Path(config.output)
    if not has_own_store(config):
        raise ConfigError(
            f"--fresh: the store {config.store} is not in {output}, so it may hold other runs;"
            " choose another name, or delete it yourself"
        )
    if not output.is_dir():
        return
    run_blocking(run_folder.check_free(config, fix_hint="stop it before --fresh deletes its files"))
    with files.exclusive(output):
        with contextlib.suppress(StoreError):  # no store, or a store of another version
            run_blocking(_fence(config))
        for pattern in RUN_OUTPUTS:
            for path in output.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


async def _fence(config: RunConfig) -> None:
    async with open_store(config.store, create=False) as store:
        await store.open_run(config.name, msgspec.to_builtins(config))


def has_own_store(config: RunConfig) -> bool:
    """Whether the store is in the output folder, so that it has no other run."""
    return config.store == store_in(Path(config.output))


async def launch(
    config: RunConfig,
    *,
    local: tuple[Any, Any] | None = None,
    callbacks: Sequence[Any] = (),
    level: int = PHASE,
) -> TrainingResult:
    """Train to the end and print the report. local: agent and verifier objects, to run here."""
    make_folder(Path(config.output))  # before the store, which is usually in it
    async with open_store(config.store) as store:
        config = await pin_dataset(store, config)
        await refuse_changes(store, config)
        async with contextlib.AsyncExitStack() as stack:
            calling = followed(store, config.name, callbacks)
            extras = [await stack.enter_async_context(calling)] if callbacks else []
            seconds = await supervise(store, config, local=local, extras=extras, level=level)
        return await _finish(store, config, seconds)


async def supervise(
    store: Store,
    config: RunConfig,
    *,
    local: tuple[Any, Any] | None = None,
    extras: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    process: str = "algorithm",
    alone: bool = False,
    console: Console | None = None,
    level: int = PHASE,
) -> float:
    """Start the processes of a run, show its progress, and stop them when the algorithm has ended.
    Returns its seconds; raises AgentRLError if another process ends first.

    extras: additional work; its error ends the run. process: name of the main process for `agentrl
    process`; alone: without metrics sinks."""
    config, output = hide_secrets(config), Path(config.output)
    logs, console = make_folder(output / "logs"), console or Console()
    async with contextlib.AsyncExitStack() as stack:
        # Runners read the settings from the store; this also fences a leftover algorithm process.
        settings = msgspec.to_builtins(config)
        ownership = await stack.enter_async_context(run_folder.hold(store, config.name, settings))
        run_file = write_settings(output / "run.json", config)
        order = ["process", process, str(run_file)]
        algorithm = Child("algorithm", order, logs / "algorithm.log")
        algorithm.variables[run_folder.OWNER_VARIABLE] = ownership.owner
        arguments = ["runner", "start", "--store", config.store, "--run", config.name]
        runners = config.runner.processes if config.plays_rollouts and not local else 0
        workers = [
            Child(f"runner-{i}", arguments, logs / f"runner-{i}.log") for i in range(runners)
        ]
        if config.plays_rollouts and not (runners or local):
            console.print(_how_to_join(config), soft_wrap=True, highlight=False)
        sinks = None if alone else sinks_process(config, run_file, console)
        auditor = Child("audit", ["process", "audit", str(run_file)], logs / "audit.log")
        logged = [algorithm, *workers, *([sinks.child] if sinks else []), auditor]
        log_lines = LogFollower(console, level, [child.log for child in logged])
        started = time.monotonic()
        stack.enter_context(files.shared(output))
        if sinks:  # stopped last: they also write the last evaluation
            stack.callback(log_lines.look)
            stack.push_async_callback(sinks.stop)
        stack.push_async_callback(algorithm.stop)  # after the runners: they still need a model
        stack.push_async_callback(_stop_runners, workers, config.runner.drain)
        count = partial(_ended_rollouts, store, config.name)
        running = [keep_alive(child, count) for child in workers]
        running += [_local_runner(config, *local)] if local else []
        if process == "algorithm" and not alone and is_audited(config):
            audit = asyncio.create_task(_audit(store, config, auditor, local, console))
            stack.push_async_callback(_end, audit)
            running = [_after(audit, work) for work in running]
        working = [_algorithm(algorithm), *running]
        working += [work() for work in extras]
        quiet = process not in ("algorithm", "plan") or level > PHASE
        shown = show_progress(store, config, console, quiet=quiet, first=log_lines.look)
        showing = [shown, log_lines.follow(), *([sinks.keep()] if sinks else [])]
        watchers = [ownership.keeping, *(asyncio.create_task(work) for work in working)]
        followers = [asyncio.create_task(work) for work in showing]
        try:
            done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*watchers, *followers):
                task.cancel()
            await asyncio.gather(*watchers, *followers, return_exceptions=True)
        for task in done:
            task.result()
    return time.monotonic() - started


def is_audited(config: RunConfig) -> bool:
    """Whether a run of these settings begins with an audit."""
    scored = bool(config.verifier.path or config.verifier.rewards)
    return config.audit.before and config.plays_rollouts and config.steps > 0 and scored


async def _audit(
    store: Store, config: RunConfig, child: Child, local: tuple[Any, Any] | None, console: Console
) -> None:
    """Attack the verifier while the policy is loaded. A failure is printed and ends no run."""
    from agentrl.audit.subjects import before_run

    verifier = local[1] if local is not None and callable(local[1]) else None
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        await before_run(store, config, child, verifier, say)
    except Exception as error:  # noqa: BLE001 - no failure of an audit ends a run
        say(f"the verifier was not audited: {type(error).__name__}: {error}")


async def _after(audit: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
    """Do `work` after an audit has ended or exceeded its time; its report may come later."""
    from agentrl.audit.subjects import LIMIT

    try:
        await asyncio.wait([audit], timeout=LIMIT)
    except asyncio.CancelledError:
        work.close()
        raise
    await work


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def write_settings(path: Path, config: RunConfig) -> Path:
    """Write the settings for the processes of a run, readable by this user alone."""
    path.touch(mode=0o600)
    path.chmod(0o600)  # the file may be from an earlier start
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    return path


def _how_to_join(config: RunConfig) -> str:
    key = " --key KEY" if config.store.startswith("http") else ""
    return (
        "No runners are started here (runner.processes = 0). On each machine that runs agents, run"
        f": agentrl runner start --store {config.store}{key} --run {config.name} --root FOLDER"
    )


async def _finish(store: Store, config: RunConfig, seconds: float) -> TrainingResult:
    state = await store.run(config.name)
    last = state.checkpoint if state else None
    steps = await store.steps(config.name)
    scored = [row for row in steps if "eval/score" in row.metrics] or steps
    before, after = scored[0].metrics, scored[-1].metrics
    result = TrainingResult(
        before=before.get("eval/score"),
        after=after.get("eval/score"),
        before_sampled=before.get("eval/sampled"),
        after_sampled=after.get("eval/sampled"),
        seconds=seconds,
        checkpoint=str(config.checkpoint_path(last)) if last else None,
        store=config.store,
        history=steps,
    )
    await print_report(store, config, steps, result.checkpoint, seconds)
    return result


async def _algorithm(child: Child) -> None:
    await child.start()
    code = await child.wait()
    if code == USER_ERROR:
        raise AgentRLError(child.last_error() or f"see {child.log}")
    if code:
        ending = exit_text(code)
        if cause := processes.cause_of(code):
            needs = (child.text_after("memory: ") or "").partition(";")[0]
            estimate = f" (the estimate was {needs})" if needs else ""
            ending += f", {cause}{estimate}: {processes.LEARNER_MEMORY_HINT}"
        elif error := child.last_exception():
            ending = error
        raise TrainingError(
            f"the algorithm process ended with {ending}; nothing is lost: the same command"
            f" continues from the last checkpoint (its output: {child.log})"
        )


async def _ended_rollouts(store: Store, run: str) -> int:
    try:
        counts = await store.counts(run)
    except StoreError:  # a store that is unavailable for a while must not end the run here
        return 0
    return counts.succeeded + counts.failed + counts.cancelled


async def _stop_runners(children: list[Child], drain: float) -> None:
    """Stop all runners at once. Each has `drain` seconds to finish and ten more to requeue."""
    await asyncio.gather(*(child.stop(drain + 10.0) for child in children))


async def _local_runner(config: RunConfig, agent: Any, verifier: Any) -> None:
    """Run a runner in this process, for an agent given as an object. Ends only with an error."""
    from agentrl.environments.runner import played_environment
    from agentrl.runners.main import RunnerThread

    runner = RunnerThread(
        config.store,
        config.name,
        agent=agent,
        verifier=verifier,
        find_environment=played_environment,
        root=Path(config.root),
    )
    runner.start()
    try:
        await asyncio.wrap_future(runner.done)
    finally:
        await asyncio.to_thread(runner.stop)


async def refuse_changes(store: Store, config: RunConfig) -> None:
    """Raises ConfigError if a started run would resume with settings that change what it learns, or
    with fewer steps than it has committed."""
    if (state := await store.run(config.name)) is None:
        return
    if not state.step:
        counts = await store.counts(config.name)
        begun = counts.queued or counts.running or counts.succeeded
        if not begun and not any("eval/score" in r.metrics for r in await store.steps(config.name)):
            return  # every rollout failed before the first step, perhaps because of a setting
    if config.steps < state.step:
        raise ConfigError(
            f"steps = {config.steps}: run {config.name!r} has {state.step} steps already; set at"
            " least as many, choose another name, or give --fresh"
        )
    started = f"run {config.name!r} in {config.output} was started"
    try:
        changed = differences(from_store(state.config), config)
    except ConfigError as error:
        raise ConfigError(
            f"{started} by another version of agentrl ({error}); choose another name, or give"
            " --fresh"
        ) from None
    if changed:
        raise ConfigError(
            f"{started} with other settings ({'; '.join(changed)}); restore them, choose another"
            " name, or give --fresh"
        )


# Name of a checkpoint: number of steps, epoch of its writer.
STEPS = re.compile(r"(\d+)(?:\.\d+)?$")


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint directory from `agentrl train`."""

    path: Path
    steps: int


def checkpoint_at(path: Path) -> SavedCheckpoint:
    """The checkpoint at a path. Raises ConfigError if there is none."""
    named = STEPS.match(path.name)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such checkpoint directory")
    if named is None or not (path / "state.json").is_file():
        raise ConfigError(f"{path} is not a checkpoint of a run; give <output>/checkpoints/...")
    return SavedCheckpoint(path.resolve(), int(named[1]))


def checkpoints_of(config: RunConfig) -> list[SavedCheckpoint]:
    """The checkpoints of a run on disk, oldest first."""
    folder = Path(config.output, "checkpoints")
    paths = [path for path in folder.glob("*") if STEPS.match(path.name) and path.is_dir()]
    return sorted(map(checkpoint_at, paths), key=lambda saved: (saved.steps, saved.path.name))


def go_back(config: RunConfig, start: str, *, take_over: bool = False) -> None:
    """Roll a run back to `start`, a number of steps or a checkpoint's path.

    Changes nothing and raises ConfigError for a checkpoint of another run, DamagedError for a
    damaged one. take_over: from a live process of the run."""
    run_blocking(_go_back(hide_secrets(config), start, take_over))


async def _go_back(config: RunConfig, start: str, take_over: bool) -> None:
    await run_folder.check_free(config, take_over=take_over)
    async with open_store(config.store, create=False) as store:
        state = await store.run(config.name)
        if state is None:
            raise ConfigError(f"--from {start}: run {config.name!r} has no steps yet; remove it")
        await refuse_changes(store, config)
        checkpoint = None if start == "0" else _chosen(config, state, start)
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        name = None if checkpoint is None else _kept(config, checkpoint, state.epoch)
        steps = checkpoint.steps if checkpoint else 0
        await store.rewind(config.name, state.epoch, steps, name)
        rolled_back = {"steps/rolled_back": float(state.step - steps)}
        await store.log(config.name, steps, rolled_back, epoch=state.epoch)


def _chosen(config: RunConfig, state: RunState, start: str) -> SavedCheckpoint:
    if start.isdecimal():
        saved = checkpoints_of(config)
        checkpoint = next((item for item in reversed(saved) if item.steps == int(start)), None)
        if checkpoint is None:
            available = ", ".join(sorted({str(item.steps) for item in saved})) or "none"
            raise ConfigError(
                f"--from {start}: there is no checkpoint after {start} steps in {config.output},"
                f" only after {available}; choose one of them, or 0 for the start"
            )
    else:
        checkpoint = checkpoint_at(Path(start))
    content = json.loads((checkpoint.path / "state.json").read_text(encoding="utf-8"))
    if content.get("run", "") not in ("", state.identity):
        raise ConfigError(f"--from {start}: it is a checkpoint of another run than {state.run!r}")
    if checkpoint.steps > state.step:
        raise ConfigError(
            f"--from {start}: run {state.run!r} has {state.step} steps, but the checkpoint is from"
            f" step {checkpoint.steps}; choose an earlier one"
        )
    digests.check(checkpoint.path)
    return checkpoint


def _kept(config: RunConfig, checkpoint: SavedCheckpoint, epoch: int) -> str:
    """The checkpoint's name relative to the run's folder; copies a checkpoint from elsewhere into
    it."""
    folder = Path(config.output, "checkpoints")
    if checkpoint.path.parent == folder.resolve():
        return f"checkpoints/{checkpoint.path.name}"
    name = f"{checkpoint.steps:06d}.{epoch}"
    with atomic_directory(folder / name) as partial:
        shutil.copytree(checkpoint.path, partial, dirs_exist_ok=True)
    return f"checkpoints/{name}"
