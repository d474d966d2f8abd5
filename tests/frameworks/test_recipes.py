"""The recipes of examples/frameworks in the real runner, each in an environment of its own, which
`make test-frameworks` installs. Only the policy is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from contextlib import AsyncExitStack
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.core.config import load
from agentrl.core.types import NewRollout, PolicyVersion, Trace
from agentrl.store import open_store
from tests.examples.conftest import EXAMPLES, Policy

RECIPES = EXAMPLES / "frameworks"
SOLVED, TOOL = ["solver", "critic"], ["solver", "solver", "critic"]
ROUTED = ["supervisor", "solver", "solver", "supervisor", "critic", "supervisor"]
HANDED = ["solver", "solver", "critic"]
CAPTURED: dict[str, tuple[list[str], str]] = {
    "agent_framework": (TOOL, "001"),
    "anthropic": (TOOL, "001"),
    "autogen": (HANDED, "111"),
    "crewai": (TOOL, "000"),
    "dspy": (SOLVED, "00"),
    "langchain": (TOOL, "110"),
    "langgraph": (ROUTED, "111111"),
    "litellm": (SOLVED, "01"),
    "llama_index": (TOOL, "110"),
    "node": (SOLVED, "01"),
    "openai_agents": (HANDED, "111"),
    "openai_sdk": (TOOL, "001"),
    "pydantic_ai": (TOOL, "001"),
    "smolagents": (TOOL, "000"),
}
"""The roles of the calls, in order, and which of them were streamed; as README.md has it."""


def scripted(body: dict[str, Any]) -> dict[str, Any]:
    """A model that adds by its tool if it has one, hands over if it can, and ends."""
    text = json.dumps(body["messages"])
    tools = [each["function"]["name"] for each in body.get("tools") or ()]
    a, b = (int(x) for x in re.findall(r"What is (\d+) plus (\d+)", text)[0])
    if "Who is next?" in text:
        return {
            "content": "end" if "right" in text else "critic" if str(a + b) in text else "solver"
        }
    found = str(a + b) in json.dumps(body["messages"][-1]).replace(f"What is {a} plus {b}", "")
    name = (
        next((n for n in tools if "transfer" in n or n == "final_answer"), "") if found else "add"
    )
    if name in tools:
        given = {"add": {"a": a, "b": b}, "final_answer": {"answer": str(a + b)}}.get(name, {})
        function = {"name": name, "arguments": json.dumps(given)}
        return {"tool_calls": [{"id": f"call-{name}", "type": "function", "function": function}]}
    if "[[ ##" in text:
        fields = re.findall(r"\[\[ ## (\w+) ## \]\]", str(body["messages"][0]["content"]))
        values = {"reasoning": "by counting", "answer": str(a + b), "right": "True"}
        return {"content": "".join(f"[[ ## {f} ## ]]\n{values.get(f, '')}\n\n" for f in fields)}
    final = "Thought: I know.\nFinal Answer: " if "Final Answer" in text else ""
    return {
        "content": f"{final}{a + b}{' is right TERMINATE' if 'heck the answer' in text else ''}"
    }


async def played(name: str, folder: Path, asked: list[bool]) -> Trace:
    """The trace of a recipe's first task. asked: gets of each call whether it was streamed."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(bool(body.get("stream")))
        return scripted(body)

    python = Path(".frameworks", name, "bin", "python").absolute()  # a link, not its target
    config = load(RECIPES / name / "run.toml", [f"output={folder}"])
    policy = Policy(answer)
    task = {"input": "What is 3 plus 4?", "answer": 7}
    async with open_store(config.store) as store, AsyncExitStack() as stack:
        await policy.server.start_server()
        stack.push_async_callback(policy.server.close)
        url = f"http://127.0.0.1:{policy.server.port}/v1"
        await store.open_run(name, msgspec.to_builtins(config))
        served = PolicyVersion(run=name, policy="policy", version=1, base_url=url, model="m")
        await store.publish(served)
        await store.enqueue([NewRollout(id="r", run=name, group="g", index=0, task=task)])
        command = ["-m", "agentrl", "runner", "start", "--store", config.store, "--run", name]
        known = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI", "ANTHROPIC"))}
        runner = await asyncio.create_subprocess_exec(
            str(python) if python.is_file() else sys.executable, *command,
            env=known | {"CREWAI_DISABLE_TELEMETRY": "true", "HOME": str(folder)},
        )  # fmt: skip
        try:
            assert await store.settled("g", timeout=30)
            trace = await store.trace("r")
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended; its output says why
                runner.terminate()
            await runner.wait()
    assert trace is not None
    return trace


def installed(name: str) -> bool:
    """Whether the recipe's environment is there, or this one has what it needs."""
    file = RECIPES / name / "requirements.txt"
    if name == "node":
        return shutil.which("node") is not None
    asked = [re.split(r"[>\[]", line)[0] for line in file.read_text().split()]
    here = {re.sub(r"[-_.]+", "-", d.name).lower() for d in distributions()}
    return Path(".frameworks", name, ".installed").is_file() or here.issuperset(asked)


@pytest.mark.parametrize("name", CAPTURED)
async def test_a_recipe_is_captured_whole(name: str, tmp_path: Path) -> None:
    if not installed(name):
        pytest.skip("its environment is installed by `make test-frameworks`")
    asked: list[bool] = []
    trace = await played(name, tmp_path, asked)
    assert trace.rollout.failure is None, trace.rollout.failure
    assert trace.rollout.reward() == 1.0, trace.rollout.result
    roles, streamed = CAPTURED[name]
    assert [call.role for call in trace.transitions] == roles
    assert "".join("01"[flag] for flag in asked) == streamed
    assert all(call.exact for call in trace.transitions)
    assert not [*Path(".frameworks", name).glob("lib/*/site-packages/torch")], "runners have none"


def test_every_recipe_is_short_and_in_the_table() -> None:
    assert {file.parent.name for file in RECIPES.glob("*/run.toml")} == CAPTURED.keys()
    table = (RECIPES / "README.md").read_text()
    for name, (roles, streamed) in CAPTURED.items():
        (agent,) = (RECIPES / name).glob("agent.*")
        assert len(agent.read_text().splitlines()) <= 40
        (row,) = [line for line in table.splitlines() if f"({name})" in line]
        assert f"| {streamed.count('1')} of {len(roles)} |" in row
        both = {"solver", "critic"}  # as the page says of every recipe
        assert both <= set(roles)
        assert set(re.findall(r"a third role, `(\w+)`", row)) == set(roles) - both
