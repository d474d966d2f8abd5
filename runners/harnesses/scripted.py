"""A model server that follows a script, and knows exactly which tokens it has served.

It runs one harness after the other through the same work: look at the test, mend `calc.py`, say so.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web

from agentrl.http_server import listen
from agentrl.types import Json

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
    # What it prints tells mini-swe-agent that it is done.
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
"""  # for a harness that reads edits from the answer
SHELL = re.compile("bash|shell|exec|command", re.IGNORECASE)
BYTES = 4  # that usage counts as a token: harnesses sum up a conversation that looks too long


class Served(NamedTuple):
    """A completion as it was served."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class ScriptedModel:
    """Chat completions with token ids, a byte each, and random log-probs."""

    def __init__(self) -> None:
        self.served: list[Served] = []
        self._random = random.Random(0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listens inside the block, which is given the URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner, url = await listen(app, "127.0.0.1", 0)
        try:
            yield f"{url}/v1"
        finally:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = answer(body, f"call_{len(self.served)}")
        # The number makes equal answers different, so that one cannot be taken for another.
        tokens = [*json.dumps(message).encode(), 256 + len(self.served)]
        one = Served(
            list(json.dumps([body["messages"], body.get("tools")]).encode()),
            tokens,
            [round(-self._random.random(), 4) for _ in tokens],
        )
        self.served.append(one)
        content = [{"token": "?", "logprob": value} for value in one.logprobs]
        choice = {"index": 0, "logprobs": {"content": content}, "token_ids": tokens}
        choice["finish_reason"] = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": len(one.prompt) // BYTES, "completion_tokens": len(tokens)}
        usage["total_tokens"] = sum(usage.values())
        whole = {"id": "c", "created": 0, "model": body["model"], "prompt_token_ids": one.prompt}
        if not body.get("stream"):
            choices = [choice | {"message": message}]
            return web.json_response(whole | {"choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in ({"choices": [choice | {"delta": message}]}, {"choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(whole | chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def answer(body: dict[str, Any], id: str) -> dict[str, Any]:
    """The message that the script has next for a conversation."""
    tools = [tool["function"] for tool in body.get("tools") or ()]
    done = sum(bool(message.get("tool_calls")) for message in body["messages"])
    shell = next((tool for tool in tools if SHELL.search(tool["name"]) and _command(tool)), None)
    if shell is None or done >= len(COMMANDS):
        said = "The test passes now." if shell else "There is no shell."
        return {"role": "assistant", "content": said if tools else EDIT}
    arguments = json.dumps(_arguments(shell, COMMANDS[done]))
    function = {"name": shell["name"], "arguments": arguments}
    call = {"index": 0, "id": id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _command(tool: dict[str, Any]) -> str | None:
    """The name of the argument of a tool that is a shell command."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return next((name for name in ("command", "cmd") if name in properties), None)


def _arguments(tool: dict[str, Any], command: str) -> dict[str, Json]:
    """The command, and something for each other argument that must be given."""
    schema, fill = tool["parameters"], {"boolean": False, "integer": 1, "number": 1, "array": []}
    kinds = {name: about.get("type") for name, about in schema["properties"].items()}
    given = {name: fill.get(str(kinds.get(name)), ".") for name in schema.get("required") or ()}
    name = str(_command(tool))
    return given | {name: ["bash", "-c", command] if kinds[name] == "array" else command}
