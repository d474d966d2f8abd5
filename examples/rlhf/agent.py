"""One call: the model's answer to the words of the task."""

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def answer(words: str) -> str:
    reply = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": words}]
    )
    return reply.choices[0].message.content or ""
