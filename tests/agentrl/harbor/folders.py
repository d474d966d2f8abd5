"""Harbor's task folders for tests, and a model that answers with what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BASE = "localhost/agentrl-busybox:1"
SAID = 'if [ "$(cat hello.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
TASK: dict[str, str | bytes] = {
    "task.toml": '[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write hello to hello.txt.",
    "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\n",
    "tests/test.sh": f"#!/bin/sh\n{SAID}\n",
    "solution/solve.sh": "#!/bin/sh\necho hello > hello.txt\n",
}


def write_task(folder: Path, changed: dict[str, str | bytes | None] | None = None) -> Path:
    """Write a task, whose files `changed` replaces, adds to or leaves out (None)."""
    for name, said in {**TASK, **(changed or {})}.items():
        if said is not None:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(said.encode() if isinstance(said, str) else said)
    return folder


class Scripted:
    """An endpoint whose policy gives these replies in turn: texts, commands for the shell in a
    list, or messages."""

    url, key = "http://127.0.0.1:1/a/00/v1", "key"

    def __init__(self, replies: Iterable[Any]) -> None:
        self._replies = iter(replies)
        self.asked: list[list[dict[str, Any]]] = []

    async def chat(self, messages: list[dict[str, Any]], tools: Any = None) -> dict[str, Any]:
        self.asked.append(list(messages))
        reply = next(self._replies, "Done.")
        if isinstance(reply, list):
            calls = [
                {
                    "id": f"call_{n}",
                    "type": "function",
                    "function": {"name": "bash", "arguments": json.dumps({"command": command})},
                }
                for n, command in enumerate(reply)
            ]
            return {"role": "assistant", "content": "", "tool_calls": calls}
        return reply if isinstance(reply, dict) else {"role": "assistant", "content": reply}

    @property
    def told(self) -> str:
        """What the policy was told at last."""
        return str(self.asked[-1][-1]["content"])
