"""Right answers of tasks, and the form in which a verifier accepts them.

They are those of an environment's solutions or of rollouts that were right; else the values of the
field whose own value a verifier pays more than that of another task; else what is found by trying
numbers and words. Time for attacks is left: a search ends early.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from statistics import fmean

import msgspec

from agentrl.algorithms.hack_signs import ANSWER_KEYS, FINAL
from agentrl.audit.attacks import BARE, SHAPES, Case, Shape, shapes_for, text_of
from agentrl.audit.scoring import Score, Subject
from agentrl.core.types import Json
from agentrl.core.values import marked_answer, normal_text

FIRST = 8  # tasks of a slow verifier
PROBED = 4  # tasks on which forms of the right answer are tried
PAID = 0.9  # of the highest reward
SEARCH_SHARE = 0.4  # of the time, for the field with right answers
PROOF_SHARE = 0.5  # of the time, with the scores of those that were found
SLOW = 0.02  # seconds of a call, from which on fewer forms are tried
BRIEF, SEARCHABLE = 0.05, 0.002  # seconds of one score: measured again; of which many are tried
NOT_ANSWERS = {"id", "input", "name", "split", "index", "question", "prompt", "messages", "plan"}
JOINTS = (", ", " ", "\n")  # of lists as texts
SEARCHED = "found by search"


@dataclass(slots=True)
class Found:
    """What a search found. cases: those that are attacked, with the right answers; right: their
    rewards, by the case's index; key: where the answers are from; empty: they are unknown."""

    cases: list[Case]
    slow: bool  # whether the verifier is
    key: str = ""
    shape: str = ""
    right: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Answers, one for each case, that may be right in a form."""

    key: str
    shape: Shape
    answers: Sequence[Json]


class Search:
    """One search. score: scores an answer to a case; until: when the whole audit ends, by
    `time.monotonic`."""

    def __init__(
        self, subject: Subject, score: Callable[[Case, Json], Awaitable[Score]], until: float
    ) -> None:
        self.subject, self.score = subject, score
        self.began, self.until = time.monotonic(), until
        self.fields: Mapping[str, Sequence[Json]] = {}  # of the tasks, that may have right answers
        self.latency, self.floor = 0.0, 0.0  # seconds of a score; the lowest reward of no answer

    async def run(self, cases: list[Case]) -> Found:
        """The cases with right answers and the form in which they are accepted, if known."""
        await self._seconds(cases[0])  # what the first call loads is no part of the search
        self.began = time.monotonic()
        self.latency = min([await self._seconds(cases[0]) for _ in range(3)])
        if self.latency < BRIEF:  # so short a time is rather that of other programs
            self.latency = min([self.latency, *[await self._seconds(cases[0]) for _ in range(20)]])
        if (own := _named_answer(cases[0])) is not None:  # an empty one may not even be parsed
            read = min([await self._seconds(cases[0], text_of(own)) for _ in range(3)])
            self.latency = max(self.latency, read)
        if self.slow:
            cases = cases[:FIRST]
        self.floor = await self._lowest(cases[:PROBED])
        candidate = await self._candidate(cases)
        literals = tuple(self.subject.source.literals)
        cases = [replace(case, literals=literals) for case in cases]
        return (
            Found(cases, self.slow) if candidate is None else await self._proven(cases, candidate)
        )

    @property
    def slow(self) -> bool:
        return self.latency > SLOW

    async def _seconds(self, case: Case, answer: str = "") -> float:
        began = time.monotonic()
        await self.score(case, answer)
        return time.monotonic() - began

    async def _lowest(self, cases: Sequence[Case]) -> float:
        """The lowest reward of an empty answer: some tasks may be paid whatever is answered."""
        scores = await asyncio.gather(*(self.score(case, "") for case in cases))
        return min((one.value for one in scores if one.value is not None), default=0.0)

    # -- where they may be -------------------------------------------------------------------------

    async def _candidate(self, cases: Sequence[Case]) -> Candidate | None:
        """The task's own field first, as an environment's solution may be asked of a process that
        starts for it."""
        if (known := self._played(cases)) is not None:
            return known
        declared, paid = await self._declared(cases)
        if declared is not None and paid >= PAID:
            return declared
        return await self._solved(cases) or declared or await self._searched(cases)

    def _played(self, cases: Sequence[Case]) -> Candidate | None:
        """Answers of rollouts that were right."""
        known = [self.subject.right.get(msgspec.json.encode(c.task, order="sorted")) for c in cases]
        enough = sum(one is not None for one in known) >= min(3, len(cases))
        return Candidate("rollouts", Shape(typed=True), known) if enough else None

    async def _solved(self, cases: Sequence[Case]) -> Candidate | None:
        """Answers of an environment's own solution."""
        if (solve := self.subject.solution) is None:
            return None
        answers: list[Json] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._left(PROOF_SHARE)):
                for case in cases:
                    said = await solve(case.task.get("input"))
                    one = said[0] if isinstance(said, list) and len(said) == 1 else said
                    answers.append(one if isinstance(one, str) else None)
        answers += [None] * (len(cases) - len(answers))
        return Candidate("solution", BARE, answers) if any(answers) else None

    async def _declared(self, cases: Sequence[Case]) -> tuple[Candidate | None, float]:
        """The field of the tasks, and the form, in which the right answer is accepted: those whose
        own value is paid more than that of another task; and the reward of its own."""
        fields = self.fields = _fields(cases)
        names = [name for name in ANSWER_KEYS if name in fields]
        names += [*filter(_is_answer, fields), *fields]
        names.sort(key=lambda name: not name.endswith(FINAL))
        shapes = shapes_for(cases, self.subject.source)
        if self.slow:
            names, shapes = names[:2], [*shapes[:6], *shapes[len(SHAPES) :]]
        best: tuple[float, str, Shape] | None = None
        paid = dict[tuple[str, Shape], float]()
        loose: tuple[float, str, Shape] | None = None  # any task's answer is paid
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._left(SEARCH_SHARE)):
                for name, shape in product(dict.fromkeys(names), shapes):
                    if best and best[0] >= PAID and best[1] != name:
                        break
                    values = fields[name]
                    probed = _distinct(values, 2 if self.slow else PROBED)
                    if len(probed) < 2 and len(cases) > 1 and not _is_answer(name):
                        continue
                    own, others = await self._paid(cases, values, probed, shape)
                    paid[name, shape] = own
                    more = own - others
                    alike = abs(more) < 1e-9 and own > self.floor + 0.5
                    if _is_answer(name) and alike and not loose:
                        loose = own, name, shape
                    if more > 1e-6 and (best is None or more > best[0] + 1e-9):
                        best = more, name, shape
        best = best or loose
        if best is None:
            return None, 0.0
        _, name, shape = best
        return Candidate(name, shape, list(fields[name])), paid[name, shape]

    def _left(self, share: float) -> float:
        """Seconds until this share of the time is over: attacks need the rest."""
        ends = self.began + share * (self.until - self.began)
        return max(0.0, ends - time.monotonic())

    async def _paid(
        self, cases: Sequence[Case], values: Sequence[Json], probed: Sequence[int], shape: Shape
    ) -> tuple[float, float]:
        """The mean reward of some tasks' own values, and of those of others."""
        own = [self.score(cases[at], shape.wrap(values[at])) for at in probed]
        turned = [*probed[1:], *probed[:1]]
        others = [
            self.score(cases[at], shape.wrap(values[to] if to != at else "zebra"))
            for at, to in zip(probed, turned, strict=True)
        ]
        scores = await asyncio.gather(*own, *others)
        paid = [one.value if one.value is not None else -math.inf for one in scores]
        rows = [x for x in paid if math.isfinite(x)]
        floor = min(rows, default=0.0)
        known = [x if math.isfinite(x) else floor for x in paid]
        return fmean(known[: len(probed)]), fmean(known[len(probed) :])

    async def _searched(self, cases: Sequence[Case]) -> Candidate | None:
        """Right answers that few texts are: numbers, and words of the question."""
        if self.latency > SEARCHABLE:
            return None
        for shape in shapes_for(cases, self.subject.source)[:10]:
            answers = [await self._only(case, shape) for case in cases[:PROBED]]
            if sum(one is not None for one in answers) >= max(2, 0.6 * len(answers)):
                rest = [await self._only(case, shape) for case in cases[PROBED:]]
                return Candidate(SEARCHED, shape, [*answers, *rest])
        return None

    async def _only(self, case: Case, shape: Shape) -> Json:
        """The one of many texts that is paid, if few are."""
        if not self._left(PROOF_SHARE):
            return None
        tried = list(dict.fromkeys(_guesses(case)))
        scores = await asyncio.gather(*(self.score(case, shape.wrap(one)) for one in tried))
        values = [one.value if one.value is not None else -math.inf for one in scores]
        top, low = max(values), min(values)
        best = [one for one, value in zip(tried, values, strict=True) if value == top]
        few = len(best) <= max(1, len(tried) // 20)
        return best[0] if few and top > max(low, 0.0) else None

    # -- whether they are right --------------------------------------------------------------------

    async def _proven(self, cases: list[Case], candidate: Candidate) -> Found:
        """The cases with the answers of a candidate, if enough of them are accepted."""
        key, shape = candidate.key, candidate.shape
        unknown = Found(cases, self.slow)
        pairs = zip(cases, candidate.answers, strict=True)
        cases = [replace(case, answer=answer, shape=shape) for case, answer in pairs]
        values = list[Score]()
        for case in cases:
            if values and not self._left(PROOF_SHARE):
                break
            is_known = case.answer is not None
            answer = shape.wrap(case.answer)
            values.append(await self.score(case, answer) if is_known else Score(None))
        cases, unknown.cases = cases[: len(values)], unknown.cases[: len(values)]
        floor = self.floor
        top = max((one.value for one in values if one.value is not None), default=floor)
        middle = floor + 0.5 * (top - floor)
        accepted = [one.value is not None and one.value >= middle for one in values]
        asked = sum(case.answer is not None for case in cases)
        is_part = key in self.fields and not _is_answer(key) and floor >= 0 and top < PAID
        if is_part and self.subject.span is None:  # as a keyword is, of what is to be written
            return unknown
        if top <= floor or sum(accepted) < 0.5 * asked:
            unknown.notes.append(
                "right answers of the tasks are not accepted in any form that was tried"
            )
            return unknown
        found = Found(_with_others(cases), self.slow, key, shape.name)
        for case, good, score in zip(cases, accepted, values, strict=True):
            if good and score.value is not None:
                found.right[case.index] = score.value
        return found


def _with_others(cases: Sequence[Case]) -> list[Case]:
    """Cases with the answers of others, none of which is equal to their own."""
    texts = {normal_text(case.text): case.answer for case in cases if case.answer is not None}
    whole = []
    for case in cases:
        others = [answer for text, answer in texts.items() if text != normal_text(case.text)]
        whole.append(replace(case, others=others))
    return whole


def _fields(cases: Sequence[Case]) -> dict[str, list[Json]]:
    """The values of each field that every task has, fields of objects by a dotted name."""
    rows = []
    for case in cases:
        row: dict[str, Json] = {}
        for key, value in case.task.items():
            if isinstance(value, dict):
                row |= {f"{key}.{name}": inner for name, inner in value.items() if key != "input"}
            if key not in NOT_ANSWERS:
                row[key] = value
        rows.append({k: v for k, v in row.items() if _may_answer(v)})
    common = [key for key in rows[0] if all(key in row for row in rows)]
    found = {key: [row[key] for row in rows] for key in common}
    for key, values in list(found.items()):
        finals = [marked_answer(value) if isinstance(value, str) else "" for value in values]
        if finals != values and all(finals):
            found[f"{key}{FINAL}"] = finals
        if all(isinstance(value, list) for value in values):
            for mark in JOINTS:
                joined = [mark.join(map(text_of, value)) for value in values]
                found[f"{key}, joined by {mark!r}"] = joined
    return found


def _named_answer(case: Case) -> Json:
    """The value of the first field that is named as answers are."""
    return next((case.task[name] for name in ANSWER_KEYS if name in case.task), None)


def _is_answer(name: str) -> bool:
    """Whether a field's name says that it is the right answer, as `answer` or `expected_call`."""
    return not {*re.split(r"[_.]", name.partition(",")[0])}.isdisjoint(ANSWER_KEYS)


def _may_answer(value: Json) -> bool:
    return isinstance(value, bool | int | float | list | dict) or (
        isinstance(value, str) and 0 < len(value) <= 20_000
    )


def _distinct(values: Sequence[Json], count: int) -> list[int]:
    """Positions of at most `count` values of which no two are equal."""
    found = dict[str, int]()
    for at, value in enumerate(values):
        found.setdefault(normal_text(text_of(value)), at)
    return list(found.values())[:count]


def _guesses(case: Case) -> Iterator[str]:
    numbers = [int(one) for one in re.findall(r"-?\d{1,9}", case.question)][:6]
    for a, b in combinations(numbers, 2):
        yield from map(str, (a + b, a - b, b - a, a * b))
    yield from map(str, range(-10, 101))
    yield from ("yes", "no", "true", "false", "True", "False", "A", "B", "C", "D")
    yield from re.findall(r"\w+", case.question)[:60]
