"""The report of an audit: attacks with the share of tasks that pay them, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from agentrl.core.types import Json

Kind = Literal["pays", "rejects", "unstable"]
Verdict = Literal["exploitable", "too strict", "no hole found", "not audited"]
LONGEST = 100  # characters of an answer that is shown


class Example(msgspec.Struct, frozen=True):
    """An answer to a task, and its reward; right: that of the right answer, if known."""

    task: str  # its id, or its input
    answer: Json
    reward: float | None
    right: float | None = None


class Finding(msgspec.Struct, frozen=True):
    """An attack that was paid for, a right answer that was not, or a score that changes.

    share: of the `tasks` that it was tried on. reward: mean over them. alarm: whether it decides
    the verdict."""

    attack: str
    kind: Kind
    share: float
    tasks: int
    reward: float
    example: Example
    change: str
    alarm: bool = True
    variant: str = ""

    @property
    def text(self) -> str:
        """The finding as part of a sentence."""
        example = f"{shown(self.example.answer)} for {self.example.task}"
        where = f"on {self.share:.0%} of {self.tasks} tasks"
        if self.kind == "pays":
            return (
                f"{self.attack} gets the reward of a right answer on {self.share:.0%} of"
                f" {self.tasks} tasks, such as {example}"
            )
        if self.kind == "rejects":
            return f"{self.attack} is refused {where}, such as {example}"
        return f"{self.attack} {where}, such as {example}"


class AuditReport(msgspec.Struct):
    """The result of an audit. `notes`: sentences that are no alarms."""

    name: str
    verdict: Verdict = "no hole found"
    findings: list[Finding] = []  # worst first
    notes: list[str] = []
    skipped: list[str] = []  # what was not done, in sentences
    tasks: int = 0
    scored: int = 0  # answers
    seconds: float = 0.0
    answer: str = ""  # the task's key that has the right answer; empty: unknown
    shape: str = ""  # the form in which it is accepted
    imbalance: str = ""  # of the tasks' right answers, as a sentence
    highest: float = 0.0  # share of tasks on which the best single constant is paid

    @property
    def alarms(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.alarm]

    def decide(self) -> None:
        """Set the verdict by the findings."""
        kinds = {finding.kind for finding in self.alarms}
        if kinds & {"pays", "unstable"}:
            self.verdict = "exploitable"
        elif kinds:
            self.verdict = "too strict"

    @property
    def _tasks(self) -> str:
        return "1 task" if self.tasks == 1 else f"{self.tasks} tasks"

    def line(self) -> str:
        """One line for the console of a run."""
        prefix = f"audit of the verifier: {self.verdict}"
        if not self.alarms:
            about = f" ({self.scored} answers to {self._tasks})" if self.scored else ""
            notes = [*self.skipped, *(self.notes[:1] if self.verdict == "not audited" else [])]
            return "; ".join([f"{prefix}{about}", *notes, *filter(None, [self.imbalance])])
        worst, others = self.alarms[0], len(self.alarms) - 1
        more = f"; {others} more by agentrl audit" if others else ""
        return f"{prefix}: {worst.text}; {worst.change}{more}"

    def lines(self) -> Iterator[str]:
        """The whole report for a terminal."""
        yield f"{self.name}: {self.verdict}"
        summary = f"{self.scored} answers to {self._tasks} were scored in {self.seconds:.1f} s"
        if self.answer:
            summary += f"; right ones are in the field {self.answer!r}, accepted as {self.shape}"
        yield summary
        for finding in self.findings:
            mark = {"pays": "PAYS", "rejects": "REJECTS", "unstable": "UNSTABLE"}[finding.kind]
            yield f"{mark if finding.alarm else 'note':<9}{finding.text}"
            yield f"{'':<9}reward {finding.reward:.3g}; to change: {finding.change}"
        for note in [*self.skipped, *self.notes, *filter(None, [self.imbalance])]:
            yield f"note     {note}"


def shown(value: Json) -> str:
    """An answer on one line."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = repr(text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}...'"


def wilson_lower(share: float, tasks: int, z: float = 2.0) -> float:
    """The lower end of the Wilson score interval of a share of `tasks`, at `z` standard errors."""
    middle = share + z * z / (2 * tasks)
    spread = z * math.sqrt(share * (1 - share) / tasks + z * z / (4 * tasks * tasks))
    return (middle - spread) / (1 + z * z / tasks)
