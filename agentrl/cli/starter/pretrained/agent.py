"""The agent: ordinary code that calls an OpenAI-compatible server.

During training, OPENAI_BASE_URL and OPENAI_API_KEY point to the policy.
"""

from openai import AsyncOpenAI

client = AsyncOpenAI()


async def agent(question: str) -> str:
    answer = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": question}]
    )
    return answer.choices[0].message.content or ""
