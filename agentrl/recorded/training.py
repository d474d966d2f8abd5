"""Training data from recorded traces: demonstrations by role, pairs, tasks, and answers of tools.
Only traces with good feedback are imitated (`Where`). Tasks are distinct first inputs; the latest
of them are held out with all their traces, so nothing leaks into the training data. Everything that
is left out is counted, with the reason.
"""

from __future__ import annotations

import operator
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from agentrl.algorithms.conversations import is_unfinished, message_key, with_calls
from agentrl.core.errors import ConfigError
from agentrl.core.images import digests, with_data_urls
from agentrl.core.otlp import TOOL_NAME
from agentrl.core.types import Rollout, Scope, Span, Trace, Transition
from agentrl.recorded.importing import RUN, normalised
from agentrl.recorded.messages import content_text
from agentrl.recorded.nodes import CUT, Object, obj, parsed
from agentrl.store import Store

PAGE = 256  # rollouts per read
HELD_OUT = 0.2  # share of the tasks, the latest ones
MIN_HELD_OUT = 5  # tasks; with fewer none is held out
MIN_TEXT = 20  # minimum characters of a text that identifies a task; greetings are shorter
# Words in names of feedback for which 1 is good for every task; for "toxic", for example, it is
# not.
GOOD = re.compile(
    r"accepted|accuracy|correct(ness)?|feedback|good|helpful(ness)?|liked?|ok|outcome|pass(ed)?"
    r"|quality|rating|resolved|reward|score|solved|success(ful)?|thumbs|up"
)
NEUTRAL = ("answer", "human", "is", "task", "the", "user", "was")
OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*(.+?)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?)\s*")


class Condition(NamedTuple):
    """A condition on feedback of one name."""

    name: str
    operator: str  # one of OPERATORS
    bound: float

    def holds(self, value: float) -> bool:
        """Whether a value of the feedback satisfies the condition."""
        return bool(OPERATORS[self.operator](value, self.bound))

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.bound:g}"


class Where(NamedTuple):
    """Which traces are good: conditions on feedback, all of which must hold."""

    conditions: tuple[Condition, ...]

    @classmethod
    def read(cls, texts: Sequence[str]) -> Where:
        """Parse conditions such as `correct>=1`. Raises ConfigError."""
        conditions = []
        for text in texts:
            match = CONDITION.fullmatch(text)
            if match is None:
                raise ConfigError(
                    f"--where {text!r}: write the name of feedback, one of"
                    f" {' '.join(OPERATORS)}, and a number, such as 'correct>=1'"
                )
            conditions.append(Condition(match[1], match[2], float(match[3])))
        return cls(tuple(conditions))

    def holds(self, rollout: Rollout) -> bool | None:
        """Whether a trace is good; None if feedback for a condition is missing. Feedback on a role
        or call counts, too; if several people gave feedback, all of it must satisfy the
        condition."""
        complete = True
        for condition in self.conditions:
            values = [row.value for row in rollout.rewards if row.name == condition.name]
            if not values:
                complete = False
            elif not all(map(condition.holds, values)):
                return False
        return True if complete and self.conditions else None

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))


async def usual_where(store: Store) -> Where:
    """The default condition: the traces must have feedback of a single name on whole traces, with
    values 0 and 1 only, and a name for which 1 is good. Raises ConfigError otherwise."""
    values: dict[str, set[float]] = defaultdict(set)
    async for row in rollouts(store):
        for reward in row.rewards:
            if reward.scope is Scope.ROLLOUT:
                values[reward.name].add(reward.value)
    if len(values) == 1:
        ((name, seen_values),) = values.items()
        words = {*re.findall(r"[a-z]+", name.lower())}.difference(NEUTRAL)
        if seen_values <= {0.0, 1.0} and words and all(map(GOOD.fullmatch, words)):
            return Where((Condition(name, ">=", 1.0),))
    listed = ", ".join(f"{name} ({min(v):g} to {max(v):g})" for name, v in sorted(values.items()))
    if not listed:
        raise ConfigError(
            "no trace has feedback with a number, so nothing tells which to imitate; import the"
            " scores, too, or judge the traces and give --where NAME>=NUMBER"
        )
    raise ConfigError(f"which traces are good? Give --where, such as 'NAME>=1', of: {listed}")


async def rollouts(store: Store, run: str = RUN) -> AsyncIterator[Rollout]:
    """The rollouts of a run, by default the imported traces, without their calls."""
    after = None
    while page := await store.rollouts(run, after=after, limit=PAGE):
        for row in page:
            yield row
        after = page[-1].id


async def traces(store: Store, run: str = RUN) -> AsyncIterator[Trace]:
    """The traces of a run, by default the imported ones."""
    async for row in rollouts(store, run):
        if row.attempt and (trace := await store.trace(row.id)):
            yield trace


def started(row: Rollout) -> float:
    """When a trace began, in unix seconds; 0: unknown."""
    return float(obj(obj(row.task).get("recorded")).get("started") or 0.0)


@dataclass(slots=True)
class Split:
    """Groups of traces with the same first input: those to train on, and those held out."""

    train: list[str] = field(default_factory=list)  # in order of their first traces
    heldout: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)  # normalised, of the inputs of only the latter


async def split_of(store: Store, share: float = HELD_OUT) -> Split:
    """Split the tasks: the latest, by their first trace, are held out. Without times they are in
    the order of their ids."""
    first: dict[str, tuple[float, str]] = {}
    texts: dict[str, set[str]] = {}
    async for row in rollouts(store):
        at = (started(row), row.id)
        first[row.group] = min(first.get(row.group, at), at)
        texts.setdefault(row.group, {*map(normalised, _texts(obj(row.task).get("input")))})
    ordered = sorted(first, key=lambda group: first[group])
    held = max(1, round(len(ordered) * share)) if len(ordered) >= MIN_HELD_OUT else 0
    split = Split(ordered[: len(ordered) - held], ordered[len(ordered) - held :])
    split.texts = {text for group in split.heldout for text in texts[group]}
    for group in split.train:
        split.texts -= texts[group]
    return split


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value that are long enough to identify a task."""
    if isinstance(value, str) and len(value) >= MIN_TEXT:
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _shows(trace: Trace, texts: set[str]) -> bool:
    """Whether a user message contains one of the texts, for example in an earlier turn of a
    thread."""
    texts_of_users = (m.get("content") for call in trace.transitions for m in call.messages
            if m.get("role") == "user")  # fmt: skip
    return bool(texts) and any(
        normalised(text) in texts for item in texts_of_users for text in _texts(item)
    )


@dataclass(slots=True)
class Training:
    """The training data. left_out: reason -> number of traces or calls."""

    demonstrations: list[Object] = field(default_factory=list)
    pairs: list[Object] = field(default_factory=list)
    tasks: list[Object] = field(default_factory=list)
    heldout: list[Object] = field(default_factory=list)
    tools: list[Object] = field(default_factory=list)
    definitions: dict[str, Object] = field(default_factory=dict)  # tool name -> definition
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def roles(self) -> list[str]:
        """The roles with demonstrations, the most frequent first."""
        return [
            role
            for role, _ in Counter(str(row["role"]) for row in self.demonstrations).most_common()
        ]


async def training_of(store: Store, where: Where) -> Training:
    """Collect the training data from the traces of a store."""
    training, split = Training(), await split_of(store)
    held, seen = {*split.heldout}, set[bytes]()
    tasks: dict[str, Object] = {}
    begun: dict[str, float] = {}
    prompts: dict[bytes, list[tuple[bool | None, Transition]]] = defaultdict(list)
    answers: dict[bytes, Object] = {}
    group = ""
    async for trace in traces(store):  # group by group
        row, good = trace.rollout, where.holds(trace.rollout)
        if row.group != group:
            training.pairs += _compared(prompts)
            group, prompts = row.group, defaultdict(list)
        _collect_tools(trace, answers, training.definitions)
        _add_task(tasks, begun, row, good)
        if row.group in held:
            training.left_out["traces of held-out tasks"] += 1
            continue
        if _shows(trace, split.texts):
            training.left_out["traces that show a held-out task"] += 1
            continue
        for call in trace.transitions:
            if call.answer is not None:
                prompts[_prompt_key(call)].append((good, call))
        training.pairs += _corrections(trace)
        training.pairs += _retries(trace)
        if good is not True:
            training.left_out[
                "traces without the feedback" if good is None else f"traces that are not {where}"
            ] += 1
            continue
        for conversation in _demonstrations(trace, training.left_out):
            if names := digests(conversation["messages"]):
                conversation["messages"] = with_data_urls(
                    conversation["messages"], await store.images(RUN, names)
                )
            keys = _answer_keys(conversation)
            conversation["imitate"] = [index for index, key in keys.items() if key not in seen]
            seen.update(keys.values())
            if not conversation["imitate"]:
                training.left_out["conversations that are there already"] += 1
                continue
            if again := len(keys) - len(conversation["imitate"]):
                training.left_out["answers with which another conversation begins, too"] += again
            training.demonstrations.append(conversation)
    training.pairs += _compared(prompts)
    training.pairs = [
        *{msgspec.json.encode(pair, order="sorted"): pair for pair in training.pairs}.values()
    ]
    training.tools = [*answers.values()]
    for groups, rows in ((split.train, training.tasks), (split.heldout, training.heldout)):
        for group in groups:
            task = tasks.get(group, {})
            if task.get("input") in (None, "", {}, []):
                training.left_out["tasks without an input"] += 1
            elif "expected" not in task:
                training.left_out[
                    "tasks without a good trace, hence without an expected result"
                ] += 1
            else:
                rows.append(task)
    return training


def _add_task(
    tasks: dict[str, Object], begun: dict[str, float], row: Rollout, good: bool | None
) -> None:
    """Add a task; its input is that of its first trace."""
    task = tasks.setdefault(row.group, {"id": row.group[:12]})
    if started(row) < begun.get(row.group, float("inf")):
        begun[row.group], task["input"] = started(row), obj(row.task).get("input")
    if good and row.result is not None:
        task.setdefault("expected", row.result)


def _demonstrations(trace: Trace, left_out: Counter[str]) -> Iterator[Object]:
    """The conversations of each role. A conversation with a truncated or failed answer is left out
    completely, because its other answers led there."""
    failed = {span.id for span in trace.spans if not span.ok}
    by_role: dict[str, list[Transition]] = defaultdict(list)
    for call in trace.transitions:
        by_role[call.role].append(call)
    for role, calls in by_role.items():
        for conversation, its_calls in with_calls(calls):
            if why := _defect(conversation, its_calls, failed):
                left_out[why] += 1
                continue
            yield {"role": role, **conversation, "trace": trace.rollout.id}


def _defect(conversation: Object, calls: Sequence[Transition], failed: set[str]) -> str:
    """Why a conversation is not imitated; "": it is."""
    texts = str(conversation["messages"])
    if any(map(is_unfinished, calls)):
        return "conversations with an answer that was cut short"
    if CUT in texts:
        return "conversations with a text that was cut off in the import"
    if any(call.span in failed for call in calls):
        return "conversations with a call that failed"
    imitated = [conversation["messages"][index] for index in conversation["imitate"]]
    if not all(message.get("content") or message.get("tool_calls") for message in imitated):
        return "conversations with an empty answer"
    calls_made = [c for message in imitated for c in message.get("tool_calls") or ()]
    if not all(isinstance(parsed(c["function"].get("arguments")), dict) for c in calls_made):
        return "conversations that call a tool with arguments that are no JSON object"
    if not conversation["tools"] and any(message.get("tool_calls") for message in imitated):
        return "conversations that call tools whose definitions were not recorded"
    return ""


def _answer_keys(conversation: Object) -> dict[int, bytes]:
    """The digest of each imitated answer and of all messages before it, by index. It recognises the
    answers that a forked or resumed session repeats."""
    digest = sha256(
        msgspec.json.encode([conversation["role"], conversation["tools"]], order="sorted")
    )
    keys: dict[int, bytes] = {}
    for index, message in enumerate(conversation["messages"]):
        digest.update(msgspec.json.encode(message_key(message), order="sorted"))
        if index in conversation["imitate"]:
            keys[index] = digest.digest()
    return keys


def _prompt_key(call: Transition) -> bytes:
    return msgspec.json.encode(
        [call.role, [*map(message_key, call.messages)], call.tools], order="sorted"
    )


def _row(call: Transition, chosen: Object, rejected: Object, why: str) -> Object:
    """A pair as `agentrl data import` and TRL read it."""
    row: Object = {
        "prompt": call.messages,
        "chosen": [_as_row(chosen)],
        "rejected": [_as_row(rejected)],
        "role": call.role,
        "why": why,
    }
    return row | ({"tools": call.tools} if call.tools else {})


def _as_row(answer: Object) -> Object:
    return {key: value for key, value in answer.items() if value is not None or key == "content"}


def _compared(prompts: dict[bytes, list[tuple[bool | None, Transition]]]) -> Iterator[Object]:
    """Pairs of answers to the same prompt, one from a good trace and one from a bad one."""
    for calls in prompts.values():
        good = [call for is_good, call in calls if is_good is True]
        bad = [call for is_good, call in calls if is_good is False]
        better = {_answer_key(call): call for call in good}
        worse = {_answer_key(call): call for call in bad if _answer_key(call) not in better}
        if choices := [*better.values()]:  # all pairs would be too many
            for number, rejected in enumerate(worse.values()):
                chosen = choices[number % len(choices)]
                yield _row(chosen, obj(chosen.answer), obj(rejected.answer), "feedback")


def _answer_key(call: Transition) -> str:
    return str(message_key(obj(call.answer)))


def _retries(trace: Trace) -> Iterator[Object]:
    """Pairs of calls with the same prompt: the first failed, and its repetition succeeded."""
    failed = _failed_steps(trace.spans)
    earlier: dict[bytes, Transition] = {}
    for call in trace.transitions:
        key = _prompt_key(call)
        before = earlier.get(key)
        if before and before.span in failed and call.span not in failed:
            answers = obj(before.answer), obj(call.answer)
            if all(answers) and _answer_key(before) != _answer_key(call):
                yield _row(call, answers[1], answers[0], "retry")
        earlier[key] = call


def _failed_steps(spans: Sequence[Span]) -> set[str | None]:
    """Model calls that failed, and those directly before a failed tool of the same parent."""
    ordered = sorted(spans, key=lambda span: span.start)
    failed: set[str | None] = {span.id for span in ordered if span.kind == "llm" and not span.ok}
    last: dict[str | None, str] = {}
    for span in ordered:
        if span.kind == "llm":
            last[span.parent] = span.id
        elif span.kind == "tool" and not span.ok and span.parent in last:
            failed.add(last[span.parent])
    return failed


def _corrections(trace: Trace) -> Iterator[Object]:
    """Pairs of answers and their corrections by people. A correction of a whole trace applies to
    its last call if the trace ended with that call's answer."""
    by_span = {call.span: call for call in trace.transitions}
    for span in trace.spans:
        for key, value in span.attributes.items():
            if key.startswith("feedback.") and key.endswith(".correction"):
                call = by_span.get(span.id) or (_final_call(trace) if span.parent is None else None)
                text = (
                    obj(value).get("content")
                    or obj(value).get("output")
                    or (value if isinstance(value, str) else None)
                )
                if (
                    call
                    and call.answer
                    and isinstance(text, str)
                    and text != call.answer.get("content")
                ):
                    yield _row(call, {"role": "assistant", "content": text}, call.answer, "edit")


def _final_call(trace: Trace) -> Transition | None:
    for call in trace.transitions[-1:]:
        text = obj(call.answer).get("content")
        result = trace.rollout.result
        if text and text in ([*result.values()] if isinstance(result, dict) else [result]):
            return call
    return None


def _collect_tools(
    trace: Trace, answers: dict[bytes, Object], definitions: dict[str, Object]
) -> None:
    """Collect the answers of tools from messages; for tools without messages, from spans."""
    answered, counted = set[str](), set[tuple[str, int]]()
    for call in trace.transitions:
        for tool in call.tools:
            definitions.setdefault(str(obj(tool.get("function")).get("name")), tool)
        called: dict[str, Object] = {}
        for place, message in enumerate(call.messages):
            for tool_call in message.get("tool_calls") or ():
                called[str(tool_call.get("id"))] = obj(tool_call.get("function"))
            if message.get("role") == "tool" and (
                function := called.pop(str(message.get("tool_call_id")), None)
            ):
                answered.add(str(function.get("name")))
                if (where := (call.role, place)) in counted:
                    continue  # a message that the agent has sent again
                counted.add(where)
                _answered(
                    answers,
                    function.get("name"),
                    parsed(function.get("arguments")),
                    content_text(message.get("content")),
                    trace,
                )
    for span in trace.spans:
        name = span.attributes.get(TOOL_NAME)
        if (
            span.kind == "tool"
            and name
            and name not in answered
            and span.ok
            and "gen_ai.tool.call.result" in span.attributes
        ):
            _answered(
                answers,
                name,
                span.attributes.get("gen_ai.tool.call.arguments"),
                span.attributes["gen_ai.tool.call.result"],
                trace,
            )


def _answered(
    answers: dict[bytes, Object], name: Any, arguments: Any, result: Any, trace: Trace
) -> None:
    key = msgspec.json.encode([name, arguments, result], order="sorted")
    row = answers.setdefault(
        key, {"name": name, "arguments": arguments, "result": result, "times": 0}
    )
    row["traces"] = [*{*row.get("traces", [])[:2], trace.rollout.id}][:3]
    row["times"] += 1
