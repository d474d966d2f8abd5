"""Roles of calls that do not state one, by the rules of `[[roles.match]]` and harness presets.

A coding harness makes calls besides the agent's own: titles, summaries, commit messages, calls of
sub-agents. Harnesses have no common way to mark them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.config import RoleRule
from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.request import ModelRequest, value
from agentrl.types import Json

SYSTEM = ("system", "developer")


class RoleRules(Feature):
    """The feature: calls without a role get that of the first rule that they match."""

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
    """Return the role of the first matching rule, or None; `raw`: the body that the agent sent."""
    body = cache(partial(msgspec.json.decode, raw, type=dict[str, Any]))  # 80 kB; few rules need it
    return next((rule.role for rule in rules if _holds(rule, request, headers, body)), None)


def _holds(
    rule: RoleRule,
    request: ModelRequest,
    headers: Mapping[str, str],
    body: Callable[[], dict[str, Any]],
) -> bool:
    form = value(request.fields, "response_format")
    leading = next((m for m in request.messages if m.get("role") in SYSTEM), {})
    last = request.messages[-1] if request.messages else {}
    said = _texts(last)[-1] if last.get("role") == "user" else ""
    return (
        all(k in headers and fnmatchcase(headers[k], v) for k, v in rule.header.items())
        and rule.tools in (None, bool(request.tools))
        and rule.schema in (None, isinstance(form, dict) and form.get("type") == "json_schema")
        and fnmatchcase(request.model, rule.model or "*")
        and fnmatchcase(_texts(leading)[0], f"{rule.system}*")
        and fnmatchcase(said, f"{rule.prompt}*")
        and all(_field_matches(body(), key, pattern) for key, pattern in rule.field.items())
    )


def _texts(message: Mapping[str, Json]) -> list[str]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    found = (part.get("text") for part in parts if isinstance(part, dict))
    return [text for text in found if isinstance(text, str)] or [""]


def _field_matches(body: Json, key: str, pattern: str) -> bool:
    for name in key.split("."):
        if not isinstance(body, dict) or name not in body:
            return False
        body = body[name]
    text = body if isinstance(body, str) else msgspec.json.encode(body).decode()
    return fnmatchcase(text, pattern)
