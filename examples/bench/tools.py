"""What the agents of this folder share: one client, and one step of a tool loop."""

from __future__ import annotations

import json
import os
from typing import Any

from openai import AsyncOpenAI

Message = dict[str, Any]
Tool = dict[str, Any]

WORDS = ["alpha", "beta", "gamma", "delta"]  # that are said where no tool is called

client = AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY", "unused"))


def tool(name: str, parameter: str, choices: list[str]) -> Tool:
    """A tool of one parameter, which is one of the choices."""
    schema = {"type": "string", "enum": choices}
    parameters = {"type": "object", "properties": {parameter: schema}, "required": [parameter]}
    about = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": about}


async def choose(messages: list[Message], *tools: Tool, model: str = "policy") -> tuple[str, str]:
    """The name and the argument of the tool that the model calls; empty where it calls none of
    them. The answer joins the messages."""
    completion = await client.chat.completions.create(
        model=model, messages=messages, tools=list(tools)
    )
    answer = completion.choices[0].message
    called = answer.tool_calls[0] if answer.tool_calls else None
    if called is None:
        messages.append({"role": "assistant", "content": answer.content or ""})
        return "", ""
    function = {"name": called.function.name, "arguments": called.function.arguments}
    call = {"id": called.id, "type": "function", "function": function}
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    known = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    given = json.loads(called.function.arguments)
    for parameter, schema in known.get(function["name"], {}).get("properties", {}).items():
        if given.get(parameter) in schema["enum"]:
            return function["name"], given[parameter]
    return "", ""


def answer_tool(messages: list[Message], content: str) -> None:
    """Give the result of the call that ends the messages, or say it where there was no call."""
    calls = messages[-1].get("tool_calls")
    who = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
    messages.append({**who, "content": content})


async def say(content: str, model: str) -> str:
    """The answer of a model to one message, in words."""
    messages = [{"role": "user", "content": content}]
    completion = await client.chat.completions.create(model=model, messages=messages)
    return (completion.choices[0].message.content or "").strip()
