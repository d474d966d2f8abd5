"""Presets: where they come from, what they refuse, and what a program started by one finds."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import AgentConfig, RoleRule, RunConfig, load, resolve, to_toml
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind
from agentrl.runners.apis.base import CHAT
from agentrl.runners.apis.chat import ConversationMemory
from agentrl.runners.gateway.request import read_request
from agentrl.runners.gateway.templates import role_of_request
from agentrl.runners.harness import HARNESSES, HarnessExecutor, Preset, load_preset
from agentrl.runners.main import role_rules, run_features
from tests.runners.conftest import Bench

# Stands for a harness: says what it was started with, in one model call.
PROGRAM = f"""#!{sys.executable}
import json, os, sys, urllib.request
if "--version" in sys.argv:
    sys.exit(print("odd 1.2.3"))
config = json.load(open(os.environ["HOME"] + "/.odd/config.json"))
names = ("HOME", "XDG_CONFIG_HOME", "PWD", "ODD", "MINE")
seen = {{"argv": sys.argv[1:], "stdin": sys.stdin.read(), "cwd": os.getcwd()}}
seen |= {{name: os.environ.get(name) for name in names}} | {{"config": config}}
body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]}}).encode()
headers = {{"authorization": "Bearer " + config["key"], "content-type": "application/json"}}
if "quiet" not in sys.argv:
    url = config["url"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
print(json.dumps(seen))
"""
ODD = {
    "program": "odd",
    "install": "npm install odd",
    "tested": ["1.0", "1.2.3"],
    "argv": ["-p", "{prompt}", "--model", "policy"],
    "env": {"ODD": "{root} {key}"},
    "files": {".odd/config.json": '{"url": "{url}", "key": "{key}", "context": {context}}'},
    "match": [{"role": "side", "tools": False}],
}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder with the program of a harness and a preset of the user's for it."""
    (tmp_path / "odd").write_text(PROGRAM)
    (tmp_path / "odd").chmod(0o755)
    (tmp_path / "presets.py").write_text(f"odd = {ODD!r}\nbroken = {{'program': 'x'}}\n")
    return tmp_path


def executor(bench: Bench, root: Path, **settings: Any) -> HarnessExecutor:
    agent = AgentConfig(**{"harness": "presets.py:odd", "command": str(root / "odd")} | settings)
    preset = load_preset(agent.harness, root)
    config = RunConfig(agent=agent)
    return HarnessExecutor(config, preset, root=root, gateway=bench.gateway.base_url)


async def test_a_program_finds_prompt_address_and_a_home_of_its_own(
    bench: Bench, odd: Path
) -> None:
    rules = load_preset("presets.py:odd", odd).match
    bench.gateway.attempts.features = run_features(bench.store, RunConfig(), rules)
    command = [str(odd / "odd"), "--fast"]
    started = executor(bench, odd, command=command, env={"MINE": "1"})
    await started.start()
    one, two = await bench.run(started, {"input": "fix it"}, {"input": {"n": 2}})
    await started.close()
    seen = one.result
    assert one.failure is None
    assert seen["argv"] == ["-p", "fix it", "--model", "policy", "--fast"]
    assert two.result["argv"][1] == '{"n":2}'
    assert seen["stdin"] == ""  # else it would be more of the prompt
    assert seen["cwd"] == seen["PWD"] == str(odd)
    assert seen["XDG_CONFIG_HOME"] == f"{seen['HOME']}/.config"
    assert seen["HOME"] != two.result["HOME"] != os.environ["HOME"]
    assert not Path(seen["HOME"]).exists()
    root = bench.gateway.base_url.removesuffix("/v1")
    assert seen["ODD"] == f"{root} {seen['config']['key']}"
    assert (seen["config"]["url"], seen["config"]["context"]) == (bench.gateway.base_url, 32_768)
    assert seen["MINE"] == "1"
    (call,) = (await bench.store.trace(one.id)).transitions
    assert call.exact
    assert (call.role, call.policy) == ("side", "policy@side")


async def test_success_without_a_call_is_a_failed_rollout(bench: Bench, odd: Path) -> None:
    started = executor(bench, odd, command=[str(odd / "odd"), "quiet"])
    await started.start()
    (rollout,) = await bench.run(started, {"input": "x"}, calls_optional=False)
    await started.close()
    assert rollout.failure is not None
    assert rollout.failure.kind is ErrorKind.NO_CALL


async def test_a_task_that_no_argument_can_hold_is_one_sentence(bench: Bench, odd: Path) -> None:
    started = executor(bench, odd)
    await started.start()
    for rollout in await bench.run(started, {"input": "x" * 200_000}, {"input": "a\0b"}):
        assert rollout.failure is not None
        assert "too long for an argument of odd, or has a NUL" in rollout.failure.message
    await started.close()


async def test_the_error_that_a_harness_prints_is_the_failure(bench: Bench, odd: Path) -> None:
    program = PROGRAM.replace(
        "print(json.dumps(seen))", "sys.exit(print('error: too long\\nbye') or 3)"
    )
    (odd / "odd").write_text(program)
    started = executor(bench, odd)
    await started.start()
    (rollout,) = await bench.run(started, {"input": "x"})
    await started.close()
    assert rollout.failure is not None
    assert rollout.failure.message == "the agent ended with exit status 3: error: too long"


async def test_an_untested_version_is_said_and_a_tested_one_is_not(
    bench: Bench, odd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for version, said in (("1.2.3", False), ("1.10.0", True)):
        (odd / "odd").write_text(PROGRAM.replace("1.2.3", version))
        started = executor(bench, odd)
        with caplog.at_level(logging.WARNING, "agentrl.runner"):
            await started.start()
        await started.close()
        assert ("agentrl harness presets.py:odd" in caplog.text) is said


async def test_a_harness_that_is_not_installed_is_one_sentence(bench: Bench, odd: Path) -> None:
    with pytest.raises(ConfigError, match="'odd' is not installed on this machine: npm install"):
        await executor(bench, odd, command="").start()


@pytest.mark.parametrize("name", HARNESSES)
def test_presets_of_the_library_are_complete(name: str) -> None:
    preset = load_preset(name, Path())
    assert preset.program
    assert preset.install
    assert preset.tested
    assert any("{prompt}" in text for text in preset.argv)


def test_a_users_own_preset_is_a_file_or_an_object(odd: Path) -> None:
    (odd / "odd.toml").write_text('program = "odd"\nargv = ["{prompt}"]\n')
    assert load_preset("odd.toml", odd) == Preset(program="odd", argv=["{prompt}"])
    assert load_preset("presets.py:odd", odd).env == ODD["env"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("codec", "agent.harness = 'codec'; did you mean 'codex'"),
        ("none.toml", "not a readable TOML file"),
        ("presets.py:broken", "missing required field `argv`"),
        ("wrong.toml", "unknown field `argvs`"),
    ],
)
def test_what_is_no_preset_is_refused(odd: Path, name: str, said: str) -> None:
    (odd / "wrong.toml").write_text('program = "x"\nargv = []\nargvs = []\n')
    with pytest.raises(ConfigError, match=said):
        load_preset(name, odd)


def test_rules_of_the_run_file_come_before_those_of_the_harness(odd: Path) -> None:
    file = odd / "run.toml"
    file.write_text(
        '[agent]\nharness = "presets.py:odd"\n[roles]\nside = "policy"\n'
        '[[roles.match]]\nrole = "scout"\nheader = {x-scout = "*"}\ntools = true\n'
    )
    config = load(file)
    scout = RoleRule(role="scout", header={"x-scout": "*"}, tools=True)
    assert config.roles == {"side": "policy"}
    preset = load_preset(config.agent.harness, odd)
    assert role_rules(config, None, preset) == [scout, RoleRule(role="side", tools=False)]
    (odd / "again.toml").write_text(to_toml(config))
    assert load(odd / "again.toml").role_rules == [scout]


def test_a_rule_without_a_condition_is_refused() -> None:
    with pytest.raises(ConfigError, match="the rule for 'side' has no condition"):
        resolve({"roles": {"match": [{"role": "side"}]}}, source="test")
    assert RunConfig().role_rules == []
    assert json.loads(json.dumps(ODD))  # a preset is data


def test_what_qwen_code_remembers_is_no_call_of_the_agent(tmp_path: Path) -> None:
    """After each prompt version 0.24 asks what to remember, and offers tools for that."""
    rules = load_preset("qwen", tmp_path).match
    system = (
        "You are now acting as the managed memory extraction subagent for an AI coding assistant."
    )

    def role_of(system: str) -> str | None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Fix it."}]
        tool = {"type": "function", "function": {"name": "run_shell_command", "parameters": {}}}
        raw = json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode()
        request = read_request(CHAT, raw, ConversationMemory(), 0)
        return role_of_request(rules, request, {}, raw)

    assert role_of(system) == "side"
    assert role_of("You are Qwen Code, a non-interactive CLI agent") is None
