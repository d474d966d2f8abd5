"""What the agents of this folder share: one client, and one step of a tool loop."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import aiohttp

Message = dict[str, Any]
Tool = dict[str, Any]

WORDS = ["alpha", "beta", "gamma", "delta"]  # that are said where no tool is called


class Client:
    """Chat completions by plain HTTP. The OpenAI client does the same, for four fifths of all the
    CPU that a runner spends on agents as small as these."""

    session: aiohttp.ClientSession | None = None

    async def complete(self, model: str, messages: list[Message], tools: Sequence[Tool]) -> Message:
        """The message that answers."""
        if self.session is None:  # as long as the process
            timeout, connections = aiohttp.ClientTimeout(), aiohttp.TCPConnector(limit=0)
            self.session = aiohttp.ClientSession(timeout=timeout, connector=connections)
        url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
        asked = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
        key = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'unused')}"}
        async with self.session.post(url, json=asked, headers=key) as response:
            response.raise_for_status()
            answer: Message = (await response.json())["choices"][0]["message"]
            return answer


client = Client()


def tool(name: str, parameter: str, choices: list[str], *seen: str) -> Tool:
    """A tool of one parameter, which is one of the choices. Before it the model names what it sees:
    parameters which the last message gives as a name and a word."""
    schema = {
        **{key: {"type": "string"} for key in seen},
        parameter: {"type": "string", "enum": choices},
    }
    parameters = {"type": "object", "properties": schema, "required": list(schema)}
    about = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": about}


async def choose(messages: list[Message], *tools: Tool, model: str = "policy") -> tuple[str, str]:
    """The name and the argument of the tool that the model calls; empty where it calls none of
    them. The answer joins the messages."""
    answer = await client.complete(model, messages, tools)
    if not answer.get("tool_calls"):
        messages.append({"role": "assistant", "content": answer["content"] or ""})
        return "", ""
    call = answer["tool_calls"][0]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    known = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    given = json.loads(arguments)
    for parameter, schema in known.get(name, {}).get("properties", {}).items():
        if given.get(parameter) in schema.get("enum", ()):
            return name, given[parameter]
    return "", ""


def answer_tool(messages: list[Message], content: str) -> None:
    """Give the result of the call that ends the messages, or say it where there was no call."""
    calls = messages[-1].get("tool_calls")
    who = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls else {"role": "user"}
    messages.append({**who, "content": content})


async def reply(messages: list[Message], model: str = "policy") -> str:
    """The answer of a model in words, which joins the messages."""
    answer = await client.complete(model, messages, ())
    messages.append({"role": "assistant", "content": answer["content"] or ""})
    return str(messages[-1]["content"]).strip()


async def say(content: str, model: str) -> str:
    """The answer of a model to one message, in words."""
    return await reply([{"role": "user", "content": content}], model)
