"""LiteLLM: one call answers, another streams a verdict. The names of the models are the roles."""

import os
from typing import Any

import litellm


async def ask(model: str, instructions: str, text: str, **options: Any) -> Any:
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": text}]
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    return await litellm.acompletion(
        f"openai/{model}", messages, api_base=url, api_key=key, **options
    )


async def agent(question: str) -> str:
    solved = await ask("solver", "Solve it. Reply with the number.", question)
    answer = str(solved.choices[0].message.content)
    check = "Check the answer: right or wrong?"
    async for _ in await ask("critic", check, f"{question} {answer}", stream=True):
        pass
    return answer
