"""`agentrl env check`: whether a run can rely on an environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import msgspec

from agentrl.config.derived import SPLITS, Named
from agentrl.environments import hosted
from agentrl.environments.hosted import Request
from agentrl.environments.reference import check_unique
from agentrl.environments.scripted import Message, Played, Reply, stage
from agentrl.errors import AgentRLError
from agentrl.types import Json

IGNORANT = "I do not know."
Say = Callable[[str], None]
Rows = dict[str, list[dict[str, Json]]]


class CheckReport(msgspec.Struct):
    """What was found."""

    environment: str
    ok: bool = True
    tasks: dict[str, int] = {}
    ground_truth: float | None = None  # mean outcome of the plug-in's solutions; none: unknown
    solved: int = 0  # tasks whose solution was played
    rollouts_per_s: float | None = None  # of these, one after the other
    lines: list[str] = []


async def examine(named: Named, count: int, timeout: float, say: Say) -> CheckReport:
    """Check an environment; `say` gets each finding as soon as it is known."""
    report = CheckReport(named.name)

    def found(status: str, sentence: str) -> None:
        report.ok = report.ok and status != "fail"
        report.lines.append(f"{status:<5}{sentence}")
        say(report.lines[-1])

    try:
        about = hosted.describe(named)
        roles = f", and asks {', '.join(about.roles)}" if about.roles else ""
        where = f" in {named.python}" if named.python else ""
        found("ok", f"it can be made{where}: it has {about.kind}{roles}")
        rows = {split: hosted.tasks(named, split) for split in SPLITS}
        report.tasks = {split: len(some) for split, some in rows.items()}
        counts = " and ".join(f"{len(some)} of {split}" for split, some in rows.items())
        found("ok", f"{counts} tasks survive JSON")
        for split in [split for split, some in rows.items() if not some]:
            found("fail", f"tasks({split!r}) has none; a run needs both splits")
        check_unique(named, rows.values())
        found(*_repeated(named, rows))
        await _play(named, rows, count, timeout, report, found)
    except AgentRLError as error:
        found("fail", str(error))
    return report


def _repeated(named: Named, rows: Rows) -> tuple[str, str]:
    """Whether another process makes the same tasks."""
    for split, ours in rows.items():
        theirs = hosted.ask(Request("tasks", named, split))
        if theirs != ours:
            pairs = zip(ours, theirs, strict=False)
            other = next((one["id"] for one, same in pairs if one != same), None)
            what = f"task {other!r} is another" if other else f"it has {len(theirs)} tasks"
            return "fail", (
                f"tasks({split!r}) is not the same in another process, where {what}: draw from"
                " random.Random(seed), and sort what comes from a set or folder"
            )
    return "ok", "ids are unique, and another process makes the same tasks"


async def _play(
    named: Named, rows: Rows, count: int, timeout: float, report: CheckReport, found: Any
) -> None:
    async with stage(named, timeout) as on:
        some = next(filter(None, rows.values()), [])
        if not some:
            return
        played = await on.play(some[0], _says([]))
        if played.problem:
            found("warn", f"a model that only says {IGNORANT!r} fails: {played.problem}")
        else:
            found("ok", f"a model that only says {IGNORANT!r} gets {_scores(played)}")
        outcomes, spent = list[float](), 0.0
        for task in [task for split in rows.values() for task in split[:count]]:
            solution = hosted.solution(named, task["input"])
            if solution is None:
                continue
            script, began = _Script(solution), time.monotonic()
            done = await on.play(task, script.reply)
            spent += time.monotonic() - began
            outcomes.append(_best(done) or 0.0)
            if why := done.problem or script.problem(done) or _unscored(done):
                found("fail", f"ground truth of task {task['id']!r}: {why}")
        if not outcomes:
            found("warn", "the plug-in has no ground truth (solution); its scoring is not checked")
            return
        report.solved, report.ground_truth = len(outcomes), fmean(outcomes)
        report.rollouts_per_s = len(outcomes) / spent
        known = _best(played)
        base = known if known is not None else float("-inf")
        text = f"ground truth of {len(outcomes)} tasks scores {report.ground_truth:g}"
        if report.ground_truth > base:
            found("ok", text)
        else:
            found("fail", f"{text}, no more than a model that knows nothing")


def _best(played: Played) -> float | None:
    """The outcome: of several roles that of the best, as not all can win a game."""
    return max(played.by_role.values(), default=played.outcome)


def _unscored(played: Played) -> str:
    return "" if played.outcome is not None else "it has no outcome"


def _scores(played: Played) -> str:
    said = ", ".join(f"{name} {value:g}" for name, value in played.rewards.items())
    return f"{said or 'no reward'} after {len(played.calls)} calls"


class _Script:
    """Answers with the replies of a solution; other roles know nothing."""

    def __init__(self, solution: Iterable[str | Message] | dict[str, Any]) -> None:
        by_role = solution if isinstance(solution, dict) else {"agent": solution}
        self._left = {role: list(replies) for role, replies in by_role.items()}
        self._asked = dict.fromkeys(self._left, 0)
        self._known = {role: len(replies) for role, replies in self._left.items()}

    async def reply(self, role: str, messages: list[Message], tools: list[Any]) -> Message:
        if role in self._asked:
            self._asked[role] += 1
        replies = self._left.get(role)
        return _message(replies.pop(0) if replies else IGNORANT)

    def problem(self, played: Played) -> str:
        """How its replies do not fit what was asked; empty if they do."""
        for role, asked in self._asked.items():
            if asked > (known := self._known[role]):
                return f"{asked} replies of {role!r} were asked for, and solution has {known}"
        return ""


def _says(replies: list[str | Message]) -> Reply:
    return _Script(replies).reply


def _message(reply: str | Message) -> Message:
    message: Message = {"content": reply} if isinstance(reply, str) else dict(reply)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", **call} if isinstance(call, dict) else call
            for index, call in enumerate(calls)
        ]
    return {"role": "assistant", "content": None, **message}
