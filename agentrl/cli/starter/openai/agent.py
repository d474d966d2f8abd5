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
        response = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS
        )
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
