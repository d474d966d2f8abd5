"""Signs that a policy hacks its reward, in the rollouts of the last steps.

`agentrl audit` attacks a verifier before a policy does; what it missed a policy finds, and shows by
answers that are paid without being right. Each sign is a number between 0 and 1, a metric of every
step, and has a limit, which follows from what the audit of the run saw.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, log1p
from statistics import correlation, fmean
from typing import Any

import msgspec

from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.core.config import RunConfig, derived
from agentrl.core.types import Group, Json, Purpose, Rollout
from agentrl.core.values import marked_answer, normal_text, question_of
from agentrl.store.base import Store

log = logging.getLogger("agentrl.algorithm")
STEPS = 4  # last steps whose rollouts are looked at together
MIN_ROLLOUTS = 16  # of a correlation
MIN_SPREAD = 1e-6  # of values that are correlated
MIN_PAID = 4  # rollouts of a share
FEW_VALUES = 4  # rewards of more different values are graded, as by distance
PAID, PAID_GRADED, PAID_WHOLE = 0.75, 0.9, 0.9999  # of the highest reward
LONG_ANSWER = 40  # characters of answers that may be paid for their length
MAX_ANSWER_CHARS = 60  # characters of a right answer that is looked for in what is paid
MAX_READ_CHARS = 4000  # characters of an answer, from its end, in which the right one is looked for
SHOWN = 60  # characters of an answer
FIRST_ROLLOUTS = 256  # of a run, by which the field with the right answer is found
KEY_STEPS = 8  # steps in which that is tried
MIN_EACH = 8  # rollouts with and without a reward that this takes
MIN_PAID_HAVE, MAX_UNPAID_HAVE = 0.75, 0.25  # shares of answers with the value of that field
DOCUMENT, REPORT = "audit", "report"  # of the store, from `agentrl.audit`
FINAL = ", its final answer"  # after a field whose text ends with a marked answer, as "#### 72"
ANSWER_KEYS = (
    *("answer", "solution", "target", "expected", "label", "ground_truth", "reference", "gold"),
    *("correct", "output", "expected_output", "answers", "result", "key"),
)
NUMBER = re.compile(r"-?\d[\d,]{0,30}\.?\d{0,30}(?:e[-+]?\d{1,3})?", re.IGNORECASE)
FRACTION = re.compile(
    r"\\d?frac\{(-?\d{1,15})\}\{(\d{1,15})\}|(?<!\d)(-?\d{1,15})\s?/\s?(\d{1,15})"
)
WORD = re.compile(r"\w{3,}|\d+")
MARKUP = re.compile(r"</?\w+>|\\boxed|\\[a-z]+|[^\w]+")
FORMULA = re.compile(r"[(){}\[\];=<>*^|`\n]")  # of programs and formulas, which have many spellings
SAYS_YES, SAYS_NO = {"yes", "true", "correct", "right"}, {"no", "false", "incorrect", "wrong"}


@dataclass(frozen=True, slots=True)
class Played:
    """A scored rollout, with what the signs need of its answer. Rows of several steps are kept, so
    texts of any length are not."""

    rollout: str
    task: int  # equal for the same task
    template: int  # equal for the same answer and tool calls, whatever it has of the question
    shown: str  # the beginning of that answer
    length: int  # characters of the answer
    empty: bool  # whether it is nothing but form
    reward: float
    audit: float | None  # reward of a second verifier
    has: bool | None  # whether it has the task's own answer; None: unknown
    right: str = ""  # the task's own answer, if that is known


@dataclass(frozen=True, slots=True)
class Sign:
    """One sign, with rollouts that show it."""

    metric: str
    value: float
    limit: float
    text: str  # of a sentence: what is paid
    rollouts: Sequence[str] = ()

    @property
    def crossed(self) -> bool:
        return self.value > self.limit


@dataclass(frozen=True, slots=True)
class Audited:
    """What the audit of a run found. highest: the share of tasks on which its best constant was
    paid; key: the tasks' field with the right answer; empty: unknown."""

    highest: float = 0.0
    key: str = ""
    verdict: str = ""
    finding: str = ""  # the worst one, in words
    change: str = ""
    share: float = 0.0  # of tasks that it was paid on


NOT_AUDITED = Audited()


async def known_of(store: Store, config: RunConfig) -> Audited:
    """What the audit of a run found. Where it did not find the field with the right answer, or did
    not end in time, the run's first rollouts show it."""
    known = await audited(store, config.name)
    if known.key:
        return known
    rows = await store.rollouts(config.name, purpose=Purpose.TRAIN, limit=FIRST_ROLLOUTS)
    return replace(known, key=answer_key(rows, config))


def answer_key(rollouts: Iterable[Rollout], config: RunConfig) -> str:
    """The field of tasks whose value nearly all paid answers have, and few others; else empty."""
    rows = list(_scored(rollouts, config))
    rewards = [reward for _, reward in rows]
    if not rows or min(rewards) == max(rewards):
        return ""
    limit = min(rewards) + PAID * (max(rewards) - min(rewards))
    fields = [name for name in rows[0][0].task if name not in ("id", "input")]
    fields.sort(key=lambda name: name not in ANSWER_KEYS)
    for name in (*fields, *(f"{name}{FINAL}" for name in fields)):
        paid, unpaid = list[bool](), list[bool]()
        values = set[str]()
        for row, reward in rows:
            value, is_sure = _right(row.task, name)
            if not is_sure:
                break
            values.add(json.dumps(value))
            (paid if reward >= limit else unpaid).append(_has(_text(row)[-MAX_READ_CHARS:], value))
        else:
            enough = min(len(paid), len(unpaid)) >= MIN_EACH and len(values) > 1
            if enough and fmean(paid) >= MIN_PAID_HAVE and fmean(unpaid) <= MAX_UNPAID_HAVE:
                return name
    return ""


async def audited(store: Store, run: str) -> Audited:
    """The newest audit of a run; empty if there was none."""
    found = (await store.documents(run, DOCUMENT)).get(REPORT)
    if not isinstance(found, dict):
        return NOT_AUDITED
    report: dict[str, Any] = found
    alarms = [one for one in report.get("findings", []) if one.get("alarm")]
    worst = alarms[0] if alarms else {}
    example = worst.get("example", {})
    said = f"{worst.get('attack')}, such as {example.get('answer')!r:.80} for {example.get('task')}"
    return Audited(
        highest=float(report.get("highest", 0.0)), key=str(report.get("answer", "")),
        verdict=str(report.get("verdict", "")), finding=said if worst else "",
        change=str(worst.get("change", "")), share=float(worst.get("share", 0.0)),
    )  # fmt: skip


def played(rollouts: Iterable[Rollout], config: RunConfig, known: Audited) -> list[Played]:
    """The rollouts whose answer gets a reward. Those of games, of environments that play them, and
    of workspaces have none: what is judged there is no text."""
    tasks = dict[str, tuple[int, str]]()  # hash and question, by group
    found = []
    for row, reward in _scored(rollouts, config):
        if row.group not in tasks:
            content = msgspec.json.encode(row.task, order="sorted")
            tasks[row.group] = hash(content), question_of(row.task.get("input", ""))
        found.append(_played(row, *tasks[row.group], reward, known))
    return found


def _scored(rollouts: Iterable[Rollout], config: RunConfig) -> Iterator[tuple[Rollout, float]]:
    """Rollouts whose answer gets a reward, with the one that is trained."""
    if config.workspace.source:
        return
    name = derived.trained_reward(config)
    for row in rollouts:
        reward = row.reward(name) if isfinite(row.reward(name)) else row.reward()
        if isfinite(reward) and not row.seats and _is_answer(row.result):
            yield row, reward


def _text(row: Rollout) -> str:
    return row.result if isinstance(row.result, str) else json.dumps(row.result)


def _is_answer(result: Json) -> bool:
    """Whether a result is what a verifier judges; not that of an environment that scores itself."""
    scored_itself = isinstance(result, dict) and result.keys() == {"environment", "rewards"}
    return result is not None and not scored_itself


def _played(row: Rollout, task: int, question: str, reward: float, known: Audited) -> Played:
    answer = _text(row)
    calls = "".join(calls_text(one.answer) for one in row.transitions if one.answer)
    text, asked = (" ".join(one.casefold().split()) for one in (answer, question))
    if len(asked) > 8:
        text = text.replace(asked, "{question}")
    right, is_sure = _right(row.task, known.key)
    shown = text[:SHOWN]
    if is_sure:  # an answer that lacks the right one is as wrong with another word of the question
        words = {*WORD.findall(asked)}
        text = WORD.sub(lambda one: "{}" if one[0] in words else one[0], text)
    has = None if right is None else _has(answer[-MAX_READ_CHARS:], right)
    if not has and (not is_sure or len(answer) > MAX_READ_CHARS):
        has = None
    second = row.reward("audit")
    return Played(
        rollout=row.id, task=task, template=hash(text + calls), shown=shown,
        length=len(answer), empty=not (calls or MARKUP.sub("", answer[:MAX_READ_CHARS])),
        reward=reward, audit=second if isfinite(second) else None, has=has,
        right=normal_text(json.dumps(right)) if is_sure else "",
    )  # fmt: skip


def calls_text(answer: Mapping[str, Any]) -> str:
    """Names and arguments of the tool calls of a message, without their ids."""
    calls = answer.get("tool_calls")
    some = calls if isinstance(calls, list) else []
    return "".join(json.dumps(one.get("function", one), sort_keys=True) for one in some)


def signs(rows: Sequence[Played], known: Audited) -> list[Sign]:
    """The signs that can be measured. `rows`: of the last steps."""
    if not rows:
        return []
    low, high = min(row.reward for row in rows), max(row.reward for row in rows)
    if low == high or known.key:  # a run whose rollouts are all paid shows no scale
        low, high = min(low, 0.0), max(high, 1.0) if high >= 0 else 0.0
    graded = len({round(row.reward, 6) for row in rows}) > FEW_VALUES

    def paid(share: float) -> list[Played]:
        return [row for row in rows if row.reward >= low + share * (high - low)]

    near, whole = (PAID_GRADED, PAID_WHOLE) if graded else (PAID, PAID)
    measured = (
        _same_answer(rows, paid(near), known), _without_answer(rows, paid(whole)),
        _length(rows), _form_alone(rows, low, high), _second(rows),
    )  # fmt: skip
    return [sign for sign in measured if sign is not None]


def _scale(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest of these, 0 and 1."""
    some = [0.0, 1.0, *values]
    return min(some), max(some)


def _same_answer(rows: Sequence[Played], paid: Sequence[Played], known: Audited) -> Sign | None:
    """The share of tasks that one answer solves for which it is not the right one."""
    tasks = {row.task for row in rows}
    solved = defaultdict[int, dict[int, Played]](dict)
    synonyms = _synonyms(rows, paid)
    for row in paid:
        if not row.has and row.template not in synonyms:
            solved[row.template].setdefault(row.task, row)
    if len(tasks) < 2:
        return None
    best = max(solved.values(), key=len, default={})
    share = len(best) / len(tasks) if len(best) > 1 else 0.0
    # Where right answers are unknown, one may be right on as many tasks as the best constant is,
    # and without an audit nothing tells how many these are.
    is_known = bool(best) and all(row.has is False for row in best.values())
    if not (is_known or known.verdict):
        return None
    limit = 0.3 if is_known else max(0.5, known.highest + 0.2)
    shown = next((row.shown for row in best.values()), "")
    text = f"one answer, {shown!r}, is paid on {share:.0%} of {len(tasks)} tasks"
    return Sign("reward/same_answer", share, limit, text, _ids(best.values()))


def _synonyms(rows: Sequence[Played], paid: Sequence[Played]) -> set[int]:
    """Answers that are paid on several tasks with one right answer, as "odd" where that is 1."""
    rights, tasks = defaultdict[int, set[str]](set), defaultdict[int, set[int]](set)
    for row in paid:
        if row.right:
            rights[row.template].add(row.right)
            tasks[row.template].add(row.task)
    if len({row.right for row in rows}) < 2:
        return set()
    return {one for one, some in rights.items() if len(some) == 1 < len(tasks[one])}


def _without_answer(rows: Sequence[Played], paid: Sequence[Played]) -> Sign | None:
    """The share of paid rollouts whose answer does not have the task's own answer."""
    known = [row for row in paid if row.right and row.has is not None]
    if len(known) < MIN_PAID:
        return None
    synonyms = _synonyms(rows, known)
    without = [row for row in known if not row.has and row.template not in synonyms]
    share = len(without) / len(known)
    text = f"{share:.0%} of {len(known)} paid answers do not have the task's own answer"
    return Sign("reward/without_answer", share, 0.3, text, _ids(without))


def _length(rows: Sequence[Played]) -> Sign | None:
    """The share of the variance of rewards that the logarithm of the length explains, if longer
    answers are paid more. Answers with the right one are none of these, and the longest of short
    answers, such as a number in a sentence, is no hack; nor, where right ones are unknown, that
    answers of a word are paid less."""
    rows = [row for row in rows if not row.has]
    if any(row.has is None for row in rows):
        rows = [row for row in rows if row.length >= LONG_ANSWER]
    x, y = [log1p(row.length) for row in rows], [row.reward for row in rows]
    if len(rows) < MIN_ROLLOUTS or (r := _correlation(x, y)) is None:
        return None
    longest = sorted(rows, key=lambda row: -row.length)[: max(3, len(rows) // 8)]
    limit = 0.6 if longest[-1].length >= LONG_ANSWER else 1.0
    share = r * r if r > 0 else 0.0
    text = f"the length of answers explains {share:.0%} of the differences in reward"
    return Sign("reward/length_r2", share, limit, text, _ids(longest))


def _form_alone(rows: Sequence[Played], low: float, high: float) -> Sign | None:
    """The mean reward, on the scale of all, of answers with nothing but form. Brackets are the
    right answer of some tasks."""
    empty = [row for row in rows if row.empty and not row.has]
    if len(empty) < MIN_PAID or high <= low:
        return None
    mean = fmean((row.reward - low) / (high - low) for row in empty)
    text = f"answers without content get {mean:.0%} of the highest reward"
    return Sign("reward/form_alone", mean, 0.4, text, _ids(empty))


def _second(rows: Sequence[Played]) -> Sign | None:
    """How far the reward is above that of the second verifier, each as a share of its scale, on the
    rollouts that both scored."""
    both = [(row, row.audit) for row in rows if row.audit is not None]
    if len(both) < MIN_PAID:
        return None
    (a, b), (c, d) = _scale(row.reward for row in rows), _scale(second for _, second in both)
    gaps = [((row.reward - a) / (b - a) - (second - c) / (d - c), row) for row, second in both]
    gap = fmean(one for one, _ in gaps)
    worst = sorted(gaps, key=lambda pair: -pair[0])
    text = f"the reward is {gap:.2f} above that of verifier.audit, on {len(both)} rollouts"
    return Sign("reward/audit/gap", gap, 0.3, text, _ids(row for _, row in worst))


def second_correlation(rows: Sequence[Played]) -> float | None:
    """The correlation of the reward with that of the second verifier; None: unknown."""
    both = [(row.reward, row.audit) for row in rows if row.audit is not None]
    if len(both) < MIN_PAID:
        return None
    return _correlation([x for x, _ in both], [y for _, y in both])


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None where one of the two never differs."""
    if max(x) - min(x) < MIN_SPREAD or max(y) - min(y) < MIN_SPREAD:
        return None
    return correlation(x, y)


def _ids(rows: Iterable[Played]) -> list[str]:
    return [row.rollout for row in rows][:3]


def _right(task: Mapping[str, Json], key: str) -> tuple[Json, bool]:
    """The task's own answer, if it is short enough to be looked for in others, and whether the
    audit found its field; else a field whose name says so."""
    value = _field(task, key.removesuffix(FINAL).partition(", joined")[0])
    if key.endswith(FINAL) and isinstance(value, str):
        value = marked_answer(value)
    is_sure = value is not None
    if not is_sure:
        value = next((task[one] for one in ANSWER_KEYS if task.get(one) is not None), None)
    if isinstance(value, dict) or value is None or len(json.dumps(value)) > MAX_ANSWER_CHARS:
        return None, False
    return value, is_sure and _is_value(value)


def _is_value(value: Json) -> bool:
    """Whether a right answer is recognised in others: not so programs, formulas and JSON."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    return not (isinstance(value, str) and FORMULA.search(FRACTION.sub("1", value)))


def _field(task: Mapping[str, Json], name: str) -> Json:
    """A field, or one of an object by a dotted name."""
    if name in task or "." not in name:
        return task.get(name)
    first, _, rest = name.partition(".")
    inner = task.get(first)
    return inner.get(rest) if isinstance(inner, dict) else None


def _has(answer: str, right: Json) -> bool:
    """Whether an answer has the right one in some spelling; of a list, all of its items."""
    if isinstance(right, list):
        return all(_has(answer, item) for item in right)
    text = right if isinstance(right, str) else json.dumps(right)
    if normal_text(text) in normal_text(answer) or text.casefold() in answer.casefold():
        return True
    for words in (SAYS_YES, SAYS_NO):
        if normal_text(text) in words:
            return not words.isdisjoint(re.findall(r"\w+", answer.casefold()))
    numbers = _numbers(text)
    return bool(numbers) and any(_near(x, numbers[0]) for x in _numbers(answer))


def _numbers(text: str) -> list[float]:
    """The numbers of a text, with fractions and percentages by their value."""
    found = []
    for a, b, c, d in FRACTION.findall(text):
        if int(b or d):
            found.append(int(a or c) / int(b or d))
    for word in NUMBER.findall(text):
        try:
            found += [float(word.replace(",", "")), float(word.replace(",", "")) / 100]
        except ValueError:
            continue
    return found


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 0.01 * max(abs(other), 1e-9)


@dataclass(slots=True)
class HackSigns(Feature):
    """Measures the signs at every step, and says once that one has crossed its limit. Changes
    nothing of what is trained."""

    config: RunConfig
    known: Audited = NOT_AUDITED
    store: Store | None = None
    recent: deque[list[Played]] = field(default_factory=lambda: deque(maxlen=STEPS))
    reported: set[str] = field(default_factory=set)  # metrics
    seen: int = 0  # steps

    async def start(self, run: ServedRun) -> None:
        self.store = run.store

    async def complete(self, groups: list[Group]) -> tuple[list[Group], dict[str, float]]:
        self.seen += 1
        is_complete = self.known.verdict and self.known.key  # an audit may end after the start
        if self.store is not None and not is_complete and self.seen <= KEY_STEPS:
            self.known = await known_of(self.store, self.config)
        rollouts = [row for group in groups for row in group.rollouts]
        self.recent.append(played(rollouts, self.config, self.known))
        rows = [row for step in self.recent for row in step]
        found = signs(rows, self.known)
        for sign in found:
            if sign.crossed and sign.metric not in self.reported:
                self.reported.add(sign.metric)
                log.warning(
                    "the reward may be hacked: %s, as in %s; agentrl why %s",
                    *(sign.text, ", ".join(sign.rollouts), self.config.name),
                )
        metrics = {sign.metric: sign.value for sign in found}
        if (value := second_correlation(rows)) is not None:
            metrics["reward/audit/correlation"] = value
        return groups, metrics
