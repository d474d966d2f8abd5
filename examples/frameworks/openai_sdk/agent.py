"""The plain OpenAI SDK: a call that may use a tool, then one that streams a verdict. The names of
the models are the roles."""

import json
from typing import Any

from openai import AsyncOpenAI

client = AsyncOpenAI()
INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


async def agent(question: str) -> str:
    messages: list[Any] = [
        {"role": "system", "content": "Solve it with the tool. Reply with the number."},
        {"role": "user", "content": question},
    ]
    chat = client.chat.completions
    for _ in range(3):
        reply = await chat.create(model="solver", messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        if not said.tool_calls:
            break
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
    checked: Any = [{"role": "system", "content": "Check the answer: right or wrong?"}]
    checked.append({"role": "user", "content": f"{question} {said.content}"})
    async for _ in await chat.create(model="critic", messages=checked, stream=True):
        pass
    return said.content or ""
