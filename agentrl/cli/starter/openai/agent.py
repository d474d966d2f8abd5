"""The agent: ordinary code with a tool. There is no training code in it.

During training, OPENAI_BASE_URL and OPENAI_API_KEY point to the policy.
"""

import json

from openai import AsyncOpenAI
from shop import TOOLS, look_up

client = AsyncOpenAI()


async def agent(question: str) -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said)
        for call in said.tool_calls:
            found = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return ""
