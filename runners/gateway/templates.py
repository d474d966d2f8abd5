"""Probes which message roles a policy's chat template renders, and adapts messages to them.

Templates silently drop roles that they do not know, and the policy would be trained on a prompt
without its instructions. The policy server renders prompts, so it is asked to tokenize probes: a
text is in the prompt if it makes it longer. Invariant: messages that a template renders are sent
unchanged; texts that it renders in no role are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web

from agentrl.base.processes import log_phase
from agentrl.runners.dialects.base import UntranslatableError, joined
from agentrl.runners.dialects.conversation import Body
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.prompt_size import RefusedPromptError, prompt_size
from agentrl.runners.gateway.refusals import UpstreamError
from agentrl.runners.gateway.upstream import Messages, Route, Upstream

log = logging.getLogger("agentrl.runner")
Count = Callable[[Messages], Awaitable[int | None]]  # prompt tokens; None: messages refused
WORDS = [str(number) for number in range(100, 164)]  # each at least one token in any tokenizer
INSTRUCTIONS = ("system", "developer")
USER, CALL = {"role": "user", "content": "1"}, {"name": "f", "arguments": "{}"}
CALLS = [{"id": "call_1", "type": "function", "function": CALL}]
CALLED: Body = {"role": "assistant", "content": None, "tool_calls": CALLS}

# Kind of text -> functions that put a text of this kind into a probe conversation.
LEADING, LATER = "instructions at the beginning", "instructions after the beginning"
BESIDE, RESULT = "text beside a tool call", "the result of a tool"
PROBES: dict[str, list[Callable[[str], Messages]]] = {
    LEADING: [
        lambda said: [_by("developer", said), _by("developer", "1"), USER],
        lambda said: [_by("system", "1"), _by("developer", said), USER],
        lambda said: [_by("system", said), USER],
    ],
    LATER: [
        lambda said: [USER, _by("developer", said), USER],
        lambda said: [USER, _by("system", said), USER],
    ],
    BESIDE: [lambda said: [USER, CALLED | {"content": said}, _result("1"), USER]],
    RESULT: [lambda said: [USER, CALLED, _result(said), USER]],
}


@dataclass(frozen=True, slots=True)
class PromptRule:
    """Rewrites the messages of an agent for a policy's chat template."""

    leading: str = ""  # role of the single message for all leading instructions; empty: unchanged
    later: str = ""  # role of later instructions; empty: unchanged
    split: bool = False  # text next to tool calls becomes a separate message before them
    lost: frozenset[str] = frozenset()  # kinds of text that the template never renders

    def apply(self, messages: Messages) -> Messages:
        """Return adapted messages. Raises UntranslatableError for a text that would be lost."""
        if self == PromptRule():
            return messages
        roles = [message.get("role") for message in messages]
        start = next((i for i, role in enumerate(roles) if role not in INSTRUCTIONS), len(roles))
        made = messages[:start]
        if self.leading and roles[:start] not in ([], [self.leading]):
            parts = [_text(message, index) for index, message in enumerate(made)]
            made = [_by(self.leading, "\n\n".join(filter(None, parts)))]
        for index, message in enumerate(messages):
            if (what := _what(message, index < start)) in self.lost and _text(message, index):
                raise UntranslatableError(
                    f"messages[{index}]",
                    f"the chat template of the policy does not show {what}; choose a model whose"
                    ' template does, or leave it out with policy.unsupported_roles = "as_sent"',
                )
            if index >= start and self.later and what == LATER:
                message = message | {"role": self.later}
            if index >= start and self.split and what == BESIDE:
                made.append({k: v for k, v in message.items() if k != "tool_calls"})
                message = message | {"content": None}
            made += [message] if index >= start else []
        return made

    def describe(self) -> str:
        said = [f"{LEADING} become one {self.leading} message"] if self.leading else []
        said += [f"{LATER} become {self.later} messages"] if self.later else []
        said += [f"{BESIDE} becomes a message before it"] if self.split else []
        said += [f"{what} is refused" for what in sorted(self.lost)]
        return "; ".join(said) or "all roles as they are sent"


class ChatTemplates(Feature):
    """The feature: messages are adapted to the chat template of the policy that they go to, by a
    rule that the first call to each server finds."""

    def __init__(self) -> None:
        self._rules: dict[str, asyncio.Task[PromptRule]] = {}  # by base URL

    def add_to(self, app: web.Application, upstream: Upstream) -> None:
        upstream.adapters.append(partial(self._adapt, upstream))

    async def _adapt(self, upstream: Upstream, route: Route, messages: Messages) -> Messages:
        finding = self._rules.get(route.base_url)
        if finding is None or (finding.done() and (finding.cancelled() or finding.exception())):
            finding = asyncio.create_task(_rule_of(upstream, route))
            self._rules[route.base_url] = finding
        return (await asyncio.shield(finding)).apply(messages)


async def _rule_of(upstream: Upstream, route: Route) -> PromptRule:
    async def count(messages: Messages) -> int | None:
        try:
            return (await prompt_size(upstream, route, {"messages": messages})).count
        except RefusedPromptError:
            return None
        except UpstreamError as error:
            if error.status != 500:
                raise
            return None  # the template failed

    try:
        return await find_rule(count, route.policy)
    except LookupError as error:
        log.warning("policy %s: messages go as they come, because %s", route.policy, error)
        return PromptRule()


async def find_rule(count: Count, policy: str) -> PromptRule:
    """Find the rule of a policy from its server's counts of prompt tokens."""

    async def shows(probe: Callable[[str], Messages], rule: PromptRule) -> bool:
        rule = replace(rule, lost=frozenset())
        long, short = [await count(rule.apply(probe(said))) for said in (" ".join(WORDS), "1")]
        return long is not None and short is not None and long - short >= len(WORDS) // 2

    async def first(what: str, *rules: PromptRule) -> PromptRule:
        for each in rules:
            if all([await shows(probe, each) for probe in PROBES[what]]):
                return each
        return replace(rules[0], lost=rules[0].lost | {what})

    rule = PromptRule()
    if not await shows(lambda said: [_by("user", said)], rule):
        log.warning(
            "policy %s: its tokenizer does not tell which messages its prompts show", policy
        )
        return rule
    rule = await first(LEADING, *(replace(rule, leading=role) for role in ("", "system", "user")))
    rule = await first(LATER, *(replace(rule, later=role) for role in ("", "system", "user")))
    rule = await first(BESIDE, rule, replace(rule, split=True))
    rule = await first(RESULT, rule)
    say = log.info if rule == PromptRule() else partial(log_phase, log)
    say(f"messages to policy {policy}: {rule.describe()}")
    return rule


def _what(message: Body, leading: bool) -> str:
    if message.get("role") in INSTRUCTIONS:
        return LEADING if leading else LATER
    if message.get("role") == "tool":
        return RESULT
    return BESIDE if message.get("tool_calls") and message.get("content") else ""


def _by(role: str, said: str) -> Body:
    return {"role": role, "content": said}


def _result(said: str) -> Body:
    return {"role": "tool", "tool_call_id": "call_1", "content": said}


def _text(message: Body, index: int) -> str:
    content, where = message.get("content"), f"messages[{index}].content"
    if content is None or isinstance(content, str):
        return content or ""
    return joined(content, where)
