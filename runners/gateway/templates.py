"""Roles of calls, by the rules of `[[roles.match]]` and harness presets; and roles of messages that
a policy's chat template supports.

A coding harness makes calls besides the agent's own: titles, summaries, commit messages, calls of
sub-agents. Harnesses have no common way to mark them, so rules do.

Templates silently drop messages with unknown roles, and the policy would be trained on a prompt
without its instructions. Probes are tokenized by the policy server, which renders prompts: a text
is in the prompt if it makes the prompt longer. Invariant: messages that a template renders are sent
unchanged; texts that it does not render in any role are rejected.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from agentrl.core.config import RoleRule
from agentrl.core.processes import log_phase
from agentrl.core.types import INSTRUCTION_ROLES, Json
from agentrl.runners.apis.base import UntranslatableError, joined
from agentrl.runners.apis.chat import Body
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.prompt_size import RefusedPromptError, prompt_size
from agentrl.runners.gateway.refusals import UpstreamError
from agentrl.runners.gateway.request import ModelRequest, value
from agentrl.runners.gateway.upstream import Messages, Route, Upstream


class RoleRules(Feature):
    """The feature that gives calls without a role the role of the first matching rule."""

    def __init__(self, rules: Sequence[RoleRule]) -> None:
        self._rules = rules

    def join(self, active: ActiveAttempt) -> None:
        if self._rules:
            active.changes.append(self._with_role)

    def _with_role(self, call: ReceivedCall) -> ReceivedCall:
        if call.caller.role is not None:
            return call
        role = role_of_request(self._rules, call.request, call.http.headers, call.raw)
        return replace(call, caller=call.caller._replace(role=role))


def role_of_request(
    rules: Sequence[RoleRule], request: ModelRequest, headers: Mapping[str, str], raw: bytes
) -> str | None:
    """Return the role of the first matching rule, or None. `raw`: the body that the agent sent."""
    # 80 kB, and few rules need it.
    body = cache(partial(msgspec.json.decode, raw, type=dict[str, Any]))
    return next((rule.role for rule in rules if _holds(rule, request, headers, body)), None)


def _holds(
    rule: RoleRule,
    request: ModelRequest,
    headers: Mapping[str, str],
    body: Callable[[], dict[str, Any]],
) -> bool:
    form = value(request.fields, "response_format")
    leading = next((m for m in request.messages if m.get("role") in INSTRUCTION_ROLES), {})
    last = request.messages[-1] if request.messages else {}
    prompt = _texts(last)[-1] if last.get("role") == "user" else ""
    return (
        all(k in headers and fnmatchcase(headers[k], v) for k, v in rule.header.items())
        and rule.tools in (None, bool(request.tools))
        and rule.schema in (None, isinstance(form, dict) and form.get("type") == "json_schema")
        and fnmatchcase(request.model, rule.model or "*")
        and fnmatchcase(_texts(leading)[0], f"{rule.system}*")
        and fnmatchcase(prompt, f"{rule.prompt}*")
        and all(_field_matches(body(), key, pattern) for key, pattern in rule.field.items())
    )


def _texts(message: Mapping[str, Json]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return [text for text in texts if isinstance(text, str)] or [""]


def _field_matches(body: Json, key: str, pattern: str) -> bool:
    for name in key.split("."):
        if not isinstance(body, dict) or name not in body:
            return False
        body = body[name]
    text = body if isinstance(body, str) else msgspec.json.encode(body).decode()
    return fnmatchcase(text, pattern)


log = logging.getLogger("agentrl.runner")
Count = Callable[[Messages], Awaitable[int | None]]  # prompt tokens; None: messages refused
WORDS = [str(number) for number in range(100, 164)]  # each is at least one token in any tokenizer
USER, CALL = {"role": "user", "content": "1"}, {"name": "f", "arguments": "{}"}
CALLS = [{"id": "call_1", "type": "function", "function": CALL}]
CALLED: Body = {"role": "assistant", "content": None, "tool_calls": CALLS}

# Kind of text -> functions that put a text of this kind into a probe conversation.
LEADING, LATER = "instructions at the beginning", "instructions after the beginning"
NEXT_TO_CALL, RESULT = "text beside a tool call", "the result of a tool"
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
    NEXT_TO_CALL: [lambda said: [USER, CALLED | {"content": said}, _result("1"), USER]],
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
        start = next(
            (i for i, role in enumerate(roles) if role not in INSTRUCTION_ROLES), len(roles)
        )
        adapted = messages[:start]
        if self.leading and roles[:start] not in ([], [self.leading]):
            parts = [_text(message, index) for index, message in enumerate(adapted)]
            adapted = [_by(self.leading, "\n\n".join(filter(None, parts)))]
        for index, message in enumerate(messages):
            if (what := _what(message, index < start)) in self.lost and _text(message, index):
                raise UntranslatableError(
                    f"messages[{index}]",
                    f"the chat template of the policy does not show {what}; choose a model whose"
                    ' template does, or leave it out with policy.unsupported_roles = "as_sent"',
                )
            if index >= start and self.later and what == LATER:
                message = message | {"role": self.later}
            if index >= start and self.split and what == NEXT_TO_CALL:
                adapted.append({k: v for k, v in message.items() if k != "tool_calls"})
                message = message | {"content": None}
            adapted += [message] if index >= start else []
        return adapted

    def describe(self) -> str:
        changes = [f"{LEADING} become one {self.leading} message"] if self.leading else []
        changes += [f"{LATER} become {self.later} messages"] if self.later else []
        changes += [f"{NEXT_TO_CALL} becomes a message before it"] if self.split else []
        changes += [f"{what} is refused" for what in sorted(self.lost)]
        return "; ".join(changes) or "all roles as they are sent"


class ChatTemplates(Feature):
    """The feature that adapts messages to the chat template of the policy that answers them. The
    first call to each server determines the rule."""

    def __init__(self) -> None:
        self._rules: dict[str, asyncio.Task[PromptRule]] = {}  # base URL -> rules

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
        rule = dataclasses.replace(rule, lost=frozenset())
        long, short = [await count(rule.apply(probe(text))) for text in (" ".join(WORDS), "1")]
        return long is not None and short is not None and long - short >= len(WORDS) // 2

    async def first(what: str, *rules: PromptRule) -> PromptRule:
        for rule in rules:
            if all([await shows(probe, rule) for probe in PROBES[what]]):
                return rule
        return dataclasses.replace(rules[0], lost=rules[0].lost | {what})

    rule = PromptRule()
    if not await shows(lambda said: [_by("user", said)], rule):
        log.warning(
            "policy %s: its tokenizer does not tell which messages its prompts show", policy
        )
        return rule
    rule = await first(
        LEADING, *(dataclasses.replace(rule, leading=role) for role in ("", "system", "user"))
    )
    rule = await first(
        LATER, *(dataclasses.replace(rule, later=role) for role in ("", "system", "user"))
    )
    rule = await first(NEXT_TO_CALL, rule, dataclasses.replace(rule, split=True))
    rule = await first(RESULT, rule)
    report = log.info if rule == PromptRule() else partial(log_phase, log)
    report(f"messages to policy {policy}: {rule.describe()}")
    return rule


def _what(message: Body, leading: bool) -> str:
    if message.get("role") in INSTRUCTION_ROLES:
        return LEADING if leading else LATER
    if message.get("role") == "tool":
        return RESULT
    return NEXT_TO_CALL if message.get("tool_calls") and message.get("content") else ""


def _by(role: str, text: str) -> Body:
    return {"role": role, "content": text}


def _result(text: str) -> Body:
    return {"role": "tool", "tool_call_id": "call_1", "content": text}


def _text(message: Body, index: int) -> str:
    content, where = message.get("content"), f"messages[{index}].content"
    if content is None or isinstance(content, str):
        return content or ""
    return joined(content, where)
