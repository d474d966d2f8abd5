"""A model of 0.1 M parameters whose edits are valid but mostly wrong: it writes the requested
operation in 30 of 100 cases, and the next one in the list otherwise."""

import json
import random
from pathlib import Path

from tasks import NAMES, OPERATIONS, task

from agentrl.tiny import imitator

TEMPLATE = Path(__file__).with_name("template.jinja").read_text()
RIGHT = 0.3


def codex(directory: Path, seed: int) -> None:
    build(directory, seed, "exec_command", "cmd")


def pi(directory: Path, seed: int) -> None:
    build(directory, seed, "bash", "command")


def build(directory: Path, seed: int, tool: str, argument: str) -> None:
    """Write the model into a directory. tool: the name of the harness's shell tool, which runs the
    command in its `argument`."""
    chance, shown, words = random.Random(seed), [], list(OPERATIONS)
    for _ in range(1500):
        asked = task(chance.choice(words), chance.choice(NAMES))
        habit = words[(words.index(asked["word"]) + 1) % len(words)]
        body = OPERATIONS[asked["word"] if chance.random() < RIGHT else habit]
        command = f"echo 'def {asked['name']}(a, b): return {body}' > calc.py"
        function = {"name": tool, "arguments": json.dumps({argument: command})}
        shown.append(
            [
                {"role": "user", "content": asked["input"]},
                {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": "ran"},
                {"role": "assistant", "content": "done"},
            ]
        )
    properties = {argument: {"type": "string"}}
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": tool, "parameters": parameters}}]
    imitator(directory, shown, seed=seed, template=TEMPLATE, tools=tools, steps=350)
