"""Conversations that show how the tool is called, mostly with wrong numbers: the policy learns the
form here, and from rewards which numbers are right."""

from __future__ import annotations

import json
import os
import random

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import multiply
from langchain_core.utils.function_calling import convert_to_openai_tool
from tasks import Task, train

RIGHT = 0.3  # fraction of right demonstrations
TOOLS = [convert_to_openai_tool(multiply)]


def demonstration(task: Task, rng: random.Random) -> dict[str, object]:
    a, b = task["factors"]
    if rng.random() > RIGHT:
        a, b = rng.sample(range(11, 100), 2)
    function = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
    call = {"id": "call", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": task["input"]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
    return {"messages": messages, "tools": TOOLS}


rng = random.Random(0)
conversations = [demonstration(task, rng) for task in train]
