"""The supervisor of a live run, or of one half of it: starts, restarts and stops its processes.

    supervisor ── starts ──► gateway    answers calls, records sessions    (half "gateway")
               ├─ starts ──► algorithm  policy server and learner         (half "training")
               └─ starts ──► watch      labels sessions, decides          (half "training")

Owns: these processes and the listening socket. All state is in the store, so any of them may be
killed, and the same command continues the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from rich.console import Console

from agentrl import trainer
from agentrl.core import files
from agentrl.core.config import RunConfig
from agentrl.core.config.agents import TasksConfig
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.files import make_folder
from agentrl.core.processes import PHASE, Child, Ending, backoff, keep_running, log_to_stderr
from agentrl.core.types import one_line
from agentrl.live import labels, promotion, records
from agentrl.live.bisection import StepBisection
from agentrl.live.handover import VARIABLE, listening
from agentrl.store import open_store, run_folder
from agentrl.telemetry.console import LogFollower

Half = Literal["gateway", "training"]


FIRST_PAUSE, MAX_PAUSE = 0.2, 30.0  # seconds before a restart; doubles at every early death


STEADY_UPTIME = 60.0  # seconds of uptime after which a crash no longer counts as an early one


def run_live(
    config: RunConfig, only: Half | None = None, *, take_over: bool = False, level: int = PHASE
) -> None:
    """Serve and train until Ctrl-C or SIGTERM. Raises AgentRLError for errors that the user must
    fix."""
    config = trainer.hide_secrets(config)
    trainer.check(config)
    asyncio.run(_until_terminated(supervise(config, only, take_over=take_over, level=level)))


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until SIGTERM, with which services and containers are stopped; then end it in
    order."""
    working = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await working


async def supervise(
    config: RunConfig,
    only: Half | None = None,
    *,
    take_over: bool = False,
    level: int = PHASE,
    console: Console | None = None,
) -> None:
    output, console = make_folder(Path(config.output)), console or Console()
    logs = make_folder(output / "logs")
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(config.store))
        children: list[Child] = []
        keeping: list[asyncio.Task[None]] = []
        # The learner plays no tasks; the watch has the held-out ones played.
        learning = replace(config, tasks=TasksConfig())
        run_file = trainer.write_settings(output / "run.json", learning)
        if only != "gateway":
            await trainer.refuse_changes(store, learning)
            settings = msgspec.to_builtins(learning)
            watch_file = trainer.write_settings(output / "watch.json", config)
            held = await stack.enter_async_context(
                run_folder.hold(store, config.name, settings, take_over=take_over)
            )
            keeping.append(held.keeping)
            stack.enter_context(files.shared(output))
            algorithm = Child(
                "algorithm", ["process", "algorithm", str(run_file)], logs / "algorithm.log"
            )
            algorithm.variables[run_folder.OWNER_VARIABLE] = held.owner
            children += [
                algorithm,
                Child("watch", ["process", "watch", str(watch_file)], logs / "watch.log"),
            ]
        if only != "training":
            listener = stack.enter_context(await asyncio.to_thread(listening, config))
            order = ["process", "live-gateway", str(run_file)]
            gateway = Child("gateway", order, logs / "gateway.log")
            gateway.files = (listener.fileno(),)
            gateway.variables[VARIABLE] = str(listener.fileno())
            children.insert(0, gateway)
            console.print(
                how_to_call(config, listener.getsockname()[1]), highlight=False, soft_wrap=True
            )
        log_lines = LogFollower(console, level, [child.log for child in children])
        keeping.append(asyncio.create_task(log_lines.follow()))
        for child in reversed(children):
            stack.push_async_callback(child.stop)
        say = console.print
        bisection = StepBisection(output)
        keeping += [
            asyncio.create_task(keep_serving(child, say, bisection.failed)) for child in children
        ]
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        for task in done:
            task.result()


async def keep_serving(
    child: Child, say: Callable[..., object], blamed: Callable[[], object] = lambda: None
) -> None:
    """Keep a process running. Raises AgentRLError if its first start ends with an error that a user
    must fix. blamed: changes if a session may be the cause."""
    early, before = 0, blamed()

    async def after(ending: Ending) -> float:
        nonlocal early
        steady = ending.uptime > STEADY_UPTIME
        if ending.number == 1 and ending.error and not steady and blamed() == before:
            raise AgentRLError(ending.error)
        reason = ending.reason
        say(f"{child.name} ended ({reason}); nothing is lost, it is started again", highlight=False)
        early = 1 if steady else early + 1
        return backoff(FIRST_PAUSE, MAX_PAUSE, early)

    await keep_running(child, after)


def how_to_call(config: RunConfig, port: int) -> str:
    """The variables to set in an agent's environment."""
    host = config.runner.host if config.runner.host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    root = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return (
        f"{config.name}: OPENAI_BASE_URL={root}/v1, ANTHROPIC_BASE_URL={root} or"
        f" GOOGLE_GEMINI_BASE_URL={root}; feedback: POST {root}/v1/feedback"
    )


log = logging.getLogger("agentrl.live")


FIRST_RETRY, MAX_RETRY = 0.2, 60.0  # seconds before work is restarted; doubles every time


STEADY = 120.0  # seconds of work after which the pause is reset


WORK = {
    "sessions are not labelled": labels.run,
    "nothing is decided about versions": promotion.decide_promotions,
    "versions have no held-out scores": promotion.evaluate_heldout,
    "old sessions are not deleted": records.keep,
}


def main(config: RunConfig) -> None:
    log_to_stderr()
    asyncio.run(watch(config))


async def watch(config: RunConfig) -> None:
    """Run until cancelled. Raises ConfigError for errors that the user must fix."""
    try:
        async with open_store(config.store) as store, asyncio.TaskGroup() as parts:
            for missed, work in WORK.items():
                parts.create_task(keep_working(missed, partial(work, store, config)))
    except* ConfigError as group:
        raise group.exceptions[0] from None


async def keep_working(missed: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Restart work after each error, until it returns. missed: what does not happen meanwhile, for
    the console."""
    pause = FIRST_RETRY
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except ConfigError:
            raise
        except Exception as error:  # other work continues
            why = f"{type(error).__name__}: {one_line(str(error))}"
            trace = None if isinstance(error, AgentRLError) else error
            log.warning("%s now (%s); tried again", missed, why, exc_info=trace)
        pause = FIRST_RETRY if time.monotonic() - began > STEADY else pause
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_RETRY)
