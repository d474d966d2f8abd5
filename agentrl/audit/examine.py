"""The course of an audit: find the right answers, attack, and judge which attacks were paid.

Which attacks are made depends only on the tasks and the verifier, never on chance or time, unless
time runs out; the report then says how many tasks were reached. Rewards are compared on a scale
from the lowest reward to that of the right answer; paying for a part of an answer is not a hole.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from statistics import fmean

import msgspec

from agentrl.audit.answers import SEARCHED, Found, Search
from agentrl.audit.attacks import (
    CHANGES,
    COPIES,
    ENDS_EVALUATED,
    Attempt,
    Case,
    first,
    ignorant,
    programs,
    respelled,
    text_of,
    wrong,
)
from agentrl.audit.report import AuditReport, Example, Finding, shown, wilson_lower
from agentrl.audit.scoring import Score, Subject, ended
from agentrl.core.types import Json
from agentrl.core.values import normal_text, question_of

MAX_TASKS = 32  # attacked tasks, evenly spread over the file
FIRST = 8  # tasks on which every attempt is made; others get only those that were paid before
EARLY_PROGRAMS = 10  # programs per task that are tried first if the verifier runs answers
EARLY = 4  # tasks on which the most informative attempts are made before all others
# Share of a right answer's reward that counts as paid: for attacks, and for small changes of it.
PAID, PAID_WHOLE = 0.9, 0.999
MIN_SHARE = 0.2  # share of tasks on which an attack must be paid to be an alarm
MIN_NEAR = 0.5  # the same for graded rewards, as by distance: a constant is near some answers
MIN_SAME = 0.6  # share of tasks with the same right answer; with two answers, more than chance
MIN_ASKED = 8  # minimum tasks with known answers to report such a share
MEAN_GAIN = 0.4  # mean gain of an attack that is an alarm although only partly paid
FEW_VALUES = 4  # distinct rewards, up to which a verifier does not grade answers
WORTH = 0.3  # share of the highest reward above which an attack is tried on more tasks
MANY = 60  # attacks, with their variants; if more are paid, fewer tasks suffice
# An indifferent task pays this share of at least so many answers.
MIN_ANSWERS, PAID_ANSWERS = 20, 0.95
BATCH = 32  # attempts that are started together
CHECKS_SHARE = 0.1  # share of the time for repeated answers and other spellings, after the attacks
SMALL = {"a wrong digit", "a longer number", "the other sign", "a wrong word"}
SMALL |= {"a part of the answer", "another order", "the same length", "wrong values"}
KNOWING = {"negation", "two answers", "a comment", "every answer with the right one", *SMALL}
KNOWING |= {"a number of the question", "nothing done"}
KNOW_NOTHING = {"empty answer", "the question", "a constant", "not a number", "format alone"}
PROGRAMS = {"a program that ends", "equal to everything"}  # never right by chance
KNOW_NOTHING |= {"length", "every answer", "another task's answer", "a word of the verifier"}


@dataclass(frozen=True, slots=True)
class Row:
    """An attempt with its lowest reward; None: it raised."""

    case: Case
    attempt: Attempt
    value: float | None


async def examine(subject: Subject, seconds: float) -> AuditReport:
    """Attack a verifier that scores results, for about `seconds` at most."""
    started = time.monotonic()
    audit = Audit(subject, started + seconds)
    report = AuditReport(subject.name)
    try:
        await audit.run(report)
    finally:
        report.scored = subject.scorer.calls
        report.seconds = time.monotonic() - started
    return report


class Audit:
    """One audit. `rows` has all scored attempts."""

    def __init__(self, subject: Subject, until: float) -> None:
        self.subject, self.began, self.until = subject, time.monotonic(), until
        self.rows = list[Row]()
        self.attempted = set[tuple[int, str, str, str]]()  # attempts, each of which is made once
        self.right = dict[int, float]()  # reward of the right answer, by the case's identity
        self.problems = list[str]()
        self.changed = list[Case]()  # tasks that the verifier changed
        self.slow = False  # whether the verifier is slow
        self.ran_out = False  # whether time ran out
        self.bounds: tuple[float, float] | None = None  # once all attempts are made
        self.indifferent = set[int]()  # tasks that pay every answer, by the case's index

    async def run(self, report: AuditReport) -> None:
        cases = [_case(at, task) for at, task in enumerate(_spread(self.subject.tasks, MAX_TASKS))]
        if not cases:
            report.verdict, report.notes = "not audited", ["there is no task"]
            return
        answers = Found(cases, slow=True)
        with contextlib.suppress(TimeoutError):
            async with self._time(self.until):
                answers = await Search(self.subject, self._score, self.until).run(cases)
        cases, self.right, self.slow = answers.cases, answers.right, answers.slow
        report.answer, report.shape, report.notes = answers.key, answers.shape, answers.notes
        reached = await self._attack(cases)
        report.tasks = len(reached)
        if report.answer == SEARCHED and self._is_exceeded:
            self._forget_answers(report)
        scored = [row for row in self.rows if row.value is not None]
        if clients := self.subject.source.calls_models:
            report.skipped.append(f"its file imports {clients[0]}: no model is called in an audit")
        if refused := sorted({*self.subject.scorer.refused}):
            hosts = ", ".join(refused[:3])
            report.skipped.append(f"it calls {hosts}, which an audit does not")
        if not self.rows:
            report.verdict, report.notes = "not audited", ["time ran out before the first attack"]
            return
        if len(scored) < 0.05 * len(self.rows) or not scored:
            why = max(set(self.problems), key=self.problems.count, default="no reward")
            report.verdict = "not audited"
            report.notes.insert(
                0, f"texts get no reward ({why}): results of this agent may have another form"
            )
            return
        self.bounds = self._span
        judged = [*self._paid_whatever(reached), *self._judged(reached)]
        report.findings += sorted(
            judged, key=lambda finding: (not finding.alarm, -finding.share, -finding.reward)
        )
        report.findings = _merged(report.findings)
        report.highest = self._highest(len(reached))
        report.findings += await self._unstable(reached)
        if not refused:
            report.findings += self._own_refused(cases, report)
            report.notes += await self._respelled(reached)
        report.notes += self._about(scored, reached)
        report.imbalance = _imbalance([case for case in cases if case.index in self.right])
        report.decide()
        if refused and not report.alarms:
            report.verdict = "not audited"

    @property
    def _is_exceeded(self) -> bool:
        """Whether other answers are paid more than those taken for right: then the verifier wants
        something else, such as a sentence with a word of the question."""
        best = dict[int, float]()
        for row in self.rows:
            if row.value is not None:
                best[row.case.index] = max(best.get(row.case.index, row.value), row.value)
        more = sum(best.get(index, value) > value + 1e-9 for index, value in self.right.items())
        return more > 0.5 * len(self.right)

    def _forget_answers(self, report: AuditReport) -> None:
        report.answer = report.shape = ""
        self.right.clear()
        self.rows = [row for row in self.rows if row.attempt.attack not in KNOWING]

    # -- attacks -----------------------------------------------------------------------------------

    async def _attack(self, cases: Sequence[Case]) -> list[Case]:
        """Make all attempts, the most informative first; return the cases that were reached."""

        runs = self.subject.isolated and self.subject.source.runs_code

        def attempts_on(case: Case) -> Iterator[Attempt]:
            if runs:
                yield from programs(case)
            if case.index in self.right:
                yield from wrong(case)
            yield from ignorant(case)
            if self.subject.isolated and not runs:
                yield from programs(case)

        early, late = cases[:FIRST], cases[FIRST:]
        parts = [early[:EARLY], early[EARLY:]] if self.right else [early]
        early_attempts = (
            (case, attempt) for case in parts[0] for attempt in _first(case, self.right, runs=runs)
        )
        remaining = chain.from_iterable(_in_turn(part, attempts_on) for part in parts)
        reached = await self._make(chain(early_attempts, remaining))
        paid = self._paid_at_all()
        if len(paid) > MANY:  # nearly everything is paid: fewer tasks suffice to show it
            late = late[:FIRST]
        again = (
            (case, attempt) for case in late for attempt in attempts_on(case) if attempt[:2] in paid
        )
        return [*reached, *await self._make(again)]

    async def _make(self, attempts: Iterable[tuple[Case, Attempt]]) -> list[Case]:
        """Make attempts until time runs out; return the cases."""
        before = len(self.rows)
        try:
            async with self._time(self.until - CHECKS_SHARE * (self.until - self.began)):
                for batch in _batches(filter(self._is_new, attempts), BATCH):
                    await asyncio.gather(*(self._attempt(case, attempt) for case, attempt in batch))
        except TimeoutError:
            self.ran_out = True
        return list({row.case.index: row.case for row in self.rows[before:]}.values())

    def _is_new(self, pair: tuple[Case, Attempt]) -> bool:
        case, attempt = pair
        key = (case.index, *_key(attempt))
        is_new = key not in self.attempted
        self.attempted.add(key)
        return is_new

    @staticmethod
    def _time(until: float) -> asyncio.Timeout:
        """A timeout at `until`, by `time.monotonic`; scores from before are kept."""
        return asyncio.timeout(max(0.0, until - time.monotonic()))

    def _paid_at_all(self) -> set[tuple[str, str]]:
        """The attacks and variants that got part of the highest reward on any task, and those whose
        answer differs by task."""
        low, high = self._span
        limit = low + WORTH * (high - low)
        above = {
            row.attempt[:2] for row in self.rows if row.value is not None and row.value > limit
        }
        return above | {("another task's answer", ""), ("empty answer", ""), ("the question", "")}

    async def _attempt(self, case: Case, attempt: Attempt) -> None:
        values = list[float]()
        for result in attempt.results:
            score = await self._score(case, result, attempt.calls)
            if score.value is None:
                self.rows.append(Row(case, attempt, None))
                return
            values.append(score.value)
        self.rows.append(Row(case, attempt, min(values)))

    async def _score(self, case: Case, result: Json, calls: int = 0) -> Score:
        score = await self.subject.scorer.score(case.task, result, calls)
        if score.value is None:
            self.problems.append(score.problem)
        if score.changed:
            self.changed.append(case)
        return score

    # -- judging -----------------------------------------------------------------------------------

    def _paid_whatever(self, reached: Sequence[Case]) -> list[Finding]:
        """A finding if some tasks pay nearly every answer, for example because their own cannot be
        parsed. No attack is the cause, so the other findings leave these tasks out."""
        rows = defaultdict[int, list[Row]](list)
        for row in self.rows:
            if row.attempt.attack in KNOW_NOTHING and not _is_right(row):
                rows[row.case.index].append(row)
        paid = {
            at: [row for row in task_rows if self._gain(row) >= PAID]
            for at, task_rows in rows.items()
        }
        indifferent = {
            at for at, task_rows in rows.items()
            if len(task_rows) >= MIN_ANSWERS and len(paid[at]) >= PAID_ANSWERS * len(task_rows)
        }  # fmt: skip
        share = len(indifferent) / max(len(reached), 1)
        if not self.right and wilson_lower(share, len(reached)) <= 0.5:
            return []
        if not indifferent or not MIN_SHARE <= share < PAID:  # few; or all, which each attack shows
            return []
        self.indifferent = indifferent
        worst = paid[min(indifferent)][0]
        return [
            Finding(
                attack="any answer to some tasks", kind="pays", share=share, tasks=len(reached),
                reward=fmean(row.value or 0.0 for row in paid[min(indifferent)]),
                change="raise where a task's own answer cannot be read; do not pay for it",
                example=Example(
                    task=_name(worst.case), answer=worst.attempt.results[0], reward=worst.value,
                    right=self.right.get(worst.case.index),
                ),
            )
        ]  # fmt: skip

    def _judged(self, reached: Sequence[Case]) -> list[Finding]:
        """The attacks that are paid, each by its best variant."""
        by = defaultdict[tuple[str, str], dict[int, Row]](dict)
        for row in self.rows:
            if row.case.index in self.indifferent:
                continue
            previous = by[row.attempt.attack, row.attempt.variant].get(row.case.index)
            if previous is None or (row.value or -math.inf) > (previous.value or -math.inf):
                by[row.attempt.attack, row.attempt.variant][row.case.index] = row
        best = dict[str, Finding]()
        for (attack, variant), rows in by.items():
            finding = self._finding(attack, variant, list(rows.values()), len(reached))
            if finding and (attack not in best or _rank(finding) > _rank(best[attack])):
                best[attack] = finding
        return list(best.values())

    def _finding(
        self, attack: str, variant: str, rows: Sequence[Row], cases: int
    ) -> Finding | None:
        rows = [row for row in rows if not _is_right(row)]
        if len(rows) < min(3, cases) or not rows:
            return None
        gains = [self._gain(row) for row in rows]
        knows = any(row.case.index in self.right for row in rows)
        near = attack in SMALL or (attack not in KNOW_NOTHING and not self._few_values)
        enough = PAID_WHOLE if near else PAID
        paid = [row for row, gain in zip(rows, gains, strict=True) if gain >= enough]
        share, mean = len(paid) / len(rows), fmean(gains)
        if attack in KNOW_NOTHING and _is_synonym(rows, paid):
            return None
        if knows:
            whole = sum(gain >= PAID_WHOLE for gain in gains) / len(rows)
            enough_tasks = share >= (MIN_SHARE if self._few_values else MIN_NEAR)
            alarm = (enough_tasks or whole >= MIN_SHARE) and len(paid) >= min(2, len(rows))
            alarm |= mean >= MEAN_GAIN and self._few_values and attack not in SMALL
        else:  # a constant may be right by chance: of two answers, on half of the tasks
            alarm = wilson_lower(share, len(rows)) > 0.5
            alarm |= attack in PROGRAMS and share == 1.0
        if not alarm:
            return None
        worst = max(zip(gains, rows, strict=True), key=lambda pair: pair[0])[1]
        values = [row.value for row in rows if row.value is not None]
        return Finding(
            attack=attack, variant=variant, kind="pays", share=share if paid else mean,
            tasks=len(rows), reward=fmean(values), change=CHANGES[attack],
            example=Example(
                task=_name(worst.case), answer=worst.attempt.results[0], reward=worst.value,
                right=self.right.get(worst.case.index),
            ),
        )  # fmt: skip

    def _gain(self, row: Row) -> float:
        """The reward on the scale from the lowest, 0, to that of the right answer, 1."""
        if row.value is None:
            return 0.0
        low, high = self.bounds or self._span
        top = self.right.get(row.case.index, high)
        return (row.value - low) / (top - low) if top > low else 0.0

    @property
    def _span(self) -> tuple[float, float]:
        values = [row.value for row in self.rows if row.value is not None]
        low, high = min(values, default=0.0), max(values, default=0.0)
        if not self.right:  # none of the attempts is known to be right
            low, high = min(low, 0.0), max(high, 1.0)
        if self.subject.span is not None:
            return min(low, self.subject.span[0]), max(high, self.subject.span[1])
        return low, high

    @property
    def _few_values(self) -> bool:
        return (
            len({round(row.value, 6) for row in self.rows if row.value is not None}) <= FEW_VALUES
        )

    def _highest(self, cases: int) -> float:
        """The share of tasks on which the best single constant is paid, even where it is right."""
        paid = defaultdict[str, set[int]](set)
        for row in self.rows:
            if (
                row.attempt.attack in ("a constant", "empty answer", "format alone")
                and self._gain(row) >= PAID
            ):
                paid[row.attempt.variant].add(row.case.index)
        return max(map(len, paid.values()), default=0) / max(cases, 1)

    async def _unstable(self, cases: Sequence[Case]) -> list[Finding]:
        """Score the same answers twice more, concurrently and in two orders."""
        by_key = {
            (row.case.index, _key(row.attempt)): row for row in self.rows if row.value is not None
        }
        single = [row for row in by_key.values() if len(row.attempt.results) == 1]
        sample = single[:: max(1, len(single) // 12)][:12]
        rights = [case for case in cases if case.index in self.right][:3]
        pairs = [(row.case, row.attempt.results[0], row.attempt.calls, row.value) for row in sample]
        pairs += [(c, c.shape.wrap(c.answer), 0, self.right[c.index]) for c in rights]
        differ = list[tuple[Case, Json, float | None]]()
        with contextlib.suppress(TimeoutError):
            async with self._time(self.until):
                for order in (pairs, pairs[::-1]):
                    again = await asyncio.gather(*(self._score(c, r, n) for c, r, n, _ in order))
                    differ += [  # a failure now, such as a timeout, is not a different reward
                        (case, result, score.value)
                        for (case, result, _, value), score in zip(order, again, strict=True)
                        if score.value not in (value, None)
                    ]
        findings = list[Finding]()
        if differ:
            case, result, value = differ[0]
            unstable = {case.index for case, _, _ in differ}
            findings.append(_unstable_finding(
                "the same answer gets another reward the next time", case, result, value,
                len(unstable) / len(cases), len(cases),
                "depend on task and answer alone: no clock, no chance, no shared state",
            ))  # fmt: skip
        if ended:
            findings.append(_unstable_finding(
                "an answer that is a program ends the verifier's process", cases[0],
                ENDS_EVALUATED, None, 1.0, len(cases),
                "run answers in a process of their own, as agentrl.verify.code does",
            ))  # fmt: skip
        if self.changed:
            changed = {case.index for case in self.changed} & {case.index for case in cases}
            findings.append(_unstable_finding(
                "the verifier changes the task", self.changed[0], None, None,
                len(changed) / len(cases), len(cases),
                "copy what is changed: another answer may be compared with it",
            ))  # fmt: skip
        return findings

    def _own_refused(self, cases: Sequence[Case], report: AuditReport) -> list[Finding]:
        """Whether right answers of some tasks are refused in the form that others accept."""
        with_answer = [case for case in cases if case.answer is not None]
        refused = [case for case in with_answer if case.index not in self.right]
        if not self.right or len(refused) < max(2, 0.1 * len(with_answer)):
            return []
        case = refused[0]
        answer = case.shape.wrap(case.answer)
        return [
            Finding(
                attack=f"the right answer ({report.answer})", kind="rejects",
                share=len(refused) / len(with_answer), tasks=len(with_answer), reward=0.0,
                example=Example(task=_name(case), answer=answer, reward=0.0),
                change="accept the task's own answer; look at the type of both sides",
            )
        ]  # fmt: skip

    async def _respelled(self, cases: Sequence[Case]) -> list[str]:
        """Which spellings of the right answer are refused, as a sentence."""
        tried, refused = defaultdict[str, int](int), defaultdict[str, list[str]](list)
        with contextlib.suppress(TimeoutError):
            async with self._time(self.until):
                for case in [case for case in cases if case.index in self.right][:8]:
                    for attempt in respelled(case):
                        score = await self._score(case, attempt.results[0])
                        tried[attempt.attack] += 1
                        if score.value is None or score.value < self.right[case.index]:
                            refused[attempt.attack].append(shown(attempt.results[0]))
        rejected = [name for name, texts in refused.items() if len(texts) > 0.5 * tried[name]]
        if not rejected:
            return []
        return [
            "a right answer is refused with another spelling:"
            f" {', '.join(f'{name} ({refused[name][0]})' for name in rejected)};"
            " say in the prompt which form is needed, or accept these"
        ]

    def _about(self, scored: Sequence[Row], cases: Sequence[Case]) -> list[str]:
        notes = list[str]()
        if self.ran_out:
            notes.append(f"time ran out after {len(cases)} tasks")
        if not self.right and all(row.value is not None and row.value <= 0 for row in scored):
            notes.append("no answer that was tried gets a reward; right ones are not known")
        rights = [case for case in cases if case.index in self.right]
        for name, copy in COPIES.items():
            same = sum(
                normal_text(copy(case.question)) == normal_text(case.text) for case in rights
            )
            if same >= max(4, 0.8 * len(rights)):
                notes.append(
                    f"{name} of the question is paid as the right answer on {same} of"
                    f" {len(rights)} tasks"
                )
        return notes


def _unstable_finding(
    attack: str, case: Case, answer: Json, reward: float | None, share: float, tasks: int,
    change: str,
) -> Finding:  # fmt: skip
    return Finding(
        attack=attack, kind="unstable", share=share, tasks=tasks, reward=reward or 0.0,
        example=Example(task=_name(case), answer=answer, reward=reward), change=change,
    )  # fmt: skip


def _imbalance(cases: Sequence[Case]) -> str:
    """A sentence if one answer, or doing nothing, is right on many of the tasks; empty if not. It
    is a property of the tasks, which no verifier can change."""
    if len(cases) < MIN_ASKED:
        return ""
    idle = sum(_is_idle(case) for case in cases) / len(cases)
    if idle >= MIN_SHARE:
        return f"an agent that does nothing is right on {idle:.0%} of the tasks: use fewer of these"
    texts = Counter(normal_text(case.text) for case in cases)
    text, count = texts.most_common(1)[0]
    if (share := count / len(cases)) < MIN_SAME:
        return ""
    return f"{shown(text)} is the right answer of {share:.0%} of the tasks: balance them"


def _is_idle(case: Case) -> bool:
    """Whether the wanted state is the one that the agent starts from."""
    task_input = case.task.get("input")
    return (
        isinstance(task_input, dict)
        and isinstance(case.answer, dict | list)
        and case.answer in list(task_input.values())
    )


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """One finding in place of many if every answer is paid."""
    alike = [
        finding for finding in findings if finding.share >= PAID and finding.attack in KNOW_NOTHING
    ]
    if len(alike) < 5:
        return list(findings)
    change = "look at the comparison: it is true for every answer"
    return [msgspec.structs.replace(alike[0], attack="any answer", change=change)]


def _first(case: Case, right: Mapping[int, float], *, runs: bool) -> Iterator[Attempt]:
    if runs:
        yield from islice(programs(case), EARLY_PROGRAMS)
    yield from first(case)
    if case.index in right:
        yield from islice(wrong(case), 1)


def _in_turn(
    cases: Sequence[Case], attempts_on: Callable[[Case], Iterator[Attempt]]
) -> Iterator[tuple[Case, Attempt]]:
    """The first attempt on each case, then the second, and so on: when time runs out, all cases
    have had the same attempts."""
    for row in zip_longest(*map(attempts_on, cases)):
        yield from (
            (case, attempt) for case, attempt in zip(cases, row, strict=True) if attempt is not None
        )


def _key(attempt: Attempt) -> tuple[str, str, str]:
    return attempt.attack, attempt.variant, repr(attempt.results)


def _is_right(row: Row) -> bool:
    """Whether an attempt happens to be right."""
    if row.case.answer is None:
        return False
    right = normal_text(row.case.text)
    answers = {normal_text(text_of(result)) for result in row.attempt.results} | {
        normal_text(row.attempt.unless)
    }
    return right in answers or normal_text(text_of(row.case.shape.wrap(row.case.answer))) in answers


def _is_synonym(rows: Sequence[Row], paid: Sequence[Row]) -> bool:
    """Whether an answer is paid only where one particular answer is right, as "true" for "yes"."""
    right_answers = {normal_text(row.case.text) for row in rows if row.case.answer is not None}
    paid_answers = {normal_text(row.case.text) for row in paid if row.case.answer is not None}
    return len(right_answers) > 1 and len(paid_answers) == 1


def _rank(finding: Finding) -> tuple[float, float]:
    return finding.share, finding.reward


def _case(index: int, task: Mapping[str, Json]) -> Case:
    task_input = task.get("input", "")
    system = ""
    if isinstance(task_input, list) and all(isinstance(message, dict) for message in task_input):
        system_messages = [
            message
            for message in task_input
            if isinstance(message, dict) and message.get("role") == "system"
        ]
        system = next((str(message.get("content")) for message in system_messages), "")
    return Case(index, task, question_of(task_input), system)


def _name(case: Case) -> str:
    id = case.task.get("id")
    return f"task {id!r}" if id is not None else f"the task {shown(case.question)}"


def _spread(tasks: Sequence[Mapping[str, Json]], count: int) -> list[Mapping[str, Json]]:
    """At most `count` tasks, evenly spread."""
    n = min(count, len(tasks))
    order = sorted(range(n), key=lambda i: (i % 4, i))  # the first ones are spread, too
    return [tasks[i * len(tasks) // n] for i in order]


def _batches(
    attempts: Iterable[tuple[Case, Attempt]], size: int
) -> Iterator[list[tuple[Case, Attempt]]]:
    remaining = iter(attempts)
    while batch := list(islice(remaining, size)):
        yield batch
