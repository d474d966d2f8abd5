"""Right answers of tasks, and the form in which a verifier accepts them.

They come from rollouts that were right or from an environment's solutions; else from the field for
which the verifier pays a task's own value more than that of another task; else from trying numbers
and words. A search ends early enough to leave time for attacks.
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
PAID = 0.9  # share of the highest reward
SEARCH_SHARE = 0.4  # share of the time until which the field with right answers is searched
PROOF_SHARE = 0.5  # share of the time until which all answers are found and scored
SLOW = 0.02  # seconds of a call above which fewer forms are tried
BRIEF = 0.05  # seconds of a score below which it is measured again
SEARCHABLE = 0.002  # seconds of a score up to which many texts are tried
NOT_ANSWERS = {"id", "input", "name", "split", "index", "question", "prompt", "messages", "plan"}
JOINTS = (", ", " ", "\n")  # of lists as texts
SEARCHED = "found by search"


@dataclass(slots=True)
class Found:
    """The result of a search. cases: the cases to attack, with their right answers; right: the
    rewards of these, by the case's index; key: where they come from, empty if they are unknown."""

    cases: list[Case]
    slow: bool  # whether the verifier is slow
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
        await self._seconds(cases[0])  # the first call may load something, which is not counted
        self.began = time.monotonic()
        self.latency = min([await self._seconds(cases[0]) for _ in range(3)])
        if self.latency < BRIEF:  # other programs distort so short a time
            self.latency = min([self.latency, *[await self._seconds(cases[0]) for _ in range(20)]])
        # An empty answer may not even be parsed.
        if (named_answer := _named_answer(cases[0])) is not None:
            read = min([await self._seconds(cases[0], text_of(named_answer)) for _ in range(3)])
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
        return min((score.value for score in scores if score.value is not None), default=0.0)

    # -- where they may be -------------------------------------------------------------------------

    async def _candidate(self, cases: Sequence[Case]) -> Candidate | None:
        """The task's own field comes before an environment's solution, which may have to start a
        process."""
        if (played := self._played(cases)) is not None:
            return played
        declared, paid = await self._declared(cases)
        if declared is not None and paid >= PAID:
            return declared
        return await self._solved(cases) or declared or await self._searched(cases)

    def _played(self, cases: Sequence[Case]) -> Candidate | None:
        """Answers of rollouts that were right."""
        results = [
            self.subject.right.get(msgspec.json.encode(c.task, order="sorted")) for c in cases
        ]
        enough = sum(result is not None for result in results) >= min(3, len(cases))
        return Candidate("rollouts", Shape(typed=True), results) if enough else None

    async def _solved(self, cases: Sequence[Case]) -> Candidate | None:
        """Answers of an environment's own solution."""
        if (solve := self.subject.solution) is None:
            return None
        answers: list[Json] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._left(PROOF_SHARE)):
                for case in cases:
                    replies = await solve(case.task.get("input"))
                    answer = (
                        replies[0] if isinstance(replies, list) and len(replies) == 1 else replies
                    )
                    answers.append(answer if isinstance(answer, str) else None)
        answers += [None] * (len(cases) - len(answers))
        return Candidate("solution", BARE, answers) if any(answers) else None

    async def _declared(self, cases: Sequence[Case]) -> tuple[Candidate | None, float]:
        """The field and the form with the right answers: a task's own value is paid more than that
        of another task. Also the mean reward of own values."""
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
                    own_reward, other_reward = await self._paid(cases, values, probed, shape)
                    paid[name, shape] = own_reward
                    more = own_reward - other_reward
                    alike = abs(more) < 1e-9 and own_reward > self.floor + 0.5
                    if _is_answer(name) and alike and not loose:
                        loose = own_reward, name, shape
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
        own_scores = [self.score(cases[at], shape.wrap(values[at])) for at in probed]
        turned = [*probed[1:], *probed[:1]]
        other_scores = [
            self.score(cases[at], shape.wrap(values[to] if to != at else "zebra"))
            for at, to in zip(probed, turned, strict=True)
        ]
        scores = await asyncio.gather(*own_scores, *other_scores)
        paid = [score.value if score.value is not None else -math.inf for score in scores]
        rows = [x for x in paid if math.isfinite(x)]
        floor = min(rows, default=0.0)
        filled = [x if math.isfinite(x) else floor for x in paid]
        return fmean(filled[: len(probed)]), fmean(filled[len(probed) :])

    async def _searched(self, cases: Sequence[Case]) -> Candidate | None:
        """Right answers found by trying numbers and words of the question."""
        if self.latency > SEARCHABLE:
            return None
        for shape in shapes_for(cases, self.subject.source)[:10]:
            answers = [await self._only(case, shape) for case in cases[:PROBED]]
            if sum(answer is not None for answer in answers) >= max(2, 0.6 * len(answers)):
                remaining = [await self._only(case, shape) for case in cases[PROBED:]]
                return Candidate(SEARCHED, shape, [*answers, *remaining])
        return None

    async def _only(self, case: Case, shape: Shape) -> Json:
        """The best paid of many texts, if only few are paid as much."""
        if not self._left(PROOF_SHARE):
            return None
        tried = list(dict.fromkeys(_guesses(case)))
        scores = await asyncio.gather(*(self.score(case, shape.wrap(text)) for text in tried))
        values = [score.value if score.value is not None else -math.inf for score in scores]
        top, low = max(values), min(values)
        best = [text for text, value in zip(tried, values, strict=True) if value == top]
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
        top = max((score.value for score in values if score.value is not None), default=floor)
        middle = floor + 0.5 * (top - floor)
        accepted = [score.value is not None and score.value >= middle for score in values]
        with_answer = sum(case.answer is not None for case in cases)
        is_part = key in self.fields and not _is_answer(key) and floor >= 0 and top < PAID
        if is_part and self.subject.span is None:  # such as a keyword of the text to write
            return unknown
        if top <= floor or sum(accepted) < 0.5 * with_answer:
            unknown.notes.append(
                "right answers of the tasks are not accepted in any form that was tried"
            )
            return unknown
        result = Found(_with_others(cases), self.slow, key, shape.name)
        for case, good, score in zip(cases, accepted, values, strict=True):
            if good and score.value is not None:
                result.right[case.index] = score.value
        return result


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
    fields = {key: [row[key] for row in rows] for key in common}
    for key, values in list(fields.items()):
        finals = [marked_answer(value) if isinstance(value, str) else "" for value in values]
        if finals != values and all(finals):
            fields[f"{key}{FINAL}"] = finals
        if all(isinstance(value, list) for value in values):
            for mark in JOINTS:
                joined = [mark.join(map(text_of, value)) for value in values]
                fields[f"{key}, joined by {mark!r}"] = joined
    return fields


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
    positions = dict[str, int]()
    for at, value in enumerate(values):
        positions.setdefault(normal_text(text_of(value)), at)
    return list(positions.values())[:count]


def _guesses(case: Case) -> Iterator[str]:
    numbers = [int(digits) for digits in re.findall(r"-?\d{1,9}", case.question)][:6]
    for a, b in combinations(numbers, 2):
        yield from map(str, (a + b, a - b, b - a, a * b))
    yield from map(str, range(-10, 101))
    yield from ("yes", "no", "true", "false", "True", "False", "A", "B", "C", "D")
    yield from re.findall(r"\w+", case.question)[:60]
