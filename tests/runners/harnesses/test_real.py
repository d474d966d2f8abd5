"""The real harnesses against a scripted model: `make test-harnesses` installs and runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.types import Transition
from agentrl.runners.harness import HARNESSES, load_preset
from agentrl.runners.harness_check import check
from tests.runners.harnesses.refusing_proxy import RefusingProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Roles of the calls of one rollout.
ROLES = {
    "aider": {"agent": 1, "side": 1},  # the edit, and the commit message
    "mini": {"agent": 2},  # it ends when a command says so
    "opencode": {"agent": 3, "side": 1},  # a title
}


@pytest.mark.parametrize("name", HARNESSES)
async def test_every_call_is_recorded_exactly_and_none_leaves_the_machine(name: str) -> None:
    try:
        load_preset(name, Path()).find_program()
    except ConfigError as error:
        pytest.skip(str(error))
    proxy = RefusingProxy()
    async with proxy.serving() as env:
        report = await check(name, Path(), rollouts=2, concurrency=2, env=env)
    assert list(report.problems()) == []
    assert report.roles == {
        role: 2 * count for role, count in ROLES.get(name, {"agent": 3}).items()
    }
    assert report.served == len(report.calls) == report.exact
    assert proxy.refused == []
    # A row for the agent's conversation, and one for each call beside it.
    assert rows(report.calls) == 2 + report.roles.get("side", 0)


def rows(calls: list[Transition]) -> int:
    """The number of calls that continue no other, word for word, tool calls included."""
    return sum(not any(continues(new, old) for old in calls) for new in calls)


def continues(new: Transition, old: Transition) -> bool:
    known, answer = len(old.messages), old.answer or {}
    if new.attempt != old.attempt or len(new.messages) <= known:
        return False
    echo = new.messages[known]
    said = [call["function"] for call in answer.get("tool_calls") or ()]
    back = [call["function"] for call in echo.get("tool_calls") or ()]
    same = said == back and (echo.get("content") or "") == (answer.get("content") or "")
    return same and new.messages[:known] == old.messages
