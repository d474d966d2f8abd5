"""A scripted model server that records exactly which tokens it has served.

Every harness gets the same script: run the test, fix `calc.py`, report success.
"""

from __future__ import annotations

import json
import random
import re
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from agentrl.base.http_server import listen
from agentrl.runners.dialects.base import CHAT
from agentrl.runners.dialects.conversation import ConversationMemory
from agentrl.runners.gateway import recorded
from agentrl.runners.gateway.request import read_request
from agentrl.types import Json, Transition, float32, int32

BUG = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": (
        "import unittest\n\nimport calc\n\n\nclass AddTest(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(calc.add(2, 3), 5)\n"
    ),
}
PROMPT = "The unit test test_calc.py in this repository fails. Fix calc.py so that it passes."
COMMANDS = (
    "python3 -m unittest -q test_calc",
    # The printed text tells mini-swe-agent that the task is complete.
    "sed -i 's/a - b/a + b/' calc.py && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
EDIT = """calc.py
```python
<<<<<<< SEARCH
    return a - b
=======
    return a + b
>>>>>>> REPLACE
```
"""  # for a harness that parses edits from the answer
SHELL = re.compile("bash|shell|exec|command", re.IGNORECASE)


class ScriptedModel:
    """Serves chat completions with one token id per four bytes and random log-probs."""

    def __init__(self) -> None:
        self.served: list[Transition] = []
        self._random = random.Random(0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the block; yields the URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner, url = await listen(app, "127.0.0.1", 0)
        try:
            yield f"{url}/v1"
        finally:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        raw, number = await request.read(), len(self.served)
        call = read_request(CHAT, raw, ConversationMemory(), number)
        message = answer({"messages": call.messages, "tools": call.tools}, f"call_{number}")
        tokens = _tokens(message) + int32([number])  # the number makes equal answers distinct
        prompt = _tokens([call.messages, call.tools])
        logprobs = float32([-self._random.random() for _ in tokens])
        finish = "tool_calls" if "tool_calls" in message else "stop"
        known: Any = {"prompt": prompt, "completion": tokens, "logprobs": logprobs}
        row = Transition(str(number), "", number, **known, finish=finish, answer=message)
        self.served.append(row)
        if not call.stream:
            return web.Response(body=recorded.whole([row], call), content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for event in recorded.stream([row], call):
            await response.write(event)
        return response


def _tokens(value: Json) -> array[int]:
    """Encode a value as few tokens, so that no harness summarizes the conversation."""
    text = json.dumps(value).encode()
    return int32(memoryview(text.ljust(-(-len(text) // 4) * 4)).cast("i"))


def answer(body: dict[str, Any], id: str) -> dict[str, Any]:
    """Return the script's next message for a conversation."""
    tools = [tool["function"] for tool in body.get("tools") or ()]
    done = sum(bool(message.get("tool_calls")) for message in body["messages"])
    shell = next((tool for tool in tools if SHELL.search(tool["name"]) and _command(tool)), None)
    if shell is None or done >= len(COMMANDS):
        text = "The test passes now." if shell else "There is no shell."
        return {"role": "assistant", "content": text if tools else EDIT}
    arguments = json.dumps(_arguments(shell, COMMANDS[done]))
    function = {"name": shell["name"], "arguments": arguments}
    call = {"id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _command(tool: dict[str, Any]) -> str | None:
    """Return the name of a tool's argument for the shell command; None if it has none."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return next((name for name in ("command", "cmd") if name in properties), None)


def _arguments(tool: dict[str, Any], command: str) -> dict[str, Json]:
    """Return the arguments of a call: the command, and dummy values for other required ones."""
    schema, fill = tool["parameters"], {"boolean": False, "integer": 1, "number": 1, "array": []}
    kinds = {name: about.get("type") for name, about in schema["properties"].items()}
    given = {name: fill.get(str(kinds.get(name)), ".") for name in schema.get("required") or ()}
    name = str(_command(tool))
    return given | {name: ["bash", "-c", command] if kinds[name] == "array" else command}
