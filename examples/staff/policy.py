"""Build the policy: a tiny Llama that writes valid but mostly wrong tool calls.

No weights are downloaded. A tokenizer is trained on demonstrations of the agent, and a new model
imitates them. The demonstrator writes valid queries, but often the wrong ones: the policy learns
from rewards which queries are right. The result is an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

os.environ.setdefault("OPENAI_API_KEY", "unused")  # agent.py makes its client when imported

from agent import PROMPT, query
from langchain_core.utils.function_calling import convert_to_openai_tool
from tasks import ASKED, Task, train

from agentrl.tiny import Conversation, imitator

DEMONSTRATIONS = 2000
CORRECT = 0.3  # fraction of right demonstrations
TOOLS = [convert_to_openai_tool(query)]


def build(directory: Path, seed: int) -> None:
    """Write model, tokenizer and chat template into `directory`."""
    rng = random.Random(seed)
    shown = [demonstrate(rng.choice(train), rng) for _ in range(DEMONSTRATIONS)]
    imitator(directory, shown, seed=seed, tools=TOOLS)


def demonstrate(task: Task, rng: random.Random) -> Conversation:
    """The messages of one rollout, as LangChain sends them."""
    path = task["path"] if rng.random() < CORRECT else habit(task["path"], rng)
    messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": task["input"]}]
    found = task["person"]
    for column in path:
        sql = f"SELECT {column} FROM staff WHERE name = '{found}'"
        function = {"name": query.name, "arguments": json.dumps({"sql": sql})}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        found = query.invoke({"sql": sql})
        messages += [call, {"role": "tool", "content": found}]
    return [*messages, {"role": "assistant", "content": found}]


def habit(path: list[str], rng: random.Random) -> list[str]:
    """A wrong lookup of the demonstrator: another column, or the column of the wrong person."""
    if len(path) > 1 and rng.random() < 0.3:
        return path[1:]
    return [*path[:-1], ASKED[(ASKED.index(path[-1]) + 1) % len(ASKED)]]
