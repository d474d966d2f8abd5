"""Checks of a run's chat templates, on the first calls that it trains on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from agentrl.algorithms.data.merge import own_calls
from agentrl.algorithms.model.chat import BLIND, Chat, Codec, RequestError, Tokenizer
from agentrl.algorithms.model.templates import proposed, templates
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.core.errors import TrainingError
from agentrl.core.types import Group, Json, Transition

log = logging.getLogger("agentrl.algorithm")
THOUGHT = "</think>"
# Share of calls; smaller ones are caused by the model, for example by a token that is not text.
MIN_BREAK_SHARE = 0.1


class Break(NamedTuple):
    """A call that continues an earlier call's messages, but not its tokens."""

    earlier: Transition
    call: Transition
    tokens: int  # tokens of the earlier call that must be computed again

    @property
    def reason(self) -> str:
        answer = self.earlier.answer or {}
        if THOUGHT in str(answer.get("content")):
            return "the thinking of earlier turns"
        return "its tool calls" if answer.get("tool_calls") else "its answers"


class TemplateChecks(Feature):
    """Ends a run if its chat template drops tools, on any engine, and warns once about the cost of
    a template that does not repeat the model's tokens."""

    def __init__(self) -> None:
        self.tokenizers: dict[str, Tokenizer] = {}  # policy -> tokenizer
        self.checked: set[str] = set()  # policies with a call whose prompt contained the tools
        self.warned: set[str] = set()

    async def start(self, run: ServedRun) -> None:
        named = ((name, base.tokenizer) for base in run.models for name in base.policies)
        self.tokenizers = dict(named)

    def claimed(self, groups: Sequence[Group]) -> dict[str, float]:
        for name, tokenizer in self.tokenizers.items():
            calls = own_calls(groups, name)
            if name not in self.checked and (first := next((c for c in calls if c.tools), None)):
                self.checked.add(name)
                check_tools(tokenizer, first)
            pairs = [] if name in self.warned else list(continued(calls))
            broken = list(breaks(pairs))
            if broken and len(broken) >= MIN_BREAK_SHARE * len(pairs):
                self.warned.add(name)
                log.warning("%s", sentence(broken, len(calls), tokenizer))
        return {}


def check_tools(tokenizer: Tokenizer, call: Transition) -> None:
    """Raise TrainingError if the chat template does not show the tools of a call."""
    try:
        Chat(tokenizer, Codec(tokenizer)).encode(list(call.messages), list(call.tools))
    except RequestError as error:
        if error.body.error.code == BLIND:
            again = "the same command with --fresh; in Python fit(fresh=True)"
            raise TrainingError(f"{error}. Then start over: {again}") from None


def continued(calls: Iterable[Transition]) -> Iterator[tuple[Transition, Transition]]:
    """Pairs of calls: the messages of the second continue those of the first and its answer."""
    attempts: dict[tuple[str, str], list[Transition]] = {}
    for call in sorted((call for call in calls if call.exact), key=lambda call: call.index):
        earlier = attempts.setdefault((call.attempt, call.role), [])
        if before := next(
            (candidate for candidate in reversed(earlier) if _continues(candidate, call)), None
        ):
            yield before, call
        earlier.append(call)


def breaks(pairs: Iterable[tuple[Transition, Transition]]) -> Iterator[Break]:
    """The `continued` calls with tokens that do not continue."""
    for before, call in pairs:
        tokens = np.concatenate([before.prompt, before.completion])
        size = min(len(tokens), len(call.prompt))
        different = np.flatnonzero(tokens[:size] != call.prompt[:size])
        same = int(different[0]) if len(different) else size
        if same < len(tokens):
            yield Break(before, call, len(tokens) - same)


def _continues(earlier: Transition, call: Transition) -> bool:
    """Whether a call's messages are an earlier call's messages, its unchanged answer, and further
    messages."""
    size = len(earlier.messages)
    if len(call.messages) <= size or call.messages[:size] != earlier.messages:
        return False
    return earlier.answer is not None and _content(call.messages[size]) == _content(earlier.answer)


def _content(message: dict[str, Json]) -> tuple[str, list[Json]]:
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    return message.get("content") or "", [
        function and (function.get("name"), function.get("arguments")) for function in calls
    ]


def sentence(broken: Sequence[Break], calls: int, tokenizer: Tokenizer) -> str:
    """A sentence: where and how often prefixes break, and the cost."""
    reasons = " and ".join(sorted({item.reason for item in broken}))
    tokens, name = sum(item.tokens for item in broken), proposed(tokenizer)
    has_better = name is not None and templates()[name].text != tokenizer.chat_template
    return (
        f"The chat template does not repeat {reasons} as the model wrote them: {len(broken)} of"
        f" {calls} calls begin a branch of their own, and {tokens} tokens that were computed are"
        " computed again, in sampling and in each update."
        + (f" policy.chat_template = {name!r} repeats all that was written." if has_better else "")
    )
