"""A policy that answers by a script, and whose tokens are the bytes of the conversation.

So a call continues an earlier one exactly if, and only if, a chat template that prints everything
(names, reasoning, the text of arguments) would print the same."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agentrl.core.http import listen
from agentrl.core.types import Json
from agentrl.runners.harness_check import SHELL

Body = dict[str, Any]

NOTE = 'caf\u00e9 <b>&"q" a/b \\ \u2192'
THOUGHT = "One and two are added.\n\nSo I call the tool."
WORDS = "Let me add them: **1** + 2, caf\u00e9."
SUM = "The sum is 3.\n\n- *exactly*"
# Case -> the items of its first answer, in the order in which they are streamed.
CASES: dict[str, tuple[str, ...]] = {
    "words": ("words",),
    "thought": ("thought", "words"),
    "call": ("call",),
    "two_calls": ("call", "call"),
    "words_call": ("words", "call"),
    "words_between": ("call", "words", "call"),
    "thought_call": ("thought", "call"),
    "malformed": ("malformed",),
    "escapes": ("escapes",),
}
CASE = re.compile(r"\[case ([a-z_]+)\]")


def questions(case: str) -> list[str]:
    """What the user asks, in one conversation."""
    return [f"[case {case}] What is 1 plus 2?", "Are you sure?"]


@dataclass(slots=True)
class Asked:
    """A request that reached the policy."""

    case: str
    beside: bool  # offers no tool for the agent's work
    body: Body
    answer: Body
    turn: int = 0  # of the case
    prompt: bytes = b""


@dataclass(slots=True)
class ScriptedPolicy:
    """Serves chat completions as vLLM does, whole and streamed."""

    asked: list[Asked] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve inside the block; yields the base URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", _tokenize)
        runner, url = await listen(app, "127.0.0.1", 0)
        try:
            yield f"{url}/v1"
        finally:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "x-agentrl-probe" in request.headers:
            return web.json_response({"count": 1, "max_model_len": None})
        asked = self._answer(body)
        choice, usage = _choice(asked), _usage(asked)
        base = {"id": f"chatcmpl-{len(self.asked)}", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            base |= {"object": "chat.completion", "prompt_token_ids": list(asked.prompt)}
            whole = choice | {"index": 0, "message": asked.answer}
            return web.json_response(base | {"usage": usage, "choices": [whole]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        first = {"prompt_token_ids": list(asked.prompt)}
        for delta in _deltas(asked):
            none = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            await _event(response, base | first | {"choices": [none]})
            first = {}
        await _event(response, base | {"choices": [choice | {"index": 0, "delta": {}}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await _event(response, base | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, body: Body) -> Asked:
        cases = CASE.findall(json.dumps(body["messages"]))
        tool = work_tool(body.get("tools") or [])
        latest = self.asked[-1].case if self.asked else ""  # a client may forget the question
        case, turn = cases[-1] if cases else latest, 0
        asked = Asked(case, tool is None, body, {})
        if tool is None or case not in CASES:
            asked.answer = {"role": "assistant", "content": "Adding one and two"}
        else:
            turn = sum(one.case == case and not one.beside for one in self.asked)
            items = CASES[case] if turn == 0 else _later(case, turn)
            ending = _tool(body, "final_answer")  # of a client that must be told by a call
            if ending and not {"call", "malformed", "escapes"} & {*items}:
                tool, items = ending, (*items[:-1], "end")
            asked.answer = _message(items, tool, f"{case}_{turn}")
        asked.turn, asked.prompt = turn, render(body).encode()
        self.asked.append(asked)
        return asked


def _tool(body: Body, name: str) -> Body | None:
    functions = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
    return next((one for one in functions if one["name"] == name), None)


def _later(case: str, turn: int) -> tuple[str, ...]:
    """After arguments that no parser reads, the policy calls again as it should."""
    return ("call",) if case == "malformed" and turn == 1 else ("sum",)


def work_tool(tools: list[Body]) -> Body | None:
    """The tool that the agent is to call: `add`, or a shell."""
    functions = [tool["function"] for tool in tools if "function" in tool]
    named = (one for one in functions if one["name"] == "add")
    shells = (one for one in functions if SHELL.search(one["name"]) and _command(one))
    return next(named, next(shells, None))


def _command(tool: Body) -> str | None:
    known = (tool.get("parameters") or {}).get("properties") or {}
    return next((name for name in ("command", "cmd") if name in known), None)


def _message(items: tuple[str, ...], tool: Body, id: str) -> Body:
    """Build the answer with `items`; `order` keeps the order of the stream."""
    answer: Body = {"role": "assistant", "content": None}
    calls: list[Body] = []
    for item in items:
        if item == "thought":
            answer["reasoning_content"] = THOUGHT
        elif item in ("words", "sum"):
            answer["content"] = WORDS if item == "words" else SUM
        else:
            text = _arguments(item, tool, len(calls))
            function = {"name": tool["name"], "arguments": text}
            calls.append({"id": f"{id}_{len(calls)}", "type": "function", "function": function})
    return answer | ({"tool_calls": calls} if calls else {})


def _arguments(item: str, tool: Body, number: int) -> str:
    """The text of arguments: as `json.dumps` writes them, cut off, or as another writer would."""
    name, given = _command(tool), dict[str, Json]()
    if item == "end":
        given = {"answer": SUM}
    elif name is None:
        given = {"a": 1 + number, "b": 2, "note": NOTE if item == "escapes" else "sum"}
    else:
        text = f"echo $((1 + 2)) {number}" + (f" '{NOTE}'" if item == "escapes" else "")
        known = tool["parameters"]["properties"]
        fill: dict[str, Json] = {"boolean": False, "integer": 1, "number": 1, "array": []}
        wanted = tool["parameters"].get("required") or ()
        given = {key: fill.get(str(known[key].get("type")), "add") for key in wanted}
        listed = known[name].get("type") == "array"
        given[name] = ["bash", "-c", text] if listed else text
    if item == "malformed":
        return json.dumps(given)[:-1]
    if item == "escapes":
        backwards = dict(reversed(given.items()))
        return json.dumps(backwards, indent=1, separators=(" ,", ":")).replace("a/b", "a\\/b")
    return json.dumps(given)


# -- its tokens ------------------------------------------------------------------------------------


def render(body: Body) -> str:
    """The prompt: tools, then each message with its role and name."""
    text = "".join(f"<tools>{json.dumps(tool)}</tools>\n" for tool in body.get("tools") or ())
    for message in body["messages"]:
        name = f" {message['name']}" if message.get("name") else ""
        text += f"<|im_start|>{message['role']}{name}\n{render_turn(message)}\n"
    return text + "<|im_start|>assistant\n"


def render_turn(message: Body) -> str:
    """The tokens of an answer, and of the message that repeats it."""
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    text = f"<think>{thought}</think>" if thought else ""
    text += plain(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f"<tool_call>{function['name']} {function['arguments']}</tool_call>"
    return text + "<|im_end|>"


def plain(content: Json) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return str(content or "")


def _choice(asked: Asked) -> Body:
    tokens = list(render_turn(asked.answer).encode())
    one = {"token": "?", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    finish = "tool_calls" if "tool_calls" in asked.answer else "stop"
    logprobs = {"content": [one] * len(tokens)}
    return {"finish_reason": finish, "logprobs": logprobs, "token_ids": tokens}


def _usage(asked: Asked) -> Body:
    prompt, completion = len(asked.prompt), len(render_turn(asked.answer).encode())
    # Few enough that no client summarizes its conversation.
    few = {"prompt_tokens": prompt // 100, "completion_tokens": completion // 100 + 1}
    return few | {"total_tokens": sum(few.values())}


def _deltas(asked: Asked) -> list[Body]:
    """The answer in pieces, in the order of its case."""
    answer = asked.answer
    calls = [_call_deltas(k, call) for k, call in enumerate(answer.get("tool_calls") or ())]
    content = answer.get("content") or ""
    words: list[Body] = [{"content": content[k : k + 7]} for k in range(0, len(content), 7)]
    thought = answer.get("reasoning_content") or ""
    parts: list[Body] = [{"role": "assistant", "content": ""}]
    parts += [{"reasoning_content": thought[k : k + 7]} for k in range(0, len(thought), 7)]
    order = CASES.get(asked.case, ()) if asked.turn == 0 else ()
    late = order[:1] == ("call",)  # words follow the first call
    rest = [*calls[:1], words, *calls[1:]] if late else [words, *calls]
    return parts + [delta for piece in rest for delta in piece]


def _call_deltas(index: int, call: Body) -> list[Body]:
    function, half = call["function"], len(call["function"]["arguments"]) // 2
    start = {"index": index, "id": call["id"], "type": "function"}
    start["function"] = {"name": function["name"], "arguments": ""}
    text = function["arguments"]
    pieces = ({"index": index, "function": {"arguments": t}} for t in (text[:half], text[half:]))
    return [{"tool_calls": [piece]} for piece in (start, *pieces)]


async def _event(response: web.StreamResponse, body: Body) -> None:
    text = json.dumps({"object": "chat.completion.chunk"} | body)
    await response.write(f"data: {text}\n\n".encode())


async def _tokenize(request: web.Request) -> web.Response:
    count = len(render(await request.json()).encode())
    return web.json_response({"count": count, "max_model_len": None})
