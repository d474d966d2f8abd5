"""`agentrl harness`: what it tells of a program that behaves, and of one that does not."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.cli.main import cli
from agentrl.runners.execution import AttemptRunner
from agentrl.runners.harness_check import COMMANDS, EDIT, answer, check

# Stands for a harness: asks for a shell command and runs it, until the model has said its last.
PROGRAM = f"""#!{sys.executable}
import json, os, subprocess, sys, urllib.request
if "--version" in sys.argv:
    sys.exit(print("odd 1.2.3"))
here = urllib.request.build_opener(urllib.request.ProxyHandler({{}}))
def ask(body, route="chat/completions"):
    key = os.environ["OPENAI_API_KEY"]
    headers = {{"authorization": "Bearer " + key, "content-type": "application/json"}}
    url = os.environ["OPENAI_BASE_URL"] + "/" + route
    return json.load(here.open(urllib.request.Request(url, json.dumps(body).encode(), headers)))
if "odd-route" in sys.argv:
    ask({{}}, "odd")
shell = {{"type": "object", "properties": {{"command": {{"type": "string"}}}}}}
tools = [{{"type": "function", "function": {{"name": "bash", "parameters": shell}}}}]
messages = [{{"role": "user", "content": sys.argv[1]}}]
while "quiet" not in sys.argv:
    said = ask({{"model": "m", "messages": messages, "tools": tools}})["choices"][0]["message"]
    messages.append(said)
    if not said.get("tool_calls"):
        ask({{"model": "m", "messages": [{{"role": "user", "content": sys.argv[1]}}]}})
        break
    for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        command = "true" if "lazy" in sys.argv else command
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        result = {{"role": "tool", "tool_call_id": call["id"], "content": done.stdout}}
        messages.append(result)
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd").write_text(PROGRAM)
    (tmp_path / "odd").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_a_runner_that_fails_ends_the_check(
    odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*given: Any) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(AttemptRunner, "run", broken)
    with pytest.raises(LookupError, match="a bug"):
        await asyncio.wait_for(check(preset(odd), odd), 20)


def preset(folder: Path, *arguments: str, **fields: Any) -> str:
    """A file with the preset of the program, started with `arguments` after its prompt."""
    data = {"program": str(folder / "odd"), "argv": ["{prompt}", *arguments]} | fields
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    (folder / "odd.toml").write_text(
        "\n".join([*lines, '[[match]]\nrole = "side"\ntools = false\n'])
    )
    return "odd.toml"


async def test_a_program_that_behaves_has_no_problems(odd: Path) -> None:
    report = await check(preset(odd), odd, rollouts=2, concurrency=2)
    assert list(report.problems()) == []
    assert (report.version, report.served, report.exact) == ("1.2.3", 8, 8)
    assert report.roles == {"agent": 6, "side": 2}
    assert {one.path for one in report.seen} == {"POST /v1/chat/completions"}
    assert report.seen[0].body.keys() == {"messages", "model", "tools"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quiet"], "made no successful model call"),
        (["lazy"], "its tools did not apply the model's fix"),
        (["odd-route"], "POST /v1/odd was refused: "),
    ],
)
async def test_what_is_wrong_is_a_sentence_each(odd: Path, arguments: list[str], said: str) -> None:
    report = await check(preset(odd, *arguments), odd)
    assert any(said in problem for problem in report.problems())


def test_the_command_prints_calls_and_needs(odd: Path) -> None:
    name = preset(odd, tested=["1.0", "1.1"], files={})
    ended = CliRunner().invoke(cli, ["harness", name])
    assert "agent     POST /v1/chat/completions  200" in ended.output
    assert "4 of 4 calls recorded exactly: 3 of agent, 1 of side" in ended.output
    assert "its preset was not tested with version 1.2.3" in ended.output
    assert ended.exit_code == 1
    listed = CliRunner().invoke(cli, ["harness"])
    assert "codex     0.169.0 to 0.171.0 npm install @openai/codex@0.171.0" in listed.output


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def test_the_script_uses_the_shell_of_any_harness() -> None:
    read = tool("read", path={"type": "string"})
    many = {"cmd": {"type": "array"}, "why": {"type": "string"}, "later": {"type": "boolean"}}
    body: dict[str, Any] = {"messages": [], "tools": [read, tool("exec_command", **many)]}
    (call,) = answer(body, "c1")["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {
        "cmd": ["bash", "-c", COMMANDS[0]],
        "why": ".",
        "later": False,
    }
    assert answer({"messages": []}, "c2")["content"] == EDIT
    assert "no shell" in answer({"messages": [], "tools": [read]}, "c3")["content"]
