"""Redaction of personal data in recorded traces, by patterns and by names of fields, with counts.
Redacted values become the name of the rule in brackets, so that a model still sees that something
was there. All texts, numbers and keys of objects are searched, including those inside JSON texts.
Rules for fields apply to data only: parts of a message, names of tools and their schemas stay
unchanged. Images are not searched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentrl.core.errors import ConfigError
from agentrl.core.types import NewRollout, Reward, Scope, Trace
from agentrl.recorded.importing import (
    BATCH,
    RUN,
    TOOL_SCHEMA,
    Imported,
    Recorded,
    add_traces,
    group_of,
    holding,
)
from agentrl.recorded.nodes import json_text, obj, parsed, python_object
from agentrl.recorded.training import rollouts
from agentrl.store import Store

PATTERNS = {
    "email": r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}",
    "phone": (
        r"(?<![\w.-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,5}\)[ .-]?)?\d{2,5}"
        r"(?:[ .-]\d{2,5}){1,4}(?![\w-])"
    ),
    "card": r"(?<!\d)(?:\d[ -]?){13,19}(?!\d)",
    "iban": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b",
    "ip": r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])",
    "key": r"\b(?:sk|pk|rk|ghp|gho|xox[abp]|AKIA|hf)[-_A-Za-z0-9]{16,200}",
}


class Rule(NamedTuple):
    """A pattern of personal data. name: as given by the user. holds: whether a match is valid, for
    example by its checksum."""

    name: str
    pattern: re.Pattern[str]
    holds: Callable[[str], bool] = bool

    @property
    def label(self) -> str:
        """The replacement of a match."""
        return f"[{self.name if self.name in PATTERNS else 'redacted'}]"


class Redactor:
    """rules: names of PATTERNS, `/REGULAR EXPRESSION/`, or else names of fields, whose values are
    redacted wherever they are. Raises ConfigError for an invalid expression."""

    def __init__(self, rules: Sequence[str]) -> None:
        self.counts: Counter[str] = Counter()
        self._fields: dict[str, str] = {}
        self._rules: list[Rule] = []
        for rule in rules:
            if rule in PATTERNS:
                compiled = Rule(rule, re.compile(PATTERNS[rule]), _CHECKS.get(rule, bool))
                self._rules.append(compiled)
            elif len(rule) > 2 and rule[0] == rule[-1] == "/":
                try:
                    self._rules.append(Rule(rule, re.compile(rule[1:-1])))
                except re.error as error:
                    raise ConfigError(
                        f"--redact {rule}: it is no regular expression: {error}"
                    ) from None
            else:
                self._fields[rule.lower()] = rule

    def applied(self, record: Recorded) -> Recorded:
        """The trace with all rules applied."""
        task = obj(record.rollout.task)
        about = obj(task.get("recorded"))  # the trace's identity
        about = about | {"trace": self._text(str(about.get("trace") or ""))}
        redacted_task = {"input": self._field("input", task.get("input")), "recorded": about}
        # Inputs that are equal after redaction must not be split into held-out and trained ones.
        rollout = replace(
            record.rollout, task=redacted_task, group=group_of(redacted_task["input"])
        )
        calls = [
            replace(
                call,
                role=self._text(call.role),
                policy=self._text(call.policy),
                messages=[self._structure(message) for message in call.messages],
                answer=self._structure(call.answer),
                tools=[self._structure(tool) for tool in call.tools],
            )
            for call in record.calls
        ]
        spans = [
            replace(span, name=self._text(span.name), attributes=self._attributes(span.attributes))
            for span in record.spans
        ]
        rewards = [self._reward(row) for row in record.rewards]
        failure = record.failure and replace(
            record.failure, message=self._text(record.failure.message)
        )
        return record._replace(
            rollout=rollout,
            calls=calls,
            spans=spans,
            rewards=rewards,
            result=self.value(record.result),
            failure=failure,
        )

    def value(self, value: Any) -> Any:
        """A JSON value, redacted."""
        if isinstance(value, str):
            return self._in_json(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self._text(str(k)): self._field(str(k), item) for k, item in value.items()}
        return self._number(value)

    def _field(self, name: str, value: Any) -> Any:
        rule = self._fields.get(name.lower())
        if rule is None or value in (None, "", [], {}):
            return self.value(value)
        self.counts[rule] += 1
        return f"[{rule}]"

    def _structure(self, value: Any) -> Any:
        """Redact a message or the definition of a tool; the names of its own fields are not
        data."""
        if isinstance(value, dict):
            return {key: self._structure(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._structure(item) for item in value]
        return self.value(value)

    def _attributes(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._structure(value) if name == TOOL_SCHEMA else self._field(name, value)
            for name, value in attributes.items()
        }

    def _reward(self, row: Reward) -> Reward:
        target = row.target
        if target and row.scope is Scope.ROLE:
            target = self._text(target)
        return replace(row, target=target, note=self._in_json(row.note))

    def _number(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        text = str(value)
        changed = self._text(text)
        return value if changed == text else changed

    def _in_json(self, text: str) -> str:
        """Redact a text. JSON, or an object in Python's notation, such as arguments, is parsed and
        redacted inside, because its letters may be escaped."""
        inner = text.strip()
        if inner[:1] in ("{", "["):
            value = python_object(inner)
            if isinstance(value, dict | list) and (changed := self.value(value)) != value:
                text = repr(changed) if isinstance(parsed(inner), str) else json_text(changed)
        return self._text(text)

    def _text(self, text: str) -> str:
        for rule in self._rules:
            text = rule.pattern.sub(partial(self._label, rule), text)
        return text

    def _label(self, rule: Rule, match: re.Match[str]) -> str:
        if not rule.holds(match[0]):
            return match[0]
        self.counts[rule.name] += 1
        return rule.label


async def redact_store(store: Store, redactor: Redactor) -> Counter[str]:
    """Redact stored traces. Each is deleted and written again under its id, so an import of the
    same files does not bring it back. Raises Conflict while an import runs."""
    async with holding(store):
        ids = [row.id async for row in rollouts(store)]
        for begin in range(0, len(ids), BATCH):
            traces = [await store.trace(id) for id in ids[begin : begin + BATCH]]
            before = [_recorded(trace) for trace in traces if trace]
            after = [redactor.applied(record) for record in before]
            changed = [new for old, new in zip(before, after, strict=True) if old != new]
            images = {id for record in changed for call in record.calls for id in call.images}
            stored_images = await store.images(RUN, sorted(images)) if images else {}
            changed = [
                record._replace(images=[stored_images[i] for c in record.calls for i in c.images])
                for record in changed
            ]
            await store.forget([record.rollout.id for record in changed])
            await add_traces(store, changed, Imported())
        await store.vacuum()
    return redactor.counts


def _recorded(trace: Trace) -> Recorded:
    """A stored trace as it was imported."""
    row = trace.rollout
    rollout = NewRollout(id=row.id, run=row.run, group=row.group, index=row.index, task=row.task)
    calls = [replace(call, attempt="") for call in trace.transitions]
    spans = [replace(span, attempt="") for span in trace.spans]
    return Recorded(rollout, calls, spans, row.rewards, [], row.result, row.failure)


def _is_card(text: str) -> bool:
    """Luhn's checksum, which most other long numbers fail."""
    digits = [int(letter) for letter in text if letter.isdigit()]
    doubled = [d if n % 2 == 0 else d * 2 - 9 * (d > 4) for n, d in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0 and len(set(digits)) > 1


def _is_phone(text: str) -> bool:
    digits = sum(letter.isdigit() for letter in text)
    return 7 <= digits <= 15


_CHECKS: dict[str, Callable[[str], bool]] = {"card": _is_card, "phone": _is_phone}
