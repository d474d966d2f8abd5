"""Which executor a run file gets, and what does not fit together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.executors.inprocess import InProcessExecutor
from agentrl.trainer import check
from tests.factories import Register

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
    assert (chosen(PATH).threaded, chosen(PATH, executor="threads").threaded) == (False, True)


def test_a_command_or_a_pool_runs_in_processes() -> None:
    from agentrl.runners.executors.command import CommandExecutor
    from agentrl.runners.executors.pool import PoolExecutor

    assert isinstance(chosen(COMMAND), CommandExecutor)
    assert chosen(COMMAND).argv == ["node", "my agent.mjs"]
    assert isinstance(chosen(COMMAND, given=PATH["path"]), InProcessExecutor)
    assert isinstance(chosen(PATH, executor="pool"), PoolExecutor)
    assert chosen(COMMAND, executor="command", host="0.0.0.0")


@pytest.mark.parametrize(
    ("agent", "given", "executor", "says"),
    [
        ({}, None, "auto", "agent.path is missing"),
        ({}, None, "pool", "agent.path is missing"),
        (PATH | COMMAND, None, "auto", "are both set: leave one out"),
        (COMMAND, None, "async", "'async' runs agent.path, not agent.command"),
        (PATH, None, "command", "give it in the run file as agent.command"),
        ({}, len, "pool", "give it in the run file as agent.path"),
    ],
)
def test_what_does_not_fit(agent: Any, given: object, executor: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        chosen(agent, given, executor=executor)


@pytest.mark.parametrize("executor", ["async", "threads", "pool"])
def test_agents_without_a_key_are_not_served_to_the_network(executor: str) -> None:
    with pytest.raises(ConfigError, match="may serve this machine only"):
        chosen(PATH, executor=executor, host="0.0.0.0")
    for host in ("127.0.0.2", "::1", "localhost"):  # as the gateway itself has it
        assert chosen(PATH, executor=executor, host=host)


def example() -> str:
    """The executor of the README."""
    text = Path("runners/README.md").read_text()
    return next(block for block in text.split("```python\n") if "class Thinking" in block).split(
        "```"
    )[0]


async def test_an_executor_from_outside_runs_agents(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    (tmp_path / "outside_executor.py").write_text(example())
    monkeypatch.syspath_prepend(tmp_path)
    register("agentrl.executors", "thinking", "outside_executor:Thinking")
    for name in ("outside_executor.py:Thinking", "thinking"):
        config = resolve({"name": "test", "runner": {"executor": name}}, source="test")
        url = bench.gateway.base_url
        executor = make_executor(config, root=tmp_path, gateway=url, runner="r")
        (rollout,) = await bench.run(executor, {"input": "hello"})
        await executor.close()
        assert rollout.result == "echo hello", rollout.failure
        (call,) = (await bench.store.trace(rollout.id)).transitions
        assert call.messages[0]["content"] == "hello"


OUTSIDE = """
class Bare:
    def __init__(self, config, root, gateway, runner): ...
    async def start(self): ...
    async def run(self, attempt): ...
    async def close(self): ...

class Shared(Bare):
    sealed, limit = False, None

def short(config): ...
def none(config, root, gateway, runner): ...
"""


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("Bare", None, "returned an executor without 'sealed'"),
        ("short", None, "must take (config, root, gateway, runner)"),
        ("none", None, "it has no start, run, close"),
        ("Shared", None, "the gateway may serve this machine only"),
        ("Shared", len, "give the agent in the run file"),
    ],
)
def test_an_executor_from_outside_that_does_not_fit(
    tmp_path: Path, name: str, given: object, says: str
) -> None:
    (tmp_path / "unfit_executor.py").write_text(OUTSIDE)
    runner = {"executor": f"unfit_executor.py:{name}", "host": "0.0.0.0"}
    config = resolve({"name": "test", "runner": runner}, source="test")
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_executor(config, root=tmp_path, gateway="", runner="r", agent=given)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pol", "did you mean 'pool'"),
        ("thread", "did you mean 'threads'"),
        ("mine.py:Mine", "there is no file"),
    ],
)
def test_an_unknown_executor_is_refused_before_anything_starts(
    tmp_path: Path, name: str, says: str
) -> None:
    data = {"name": "test", "tasks": {"train": "tasks.jsonl"}, "root": str(tmp_path)}
    with pytest.raises(ConfigError, match=f"runner.executor = '{name}'.* {says}"):
        check(resolve(data | {"runner": {"executor": name}}, source="test"))


# -- who gets the executors of containers, and what does not fit them ------------------------------


IMAGES = {
    "container": {"container": {"image": "an-image"}},
    "kubernetes": {"kubernetes": {"image": "an-image"}},
}


@pytest.mark.parametrize("executor", IMAGES)
@pytest.mark.parametrize(("agent", "given"), [({}, len), (PATH, None), ({}, PATH["path"])])
def test_an_agent_of_python_does_not_fit(
    executor: str, agent: dict[str, str], given: object
) -> None:
    with pytest.raises(ConfigError, match=r"give it in the run file as agent\.command"):
        chosen(agent, given, executor=executor, **IMAGES[executor])


def test_an_executor_of_its_own_module_is_imported_by_its_users_only() -> None:
    """Without the modules, every other executor is made; theirs is named by the error."""
    hide = """
import sys
from tests.runners.executors.test_factory import COMMAND, PATH, chosen
for kind in ("containers", "kubernetes"):
    assert f"agentrl.runners.executors.{kind}" not in sys.modules
    sys.modules[f"agentrl.runners.executors.{kind}"] = None
for agent in (PATH, COMMAND):
    chosen(agent)
chosen(PATH, executor="pool")
try:
    chosen(COMMAND, executor="container", container={"image": "an-image"})
except ImportError as error:
    print(error)
"""
    asked = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=True)
    assert "agentrl.runners.executors.containers" in asked.stdout
