"""Signs that a policy hacks its reward, in the rollouts of the last steps.

`agentrl audit` attacks a verifier before a policy does; a policy may find weaknesses that it
missed, and then gets rewards for wrong answers. Each sign is a number between 0 and 1, a metric of
every step, and has a limit that depends on the result of the run's audit.
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
STEPS = 4  # last steps that are analysed together
MIN_ROLLOUTS = 16  # for a correlation
MIN_SPREAD = 1e-6  # standard deviation that both variables of a correlation need
MIN_PAID = 4  # rollouts of a share
FEW_VALUES = 4  # more distinct reward values indicate a graded reward, such as a distance
# Share of the highest reward from which an answer counts as rewarded.
PAID, PAID_GRADED, PAID_WHOLE = 0.75, 0.9, 0.9999
LONG_ANSWER = 40  # characters from which a length bonus is possible
MAX_ANSWER_CHARS = 60  # characters of a right answer that is searched in others
MAX_READ_CHARS = 4000  # characters at the end of an answer that are searched
SHOWN = 60  # characters of an answer
FIRST_ROLLOUTS = 256  # first rollouts of a run, used to find the field with the right answer
KEY_STEPS = 8  # steps in which the search for the field is tried
MIN_EACH = 8  # rollouts with and without a reward, needed to find the field
MIN_PAID_HAVE, MAX_UNPAID_HAVE = 0.75, 0.25  # shares of answers with the value of that field
DOCUMENT, REPORT = "audit", "report"  # documents of the store, written by `agentrl.audit`
# Suffix for a field whose text ends with a marked answer, such as "#### 72".
FINAL = ", its final answer"
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
# Characters of programs and formulas, which have many spellings.
FORMULA = re.compile(r"[(){}\[\];=<>*^|`\n]")
SAYS_YES, SAYS_NO = {"yes", "true", "correct", "right"}, {"no", "false", "incorrect", "wrong"}


@dataclass(frozen=True, slots=True)
class Played:
    """A scored rollout, with the features of its answer that the signs need. Rows of several steps
    are kept, so long texts are not."""

    rollout: str
    task: int  # id of the task
    template: int  # id of the answer and tool calls, with text of the question replaced
    shown: str  # the beginning of the answer
    length: int  # characters of the answer
    empty: bool  # whether the answer is form without content
    reward: float
    audit: float | None  # reward of a second verifier
    has: bool | None  # whether it contains the task's right answer; None: unknown
    right: str = ""  # the task's right answer, if known


@dataclass(frozen=True, slots=True)
class Sign:
    """One sign, with rollouts that show it."""

    metric: str
    value: float
    limit: float
    text: str  # part of a sentence: the rewarded behaviour
    rollouts: Sequence[str] = ()

    @property
    def crossed(self) -> bool:
        return self.value > self.limit


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of a run's audit. highest: the share of tasks on which the best constant answer
    was rewarded; key: the tasks' field with the right answer; empty: unknown."""

    highest: float = 0.0
    key: str = ""
    verdict: str = ""
    finding: str = ""  # the worst finding, as text
    change: str = ""
    share: float = 0.0  # share of tasks on which it was rewarded


NOT_AUDITED = Audited()


async def known_of(store: Store, config: RunConfig) -> Audited:
    """The result of a run's audit. If it did not find the field with the right answer, or did not
    end in time, the field is derived from the run's first rollouts."""
    audit = await audited(store, config.name)
    if audit.key:
        return audit
    rows = await store.rollouts(config.name, purpose=Purpose.TRAIN, limit=FIRST_ROLLOUTS)
    return replace(audit, key=answer_key(rows, config))


def answer_key(rollouts: Iterable[Rollout], config: RunConfig) -> str:
    """The field of tasks whose value is in nearly all rewarded answers and in few others; else
    empty."""
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
    document = (await store.documents(run, DOCUMENT)).get(REPORT)
    if not isinstance(document, dict):
        return NOT_AUDITED
    report: dict[str, Any] = document
    alarms = [finding for finding in report.get("findings", []) if finding.get("alarm")]
    worst = alarms[0] if alarms else {}
    example = worst.get("example", {})
    worst_finding = (
        f"{worst.get('attack')}, such as {example.get('answer')!r:.80} for {example.get('task')}"
    )
    return Audited(
        highest=float(report.get("highest", 0.0)), key=str(report.get("answer", "")),
        verdict=str(report.get("verdict", "")), finding=worst_finding if worst else "",
        change=str(worst.get("change", "")), share=float(worst.get("share", 0.0)),
    )  # fmt: skip


def played(rollouts: Iterable[Rollout], config: RunConfig, audit: Audited) -> list[Played]:
    """The rollouts with a rewarded answer. Games, environments that play their rollouts, and
    workspaces have none, because no text is judged there."""
    tasks = dict[str, tuple[int, str]]()  # hash and question, by group
    played_rows = []
    for row, reward in _scored(rollouts, config):
        if row.group not in tasks:
            content = msgspec.json.encode(row.task, order="sorted")
            tasks[row.group] = hash(content), question_of(row.task.get("input", ""))
        played_rows.append(_played(row, *tasks[row.group], reward, audit))
    return played_rows


def _scored(rollouts: Iterable[Rollout], config: RunConfig) -> Iterator[tuple[Rollout, float]]:
    """Rollouts with a judged answer, with the trained reward."""
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
    """Whether a verifier judges the result; False for an environment that scores itself."""
    scored_itself = isinstance(result, dict) and result.keys() == {"environment", "rewards"}
    return result is not None and not scored_itself


def _played(row: Rollout, task: int, question: str, reward: float, audit: Audited) -> Played:
    answer = _text(row)
    calls = "".join(calls_text(call.answer) for call in row.transitions if call.answer)
    text, question_text = (" ".join(part.casefold().split()) for part in (answer, question))
    if len(question_text) > 8:
        text = text.replace(question_text, "{question}")
    right, is_sure = _right(row.task, audit.key)
    shown = text[:SHOWN]
    if is_sure:  # a wrong answer stays wrong with another word of the question
        words = {*WORD.findall(question_text)}
        text = WORD.sub(lambda match: "{}" if match[0] in words else match[0], text)
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
    listed = calls if isinstance(calls, list) else []
    return "".join(json.dumps(call.get("function", call), sort_keys=True) for call in listed)


def signs(rows: Sequence[Played], audit: Audited) -> list[Sign]:
    """The signs that can be measured. `rows`: of the last steps."""
    if not rows:
        return []
    low, high = min(row.reward for row in rows), max(row.reward for row in rows)
    if low == high or audit.key:  # without unrewarded rollouts the scale is unknown
        low, high = min(low, 0.0), max(high, 1.0) if high >= 0 else 0.0
    graded = len({round(row.reward, 6) for row in rows}) > FEW_VALUES

    def paid(share: float) -> list[Played]:
        return [row for row in rows if row.reward >= low + share * (high - low)]

    near, right = (PAID_GRADED, PAID_WHOLE) if graded else (PAID, PAID)
    measured = (
        _same_answer(rows, paid(near), audit), _without_answer(rows, paid(right)),
        _length(rows), _form_alone(rows, low, high), _second(rows),
    )  # fmt: skip
    return [sign for sign in measured if sign is not None]


def _scale(values: Iterable[float]) -> tuple[float, float]:
    """The minimum and maximum of the rewards, 0 and 1."""
    all_values = [0.0, 1.0, *values]
    return min(all_values), max(all_values)


def _same_answer(rows: Sequence[Played], paid: Sequence[Played], audit: Audited) -> Sign | None:
    """The share of tasks that a single answer solves although it is not their right answer."""
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
    # If right answers are unknown, a single answer may be right on as many tasks as the best
    # constant, and without an audit that number is unknown.
    is_known = bool(best) and all(row.has is False for row in best.values())
    if not (is_known or audit.verdict):
        return None
    limit = 0.3 if is_known else max(0.5, audit.highest + 0.2)
    shown = next((row.shown for row in best.values()), "")
    text = f"one answer, {shown!r}, is paid on {share:.0%} of {len(tasks)} tasks"
    return Sign("reward/same_answer", share, limit, text, _ids(best.values()))


def _synonyms(rows: Sequence[Played], paid: Sequence[Played]) -> set[int]:
    """Answers that are rewarded on several tasks with the same right answer, such as "odd" for
    1."""
    rights, tasks = defaultdict[int, set[str]](set), defaultdict[int, set[int]](set)
    for row in paid:
        if row.right:
            rights[row.template].add(row.right)
            tasks[row.template].add(row.task)
    if len({row.right for row in rows}) < 2:
        return set()
    return {
        template
        for template, rights_of_one in rights.items()
        if len(rights_of_one) == 1 < len(tasks[template])
    }


def _without_answer(rows: Sequence[Played], paid: Sequence[Played]) -> Sign | None:
    """The share of rewarded rollouts with an answer that does not contain the task's right
    answer."""
    judged = [row for row in paid if row.right and row.has is not None]
    if len(judged) < MIN_PAID:
        return None
    synonyms = _synonyms(rows, judged)
    without = [row for row in judged if not row.has and row.template not in synonyms]
    share = len(without) / len(judged)
    text = f"{share:.0%} of {len(judged)} paid answers do not have the task's own answer"
    return Sign("reward/without_answer", share, 0.3, text, _ids(without))


def _length(rows: Sequence[Played]) -> Sign | None:
    """The share of the variance of rewards that the logarithm of the length explains, if longer
    answers get more. Answers that contain the right one are left out. Differences between short
    answers, such as a number in a sentence, are not a hack; nor, if right answers are unknown, that
    one-word answers get less."""
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
    """The mean reward, on the scale of all rewards, of answers that are form without content. For
    some tasks brackets are the right answer."""
    empty = [row for row in rows if row.empty and not row.has]
    if len(empty) < MIN_PAID or high <= low:
        return None
    mean = fmean((row.reward - low) / (high - low) for row in empty)
    text = f"answers without content get {mean:.0%} of the highest reward"
    return Sign("reward/form_alone", mean, 0.4, text, _ids(empty))


def _second(rows: Sequence[Played]) -> Sign | None:
    """The reward minus that of the second verifier, each relative to its scale, on the rollouts
    that both have scored."""
    scored_twice = [(row, row.audit) for row in rows if row.audit is not None]
    if len(scored_twice) < MIN_PAID:
        return None
    (a, b), (c, d) = (
        _scale(row.reward for row in rows),
        _scale(second for _, second in scored_twice),
    )
    gaps = [
        ((row.reward - a) / (b - a) - (second - c) / (d - c), row) for row, second in scored_twice
    ]
    gap = fmean(gap_of_row for gap_of_row, _ in gaps)
    worst = sorted(gaps, key=lambda pair: -pair[0])
    text = f"the reward is {gap:.2f} above that of verifier.audit, on {len(scored_twice)} rollouts"
    return Sign("reward/audit/gap", gap, 0.3, text, _ids(row for _, row in worst))


def second_correlation(rows: Sequence[Played]) -> float | None:
    """The correlation of the reward with that of the second verifier; None: unknown."""
    scored_twice = [(row.reward, row.audit) for row in rows if row.audit is not None]
    if len(scored_twice) < MIN_PAID:
        return None
    return _correlation([x for x, _ in scored_twice], [y for _, y in scored_twice])


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson correlation; None if either variable is constant."""
    if max(x) - min(x) < MIN_SPREAD or max(y) - min(y) < MIN_SPREAD:
        return None
    return correlation(x, y)


def _ids(rows: Iterable[Played]) -> list[str]:
    return [row.rollout for row in rows][:3]


def _right(task: Mapping[str, Json], key: str) -> tuple[Json, bool]:
    """The task's right answer, if it is short enough to be searched in others, and whether the
    audit found its field; else from a field with a typical name."""
    value = _field(task, key.removesuffix(FINAL).partition(", joined")[0])
    if key.endswith(FINAL) and isinstance(value, str):
        value = marked_answer(value)
    is_sure = value is not None
    if not is_sure:
        value = next((task[name] for name in ANSWER_KEYS if task.get(name) is not None), None)
    if isinstance(value, dict) or value is None or len(json.dumps(value)) > MAX_ANSWER_CHARS:
        return None, False
    return value, is_sure and _is_value(value)


def _is_value(value: Json) -> bool:
    """Whether a right answer is recognised in others: not so programs, formulas and JSON."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    return not (isinstance(value, str) and FORMULA.search(FRACTION.sub("1", value)))


def _field(task: Mapping[str, Json], name: str) -> Json:
    """A field by its name; dotted names are fields of objects."""
    if name in task or "." not in name:
        return task.get(name)
    first, _, inner_name = name.partition(".")
    inner = task.get(first)
    return inner.get(inner_name) if isinstance(inner, dict) else None


def _has(answer: str, right: Json) -> bool:
    """Whether an answer contains the right one in some spelling; for a list, all of its items."""
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
    numbers = []
    for a, b, c, d in FRACTION.findall(text):
        if int(b or d):
            numbers.append(int(a or c) / int(b or d))
    for word in NUMBER.findall(text):
        try:
            numbers += [float(word.replace(",", "")), float(word.replace(",", "")) / 100]
        except ValueError:
            continue
    return numbers


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.01 * max(abs(b), 1e-9)


@dataclass(slots=True)
class HackSigns(Feature):
    """Measures the signs at every step, and warns once when a sign has crossed its limit. Does not
    affect training."""

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
        measured = signs(rows, self.known)
        for sign in measured:
            if sign.crossed and sign.metric not in self.reported:
                self.reported.add(sign.metric)
                log.warning(
                    "the reward may be hacked: %s, as in %s; agentrl why %s",
                    *(sign.text, ", ".join(sign.rollouts), self.config.name),
                )
        metrics = {sign.metric: sign.value for sign in measured}
        if (value := second_correlation(rows)) is not None:
            metrics["reward/audit/correlation"] = value
        return groups, metrics
