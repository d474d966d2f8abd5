"""The processes of a live run, or of one half of it: started, restarted when they die, stopped.

    supervisor ── starts ──► gateway    answers calls, records sessions    (half "gateway")
               ├─ starts ──► algorithm  policy server and learner         (half "training")
               └─ starts ──► watch      labels sessions, decides          (half "training")

It owns these processes and the listening socket. All state is in the store, so any of them may be
killed, and the same command goes on with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace
from rich.console import Console

from agentrl import run_owner, trainer
from agentrl.base import folder_lock, memory
from agentrl.base.files import make_folder
from agentrl.base.processes import PHASE, USER_ERROR, Child
from agentrl.config import RunConfig
from agentrl.config.agents import TasksConfig
from agentrl.errors import AgentRLError
from agentrl.live import handover
from agentrl.live.blame import Blame
from agentrl.store import open_store
from agentrl.telemetry.console import LogFollower

Half = Literal["gateway", "training"]
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0  # seconds before a restart; doubles at every early death
STEADY_UPTIME = 60.0  # seconds of uptime after which a death is no early one


def run_live(
    config: RunConfig, only: Half | None = None, *, take_over: bool = False, level: int = PHASE
) -> None:
    """Serve and train until Ctrl-C or SIGTERM. Raises AgentRLError for what a user must fix."""
    config = trainer.hide_secrets(config)
    trainer.check(config)
    asyncio.run(_until_terminated(supervise(config, only, take_over=take_over, level=level)))


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until SIGTERM, by which services and containers are stopped: it stops in order."""
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
                run_owner.hold(store, config.name, settings, take_over=take_over)
            )
            keeping.append(held.keeping)
            stack.enter_context(folder_lock.shared(output))
            algorithm = Child(
                "algorithm", ["algorithm", "start", str(run_file)], logs / "algorithm.log"
            )
            algorithm.variables[run_owner.VARIABLE] = held.owner
            children += [
                algorithm,
                Child("watch", ["live", "watch", str(watch_file)], logs / "watch.log"),
            ]
        if only != "training":
            listener = stack.enter_context(await asyncio.to_thread(handover.listening, config))
            gateway = Child("gateway", ["live", "gateway", str(run_file)], logs / "gateway.log")
            gateway.files = (listener.fileno(),)
            gateway.variables[handover.VARIABLE] = str(listener.fileno())
            children.insert(0, gateway)
            console.print(
                how_to_call(config, listener.getsockname()[1]), highlight=False, soft_wrap=True
            )
        log_lines = LogFollower(console, level, [child.log for child in children])
        keeping.append(asyncio.create_task(log_lines.follow()))
        for child in reversed(children):
            stack.push_async_callback(child.stop)
        say = console.print
        blame = Blame(output)
        keeping += [asyncio.create_task(keep_running(one, say, blame.failed)) for one in children]
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        for task in done:
            task.result()


async def keep_running(
    child: Child, say: Callable[..., object], blamed: Callable[[], object] = lambda: None
) -> None:
    """Run a process and restart it whenever it ends. Raises AgentRLError if its first start ends
    with an error that a user must fix. blamed: changes if a session may be the cause."""
    pause, first = FIRST_PAUSE, True
    while True:
        before = blamed()
        await child.start()
        started = time.monotonic()
        code = await child.wait()
        steady = time.monotonic() - started > STEADY_UPTIME
        error = child.last_error() if code == USER_ERROR else None
        if first and error and not steady and blamed() == before:
            raise AgentRLError(error)
        pause, first = FIRST_PAUSE if steady else pause, False
        why = (
            error
            or memory.cause_of(code)
            or (f"signal {-code}" if code < 0 else f"exit code {code}")
        )
        say(f"{child.name} ended ({why}); nothing is lost, it is started again", highlight=False)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def how_to_call(config: RunConfig, port: int) -> str:
    """What to set in an agent's environment."""
    host = config.runner.host if config.runner.host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    root = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return (
        f"{config.name}: OPENAI_BASE_URL={root}/v1, ANTHROPIC_BASE_URL={root} or"
        f" GOOGLE_GEMINI_BASE_URL={root}; feedback: POST {root}/v1/feedback"
    )
