"""Which executor a run file gets, and what does not fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import resolve
from agentrl.errors import ConfigError
from agentrl.runners.executors.command import CommandExecutor
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.executors.inprocess import InProcessExecutor
from agentrl.runners.executors.pool import PoolExecutor

PATH = {"path": "contract_agent.py:agent"}
COMMAND = {"command": "node 'my agent.mjs'"}


def chosen(agent: dict[str, Any], given: object = None, **runner: Any) -> Any:
    config = resolve({"name": "test", "agent": agent, "runner": runner}, source="test")
    root = Path(__file__).parent
    return make_executor(
        config, root=root, gateway="http://127.0.0.1:1/v1", runner="r", agent=given
    )


def test_the_agent_decides_unless_the_run_file_does() -> None:
    assert isinstance(chosen(PATH), InProcessExecutor)
    assert isinstance(chosen({}, given=lambda text: text), InProcessExecutor)
    assert isinstance(chosen(COMMAND), CommandExecutor)
    assert chosen(COMMAND).argv == ["node", "my agent.mjs"]
    assert isinstance(chosen(COMMAND, given=PATH["path"]), InProcessExecutor)
    assert isinstance(chosen(PATH, executor="pool"), PoolExecutor)
    assert (chosen(PATH).threaded, chosen(PATH, executor="threads").threaded) == (False, True)


@pytest.mark.parametrize(
    ("agent", "given", "executor", "says"),
    [
        ({}, None, "auto", "agent.path is missing"),
        ({}, None, "pool", "agent.path is missing"),
        (PATH | COMMAND, None, "auto", "which of the two is the agent?"),
        (COMMAND, None, "async", "'async' runs agent.path, not agent.command"),
        (PATH, None, "command", "give it in the run file as agent.command"),
        ({}, len, "pool", "give it in the run file as agent.path"),
        ({}, len, "container", "give it in the run file as agent.command"),
    ],
)
def test_what_does_not_fit(agent: Any, given: object, executor: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        chosen(agent, given, executor=executor)


@pytest.mark.parametrize("executor", ["async", "threads", "pool"])
def test_agents_without_a_key_are_not_served_to_the_network(executor: str) -> None:
    with pytest.raises(ConfigError, match="listens to this machine only"):
        chosen(PATH, executor=executor, host="0.0.0.0")
    assert chosen(COMMAND, executor="command", host="0.0.0.0")
    for host in ("127.0.0.2", "::1", "localhost"):  # as the gateway itself has it
        assert chosen(PATH, executor=executor, host=host)
