"""What parts do in a runner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT = Path(__file__).parents[1] / "without"
CODE = """
from pathlib import Path
from agentrl.config import AgentConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.runners.hooks import runner_hooks
assert runner_hooks(RunConfig(), Path()) == []
try:
    runner_hooks(RunConfig(agent=AgentConfig(harness="mine.toml")), Path())
except ConfigError as error:
    print(error)
"""
COMMAND = CODE.replace('harness="mine.toml"', 'command="ls"')


def test_a_runner_without_the_part_that_a_run_needs_names_it() -> None:
    """Its run file was read on another machine, which has the part."""
    env = os.environ | {"PYTHONPATH": str(WITHOUT), "WITHOUT_PARTS": "harnesses,workspaces"}
    asked = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=env
    )
    assert asked.stdout == (
        "agent.harness = 'mine.toml': it belongs to the part 'harnesses', which is not installed"
        " here\n"
    )
    env["WITHOUT_PARTS"] = "processes"
    for code, key in ((CODE, "harness"), (COMMAND, "command")):
        asked = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        why = "it belongs to the part 'processes', which is not installed here\n"
        assert asked.stdout == f"agent.{key} starts processes; {why}"
