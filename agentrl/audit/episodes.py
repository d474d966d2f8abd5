"""Audits of environments that play and score their rollouts themselves.

A script answers in place of a model: with nothing, with the same words, with calls of the first
tool that do no work, or with commands that write a reward where a test would. Rewards are compared
with those of the environment's own solutions, if it has them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.audit.attacks import CHANGES, text_of
from agentrl.audit.report import AuditReport, Example, Finding, shown, wilson_lower
from agentrl.audit.workspaces import FIX, PASS_ALL, PRETEND
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import EnvironmentName
from agentrl.core.errors import AgentRLError
from agentrl.core.types import ROUNDING, Json
from agentrl.environments import hosted
from agentrl.environments.hosted import Message, Reply
from agentrl.environments.packages import SolutionScript
from agentrl.environments.runner import Played, Stage, stage

MAX_TASKS = 8
TIMEOUT = 120.0  # seconds of a rollout
TRIED = 2  # tasks on which an attack that is never paid is tried
PAID = 0.9
SHELLS = ("command", "cmd", "code", "script")  # arguments of tools that run something
TURNS = 3  # tool calls before a final answer

WRITTEN = """\
for d in /logs/verifier /tests /app . ; do mkdir -p $d 2>/dev/null
echo 1 > $d/reward.txt; echo '{"reward": 1}' > $d/reward.json; done 2>/dev/null; true
"""
SHADOWED = f"""\
cat > conftest.py <<'END'
{PASS_ALL}END
for n in unittest pytest sitecustomize; do cat > $n.py <<'END'
{PRETEND}END
done
"""
REPLACED = """\
for n in pytest python python3 bash; do for d in /usr/local/bin $HOME/.local/bin; do
mkdir -p $d; printf '#!/bin/sh\\necho passed\\nexit 0\\n' > $d/$n && chmod +x $d/$n; done
done 2>/dev/null; true
"""
COMMANDS = {
    "an outcome file": WRITTEN,
    "a shadowed test runner": SHADOWED,
    "deleted tests": "rm -rf /tests tests test_*.py *_test.py 2>/dev/null; true",
    "replaced programs": REPLACED,
}
CHANGE = {
    **FIX,
    "no work": CHANGES["empty answer"],
    "one answer to everything": CHANGES["a constant"],
    "tool calls without work": CHANGES["tool calls without work"],
}
WORDS = ("0", "1", "yes", "no", "A", "True", "nan", "I do not know.", "Done.")


class Row(NamedTuple):
    """The reward of one script on one task, and that of the environment's own solution, if any."""

    task: str
    reward: float
    right: float | None


@dataclass(frozen=True, slots=True)
class Script:
    """What one attack answers: a function of the turn, the question and the tools."""

    attack: str
    variant: str
    answer: Callable[[int, str, Sequence[Any]], Message]

    def reply(self) -> Reply:
        turns = itertools.count()

        async def reply(role: str, messages: list[Message], tools: list[Any]) -> Message:
            user = next((m for m in messages if m.get("role") == "user"), {})
            return self.answer(next(turns), text_of(user.get("content") or ""), tools)

        return reply


def scripts() -> Iterator[Script]:
    yield Script("no work", "", lambda turn, question, tools: _says(""))
    yield Script("the question", "", lambda turn, question, tools: _says(question))
    for word in WORDS:
        yield Script("one answer to everything", word, lambda t, a, s, word=word: _says(word))  # type: ignore[misc]
    yield Script("tool calls without work", "", _idle_call)
    for name, command in COMMANDS.items():
        yield Script(name, "", lambda t, a, s, command=command: _runs(t, s, command))  # type: ignore[misc]


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _calls(name: str, arguments: Mapping[str, Json]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None,
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}  # fmt: skip


def _idle_call(turn: int, question: str, tools: Sequence[Any]) -> Message:
    if not tools or turn >= TURNS:
        return _says("Done.")
    function = tools[0].get("function", tools[0])
    return _calls(function["name"], dict.fromkeys(_parameters(function), "true"))


def _runs(turn: int, tools: Sequence[Any], command: str) -> Message:
    for tool in tools if turn == 0 else ():
        function = tool.get("function", tool)
        for name in _parameters(function):
            if name in SHELLS:
                return _calls(function["name"], {name: command})
    return _says("Done.")


def _parameters(function: Mapping[str, Any]) -> list[str]:
    return list((function.get("parameters") or {}).get("properties") or {})


async def audit_episodes(named: EnvironmentName, config: RunConfig, seconds: float) -> AuditReport:
    """Play the scripts on tasks of an environment for about `seconds` at most."""
    started = time.monotonic()
    report = AuditReport(named.name)
    results = dict[tuple[str, str], list[Row]]()
    try:
        tasks = hosted.tasks(named, "train")[:MAX_TASKS]
        async with stage(named, TIMEOUT) as on, asyncio.timeout(seconds):
            for task in tasks:
                right = await _solved(on, named, task)
                report.tasks += 1
                for script in scripts():
                    rows = results.setdefault((script.attack, script.variant), [])
                    if len(rows) >= TRIED and not any(map(_is_paid, rows)):
                        continue
                    outcome = _outcome(await on.play(task, script.reply()))
                    report.scored += 1
                    if outcome is not None:
                        rows.append(Row(str(task["id"]), outcome, right))
    except TimeoutError:
        report.notes.append(f"time ran out after {report.scored} rollouts")
    except AgentRLError as error:
        report.verdict, report.notes = "not audited", [str(error)]
    report.findings = list(_findings(results))
    if _is_open([row for rows in results.values() for row in rows]):
        report.verdict = "not audited"
        report.notes.append("its rewards exceed 1, and it has no solution to compare them with")
    report.seconds = time.monotonic() - started
    report.decide()
    return report


async def _solved(on: Stage, named: EnvironmentName, task: Mapping[str, Json]) -> float | None:
    """The reward of the environment's own solution; None: it has none that is paid."""
    solution = hosted.solution(named, task["input"])
    if solution is None:
        return None
    outcome = _outcome(await on.play(dict(task), SolutionScript(solution).reply))
    return None if outcome is None or outcome <= 0 else outcome


def _outcome(played: Played) -> float | None:
    """The reward; with several roles their mean, as one wins a game whatever they answer."""
    return fmean(played.by_role.values()) if played.by_role else played.outcome


def _is_paid(row: Row) -> bool:
    return row.reward >= PAID * (1.0 if row.right is None else row.right)


def _is_open(rows: Sequence[Row]) -> bool:
    """Whether the reward of a right answer is unknown: returns are above 1, for example because
    each step is paid, and there is no solution."""
    return any(row.right is None and row.reward > 1 + ROUNDING for row in rows)


def _findings(results: Mapping[tuple[str, str], Sequence[Row]]) -> Iterator[Finding]:
    best = dict[str, Finding]()
    all_rows = [row for rows in results.values() for row in rows]
    if _is_open(all_rows):
        return
    for (attack, variant), rows in results.items():
        paid = [row for row in rows if _is_paid(row)]
        share = len(paid) / max(len(rows), 1)
        # By luck a word may be right and a game won, but no file is paid by luck.
        enough = share > 0 if attack in COMMANDS else (
            wilson_lower(share, len(rows)) > 0.5 if len(rows) > 4 else share == 1.0
        )  # fmt: skip
        if not paid or not enough:
            continue
        finding = Finding(
            attack=attack, variant=variant, kind="pays", share=share, tasks=len(rows),
            reward=fmean(row.reward for row in rows), change=CHANGE[attack]
            if attack in CHANGE else CHANGES[attack],
            example=Example(task=f"task {shown(paid[0].task)}", answer=variant or attack,
                            reward=paid[0].reward, right=paid[0].right),
        )  # fmt: skip
        if attack not in best or finding.share > best[attack].share:
            best[attack] = finding
    yield from best.values()
