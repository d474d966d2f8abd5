"""What is audited: the verifier of a run, in a process of its own.

The process ends with its report in the store or a file, so a verifier that exits, hangs or crashes
cannot end a run. A verifier that is an object of the user's process is audited there, without
answers that would end it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from agentrl.algorithms.hack_signs import DOCUMENT, REPORT
from agentrl.audit.attacks import source_of
from agentrl.audit.examine import examine
from agentrl.audit.report import AuditReport
from agentrl.audit.scoring import Scorer, Subject, end_process, isolate
from agentrl.core.config import RunConfig, derived
from agentrl.core.config.derived import SCHEME, EnvironmentName
from agentrl.core.config.run_file import tasks_of
from agentrl.core.errors import AgentRLError
from agentrl.core.processes import Child, exit_text, log_phase, log_to_stderr
from agentrl.core.types import Json, RolloutState
from agentrl.environments import hosted
from agentrl.runners import scoring
from agentrl.store import open_store
from agentrl.store.base import Store

log = logging.getLogger("agentrl.audit")
LIMIT = 10.0  # seconds of a whole audit before a run, with the start of its process
ENDING = 1.5  # seconds of these that are left for judging, and for the store
SHORTEST = 3.0  # seconds of scoring, where the machine is so busy that the process starts late
LATE = 30.0  # seconds after LIMIT for which a report is still awaited, while the run plays
UNTIL = "AGENTRL_AUDIT_UNTIL"  # unix time until which the process before a run scores
MAX_RIGHT = 256  # rollouts of a store that are read for right answers


async def audit_run(
    config: RunConfig,
    seconds: float,
    *,
    verifier: Callable[..., Any] | str = "",
    store: Store | None = None,
) -> AuditReport:
    """Audit the verifier of a run for about `seconds` at most. verifier: in place of the run
    file's; store: with rollouts of the run, whose right answers are attacked, too. Raises
    AgentRLError if tasks or verifier cannot be loaded."""
    root, isolated = Path(config.root), not callable(verifier)
    if (played := plays_itself(config)) is not None:
        from agentrl.audit.episodes import audit_episodes

        return await audit_episodes(played, config, seconds)
    path = verifier or config.verifier.path
    if not (path or config.verifier.rewards):
        note = "the run has no verifier" + (", and judges are not asked" if config.judges else "")
        return AuditReport(config.name, verdict="not audited", notes=[note])
    tasks = tasks_of(config, "train") or tasks_of(config, "heldout")
    scores = scoring.load(path, config.verifier.rewards, root, config.verifier.range)
    name = derived.trained_reward(config)
    timeout = min(config.agent.timeout, max(1.0, seconds / 2))
    scorer = Scorer(scores, timeout=timeout, first=seconds, name=name)
    subject = Subject(
        name=_name(config, path), scorer=scorer, tasks=tasks, isolated=isolated,
        source=source_of(scores.functions), span=config.verifier.range,
    )  # fmt: skip
    named = hosted.named_in(config)
    if named is not None and config.verifier.path.startswith(f"{SCHEME}:"):
        subject.solution = solver(named)
    if store is not None:
        subject.right = await _right_results(store, config)
    if scores.wants_workspace:
        from agentrl.audit.workspaces import audit_workspaces

        report = await audit_workspaces(subject, config, seconds)
    else:
        report = await examine(subject, seconds)
    for judge in config.judges:
        report.skipped.append(f"the judge {judge!r} is not asked in an audit")
    return report


def plays_itself(config: RunConfig) -> EnvironmentName | None:
    """The environment of a run, if it plays and scores its rollouts itself."""
    named = hosted.named_in(config)
    if named is None or not config.agent.path.startswith(f"{SCHEME}:"):
        return None
    return None if hosted.describe(named).kind == "verify" else named


def solver(named: EnvironmentName) -> Callable[[Json], Awaitable[Any]]:
    """The ground truth of an environment's inputs."""
    helper = hosted.Helper(named) if hosted.is_hosted(named) else None

    async def solve(task_input: Json) -> Any:
        if helper is None:
            return await asyncio.to_thread(hosted.solution, named, task_input)
        return await helper.ask(hosted.Request("solution", named, task_input))

    return solve


async def _right_results(store: Store, config: RunConfig) -> dict[bytes, Json]:
    """Results of rollouts with the highest outcome of their run, by the JSON of their task."""
    rows = await store.rollouts(config.name, state=RolloutState.SUCCEEDED, limit=MAX_RIGHT)
    rewarded = [row for row in rows if row.reward() == row.reward()]
    top = max((row.reward() for row in rewarded), default=0.0)
    low = min((row.reward() for row in rewarded), default=0.0)
    best = [row for row in rewarded if row.reward() == top > low]
    return {msgspec.json.encode(row.task, order="sorted"): row.result for row in best}


def _name(config: RunConfig, path: object) -> str:
    named = path if isinstance(path, str) else getattr(path, "__qualname__", "verifier")
    if named.startswith(f"{SCHEME}:"):
        return config.environment
    return f"{named} of {config.name}" if config.name else named


# -- before a run ----------------------------------------------------------------------------------


def main(config: RunConfig) -> None:
    """The process `agentrl process audit`: audits, logs one line for the console of the run, and
    stores the report."""
    log_to_stderr()
    until = float(os.environ.get(UNTIL, time.time() + LIMIT))
    isolate()
    asyncio.run(_audit_and_store(config, until))
    end_process(0)  # threads of a verifier that hangs would keep the process


async def _audit_and_store(config: RunConfig, until: float) -> None:
    seconds = max(SHORTEST, until - ENDING - time.time())
    try:
        report = await audit_run(config, seconds)
    except AgentRLError as error:  # the runners report it, too
        report = AuditReport(config.name, verdict="not audited", notes=[str(error)])
    async with open_store(config.store) as store:
        await keep(report, store, config.name)
    if report.alarms:
        log.warning("%s", report.line())
    else:
        log_phase(log, report.line())


async def keep(report: AuditReport, store: Store, run: str) -> None:
    """Store a report with its run, in place of an earlier one."""
    document = {REPORT: msgspec.to_builtins(report)}
    await store.put_documents(run, DOCUMENT, document, replace=True)


async def before_run(
    store: Store,
    config: RunConfig,
    child: Child,
    local: Callable[..., Any] | None,
    say: Callable[[str], None],
) -> None:
    """Audit a run that has no step yet; never raises for what a verifier does. It has LIMIT
    seconds, and LATE more on a busy machine, where a run begins without it. child: the process
    that audits, whose log has its line; local: the verifier, if it is an object of this process;
    say: prints a line."""
    state = await store.run(config.name)
    if state is not None and state.step:
        return
    if local is not None and _is_async(local):  # its state would belong to this event loop
        say(
            "audit of the verifier: not made, as it is async and an object; name it as file.py:name"
        )
        return
    try:
        async with asyncio.timeout(LIMIT + LATE):
            if local is not None:
                report = await audit_run(config, LIMIT - 2 * ENDING, verifier=local)
                await keep(report, store, config.name)
                say(report.line())
                return
            child.variables[UNTIL] = str(time.time() + LIMIT)
            await child.start()
            try:
                code = await child.wait()
            finally:
                await child.stop(0.2)
            if code:
                say(f"audit of the verifier: its process ended, {exit_text(code)}; see {child.log}")
    except TimeoutError:
        spent = f"{LIMIT + LATE:g} s"
        say(f"audit of the verifier: not finished in {spent}; agentrl audit has more time")


def _is_async(function: Any) -> bool:
    """Whether a function, or the call of an object, is async."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
