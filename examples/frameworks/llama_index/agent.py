"""A streaming solver of LlamaIndex with a tool, and a critic. The names of their models are the
roles."""

import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def model(name: str) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def agent(question: str) -> str:
    solver = FunctionAgent(
        tools=[add],
        llm=model("solver"),
        system_prompt="Solve it with the tool. Reply with the number.",
    )
    answer = str(await solver.run(question))
    check = f"Check the answer: right or wrong? {question} {answer}"
    await model("critic").achat([ChatMessage(role="user", content=check)])
    return answer
