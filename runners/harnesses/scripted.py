"""A model server that follows a script, and knows exactly which tokens it has served.

It runs one harness after the other through the same work: look at the test, mend `calc.py`, say so.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
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
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent is told that it is done
COMMANDS = (
    "python3 -m unittest -q test_calc",
    f"sed -i 's/a - b/a + b/' calc.py && echo {SUBMIT}",
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


@dataclass
class ScriptedModel:
    """Chat completions with token ids, a byte each, and random log-probs."""

    served: list[Served] = field(default_factory=list)
    base_url: str = ""
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        self._runner, url = await listen(app, "127.0.0.1", 0)
        self.base_url = f"{url}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": len(await request.read()) // BYTES})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        message = answer(body, f"call_{len(self.served)}")
        text = message["content"] or json.dumps(message["tool_calls"])
        # A number makes equal answers different, so that one cannot be taken for another.
        tokens = [*text.encode(), 256 + len(self.served)]
        logprobs = [round(-self._random.random(), 4) for _ in tokens]
        said = json.dumps([body["messages"], body.get("tools")])
        self.served.append(Served(list(said.encode()), tokens, logprobs))
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        content: list[dict[str, Json]] = [
            {"token": "?", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs
        ]
        known = {"logprobs": {"content": content}, "token_ids": tokens}
        count = {"prompt_tokens": len(said) // BYTES, "completion_tokens": len(tokens)}
        usage = count | {"total_tokens": sum(count.values())}
        whole = {"id": "c", "created": 0, "model": body["model"]}
        ids = {"prompt_token_ids": self.served[-1].prompt}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish} | known
            kind = {"object": "chat.completion", "choices": [choice], "usage": usage}
            return web.json_response(whole | ids | kind)
        whole |= {"object": "chat.completion.chunk"}
        calls = [call | {"index": n} for n, call in enumerate(message.get("tool_calls") or ())]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunks = (
            whole
            | ids
            | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | known]},
            whole | {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
            whole | {"choices": [], "usage": usage},
        )
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        for chunk in chunks:
            await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream


def answer(body: dict[str, Any], id: str) -> dict[str, Any]:
    """The message that the script has next for a conversation."""
    said = {"role": "assistant", "content": EDIT}
    tools = [tool["function"] for tool in body.get("tools") or ()]
    if not tools:
        return said
    done = sum(bool(message.get("tool_calls")) for message in body["messages"])
    shell = next((tool for tool in tools if SHELL.search(tool["name"]) and _command(tool)), None)
    if shell is None or done >= len(COMMANDS):
        return said | {"content": "The test passes now." if shell else "There is no shell."}
    arguments = json.dumps(_arguments(shell, COMMANDS[done]))
    function = {"name": shell["name"], "arguments": arguments}
    return said | {
        "content": None,
        "tool_calls": [{"id": id, "type": "function"} | {"function": function}],
    }


def _command(tool: dict[str, Any]) -> str | None:
    """The name of the argument of a tool that is a shell command."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    return next((name for name in ("command", "cmd") if name in properties), None)


def _arguments(tool: dict[str, Any], command: str) -> dict[str, Json]:
    """The command, and something for each other argument that must be given."""
    name, schema = _command(tool), tool["parameters"]
    kinds = {key: value.get("type") for key, value in schema["properties"].items()}
    fill = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    needed = [key for key in schema.get("required") or () if key != name]
    others = {key: fill.get(str(kinds.get(key)), ".") for key in needed}
    asked = ["bash", "-c", command] if kinds[name] == "array" else command
    return {str(name): asked} | others
