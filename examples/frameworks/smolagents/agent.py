"""An agent of smolagents that calls tools, and a model that checks it. The names of their models
are the roles."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


def model(name: str) -> OpenAIModel:
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    return OpenAIModel(model_id=name, api_base=url, api_key=key)


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: another
    """
    return a + b


def agent(question: str) -> str:
    solver = ToolCallingAgent([add], model("solver"), max_steps=4, verbosity_level=0)
    answer = str(solver.run(question))
    check = f"Check the answer: right or wrong? {question} {answer}"
    model("critic").generate([{"role": "user", "content": check}])
    return answer
